// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Several callers at once, and callers that die.

#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"

// Two processes lock and unlock the same target: every answer is one that the state machine can
// give, and it ends RUNNING.
static void two_at_once(void)
{
	struct target t = start("counter", "");
	pid_t a = call_elsewhere("hammer", t.pid), b = call_elsewhere("hammer", t.pid);

	WANT(finish(a), 0);
	WANT(finish(b), 0);
	WANT(state_of(t.pid), CU_PROCESS_STATE_RUNNING);
	want_reply(t, "", "101");
	stop(t);
}

// The target finishes what a dead caller began; its answer confuses nobody.
static void killed_caller(void)
{
	struct target t = start("counter", "SOFTCUDA_CHECKPOINT_DELAY_MS=700");

	WANT(lock(t.pid, 0), CUDA_SUCCESS);
	pid_t caller = call_elsewhere("checkpoint", t.pid);
	usleep(200000);
	kill(caller, SIGKILL);
	WANT(finish(caller), -SIGKILL);
	// Asked while the checkpoint runs, answered after it.
	WANT(state_of(t.pid), CU_PROCESS_STATE_CHECKPOINTED);
	WANT(restore(t.pid, 0, NULL), CUDA_SUCCESS);
	WANT(state_of(t.pid), CU_PROCESS_STATE_LOCKED);
	WANT(cu.unlock(t.pid, NULL), CUDA_SUCCESS);
	want_reply(t, "", "101");
	stop(t);
}

void test_callers(void)
{
	two_at_once();
	if (!real_driver)
		killed_caller();
}
