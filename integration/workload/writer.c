// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// A counter in device memory beside a thread that appends to a file all the time: 8-byte
// little-endian numbers, each raised in memory before it is written. So no number in the file is
// ever newer than memory, and a restore that pairs a memory with a younger file is found out.
//
// Requests: "seq" answers the number in memory, anything else counts.

#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "gpu.h"
#include "udp.h"
#include "workloads.h"

struct writer {
	struct gpu gpu;
	int file;
	_Atomic uint64_t seq;
};

static void *append(void *arg)
{
	struct writer *w = arg;
	// A pause, so that a file system on a small machine is not filled: at most 80 kB a second.
	const struct timespec pause = {.tv_nsec = 100000};

	for (;;) {
		uint64_t next = htole64(atomic_fetch_add(&w->seq, 1) + 1);
		ssize_t n;
		while ((n = write(w->file, &next, sizeof next)) < 0 && errno == EINTR)
			;
		if (n != sizeof next) {
			fprintf(stderr, "gpuwork: append: %s\n", n < 0 ? strerror(errno) : "cut short");
			exit(1);
		}
		nanosleep(&pause, NULL);
	}
	return NULL;
}

static void answer(void *arg, const char *request, char *reply)
{
	struct writer *w = arg;

	if (!strcmp(request, "seq"))
		snprintf(reply, UDP_TEXT, "%" PRIu64, atomic_load(&w->seq));
	else
		snprintf(reply, UDP_TEXT, "%" PRIu64, gpu_increment(&w->gpu, w->gpu.counter));
}

void run_writer(const struct options *o)
{
	static struct writer w;
	pthread_t thread;
	int s = udp_listen(o->port);

	w.file = o->file ? open(o->file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;
	if (w.file < 0) {
		fprintf(stderr, "gpuwork: --file %s: %s\n", o->file ? o->file : "", strerror(errno));
		exit(1);
	}
	w.gpu = gpu_open(o->gpu);
	gpu_write(w.gpu.counter, o->start);
	if (pthread_create(&thread, NULL, append, &w)) {
		fprintf(stderr, "gpuwork: cannot start a thread\n");
		exit(1);
	}
	udp_serve(s, answer, &w);
}
