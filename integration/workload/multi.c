// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Several CUDA processes in one container: children forked before any CUDA call, each a pattern on
// a port of its own, GPUs dealt out in turn. The parent knows no CUDA.

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "workloads.h"

enum { MAX_PROCS = 64 };

static pid_t children[MAX_PROCS];

static void pass_on(int signal)
{
	for (int i = 0; i < MAX_PROCS; i++)
		if (children[i] > 0)
			kill(children[i], signal);
}

static pid_t start(const struct options *o, int index, void (*run)(const struct options *, int))
{
	struct options mine = *o;

	fflush(NULL);
	pid_t pid = fork();
	if (pid)
		return pid;
	signal(SIGTERM, SIG_DFL);
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	mine.port += index;
	mine.gpu = index % o->gpus;
	mine.gpus = 1;
	mine.seed = o->seed + (unsigned long long)index;
	run(&mine, index);
	exit(1);
}

static void run_one(const struct options *o, int index)
{
	(void)index;
	run_pattern(o);
}

int run_multi(const struct options *o)
{
	return run_each(o, run_one);
}

int run_each(const struct options *o, void (*run)(const struct options *, int))
{
	int status = 0;

	if (o->procs > MAX_PROCS) {
		fprintf(stderr, "gpuwork: at most %d processes\n", MAX_PROCS);
		return 2;
	}
	signal(SIGTERM, pass_on);
	for (int i = 0; i < o->procs; i++) {
		children[i] = start(o, i, run);
		if (children[i] < 0) {
			fprintf(stderr, "gpuwork: fork: %s\n", strerror(errno));
			pass_on(SIGKILL);
			return 1;
		}
	}
	pid_t ended;
	while ((ended = wait(&status)) < 0 && errno == EINTR)
		;
	for (int i = 0; i < o->procs; i++)
		if (children[i] == ended)
			children[i] = 0;
	pass_on(SIGKILL);
	while (wait(NULL) > 0 || errno == EINTR)
		;
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
