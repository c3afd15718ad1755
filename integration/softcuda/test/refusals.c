// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Processes and arguments that the driver refuses, and that they go on undisturbed.

#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"

static void not_cuda(void)
{
	struct target t = launch("plain", "", false);
	int tid;

	want_reply(t, "", "101");
	WANT(state_of(t.pid), -CUDA_ERROR_NOT_INITIALIZED);
	WANT(cu.tid(t.pid, &tid), CUDA_ERROR_NOT_INITIALIZED);
	WANT(lock(t.pid, 100), CUDA_ERROR_NOT_INITIALIZED);
	want_reply(t, "", "102");
	stop(t);
	WANT(state_of(t.pid), -CUDA_ERROR_OPERATING_SYSTEM);
	WANT(cu.tid(t.pid, &tid), CUDA_ERROR_OPERATING_SYSTEM);
	WANT(lock(t.pid, 100) != CUDA_SUCCESS, true);
	WANT(state_of(0), -CUDA_ERROR_OPERATING_SYSTEM);
	WANT(state_of(-1), -CUDA_ERROR_OPERATING_SYSTEM);
}

// Of forked CUDA processes, the parent has no CUDA and each child has its own.
static void forked(void)
{
	struct target t = launch("multi --procs 2 --bytes 1M", "", false);
	struct target first = t, second = t;

	second.port++;
	want_reply(first, "verify", "bad=0");
	want_reply(second, "verify", "bad=0");
	sscanf(ask(first, "info", 60000), "pid=%d", &first.pid);
	sscanf(ask(second, "info", 60000), "pid=%d", &second.pid);
	WANT(state_of(t.pid), -CUDA_ERROR_NOT_INITIALIZED);
	want_cycle(first.pid);
	want_cycle(second.pid);
	want_reply(first, "verify", "bad=0");
	want_reply(second, "verify", "bad=0");
	stop(t); // the children die with it
}

static void unified_memory(void)
{
	struct target t = start("managed", "");

	want_reply(t, "", "101");
	WANT(lock(t.pid, 0), CUDA_SUCCESS);
	WANT(cu.checkpoint(t.pid, NULL), CUDA_ERROR_NOT_SUPPORTED);
	WANT(state_of(t.pid), CU_PROCESS_STATE_LOCKED);
	WANT(cu.unlock(t.pid, NULL), CUDA_SUCCESS);
	want_reply(t, "", "102");
	stop(t);
}

static void endless_kernel(void)
{
	struct target t = start("spin", "");

	want_reply(t, "state", "spinning");
	// The kernel may be answered for before it is launched; until then a lock succeeds.
	CUresult r = lock(t.pid, 300);
	for (int i = 0; r == CUDA_SUCCESS && i < 100; i++) {
		WANT(cu.unlock(t.pid, NULL), CUDA_SUCCESS);
		usleep(50000);
		r = lock(t.pid, 300);
	}
	WANT(r, CUDA_ERROR_NOT_READY);
	WANT(state_of(t.pid), CU_PROCESS_STATE_RUNNING);
	want_reply(t, "alive", "1");
	want_reply(t, "stop", "stopping");
	WANT(lock(t.pid, 60000), CUDA_SUCCESS);
	WANT(cu.unlock(t.pid, NULL), CUDA_SUCCESS);
	for (int i = 0; i < 600 && strcmp(ask(t, "state", 60000), "idle"); i++)
		usleep(100000);
	want_reply(t, "state", "idle");
	want_cycle(t.pid);
	stop(t);
}

static void arguments(void)
{
	struct target t = start("counter", "");
	CUcheckpointLockArgs l = {.reserved1 = {1}};
	CUcheckpointCheckpointArgs c = {.reserved = {1}};
	CUcheckpointUnlockArgs u = {.reserved = {1}};

	WANT(cu.lock(t.pid, &l), CUDA_ERROR_INVALID_VALUE);
	WANT(lock(t.pid, 0), CUDA_SUCCESS);
	WANT(cu.checkpoint(t.pid, &c), CUDA_ERROR_INVALID_VALUE);
	WANT(cu.unlock(t.pid, &u), CUDA_ERROR_INVALID_VALUE);
	WANT(state_of(t.pid), CU_PROCESS_STATE_LOCKED);
	WANT(cu.unlock(t.pid, NULL), CUDA_SUCCESS);
	WANT(cu.state(t.pid, NULL), CUDA_ERROR_INVALID_VALUE);
	stop(t);
}

void test_refusals(void)
{
	not_cuda();
	forked();
	unified_memory();
	endless_kernel();
	if (!real_driver)
		arguments();
}
