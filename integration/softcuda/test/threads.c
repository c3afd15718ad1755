// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// The driver's own threads: which of them must run for which step, that their signals are blocked,
// and that the control thread asks for the whole staging area in one mmap.

#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"

static void hold(int tid)
{
	if (ptrace(PTRACE_SEIZE, tid, NULL, NULL) || ptrace(PTRACE_INTERRUPT, tid, NULL, NULL) ||
	    waitpid(tid, NULL, __WALL) != tid)
		die("hold thread %d: %s", tid, strerror(errno));
}

// event_thread finds the driver's event thread by its name. 0: none.
static int event_thread(pid_t pid)
{
	char path[300], name[32];
	int found = 0;

	snprintf(path, sizeof path, "/proc/%d/task", pid);
	DIR *d = opendir(path);
	for (struct dirent *e; d && (e = readdir(d));) {
		snprintf(path, sizeof path, "/proc/%d/task/%s/comm", pid, e->d_name);
		FILE *f = fopen(path, "re");
		if (f && fgets(name, sizeof name, f) && !strcmp(name, "cuda-EvtHandlr\n"))
			found = atoi(e->d_name);
		if (f)
			fclose(f);
	}
	if (d)
		closedir(d);
	return found;
}

// hold_but holds a process's threads except up to two; returns how many it lists in tids.
static int hold_but(pid_t pid, int first, int second, int *tids, int room)
{
	char path[64];
	int n = 0;

	snprintf(path, sizeof path, "/proc/%d/task", pid);
	DIR *d = opendir(path);
	for (struct dirent *e; d && n < room && (e = readdir(d));) {
		int tid = atoi(e->d_name);
		if (!tid || tid == first || tid == second)
			continue;
		hold(tid);
		tids[n++] = tid;
	}
	if (d)
		closedir(d);
	return n;
}

static void release(const int *tids, int n)
{
	for (int i = 0; i < n; i++)
		ptrace(PTRACE_DETACH, tids[i], NULL, NULL);
}

struct call {
	pid_t pid;
	CUresult (*make)(pid_t);
	CUresult result;
	atomic_bool done;
};

static void *make_call(void *arg)
{
	struct call *c = arg;
	c->result = c->make(c->pid);
	atomic_store(&c->done, true);
	return NULL;
}

static CUresult lock_for_ever(pid_t pid)
{
	return lock(pid, 0);
}

static CUresult checkpoint(pid_t pid)
{
	return cu.checkpoint(pid, NULL);
}

static pthread_t begin(struct call *c)
{
	pthread_t caller;
	if (pthread_create(&caller, NULL, make_call, c))
		die("cannot start a thread");
	return caller;
}

// As for a paused container: a tracer holds the program's threads, and the driver's run.
static void program_held(void)
{
	struct target t = start("pattern --bytes 4M", "");
	int tids[64], tid = 0, n;

	want_reply(t, "verify", "bad=0");
	WANT(cu.tid(t.pid, &tid), CUDA_SUCCESS);
	int events = event_thread(t.pid);
	WANT(events > 0, true);
	n = hold_but(t.pid, tid, events, tids, 64);
	WANT(n > 0, true);
	want_cycle(t.pid);
	release(tids, n);
	want_reply(t, "verify", "bad=0");

	// With only the restore thread let run, a lock waits; the other steps do not.
	n = hold_but(t.pid, tid, 0, tids, 64);
	struct call c = {.pid = t.pid, .make = lock_for_ever};
	pthread_t caller = begin(&c);
	usleep(500000);
	WANT(atomic_load(&c.done), false);
	release(tids, n);
	pthread_join(caller, NULL);
	WANT(c.result, CUDA_SUCCESS);
	n = hold_but(t.pid, tid, 0, tids, 64);
	WANT(cu.checkpoint(t.pid, NULL), CUDA_SUCCESS);
	WANT(restore(t.pid, 0, NULL), CUDA_SUCCESS);
	WANT(cu.unlock(t.pid, NULL), CUDA_SUCCESS);
	release(tids, n);
	want_reply(t, "verify", "bad=0");
	stop(t);
}

static void signals_blocked(void)
{
	struct target t = start("counter", "");
	char path[64], line[256];
	unsigned long long blocked = 0;
	int tid = 0;

	WANT(cu.tid(t.pid, &tid), CUDA_SUCCESS);
	snprintf(path, sizeof path, "/proc/%d/task/%d/status", t.pid, tid);
	FILE *f = fopen(path, "re");
	while (f && fgets(line, sizeof line, f))
		sscanf(line, "SigBlk: %llx", &blocked);
	if (f)
		fclose(f);
	// all that can be, less the two that the C library keeps to itself (32 and 33)
	const unsigned long long able = ~(1ULL << (SIGKILL - 1) | 1ULL << (SIGSTOP - 1) | 3ULL << 31);
	WANT(blocked & able, able);
	stop(t);
}

// count_areas traces a thread until the call is done, and counts its large mmaps and those of the
// one form that a tracer may rewrite.
static void count_areas(int tid, size_t bytes, atomic_bool *done, int *large, int *fitting)
{
	struct __ptrace_syscall_info info;
	int status;

	*large = *fitting = 0;
	for (;;) {
		if (waitpid(tid, &status, __WALL | WNOHANG) != tid) {
			if (atomic_load(done))
				return;
			usleep(200);
			continue;
		}
		ptrace(PTRACE_GET_SYSCALL_INFO, tid, sizeof info, &info);
		if (info.op == PTRACE_SYSCALL_INFO_ENTRY && info.entry.nr == SYS_mmap &&
		    info.entry.args[1] >= bytes) {
			++*large;
			*fitting += info.entry.args[2] == (PROT_READ | PROT_WRITE) &&
			            info.entry.args[3] == (MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE);
		}
		ptrace(PTRACE_SYSCALL, tid, NULL, NULL);
	}
}

static void one_area(void)
{
	enum { BYTES = 8 << 20 };
	struct target t = start("pattern --bytes 8M --chunks 4", "");
	struct call c = {.pid = t.pid, .make = checkpoint};
	int tid = 0, large, fitting;

	want_reply(t, "verify", "bad=0");
	WANT(cu.tid(t.pid, &tid), CUDA_SUCCESS);
	WANT(lock(t.pid, 0), CUDA_SUCCESS);
	hold(tid);
	ptrace(PTRACE_SETOPTIONS, tid, NULL, PTRACE_O_TRACESYSGOOD);
	ptrace(PTRACE_SYSCALL, tid, NULL, NULL);
	pthread_t caller = begin(&c);
	count_areas(tid, BYTES, &c.done, &large, &fitting);
	pthread_join(caller, NULL);
	WANT(c.result, CUDA_SUCCESS);
	if (!real_driver) // which has other large mappings
		WANT(large, 1);
	WANT(fitting, 1);
	ptrace(PTRACE_INTERRUPT, tid, NULL, NULL);
	waitpid(tid, NULL, __WALL);
	ptrace(PTRACE_DETACH, tid, NULL, NULL);
	WANT(restore(t.pid, 0, NULL), CUDA_SUCCESS);
	WANT(cu.unlock(t.pid, NULL), CUDA_SUCCESS);
	want_reply(t, "verify", "bad=0");
	stop(t);
}

void test_threads(void)
{
	program_held();
	if (!real_driver)
		signals_blocked();
	one_area();
}
