// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Two processes with a long kernel each on one GPU, which interrupts one kernel for the other all the
// time: before one of them is checkpointed and restored, and after.

#include <string.h>
#include <unistd.h>

#include "harness.h"

static void want_state(struct target t, const char *want)
{
	const char *reply = NULL;

	for (int i = 0; i < 600; i++) {
		reply = ask(t, "state", 60000);
		if (reply && !strcmp(reply, want))
			return;
		usleep(10000);
	}
	FAIL("process %d is %s, want %s", t.pid, reply ? reply : "silent", want);
}

// together has both run their kernels for a second: some hundred slices of time.
static void together(struct target one, struct target other)
{
	want_reply(one, "again", "spinning");
	want_reply(other, "again", "spinning");
	sleep(1);
	want_reply(one, "state", "spinning");
	want_reply(other, "state", "spinning");
	want_reply(one, "stop", "stopping");
	want_reply(other, "stop", "stopping");
	want_state(one, "idle");
	want_state(other, "idle");
}

void test_interrupted(void)
{
	struct target one = start("spin", ""), other = start("spin", "");

	want_reply(one, "stop", "stopping");
	want_reply(other, "stop", "stopping");
	want_state(one, "idle");
	want_state(other, "idle");
	together(one, other);
	want_cycle(one.pid);
	together(one, other);
	want_cycle(one.pid);
	want_cycle(other.pid);
	together(one, other);
	stop(one);
	stop(other);
}
