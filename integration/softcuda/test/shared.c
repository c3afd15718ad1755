// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Memory that two processes share by an exported handle, and give back before they are checkpointed: they
// are restored, and share new memory at the same addresses. What the interposer relies on (../../../interposer).

#include <stdio.h>

#include "harness.h"

static void go_round(struct target both[2], int first)
{
	want_reply(both[1], "drop", "done");
	want_reply(both[0], "drop", "done");
	for (int i = 0; i < 2; i++)
		WANT(lock(both[i ^ first].pid, 10000), CUDA_SUCCESS);
	for (int i = 0; i < 2; i++)
		WANT(cu.checkpoint(both[i ^ first].pid, NULL), CUDA_SUCCESS);
	for (int i = 0; i < 2; i++)
		WANT(restore(both[i ^ first].pid, 0, NULL), CUDA_SUCCESS);
	for (int i = 0; i < 2; i++)
		WANT(cu.unlock(both[i ^ first].pid, NULL), CUDA_SUCCESS);
	want_reply(both[0], "remake", "done");
	want_reply(both[1], "remake", "done");
	want_reply(both[0], "", "1001");
	want_reply(both[1], "", "1002");
	want_reply(both[0], "", "1003");
}

void test_shared(void)
{
	struct target both[2] = {launch("ipc --share handle", "", false)};
	const char *pid;

	both[1].port = both[0].port + 1;
	both[1].launched = both[0].launched;
	want_reply(both[0], "", "101");
	want_reply(both[1], "", "102");
	pid = ask(both[1], "pid", 60000);
	if (!pid || sscanf(pid, "%d", &both[1].pid) != 1)
		die("no pid: %s", pid ? pid : "no reply");
	go_round(both, 0);
	go_round(both, 1); // in the other order
	stop(both[0]);
}
