// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// The locks of the interposer's. A program may fork while its threads have any of them. The child has no CUDA, but calls
// the driver all the same, from finalizers for one, and must not wait there for threads that it does not have.

#include "interposer.h"

#include <pthread.h>

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
