// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Processes whose work on the GPU waits for each other's: locked one after the other, the first keeps
// the second waiting.

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "harness.h"

static unsigned long long steps(struct target t)
{
	unsigned long long n = 0, bad = 1;

	for (int i = 0; i < 600; i++) {
		const char *reply = ask(t, "", 60000);
		if (reply && sscanf(reply, "steps=%llu bad=%llu", &n, &bad) == 2 && n)
			break;
		usleep(100000);
	}
	WANT(bad, 0);
	return n;
}

static void want_more_steps(struct target t)
{
	unsigned long long before = steps(t);

	for (int i = 0; i < 600 && steps(t) == before; i++)
		usleep(100000);
	WANT(steps(t) > before, true);
}

void test_ranks(void)
{
	// Processes take turns on one GPU: a kernel that waits keeps others from it for its slice of time.
	bool one_gpu = real_driver && gpu_count() < 2;
	struct target t = launch(one_gpu ? "ranks --procs 2 --gpus 1" : "ranks --procs 2 --gpus 2", "", false);
	struct target first = t, second = t;

	second.port++;
	want_more_steps(first);
	want_more_steps(second);
	sscanf(ask(first, "info", 60000), "pid=%d", &first.pid);
	sscanf(ask(second, "info", 60000), "pid=%d", &second.pid);
	WANT(lock(first.pid, 60000), CUDA_SUCCESS); // the second goes on until the first is done
	// The second is locked only where it has not launched its next step yet.
	CUresult r = lock(second.pid, 300);
	for (int i = 0; r == CUDA_SUCCESS && i < 600; i++) {
		WANT(cu.unlock(second.pid, NULL), CUDA_SUCCESS);
		usleep(10000);
		r = lock(second.pid, 300);
	}
	WANT(r, CUDA_ERROR_NOT_READY);
	WANT(state_of(second.pid), CU_PROCESS_STATE_RUNNING);
	WANT(lock(second.pid, 300), CUDA_ERROR_NOT_READY); // however often
	WANT(cu.unlock(first.pid, NULL), CUDA_SUCCESS);
	want_more_steps(first);
	want_more_steps(second);
	stop(t);
}
