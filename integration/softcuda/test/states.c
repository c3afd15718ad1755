// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// The state machine, its refusals, and what a locked process can do.

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "harness.h"

static void want_illegal(pid_t pid, bool l, bool c, bool r, bool u)
{
	if (l)
		WANT(lock(pid, 100), CUDA_ERROR_ILLEGAL_STATE);
	if (c)
		WANT(cu.checkpoint(pid, NULL), CUDA_ERROR_ILLEGAL_STATE);
	if (r)
		WANT(restore(pid, 0, NULL), CUDA_ERROR_ILLEGAL_STATE);
	if (u)
		WANT(cu.unlock(pid, NULL), CUDA_ERROR_ILLEGAL_STATE);
}

void test_states(void)
{
	struct target t = start("counter", "");
	int tid = 0;

	want_reply(t, "", "101");
	WANT(cu.tid(t.pid, &tid), CUDA_SUCCESS);
	WANT(is_thread_of(t.pid, tid), true);
	WANT(tid != t.pid, true);
	WANT(gpu_fds(t.pid) > 0, true);
	want_illegal(t.pid, false, true, true, true);

	WANT(lock(t.pid, 10000), CUDA_SUCCESS);
	WANT(state_of(t.pid), CU_PROCESS_STATE_LOCKED);
	want_illegal(t.pid, true, false, true, false);
	if (ask(t, "", 300)) // counted once it is unlocked: 102
		FAIL("a locked process answered");

	WANT(cu.checkpoint(t.pid, NULL), CUDA_SUCCESS);
	WANT(state_of(t.pid), CU_PROCESS_STATE_CHECKPOINTED);
	want_illegal(t.pid, true, true, false, true);
	WANT(gpu_fds(t.pid), 0);
	WANT(gpu_mappings(t.pid), 0);
	if (ask(t, "", 300)) // 103
		FAIL("a checkpointed process answered");

	WANT(restore(t.pid, 0, NULL), CUDA_SUCCESS);
	WANT(state_of(t.pid), CU_PROCESS_STATE_LOCKED);
	WANT(gpu_fds(t.pid) > 0, true);
	WANT(cu.unlock(t.pid, NULL), CUDA_SUCCESS);
	WANT(state_of(t.pid), CU_PROCESS_STATE_RUNNING);
	want_reply(t, "", "104");

	for (int i = 0; i < 3; i++)
		want_cycle(t.pid);
	want_reply(t, "", "105");
	stop(t);
}
