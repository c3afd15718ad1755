// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Two processes with a long kernel each on one GPU. It interrupts one kernel for the other all the time, until one of
// them is checkpointed and restored. From then on the other one's waits until that one's ends.

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
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

// waited returns how many milliseconds a kernel of the one takes that is begun beside one of the other. That spins until
// somebody stops it after a while; -1: it is ended before.
static long waited(struct target counter, struct target spinner, int ms)
{
	struct timespec from, to;
	int status;

	want_reply(spinner, "again", "spinning");
	usleep(200000); // until it runs
	pid_t later = fork();
	if (!later) {
		usleep(1000 * (unsigned)ms);
		ask(spinner, "stop", 1000);
		_exit(0);
	}
	clock_gettime(CLOCK_MONOTONIC, &from);
	if (!ask(counter, "count", 60000))
		FAIL("no answer of process %d", counter.pid);
	clock_gettime(CLOCK_MONOTONIC, &to);
	long took = (to.tv_sec - from.tv_sec) * 1000 + (to.tv_nsec - from.tv_nsec) / 1000000;
	bool ended = false;
	for (int i = 0; i < 300 && took > 3000 && !ended; i++, usleep(10000)) // it writes its error first
		ended = waitpid(spinner.launched, &status, WNOHANG) == spinner.launched;
	if (ended)
		kill(later, SIGKILL);
	waitpid(later, NULL, 0);
	if (ended)
		return -1;
	want_state(spinner, "idle");
	return took;
}

// A process that was restored: its kernels are not interrupted any more, and one that another process's kernel waits
// for some 5 s is ended (Xid 109).
void test_slices(void)
{
	struct target spinner = start("spin", ""), counter = start("counter", "");

	want_reply(spinner, "stop", "stopping");
	want_state(spinner, "idle");
	WANT(waited(counter, spinner, 1500) < 700, true);
	want_cycle(counter.pid);
	WANT(waited(counter, spinner, 1500) < 700, true);
	want_cycle(spinner.pid);
	WANT(waited(counter, spinner, 1500) > 1000, true);
	WANT(waited(counter, spinner, 12000), -1);
	want_reply(counter, "count", "105");
	stop(counter);
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
