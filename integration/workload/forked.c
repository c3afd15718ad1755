// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// A program that forks after it began to use CUDA, as PyTorch's DataLoader and gunicorn with
// --preload do: the child keeps the parent's open files of the GPU, and can do nothing with them.

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "gpu.h"
#include "workloads.h"

void run_forked(const struct options *o)
{
	struct options mine = *o;

	gpu_open(o->gpu); // the counter retains the same context
	pid_t pid = fork();
	if (pid < 0) {
		perror("gpuwork: fork");
		exit(1);
	}
	if (pid)
		run_counter(o);
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	mine.port++;
	run_plain(&mine);
}
