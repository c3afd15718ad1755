// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// A target that is pid 1 of its own pid and mount namespaces, called from outside and from inside.

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"

// call_inside joins the target's mount namespace, and its pid namespace if asked to, and makes the
// call there; returns its result.
static int call_inside(pid_t pid, bool pid_namespace, const char *call, pid_t as_seen)
{
	char path[64];

	pid_t caller = fork();
	if (caller)
		return finish(caller);
	snprintf(path, sizeof path, "/proc/%d/ns/mnt", pid);
	int mount_fd = open(path, O_RDONLY | O_CLOEXEC);
	snprintf(path, sizeof path, "/proc/%d/ns/pid", pid);
	int pid_fd = open(path, O_RDONLY | O_CLOEXEC);
	if ((pid_namespace && setns(pid_fd, CLONE_NEWPID)))
		die("join pid namespace: %s", strerror(errno));
	// The program is looked up before its /proc is left.
	int self = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
	if (setns(mount_fd, CLONE_NEWNS))
		die("join mount namespace: %s", strerror(errno));
	pid_t child = fork(); // only children are in the pid namespace
	if (child)
		_exit(finish(child));
	char text[16];
	snprintf(text, sizeof text, "%d", as_seen);
	char *arguments[] = {"conform", "--call", (char *)call, text, NULL};
	fexecve(self, arguments, environ);
	die("run myself: %s", strerror(errno));
}

void test_namespaces(void)
{
	struct target t = start_in_namespaces("counter");
	int tid = 0;

	// from outside
	want_reply(t, "", "101");
	WANT(cu.tid(t.pid, &tid), CUDA_SUCCESS);
	WANT(is_thread_of(t.pid, tid), true);
	WANT(tid != t.pid, true);
	want_cycle(t.pid);

	// from inside
	WANT(call_inside(t.pid, true, "init", 0), CUDA_SUCCESS);
	WANT(call_inside(t.pid, true, "tid", 1), CUDA_SUCCESS);
	WANT(call_inside(t.pid, true, "cycle", 1), CUDA_SUCCESS);
	WANT(call_inside(t.pid, true, "lock", 1), CUDA_SUCCESS);
	WANT(state_of(t.pid), CU_PROCESS_STATE_LOCKED);
	WANT(call_inside(t.pid, true, "unlock", 1), CUDA_SUCCESS);
	want_reply(t, "", "102");

	// With only the mount namespace joined, /proc is another pid namespace's: 304, modulo 256 in
	// an exit status.
	WANT(call_inside(t.pid, false, "init", 0), CUDA_ERROR_OPERATING_SYSTEM & 0xff);
	stop(t);
}
