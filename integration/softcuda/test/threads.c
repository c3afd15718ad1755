// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// The control thread: it alone must run, its signals are blocked, and it asks for the whole staging
// area in one mmap.

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

// threads_but lists a process's threads without one.
static int threads_but(pid_t pid, int without, int *tids, int room)
{
	char path[64];
	int n = 0;

	snprintf(path, sizeof path, "/proc/%d/task", pid);
	DIR *d = opendir(path);
	for (struct dirent *e; d && n < room && (e = readdir(d));)
		if (atoi(e->d_name) && atoi(e->d_name) != without)
			tids[n++] = atoi(e->d_name);
	if (d)
		closedir(d);
	return n;
}

// A whole cycle while a tracer holds every other thread, as for a paused container.
static void others_held(void)
{
	struct target t = start("pattern --bytes 4M", "");
	int tids[64], tid = 0;

	want_reply(t, "verify", "bad=0");
	WANT(cu.tid(t.pid, &tid), CUDA_SUCCESS);
	int n = threads_but(t.pid, tid, tids, 64);
	WANT(n > 0, true);
	for (int i = 0; i < n; i++)
		hold(tids[i]);
	want_cycle(t.pid);
	for (int i = 0; i < n; i++)
		ptrace(PTRACE_DETACH, tids[i], NULL, NULL);
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

struct call {
	pid_t pid;
	CUresult result;
	atomic_bool done;
};

static void *checkpoint(void *arg)
{
	struct call *c = arg;
	c->result = cu.checkpoint(c->pid, NULL);
	atomic_store(&c->done, true);
	return NULL;
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
	struct call c = {.pid = t.pid};
	pthread_t caller;
	int tid = 0, large, fitting;

	want_reply(t, "verify", "bad=0");
	WANT(cu.tid(t.pid, &tid), CUDA_SUCCESS);
	WANT(lock(t.pid, 0), CUDA_SUCCESS);
	hold(tid);
	ptrace(PTRACE_SETOPTIONS, tid, NULL, PTRACE_O_TRACESYSGOOD);
	ptrace(PTRACE_SYSCALL, tid, NULL, NULL);
	if (pthread_create(&caller, NULL, checkpoint, &c))
		die("cannot start a thread");
	count_areas(tid, BYTES, &c.done, &large, &fitting);
	pthread_join(caller, NULL);
	WANT(c.result, CUDA_SUCCESS);
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
	others_held();
	if (!real_driver)
		signals_blocked();
	one_area();
}
