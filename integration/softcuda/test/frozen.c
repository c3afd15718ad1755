// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// A frozen container: the restore thread is told, all else waits for the thaw.

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"

struct group {
	char path[128];
	const char *file, *freeze, *thaw;
	const char *shown, *frozen; // the file that tells when all are frozen, and how
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

// freeze has the processes of a cgroup stand still.
static bool freeze(const struct group *g)
{
	char path[200], text[256];

	if (!put(g, g->file, g->freeze))
		return false;
	snprintf(path, sizeof path, "%s/%s", g->path, g->shown);
	for (int i = 0; i < 1000; i++, usleep(10000)) {
		int fd = open(path, O_RDONLY | O_CLOEXEC);
		ssize_t n = fd >= 0 ? read(fd, text, sizeof text - 1) : -1;
		if (fd >= 0)
			close(fd);
		if (n >= 0) {
			text[n] = 0;
			if (strstr(text, g->frozen))
				return true;
		}
	}
	return false;
}

// make_group makes a cgroup that can be frozen, of either version, and puts the process into it.
static bool make_group(struct group *g, pid_t pid)
{
	static const struct {
		const char *root;
		struct group group;
	} kinds[] = {
		{"/sys/fs/cgroup/freezer", {.file = "freezer.state", .freeze = "FROZEN", .thaw = "THAWED", .shown = "freezer.state", .frozen = "FROZEN"}},
		{"/sys/fs/cgroup", {.file = "cgroup.freeze", .freeze = "1", .thaw = "0", .shown = "cgroup.events", .frozen = "frozen 1"}},
		{"/sys/fs/cgroup/unified", {.file = "cgroup.freeze", .freeze = "1", .thaw = "0", .shown = "cgroup.events", .frozen = "frozen 1"}},
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
	bool ask_state; // else lock
	CUresult result;
	atomic_bool done;
};

static void *make_call(void *arg)
{
	struct call *c = arg;
	c->result = c->ask_state ? state_of(c->pid) : (int)lock(c->pid, 1000);
	atomic_store(&c->done, true);
	return NULL;
}

static pthread_t begin(struct call *c)
{
	pthread_t caller;
	if (pthread_create(&caller, NULL, make_call, c))
		die("cannot start a thread");
	return caller;
}

static void waits_for_thaw(void)
{
	struct target t = start("counter", "");
	struct group g;
	struct call asking = {.pid = t.pid, .ask_state = true}, locking = {.pid = t.pid};
	pthread_t asker, locker;
	int tid = 0;

	if (!make_group(&g, t.pid)) {
		printf("    no cgroup can be frozen here: not run\n");
		stop(t);
		return;
	}
	WANT(freeze(&g), true);
	WANT(cu.tid(t.pid, &tid), CUDA_SUCCESS);
	WANT(is_thread_of(t.pid, tid), true);
	asker = begin(&asking);
	usleep(300000);
	WANT(atomic_load(&asking.done), false);
	locker = begin(&locking);
	usleep(1500000); // longer than the lock's own timeout of 1 s
	WANT(atomic_load(&locking.done), false);
	WANT(put(&g, g.file, g.thaw), true);
	pthread_join(asker, NULL);
	pthread_join(locker, NULL);
	// After the thaw the two race.
	WANT(asking.result == CU_PROCESS_STATE_RUNNING || asking.result == CU_PROCESS_STATE_LOCKED, true);
	WANT(locking.result, CUDA_SUCCESS);
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

	kill(t.pid, SIGSTOP);
	WANT(waitpid(t.pid, NULL, WUNTRACED), t.pid); // all its threads have stopped
	pthread_t caller = begin(&c);
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
