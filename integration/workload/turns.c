// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// One of two programs that count in turns in a file that both have mapped, and in device memory of
// their own. Each turn compares the two: after a restore of checkpoints that are not of one moment
// they differ.

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "gpu.h"
#include "udp.h"
#include "workloads.h"

struct turns {
	struct gpu gpu;
	uint64_t place;           // 0 or 1: whose turn it is when the count is even
	_Atomic uint64_t *shared; // the count
	_Atomic int torn;
	uint64_t found, own; // if torn: the count in the file, and by device memory
};

static void *count(void *arg)
{
	struct turns *t = arg;
	const struct timespec pause = {.tv_nsec = 2000000};

	gpu_use(&t->gpu);
	for (;; nanosleep(&pause, NULL)) {
		uint64_t now = atomic_load(t->shared);
		if (now % 2 != t->place)
			continue;
		uint64_t own = 2 * (gpu_increment(&t->gpu, t->gpu.counter) - 1) + t->place;
		if (now == own) {
			atomic_store(t->shared, now + 1);
			continue;
		}
		t->found = now;
		t->own = own;
		atomic_store(&t->torn, 1);
		return NULL;
	}
}

static void answer(void *arg, const char *request, char *reply)
{
	struct turns *t = arg;

	(void)request;
	if (atomic_load(&t->torn))
		snprintf(reply, UDP_TEXT, "torn: %" PRIu64 " in the file, %" PRIu64 " on the GPU", t->found, t->own);
	else
		snprintf(reply, UDP_TEXT, "%" PRIu64, atomic_load(t->shared));
}

void run_turns(const struct options *o)
{
	static struct turns t;
	pthread_t thread;
	int s = udp_listen(o->port);
	int file = o->file ? open(o->file, O_RDWR | O_CREAT | O_CLOEXEC, 0644) : -1;

	if (file < 0 || ftruncate(file, 4096) ||
	    (t.shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)) == MAP_FAILED) {
		fprintf(stderr, "gpuwork: --file %s: %s\n", o->file ? o->file : "", strerror(errno));
		exit(1);
	}
	t.place = o->start;
	t.gpu = gpu_open(o->gpu);
	gpu_write(t.gpu.counter, 0);
	if (pthread_create(&thread, NULL, count, &t)) {
		fprintf(stderr, "gpuwork: cannot start a thread\n");
		exit(1);
	}
	udp_serve(s, answer, &t);
}
