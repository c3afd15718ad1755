// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0
//
// A tracer writes into shared code of a program, as CRIU does: code without a name, or a file's.
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	int file = argc > 1 ? open(argv[1], O_RDONLY) : -1;
	long *code = mmap(NULL, 4096, PROT_READ, MAP_SHARED | (file < 0 ? MAP_ANONYMOUS : 0), file, 0);
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
