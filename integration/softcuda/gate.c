// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// The gate that every API call passes: while a checkpoint holds the process locked, calls wait
// outside. Kernels run on their caller's thread, inside, so a kernel in flight delays the lock.

#include <errno.h>
#include <pthread.h>
#include <time.h>

#include "softcuda.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed;
static bool closed;
static int inside;

// The timeout must not depend on the wall clock, which a restore elsewhere may set back.
__attribute__((constructor)) static void make_condition(void)
{
	pthread_condattr_t attr;
	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&changed, &attr);
	pthread_condattr_destroy(&attr);
}

CUresult gate_enter(void)
{
	if (process.forked || !__atomic_load_n(&process.initialised, __ATOMIC_ACQUIRE))
		return CUDA_ERROR_NOT_INITIALIZED;
	return gate_enter_served();
}

CUresult gate_enter_served(void)
{
	process_wait_for_forks();
	pthread_mutex_lock(&mutex);
	while (closed)
		pthread_cond_wait(&changed, &mutex);
	inside++;
	pthread_mutex_unlock(&mutex);
	return CUDA_SUCCESS;
}

CUresult gate_leave(CUresult result)
{
	pthread_mutex_lock(&mutex);
	inside--;
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&mutex);
	return result;
}

bool gate_close(unsigned timeout_ms)
{
	struct timespec until;
	int late = 0;

	clock_gettime(CLOCK_MONOTONIC, &until);
	until.tv_sec += timeout_ms / 1000;
	until.tv_nsec += timeout_ms % 1000 * 1000000L;
	if (until.tv_nsec >= 1000000000L) {
		until.tv_sec++;
		until.tv_nsec -= 1000000000L;
	}
	pthread_mutex_lock(&mutex);
	closed = true;
	while (inside && late != ETIMEDOUT) {
		if (timeout_ms)
			late = pthread_cond_timedwait(&changed, &mutex, &until);
		else
			pthread_cond_wait(&changed, &mutex);
	}
	bool empty = !inside;
	if (!empty) {
		closed = false;
		pthread_cond_broadcast(&changed);
	}
	pthread_mutex_unlock(&mutex);
	return empty;
}

void gate_forget_after_fork(void)
{
	pthread_mutex_init(&mutex, NULL); // another thread may have held it
	make_condition();
	closed = false;
	inside = 0;
}

void gate_open(void)
{
	pthread_mutex_lock(&mutex);
	closed = false;
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&mutex);
}
