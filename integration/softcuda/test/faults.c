// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// The software GPU's own switches: injected faults and the driver's version.

#include <stdio.h>
#include <stdlib.h>

#include "harness.h"

// A step that is made to fail changes nothing, and works when tried again.
static void injected(void)
{
	struct target t;

	t = start("counter", "SOFTCUDA_FAIL=lock:999:1");
	WANT(lock(t.pid, 0), CUDA_ERROR_UNKNOWN);
	WANT(state_of(t.pid), CU_PROCESS_STATE_RUNNING);
	want_cycle(t.pid);
	want_reply(t, "", "101");
	stop(t);

	t = start("counter", "SOFTCUDA_FAIL=checkpoint:2:1");
	WANT(lock(t.pid, 0), CUDA_SUCCESS);
	WANT(cu.checkpoint(t.pid, NULL), CUDA_ERROR_OUT_OF_MEMORY);
	WANT(state_of(t.pid), CU_PROCESS_STATE_LOCKED);
	WANT(cu.unlock(t.pid, NULL), CUDA_SUCCESS);
	want_reply(t, "", "101");
	want_cycle(t.pid);
	want_reply(t, "", "102");
	stop(t);

	t = start("counter", "SOFTCUDA_FAIL=restore:999:2");
	WANT(lock(t.pid, 0), CUDA_SUCCESS);
	WANT(cu.checkpoint(t.pid, NULL), CUDA_SUCCESS);
	for (int i = 0; i < 2; i++) {
		WANT(restore(t.pid, 0, NULL), CUDA_ERROR_UNKNOWN);
		WANT(state_of(t.pid), CU_PROCESS_STATE_CHECKPOINTED);
		WANT(gpu_fds(t.pid), 0);
		WANT(gpu_mappings(t.pid), 0);
	}
	WANT(restore(t.pid, 0, NULL), CUDA_SUCCESS);
	WANT(cu.unlock(t.pid, NULL), CUDA_SUCCESS);
	want_reply(t, "", "101");
	stop(t);
}

static void old_driver(void)
{
	struct target t = start("counter", "");

	setenv("SOFTCUDA_DRIVER", "550.54.14", 1);
	WANT(state_of(t.pid), -CUDA_ERROR_NOT_SUPPORTED);
	WANT(lock(t.pid, 0), CUDA_ERROR_NOT_SUPPORTED);
	unsetenv("SOFTCUDA_DRIVER");
	WANT(state_of(t.pid), CU_PROCESS_STATE_RUNNING);
	stop(t);
}

void test_faults(void)
{
	injected();
	old_driver();
}
