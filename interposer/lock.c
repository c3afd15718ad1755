// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// The locks of the interposer's. A program may fork while its threads have any of them. The child has no CUDA, but calls
// the driver all the same, from finalizers for one, and must not wait there for threads that it does not have.
//
// And its threads and descriptors, which the program has too and knows nothing of.

#include "interposer.h"

#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>

// In a library of their own before glibc 2.34, which a program may lack.
#pragma weak pthread_create
#pragma weak pthread_once

static pthread_mutex_t locks[LOCKS] = {[0 ... LOCKS - 1] = PTHREAD_MUTEX_INITIALIZER};

void lock(enum lock which)
{
	pthread_mutex_lock(&locks[which]);
}

void unlock(enum lock which)
{
	pthread_mutex_unlock(&locks[which]);
}

void locks_forked(void)
{
	for (int i = 0; i < LOCKS; i++)
		locks[i] = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}

void once(pthread_once_t *state, void (*call)(void))
{
	if (pthread_once) {
		pthread_once(state, call);
	} else if (!*state) { // there are no threads
		*state = 1;
		call();
	}
}

struct start {
	const char *name;
	void (*run)(void);
	int32_t *tid;
};

static void *main_of(void *arg)
{
	struct start s = *(struct start *)arg;

	gate_exempt();
	prctl(PR_SET_NAME, s.name);
	__atomic_store_n(s.tid, (int32_t)syscall(SYS_gettid), __ATOMIC_SEQ_CST);
	s.run();
	return NULL;
}

bool thread_start(const char *name, void (*run)(void), int32_t *tid)
{
	struct start s = {name, run, tid};
	sigset_t all, before;
	pthread_t thread;

	sigfillset(&all);
	sigprocmask(SIG_SETMASK, &all, &before); // of this thread, as pthread_sigmask
	bool started = pthread_create && !pthread_create(&thread, NULL, main_of, &s);
	while (started && !__atomic_load_n(tid, __ATOMIC_SEQ_CST))
		sched_yield();
	sigprocmask(SIG_SETMASK, &before, NULL);
	return started;
}

// By a system call: before glibc 2.33 there is no such function.
static bool file_of(int fd, struct stat *st)
{
	return fd >= 0 && !syscall(SYS_fstat, fd, st);
}

struct owned owned(int fd)
{
	struct stat st;

	return file_of(fd, &st) ? (struct owned){fd, st.st_dev, st.st_ino} : (struct owned){.fd = -1};
}

bool owned_has(const struct owned *o)
{
	struct stat st;

	return file_of(o->fd, &st) && st.st_dev == o->dev && st.st_ino == o->ino;
}

void owned_end(struct owned *o)
{
	if (owned_has(o))
		close(o->fd);
	o->fd = -1;
}
