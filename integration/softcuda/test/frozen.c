// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// A frozen container: what only reads answers, what needs the control thread waits for the thaw.

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "harness.h"

struct group {
	char path[128];
	const char *file, *freeze, *thaw;
};

static bool put(const struct group *g, const char *file, const char *text)
{
	char path[200];
	snprintf(path, sizeof path, "%s/%s", g->path, file);
	int fd = open(path, O_WRONLY | O_CLOEXEC);
	bool ok = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);
	if (fd >= 0)
		close(fd);
	return ok;
}

// make_group makes a cgroup that can be frozen, of either version, and puts the process into it.
static bool make_group(struct group *g, pid_t pid)
{
	static const struct {
		const char *root;
		struct group group;
	} kinds[] = {
		{"/sys/fs/cgroup/freezer", {.file = "freezer.state", .freeze = "FROZEN", .thaw = "THAWED"}},
		{"/sys/fs/cgroup", {.file = "cgroup.freeze", .freeze = "1", .thaw = "0"}},
		{"/sys/fs/cgroup/unified", {.file = "cgroup.freeze", .freeze = "1", .thaw = "0"}},
	};
	char text[16];

	snprintf(text, sizeof text, "%d", pid);
	for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
		*g = kinds[i].group;
		snprintf(g->path, sizeof g->path, "%s/gpuckpt-conform-%d", kinds[i].root, getpid());
		if (mkdir(g->path, 0755))
			continue;
		if (put(g, "cgroup.procs", text) && put(g, g->file, g->thaw))
			return true;
		rmdir(g->path);
	}
	return false;
}

static void remove_group(const struct group *g)
{
	for (int i = 0; rmdir(g->path) && errno == EBUSY && i < 500; i++)
		usleep(10000);
}

struct call {
	pid_t pid;
	CUresult result;
	atomic_bool done;
};

static void *lock_it(void *arg)
{
	struct call *c = arg;
	c->result = lock(c->pid, 0);
	atomic_store(&c->done, true);
	return NULL;
}

static void waits_for_thaw(void)
{
	struct target t = start("counter", "");
	struct group g;
	struct call c = {.pid = t.pid};
	pthread_t caller;
	int tid = 0;

	if (!make_group(&g, t.pid)) {
		printf("    no cgroup can be frozen here: not run\n");
		stop(t);
		return;
	}
	WANT(put(&g, g.file, g.freeze), true);
	WANT(state_of(t.pid), CU_PROCESS_STATE_RUNNING);
	WANT(cu.tid(t.pid, &tid), CUDA_SUCCESS);
	WANT(is_thread_of(t.pid, tid), true);
	if (pthread_create(&caller, NULL, lock_it, &c))
		die("cannot start a thread");
	usleep(500000);
	WANT(atomic_load(&c.done), false);
	WANT(put(&g, g.file, g.thaw), true);
	pthread_join(caller, NULL);
	WANT(c.result, CUDA_SUCCESS);
	WANT(cu.unlock(t.pid, NULL), CUDA_SUCCESS);
	want_reply(t, "", "101");
	stop(t);
	remove_group(&g);
}

// A caller that waits for a stopped process is let go when that is killed.
static void killed_while_stopped(void)
{
	struct target t = start("counter", "");
	struct call c = {.pid = t.pid};
	pthread_t caller;

	kill(t.pid, SIGSTOP);
	if (pthread_create(&caller, NULL, lock_it, &c))
		die("cannot start a thread");
	usleep(300000);
	WANT(atomic_load(&c.done), false);
	stop(t);
	pthread_join(caller, NULL);
	WANT(c.result != CUDA_SUCCESS, true);
}

void test_frozen(void)
{
	waits_for_thaw();
	killed_while_stopped();
}
