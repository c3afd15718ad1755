// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// The event thread. The real driver has one from the first context on ("cuda-EvtHandlr"), and a lock
// needs it. Seen on driver 580.159: while a tracer holds that thread a lock waits, whatever its
// timeout, whereas checkpoint, restore and unlock need the restore thread alone.

#include <pthread.h>

#include "softcuda.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static bool started;
static unsigned long asked, answered;

static void *answer(void *unused)
{
	(void)unused;
	pthread_mutex_lock(&mutex);
	for (;;) {
		while (answered == asked)
			pthread_cond_wait(&changed, &mutex);
		answered = asked;
		pthread_cond_broadcast(&changed);
	}
	return NULL;
}

CUresult events_start(void)
{
	CUresult r = CUDA_SUCCESS;

	pthread_mutex_lock(&mutex);
	if (!started) {
		r = thread_start("cuda-EvtHandlr", answer);
		started = !r;
	}
	pthread_mutex_unlock(&mutex);
	return r;
}

void events_settle(void)
{
	pthread_mutex_lock(&mutex);
	if (started) {
		unsigned long mine = ++asked;
		pthread_cond_broadcast(&changed);
		while (answered < mine)
			pthread_cond_wait(&changed, &mutex);
	}
	pthread_mutex_unlock(&mutex);
}
