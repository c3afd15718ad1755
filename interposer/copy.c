// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// The copies between GPU memory and host memory. The host memory is a file's: to register it for the
// GPU costs more than the copy (11 s for 16 GiB of a private mapping, which the kernel copies page by
// page: H200, driver 580). So several threads copy by way of pinned buffers, each with a stream of its
// own: while the GPU moves one buffer, the thread moves the other.
//
// The copiers are there from the interposer's start on, since the shim lets only threads that it knows
// run while GPU memory comes back. They wait for work without the driver.
//
// What was zeros when it was copied out is not read on the way back: the GPU makes it. A KV cache is mostly
// zeros, and in the checkpoint's file they are holes, which a read would fill with pages.

#include "driver.h"

#include <limits.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

// What a buffer holds, and a thread copies at a time. Two for each thread are pinned during copies.
#define CHUNK ((size_t)4 << 20)
// What is zeros or not: a piece of memory of cuMemCreate.
#define UNIT ((size_t)2 << 20)

// One job at a time, which all copiers and its caller work on.
static struct {
	const struct piece *pieces;
	size_t chunks, next; // next: the chunk that nobody has taken
	bool out, streams;
	CUresult result; // of the first that failed
	uint32_t busy;   // copiers that have not ended
} job;

// What the last copies out have found, by units of the host memory; NULL: nothing is known.
static struct {
	bool *are;
	const char *base;
	size_t count;
} zeros;

static uint32_t round_number; // counts jobs up; copiers wait for it to change
static int copiers;

// A side is one of a thread's two buffers, and what it is doing.
struct side {
	CUstream stream;
	char *buffer;
	char *host; // where the buffer's bytes go when the GPU has written them; NULL for nowhere
	size_t bytes;
};

// zeros_begin forgets what was found, and has room for what is copied out to so much host memory from now on.
static void zeros_begin(const char *base, size_t bytes)
{
	free(zeros.are);
	zeros.base = base;
	zeros.count = bytes / UNIT;
	zeros.are = driver_serves(ZEROS) ? calloc(zeros.count + 1, sizeof *zeros.are) : NULL;
}

// zeros_look notes which whole units of some host memory, of which there is a copy, are zeros.
static void zeros_look(const char *host, const char *copy, size_t bytes)
{
	size_t at = (size_t)(host - zeros.base);

	if (!zeros.are || at % UNIT)
		return;
	for (size_t i = 0; i + UNIT <= bytes && at / UNIT < zeros.count; i += UNIT, at += UNIT)
		zeros.are[at / UNIT] = !copy[i] && !memcmp(copy + i, copy + i + 1, UNIT - 1);
}

// zeros_all reports whether all of some host memory is known to be zeros.
static bool zeros_all(const char *host, size_t bytes)
{
	size_t at = (size_t)(host - zeros.base);

	if (!zeros.are || at % UNIT || bytes % UNIT || (at + bytes) / UNIT > zeros.count)
		return false;
	for (size_t i = at / UNIT; i < (at + bytes) / UNIT; i++)
		if (!zeros.are[i])
			return false;
	return true;
}

static CUresult settle(struct side *s)
{
	CUresult r = s->stream ? driver.cuStreamSynchronize(s->stream) : CUDA_SUCCESS;

	if (!r && s->host) {
		memcpy(s->host, s->buffer, s->bytes);
		zeros_look(s->host, s->buffer, s->bytes);
	}
	s->host = NULL;
	return r;
}

static void end_stream(struct side *s)
{
	if (s->stream)
		driver.cuStreamDestroy_v2(s->stream);
	s->stream = NULL;
}

// begin has a side move bytes, or moves them itself where there is no stream or no buffer.
static CUresult begin(struct side *s, char *host, CUdeviceptr device, size_t bytes)
{
	if (job.streams && !s->buffer && driver.cuMemHostAlloc((void **)&s->buffer, CHUNK, 1)) // CU_MEMHOSTALLOC_PORTABLE
		s->buffer = NULL;
	if (job.streams && !s->stream && driver.cuStreamCreate(&s->stream, 1)) // CU_STREAM_NON_BLOCKING
		s->stream = NULL;
	if (!s->buffer || !s->stream)
		return job.out ? driver.cuMemcpyDtoH_v2(host, device, bytes) : driver.cuMemcpyHtoD_v2(device, host, bytes);
	if (job.out) {
		s->host = host;
		s->bytes = bytes;
		return driver.cuMemcpyDtoHAsync_v2(s->buffer, device, bytes, s->stream);
	}
	if (zeros_all(host, bytes))
		return driver.cuMemsetD8Async(device, 0, bytes, s->stream);
	memcpy(s->buffer, host, bytes);
	return driver.cuMemcpyHtoDAsync_v2(device, s->buffer, bytes, s->stream);
}

