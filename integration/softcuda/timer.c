// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// A thread of the driver's own that wakes by a timer and reads what it has mapped of a GPU, as one
// does under JAX on driver 580.159. It asks nobody first: it dies by SIGSEGV if it runs while the
// process is checkpointed. So it must not run between CRIU's restore and the restore of GPU state.
// Only with timer_ms, read at the first context.

#include <pthread.h>
#include <time.h>

#include "softcuda.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static CUdeviceptr watched; // 0: nothing to read
static unsigned period_ms;
static bool started;

static void *tick(void *unused)
{
	struct timespec period = {.tv_sec = period_ms / 1000, .tv_nsec = period_ms % 1000 * 1000000L};

	(void)unused;
	for (;;) {
		nanosleep(&period, NULL);
		pthread_mutex_lock(&mutex);
		if (watched)
			(void)*(volatile const char *)watched;
		pthread_mutex_unlock(&mutex);
	}
	return NULL;
}

CUresult timer_watch(CUdeviceptr address)
{
	struct config config;
	CUresult r = CUDA_SUCCESS;

	pthread_mutex_lock(&mutex);
	if (!started) {
		config_load(&config);
		period_ms = config.timer_ms;
		if (period_ms && !(r = thread_start("cuda-timer", tick)))
			started = true;
	}
	if (started && !watched)
		watched = address;
	pthread_mutex_unlock(&mutex);
	return r;
}

void timer_forget(CUdeviceptr address)
{
	pthread_mutex_lock(&mutex);
	if (watched == address)
		watched = 0;
	pthread_mutex_unlock(&mutex);
}
