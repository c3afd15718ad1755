// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0
//
// poke [FILE [gone]]: a tracer writes into shared memory of a program that this may only read, as CRIU does. It is memory
// without a name, a file's, which may be removed, or with the file "sysv" of System V.
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/shm.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	bool sysv = argc > 1 && !strcmp(argv[1], "sysv");
	int file = argc > 1 && !sysv ? open(argv[1], O_RDONLY) : -1, segment = sysv ? shmget(IPC_PRIVATE, 4096, 0400) : -1;
	long *code = sysv ? shmat(segment, NULL, SHM_RDONLY) : mmap(NULL, 4096, PROT_READ, MAP_SHARED | (file < 0 ? MAP_ANONYMOUS : 0), file, 0);
	if (sysv)
		shmctl(segment, IPC_RMID, NULL);
	if (argc > 2)
		unlink(argv[1]);
	if (code == MAP_FAILED)
		return 1;
	pid_t child = fork();
	if (!child) {
		ptrace(PTRACE_TRACEME, 0, NULL, NULL);
		raise(SIGSTOP);
		_exit(0);
	}
	waitpid(child, NULL, 0);
	long failed = ptrace(PTRACE_POKEDATA, child, code, (void *)0x1122);
	printf("%s %lx\n", failed ? "refused" : "written", *code);
	kill(child, SIGKILL);
	return 0;
}
