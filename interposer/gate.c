// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// The gate that every call of the driver passes. While it is closed, calls wait outside; those that
// are inside end. A call within a call, as from a driver whose functions call each other by their
// names, is not counted again and does not wait.
//
// A turn lets those in that wait at this moment, and nobody who comes later. A call that waits is
// counted by the turn that it came in, so that who drains the gate waits for all that a turn has let in.

#include "interposer.h"

static uint32_t closed; // the number that it was closed by; 0: it is open
static uint32_t inside;
static uint32_t turn;       // counts up
static uint32_t outside[2]; // calls that wait, by the lowest bit of the turn that they came in

// A thread's call, and where it returns to.
static __thread bool calling __attribute__((tls_model("initial-exec")));
static __thread uintptr_t back __attribute__((tls_model("initial-exec")));

// Who waits looks again this often whether a park was cancelled, which nobody wakes it for.
#define LOOK_NS 20000000

// How often who drains the gate looks whether it is empty.
#define DRAIN_LOOK_NS 100000

// How long a turn waits for a call of a program that has just had one, and how often it looks.
#define NEXT_CALL_NS 1000000
#define NEXT_LOOK_NS 50000

void *interposer_target(uint32_t thunk);    // route.c
bool interposer_cancelled(uint32_t number); // worker.c

static void add(uint32_t *p, uint32_t n)
{
	__atomic_add_fetch(p, n, __ATOMIC_SEQ_CST);
}

static void wake(void)
{
	add(&turn, 1);
	futex(&turn, FUTEX_WAKE_PRIVATE, INT32_MAX);
}

// wait_outside returns when the gate was opened or a turn has come. true: the call is inside.
static bool wait_outside(void)
{
	struct timespec look = {.tv_nsec = LOOK_NS};
	uint32_t mine = load(&turn), number, now;

	add(&outside[mine & 1], 1);
	while ((now = load(&turn)) != mine) { // who drains that turn may not have seen it
		add(&outside[now & 1], 1);
		add(&outside[mine & 1], -1u);
		mine = now;
	}
	while ((number = load(&closed)) && load(&turn) == mine) {
		if (!interposer_cancelled(number))
			syscall(SYS_futex, &turn, FUTEX_WAIT_PRIVATE, mine, &look, NULL, 0);
		else if (__atomic_compare_exchange_n(&closed, &number, 0, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
			wake(); // the worker may be busy with the driver
	}
	add(&inside, 1);
	bool may = load(&turn) == mine + 1 || !load(&closed);
	add(&outside[mine & 1], -1u);
	if (!may)
		add(&inside, -1u);
	return may;
}

struct entered {
	void *function;
	uint64_t leave; // whether interposer_leave is to be called
};

struct entered interposer_enter(uint64_t thunk, uintptr_t caller) __attribute__((visibility("hidden")));
struct entered interposer_enter(uint64_t thunk, uintptr_t caller)
{
	struct entered e = {interposer_target((uint32_t)thunk), 0};

	if (calling || interposer_passive)
		return e;
	for (;;) {
		add(&inside, 1);
		if (!load(&closed))
			break;
		add(&inside, -1u);
		if (wait_outside())
			break;
	}
	// In this order, also for a handler of a signal that makes a call in between.
	__atomic_store_n(&calling, true, __ATOMIC_RELAXED);
	__atomic_signal_fence(__ATOMIC_SEQ_CST);
	back = caller;
	e.leave = 1;
	return e;
}

uintptr_t interposer_leave(void) __attribute__((visibility("hidden")));
uintptr_t interposer_leave(void)
{
	uintptr_t to = back;

	__atomic_store_n(&calling, false, __ATOMIC_RELEASE); // the next call may be one of a signal's handler
	// A child of fork has none inside, and may come back from a call of its parent's.
	if (__atomic_load_n(&inside, __ATOMIC_RELAXED))
		add(&inside, -1u);
	return to;
}

void gate_close(uint32_t number)
{
	__atomic_store_n(&closed, number, __ATOMIC_SEQ_CST);
}

void gate_open(void)
{
	__atomic_store_n(&closed, 0, __ATOMIC_SEQ_CST);
	wake();
}

int64_t gate_since(const struct timespec *begun)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (now.tv_sec - begun->tv_sec) * 1000000000 + (now.tv_nsec - begun->tv_nsec);
}

bool gate_turn(bool wait)
{
	struct timespec begun, nap = {.tv_nsec = NEXT_LOOK_NS};

	clock_gettime(CLOCK_MONOTONIC, &begun);
	while (!load(&outside[load(&turn) & 1])) {
		if (!wait || gate_since(&begun) >= NEXT_CALL_NS)
			return false;
		nanosleep(&nap, NULL);
	}
	wake();
	return true;
}

bool gate_drain(unsigned timeout_ms, const uint32_t *cancelled, uint32_t number)
{
	struct timespec begun, nap = {.tv_nsec = DRAIN_LOOK_NS};

	clock_gettime(CLOCK_MONOTONIC, &begun);
	// In this order: a call that a turn lets in is counted inside before it is not outside any more.
	while (load(&outside[~load(&turn) & 1]) || load(&inside)) {
		if (gate_since(&begun) >= timeout_ms * INT64_C(1000000) || load(cancelled) == number)
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
	closed = inside = outside[0] = outside[1] = 0;
}
