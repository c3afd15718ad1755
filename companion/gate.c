// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// The gate that every call of the driver passes. While it is closed, calls wait outside; those that
// are inside end. A call within a call, as from a driver whose functions call each other by their
// names, is not counted again and does not wait.

#include "companion.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static uint32_t closed;
static uint32_t inside;

// A thread's call, and where it returns to.
static __thread bool calling __attribute__((tls_model("initial-exec")));
static __thread uintptr_t back __attribute__((tls_model("initial-exec")));

// Who waits looks again this often whether a park was cancelled, which nobody wakes it for.
#define LOOK_NS 20000000

void *companion_target(uint32_t thunk); // route.c
bool companion_cancelled(void);         // worker.c

static void wait_outside(void)
{
	struct timespec look = {.tv_nsec = LOOK_NS};

	if (companion_cancelled()) // its worker may be busy with the driver
		gate_open();
	else
		syscall(SYS_futex, &closed, FUTEX_WAIT_PRIVATE, 1, &look, NULL, 0);
}

struct entered {
	void *function;
	uint64_t leave; // whether companion_leave is to be called
};

struct entered companion_enter(uint64_t thunk, uintptr_t caller) __attribute__((visibility("hidden")));
struct entered companion_enter(uint64_t thunk, uintptr_t caller)
{
	struct entered e = {companion_target((uint32_t)thunk), 0};

	if (calling || companion_passive)
		return e;
	for (;;) {
		__atomic_add_fetch(&inside, 1, __ATOMIC_SEQ_CST);
		if (!__atomic_load_n(&closed, __ATOMIC_SEQ_CST))
			break;
		__atomic_sub_fetch(&inside, 1, __ATOMIC_SEQ_CST);
		wait_outside();
	}
	calling = true;
	back = caller;
	e.leave = 1;
	return e;
}

uintptr_t companion_leave(void) __attribute__((visibility("hidden")));
uintptr_t companion_leave(void)
{
	calling = false;
	// A child of fork has none inside, and may come back from a call of its parent's.
	if (__atomic_load_n(&inside, __ATOMIC_RELAXED))
		__atomic_sub_fetch(&inside, 1, __ATOMIC_SEQ_CST);
	return back;
}

void gate_close(void)
{
	__atomic_store_n(&closed, 1, __ATOMIC_SEQ_CST);
}

void gate_open(void)
{
	__atomic_store_n(&closed, 0, __ATOMIC_SEQ_CST);
	syscall(SYS_futex, &closed, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

bool gate_drain(unsigned timeout_ms, const uint32_t *cancelled, uint32_t number)
{
	struct timespec begun, now, nap = {.tv_nsec = 200000};

	clock_gettime(CLOCK_MONOTONIC, &begun);
	while (__atomic_load_n(&inside, __ATOMIC_SEQ_CST)) {
		clock_gettime(CLOCK_MONOTONIC, &now);
		int64_t ms = (now.tv_sec - begun.tv_sec) * 1000 + (now.tv_nsec - begun.tv_nsec) / 1000000;
		if (ms >= timeout_ms || __atomic_load_n(cancelled, __ATOMIC_SEQ_CST) == number)
			return false;
		nanosleep(&nap, NULL);
	}
	return true;
}

void gate_exempt(void)
{
	calling = true;
}

void gate_forked(void)
{
	closed = inside = 0;
}
