// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// A kernel that runs until a flag in pinned host memory is set, so that a lock of the process times
// out, while a host thread goes on answering.
//
// Requests: "stop" ends the kernel, "again" begins another when that has ended, "state" answers spinning
// or idle, anything else a count kept in host memory.

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "gpu.h"
#include "udp.h"
#include "workloads.h"

struct spinner {
	struct gpu gpu;
	int seconds; // 0: until told to stop
	CUdeviceptr flag_on_gpu;
	_Atomic uint32_t *flag;
	_Atomic bool spinning;
	uint64_t alive;
};

static void *spin(void *arg)
{
	struct spinner *s = arg;
	void *params[] = {&s->flag_on_gpu};

	gpu_use(&s->gpu);
	gpu_launch(s->gpu.spin, 1, 1, params);
	gpu_wait();
	atomic_store(&s->spinning, false);
	return NULL;
}

static void *stop_later(void *arg)
{
	struct spinner *s = arg;
	struct timespec left = {.tv_sec = s->seconds};

	while (nanosleep(&left, &left))
		;
	atomic_store(s->flag, 1);
	return NULL;
}

static void start(void *(*run)(void *), void *arg)
{
	pthread_t thread;
	if (pthread_create(&thread, NULL, run, arg) || pthread_detach(thread)) {
		fprintf(stderr, "gpuwork: cannot start a thread\n");
		exit(1);
	}
}

// begin has the GPU run the kernel.
static void begin(struct spinner *s)
{
	atomic_store(s->flag, 0);
	atomic_store(&s->spinning, true);
	start(spin, s);
}

static void answer(void *arg, const char *request, char *reply)
{
	struct spinner *s = arg;

	if (!strcmp(request, "stop")) {
		atomic_store(s->flag, 1);
		snprintf(reply, UDP_TEXT, "stopping");
	} else if (!strcmp(request, "again")) {
		bool idle = !atomic_load(&s->spinning);
		if (idle)
			begin(s);
		snprintf(reply, UDP_TEXT, "%s", idle ? "spinning" : "still spinning");
	} else if (!strcmp(request, "state")) {
		snprintf(reply, UDP_TEXT, "%s", atomic_load(&s->spinning) ? "spinning" : "idle");
	} else {
		snprintf(reply, UDP_TEXT, "%" PRIu64, ++s->alive);
	}
}

void run_spin(const struct options *o)
{
	static struct spinner s;
	int socket = udp_listen(o->port);

	s.gpu = gpu_open(o->gpu);
	s.seconds = o->seconds;
	s.flag = gpu_alloc_pinned(sizeof *s.flag, &s.flag_on_gpu);
	begin(&s);
	if (s.seconds)
		start(stop_later, &s);
	udp_serve(socket, answer, &s);
}
