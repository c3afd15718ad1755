// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Processes whose work on their GPUs waits for each other's, as the ranks of an all-reduce over shared
// host memory: children forked before any CUDA call, GPUs dealt out in turn. Each takes step after
// step without a pause, on a board that all map. A step ends when all ranks have launched it.
//
// Each rank also computes on its processor what the GPU must have: a lost or repeated step on one of
// the two shows. Requests, to rank i on port P+i: "info" as of pattern; anything else:
// "steps=N bad=M".

#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
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

enum { MAX_RANKS = 64 };

static uint64_t *board; // kernels.h: meet

struct rank {
	const struct options *options;
	int index;
	_Atomic uint64_t steps, bad;
};

static uint64_t mix(uint64_t x)
{
	x += 0x9e3779b97f4a7c15;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
	x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
	return x ^ (x >> 31);
}

// after returns the sum after a step, from the one before it.
static uint64_t after(uint64_t sum, uint64_t step, int ranks)
{
	uint64_t next = sum;
	for (uint64_t i = 0; i < (uint64_t)ranks; i++)
		next += mix(sum + step + (i << 32));
	return next;
}

// bytes_of returns how much memory of the GPU a rank has: with --share large as much as --bytes says.
static size_t bytes_of(const struct options *o)
{
	return strcmp(o->share, "large") ? 2 * sizeof(uint64_t) : o->bytes;
}

static void *take_steps(void *arg)
{
	struct rank *r = arg;
	int ranks = r->options->procs;
	long long work = 1000ll * r->options->work_us * r->index;
	struct timespec pause = {.tv_sec = work / 1000000000, .tv_nsec = work % 1000000000};
	struct gpu gpu = gpu_open(r->options->gpu);
	CUdeviceptr on_gpu = gpu_register(board, 4096), state = gpu_alloc(bytes_of(r->options));
	uint64_t count = (uint64_t)ranks, number = (uint64_t)r->index, sum = 0;
	void *params[] = {&on_gpu, &count, &number, &state};

	gpu_write(state, 0);
	gpu_write(state + 8, 0);
	for (uint64_t step = 0;;) {
		nanosleep(&pause, NULL); // what a rank computes before its part of the step
		for (int i = 0; i < r->options->ahead; i++) {
			gpu_launch(gpu.meet, 1, 1, params);
			step++;
			sum = after(sum, step, ranks);
		}
		gpu_wait();
		if (gpu_read(state) != step || gpu_read(state + 8) != sum)
			atomic_fetch_add(&r->bad, 1);
		atomic_store(&r->steps, step);
	}
	return NULL;
}

static void answer(void *arg, const char *request, char *reply)
{
	struct rank *r = arg;

	if (!strcmp(request, "info")) {
		char uuid[41];
		gpu_uuid(r->options->gpu, uuid);
		snprintf(reply, UDP_TEXT, "pid=%d bytes=%zu gpus=1 %s", getpid(), bytes_of(r->options), uuid);
	} else {
		snprintf(reply, UDP_TEXT, "steps=%" PRIu64 " bad=%" PRIu64, atomic_load(&r->steps), atomic_load(&r->bad));
	}
}

static void run_rank(const struct options *o, int index)
{
	static struct rank r;
	pthread_t thread;
	int s = udp_listen(o->port);

	gpu_count(); // loads the driver, before there is a second thread
	r.options = o;
	r.index = index;
	if (pthread_create(&thread, NULL, take_steps, &r)) {
		fprintf(stderr, "gpuwork: cannot start a thread\n");
		exit(1);
	}
	udp_serve(s, answer, &r);
}

int run_ranks(const struct options *o)
{
	if (o->procs > MAX_RANKS) {
		fprintf(stderr, "gpuwork: at most %d ranks\n", MAX_RANKS);
		return 2;
	}
	board = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (board == MAP_FAILED) {
		perror("gpuwork: the board");
		return 1;
	}
	return run_each(o, run_rank);
}
