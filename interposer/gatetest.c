// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Threads that make calls one after the other, and a gate that is closed, has turns and is opened as fast as it goes:
// nobody is inside when it is drained, and each thread makes one call in a turn at most. Answers nothing and ends with
// 0, or says what is wrong.

#include "gate.c"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <x86intrin.h>

#include "want.h"

enum { MAX_CALLERS = 4, ROUNDS = 150, SECONDS_10 = 10000 };

bool interposer_passive;
static uint32_t calls[MAX_CALLERS], cancelled, stop;

void *interposer_target(uint32_t thunk)
{
	(void)thunk;
	return NULL;
}

bool interposer_cancelled(uint32_t number)
{
	return load(&cancelled) == number;
}

static void *call(void *arg)
{
	uint32_t *mine = arg, number = (uint32_t)(mine - calls);

	while (!load(&stop)) {
		WANT(interposer_enter(0, 1).leave == 1);
		WANT(interposer_enter(0, 2).leave == 0); // a call within the call
		add(mine, 1);
		WANT(interposer_leave() == 1);
		for (uint32_t i = 0; i < number * 50; i++) // what a program does between two calls
			__asm__ volatile("pause");
	}
	return NULL;
}

// quiet fails unless each caller has made so many calls more at most, and all together so many at least; then it
// notes how many they have made, and looks a little longer whether there are more.
static void quiet(uint32_t *before, int callers, uint32_t each, uint32_t all)
{
	uint32_t sum = 0;

	for (int i = 0; i < callers; i++) {
		uint32_t now = load(&calls[i]);
		WANT(now - before[i] <= each);
		sum += now - before[i];
		before[i] = now;
	}
	WANT(sum >= all);
	usleep((unsigned)rand() % 64);
	for (int i = 0; i < callers; i++)
		WANT(load(&calls[i]) == before[i]);
}

static void callers(int count)
{
	uint32_t before[MAX_CALLERS] = {0};
	pthread_t threads[MAX_CALLERS];
	int turns = 0;

	stop = 0;
	for (int i = 0; i < count; i++)
		WANT(!pthread_create(&threads[i], NULL, call, &calls[i]));
	for (uint32_t n = 1; n <= ROUNDS; n++) {
		gate_close(n);
		WANT(gate_drain(SECONDS_10, &cancelled, n));
		quiet(before, count, UINT32_MAX, 0);
		for (int i = rand() % 4; i > 0 && gate_turn(true); i--) {
			gate_close(n + ROUNDS);
			WANT(gate_drain(SECONDS_10, &cancelled, n + ROUNDS));
			quiet(before, count, 1, 1);
			turns++;
		}
		if (n % 50) {
			gate_open();
			continue;
		}
		// Nobody opens it but those that wait.
		uint32_t one = load(&calls[0]);
		__atomic_store_n(&cancelled, load(&closed), __ATOMIC_SEQ_CST);
		for (int i = 0; i < SECONDS_10 && load(&calls[0]) == one; i++)
			usleep(1000);
		WANT(load(&calls[0]) != one && !load(&closed));
	}
	WANT(turns > ROUNDS / 2);
	__atomic_store_n(&stop, 1, __ATOMIC_SEQ_CST);
	gate_open();
	for (int i = 0; i < count; i++)
		WANT(!pthread_join(threads[i], NULL));
	WANT(!inside && !outside[0] && !outside[1]);
}

// A ThreadSanitizer's own functions, which the processor would stop in as well, bear with no handler there.
#ifndef __SANITIZE_THREAD__
enum { STEP = 1 << 8, CALLER = 1, HANDLER = 2 }; // STEP: of the processor's flags
static int steps;

static void step(int signal)
{
	(void)signal;
	steps++;
	if (interposer_enter(0, HANDLER).leave)
		WANT(interposer_leave() == HANDLER);
}

// A handler of a signal that makes a call, after each instruction of another call.
static void interrupted(void)
{
	struct sigaction a = {.sa_handler = step};

	WANT(!sigaction(SIGTRAP, &a, NULL));
	__writeeflags(__readeflags() | STEP);
	struct entered e = interposer_enter(0, CALLER);
	uintptr_t to = interposer_leave();
	__writeeflags(__readeflags() & ~(unsigned long long)STEP);
	WANT(e.leave == 1 && to == CALLER && steps > 20 && !inside);
}
#else
static void interrupted(void)
{
}
#endif

int main(void)
{
	interrupted();
	gate_close(1);
	WANT(!gate_turn(true)); // there is nobody
	inside = 1;
	WANT(!gate_drain(1, &cancelled, 1));
	gate_forked();
	callers(1);
	callers(2);
	callers(MAX_CALLERS);
	return 0;
}
