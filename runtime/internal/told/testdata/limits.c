// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0
//
// limits PID: prints three limits of a process as CRIU asks for them, and tries to set one.

#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	const int asked[] = {RLIMIT_CPU, RLIMIT_FSIZE, RLIMIT_NOFILE};
	struct rlimit64 limit = {10, 10};
	int pid = argc > 1 ? atoi(argv[1]) : 0;

	for (int i = 0; i < 3; i++)
		if (syscall(SYS_prlimit64, pid, asked[i], NULL, &limit))
			puts("refused");
		else
			printf("%lld %lld\n", (long long)limit.rlim_cur, (long long)limit.rlim_max);
	puts(syscall(SYS_prlimit64, pid, RLIMIT_NOFILE, &limit, NULL) ? "set: refused" : "set");
}