// share copies chunks until there are none.
static void share(void)
{
	struct side sides[2] = {{0}};
	const struct piece *p = job.pieces;
	size_t first = 0, n, turn = 0; // first: the chunk that p begins with
	CUcontext current = NULL;
	CUresult r = CUDA_SUCCESS, last;
	int relaxed = 2; // CU_STREAM_CAPTURE_MODE_RELAXED: a capture of the program's goes on beside this

	driver.cuThreadExchangeStreamCaptureMode(&relaxed);

	while (!r && !__atomic_load_n(&job.result, __ATOMIC_RELAXED) && (n = __atomic_fetch_add(&job.next, 1, __ATOMIC_RELAXED)) < job.chunks) {
		for (; n - first >= (p->bytes + CHUNK - 1) / CHUNK; p++)
			first += (p->bytes + CHUNK - 1) / CHUNK;
		if (p->context != current) {
			for (int i = 0; i < 2; i++) { // a stream is its context's
				last = settle(&sides[i]);
				r = r ? r : last;
				end_stream(&sides[i]);
			}
			if (r || (r = driver.cuCtxSetCurrent(p->context)))
				break;
			current = p->context;
		}
		struct side *s = &sides[turn++ % 2];
		size_t at = (n - first) * CHUNK;
		if (!(r = settle(s)))
			r = begin(s, p->host + at, p->device + at, p->bytes - at < CHUNK ? p->bytes - at : CHUNK);
	}
	for (int i = 0; i < 2; i++) {
		last = settle(&sides[i]);
		r = r ? r : last;
		end_stream(&sides[i]);
		if (sides[i].buffer)
			driver.cuMemFreeHost(sides[i].buffer);
	}
	if (r) {
		CUresult none = CUDA_SUCCESS;
		__atomic_compare_exchange_n(&job.result, &none, r, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
	}
}

static void work(void)
{
	uint32_t seen = 0;

	for (;;) {
		uint32_t now = __atomic_load_n(&round_number, __ATOMIC_SEQ_CST);
		if (now == seen) {
			futex(&round_number, FUTEX_WAIT_PRIVATE, seen);
			continue;
		}
		seen = now;
		share();
		if (!__atomic_sub_fetch(&job.busy, 1, __ATOMIC_SEQ_CST))
			futex(&job.busy, FUTEX_WAKE_PRIVATE, 1);
	}
}

void copy_start(int32_t *tids, int most)
{
	cpu_set_t cpus;

	// The caller copies too.
	int wanted = sched_getaffinity(0, sizeof cpus, &cpus) ? 1 : CPU_COUNT(&cpus) - 1;
	if (wanted > most)
		wanted = most;
	while (copiers < wanted && thread_start("gpuckpt-copy", work, &tids[copiers]))
		copiers++;
}

void copy_forget(void)
{
	zeros_begin(NULL, 0);
}

CUresult copy_all(const struct piece *pieces, size_t count, const char *host, size_t bytes, bool out)
{
	if (out)
		zeros_begin(host, bytes);
	else if (host != zeros.base || bytes / UNIT != zeros.count)
		copy_forget(); // of other memory
	job.pieces = pieces;
	job.chunks = job.next = 0;
	for (size_t i = 0; i < count; i++)
		job.chunks += (pieces[i].bytes + CHUNK - 1) / CHUNK;
	job.out = out;
	job.streams = driver_serves(STREAMS);
	job.result = CUDA_SUCCESS;
	__atomic_store_n(&job.busy, (uint32_t)copiers, __ATOMIC_SEQ_CST);
	__atomic_add_fetch(&round_number, 1, __ATOMIC_SEQ_CST);
	futex(&round_number, FUTEX_WAKE_PRIVATE, INT_MAX);
	share();
	for (uint32_t busy; (busy = __atomic_load_n(&job.busy, __ATOMIC_SEQ_CST));)
		futex(&job.busy, FUTEX_WAIT_PRIVATE, busy);
	return job.result;
}
