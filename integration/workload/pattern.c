// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Device memory full of a known pattern: word i of a piece is mix(i + seed), or that made to look
// like something else by masks. Pieces start with one seed each and can be rewritten in part with
// another; which seed is where is remembered in host memory, so that every bit can be checked.
//
// Requests: "verify" answers bad=N, "count" the next value of a counter in device memory, "write
// PERMILLE" rewrites that share of each chunk, "info" answers bytes, GPUs and addresses. With
// --host-bytes there is as much host memory beside it, which "verify" checks as well; with --pinned 1
// cuMemHostAlloc's, with 2 page-locked by cuMemHostRegister, where the GPU must see it too; with 3 shared.
// "where" answers its address.

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "gpu.h"
#include "udp.h"
#include "workloads.h"

enum { MAX_PATTERN_GPUS = 16, SLICES = 1000, HOST_THREADS = 8 };

struct chunk {
	int gpu; // index into pattern.gpu
	CUdeviceptr address;
	uint64_t words;
	uint64_t seed[SLICES]; // of words [words*i/SLICES, words*(i+1)/SLICES)
};

struct pattern {
	struct gpu gpu[MAX_PATTERN_GPUS];
	CUdeviceptr bad[MAX_PATTERN_GPUS];
	int ordinal[MAX_PATTERN_GPUS];
	int gpus, chunks;
	struct chunk *chunk;
	uint64_t seed, writes;
	uint64_t keep, fixed; // a word is (mix & keep) | fixed
	uint64_t *host;       // host memory beside it
	size_t host_words;
	CUdeviceptr host_device; // where the GPU has it
};

// host_part is what one thread does with the host memory.
struct host_part {
	uint64_t *words;
	size_t from, to;
	int check;
	uint64_t bad;
};

static void *host_work(void *arg)
{
	struct host_part *h = arg;

	for (size_t i = h->from; i < h->to; i++) {
		uint64_t word = (i + 1) * 0x9e3779b97f4a7c15ull;
		if (!h->check)
			h->words[i] = word;
		else
			h->bad += h->words[i] != word;
	}
	return NULL;
}

// host_all fills or checks the host memory. It returns the number of words that are wrong.
static uint64_t host_all(const struct pattern *p, int check)
{
	struct host_part parts[HOST_THREADS];
	pthread_t threads[HOST_THREADS];
	uint64_t bad = 0;

	for (int i = 0; i < HOST_THREADS; i++) {
		parts[i] = (struct host_part){p->host, p->host_words / HOST_THREADS * (size_t)i, p->host_words / HOST_THREADS * (size_t)(i + 1), check, 0};
		if (i == HOST_THREADS - 1)
			parts[i].to = p->host_words;
		if (pthread_create(&threads[i], NULL, host_work, &parts[i])) {
			fprintf(stderr, "gpuwork: no thread\n");
			exit(1);
		}
	}
	for (int i = 0; i < HOST_THREADS; i++) {
		pthread_join(threads[i], NULL);
		bad += parts[i].bad;
	}
	return bad;
}

// host_seen returns the number of places where the GPU and the processor do not have the same memory.
static uint64_t host_seen(const struct pattern *p)
{
	uint64_t bad = 0;

	for (int i = 0; p->host_device && i < 64; i++) {
		size_t at = p->host_words / 64 * (size_t)i;
		CUdeviceptr there = p->host_device + at * sizeof(uint64_t);
		uint64_t was = p->host[at];

		bad += gpu_read(there) != was;
		gpu_write(there, ~was);
		bad += ((volatile uint64_t *)p->host)[at] != ~was;
		p->host[at] = was;
	}
	return bad;
}

static void host_begin(struct pattern *p, const struct options *o)
{
	if (!o->host_bytes)
		return;
	p->host_words = o->host_bytes / sizeof(uint64_t);
	if (o->pinned == 1) {
		p->host = gpu_alloc_pinned(o->host_bytes, &p->host_device);
	} else {
		p->host = mmap(NULL, o->host_bytes, PROT_READ | PROT_WRITE, (o->pinned == 3 ? MAP_SHARED : MAP_PRIVATE) | MAP_ANONYMOUS, -1, 0);
		if (p->host == MAP_FAILED) {
			perror("gpuwork: mmap");
			exit(1);
		}
	}
	if (o->pinned == 2)
		p->host_device = gpu_register(p->host, o->host_bytes);
	host_all(p, 0);
}

// choose sets the masks for a kind of content.
static void choose(struct pattern *p, const char *content)
{
	static const struct {
		const char *name;
		uint64_t keep, fixed;
	} contents[] = {
		{"pattern", ~0ULL, 0},
		{"zero", 0, 0},
		// bf16: sign and mantissa at random, exponents 112 to 119, that is 2^-15 to 2^-7
		{"weights", 0x83ff83ff83ff83ff, 0x3800380038003800},
	};

	for (size_t i = 0; i < sizeof contents / sizeof *contents; i++) {
		if (strcmp(contents[i].name, content))
			continue;
		p->keep = contents[i].keep;
		p->fixed = contents[i].fixed;
		return;
	}
	fprintf(stderr, "gpuwork: --content %s is not known\n", content);
	exit(2);
}

static uint64_t slice_start(const struct chunk *c, int slice)
{
	return c->words * (uint64_t)slice / SLICES;
}

// run_slices runs a kernel over the slices [from, to), which share a seed.
static void run_slices(struct pattern *p, struct chunk *c, int from, int to, CUfunction kernel)
{
	uint64_t first = slice_start(c, from), count = slice_start(c, to) - first;
	uint64_t seed = c->seed[from] + first;
	CUdeviceptr address = c->address + first * sizeof(uint64_t);
	void *params[] = {&address, &count, &seed, &p->keep, &p->fixed, &p->bad[c->gpu]};

	if (count)
		gpu_launch(kernel, 1024, 256, params);
}

static void fill(struct pattern *p, struct chunk *c, int slices, uint64_t seed)
{
	for (int i = 0; i < slices; i++)
		c->seed[i] = seed;
	gpu_use(&p->gpu[c->gpu]);
	run_slices(p, c, 0, slices, p->gpu[c->gpu].fill);
	gpu_wait();
}

static uint64_t verify(struct pattern *p)
{
	uint64_t bad = 0;

	for (int g = 0; g < p->gpus; g++) {
		gpu_use(&p->gpu[g]);
		gpu_write(p->bad[g], 0);
		for (struct chunk *c = p->chunk; c < p->chunk + p->chunks; c++) {
			if (c->gpu != g)
				continue;
			for (int from = 0, to; from < SLICES; from = to) {
				for (to = from + 1; to < SLICES && c->seed[to] == c->seed[from];)
					to++;
				run_slices(p, c, from, to, p->gpu[g].check);
			}
		}
		gpu_wait();
		bad += gpu_read(p->bad[g]);
	}
	if (p->host_words)
		bad += host_all(p, 1) + host_seen(p);
	return bad;
}

// seed_of tells chunks and writes apart, so that data that comes back in the wrong place is found.
static uint64_t seed_of(const struct pattern *p, int chunk)
{
	return p->seed ^ (uint64_t)chunk << 48 ^ p->writes << 40;
}

static void rewrite(struct pattern *p, int permille)
{
	p->writes++;
	for (int i = 0; i < p->chunks; i++)
		fill(p, &p->chunk[i], permille * SLICES / 1000, seed_of(p, i));
}

static void info(const struct pattern *p, char *reply)
{
	uint64_t bytes = 0;
	char uuid[41];

	for (int i = 0; i < p->chunks; i++)
		bytes += p->chunk[i].words * sizeof(uint64_t);
	int at = snprintf(reply, UDP_TEXT, "pid=%d bytes=%" PRIu64 " gpus=%d", getpid(), bytes, p->gpus);
	for (int g = 0; g < p->gpus; g++) {
		gpu_uuid(p->ordinal[g], uuid);
		at += snprintf(reply + at, (size_t)(UDP_TEXT - at), " %s", uuid);
	}
	for (int i = 0; i < p->chunks && at < UDP_TEXT - 32; i++)
		at += snprintf(reply + at, (size_t)(UDP_TEXT - at), " 0x%llx", p->chunk[i].address);
}

static void answer(void *arg, const char *request, char *reply)
{
	struct pattern *p = arg;
	int permille;

	if (!strcmp(request, "verify")) {
		snprintf(reply, UDP_TEXT, "bad=%" PRIu64, verify(p));
	} else if (!strcmp(request, "count")) {
		gpu_use(&p->gpu[0]);
		snprintf(reply, UDP_TEXT, "%" PRIu64, gpu_increment(&p->gpu[0], p->gpu[0].counter));
	} else if (sscanf(request, "write %d", &permille) == 1 && permille >= 0 && permille <= 1000) {
		rewrite(p, permille);
		snprintf(reply, UDP_TEXT, "wrote %d", permille);
	} else if (!strcmp(request, "info")) {
		info(p, reply);
	} else if (!strcmp(request, "where")) {
		snprintf(reply, UDP_TEXT, "%" PRIxPTR, (uintptr_t)p->host);
	} else {
		snprintf(reply, UDP_TEXT, "verify, count, write PERMILLE, info or where");
	}
}

// run_pattern fills o->bytes on each of o->gpus GPUs, the first of them o->gpu.
void run_pattern(const struct options *o)
{
	static struct pattern p;
	int s = udp_listen(o->port), have = gpu_count();

	if (o->gpus > have || o->gpus > MAX_PATTERN_GPUS) {
		fprintf(stderr, "gpuwork: %d GPUs asked for, %d here\n", o->gpus, have);
		exit(1);
	}
	choose(&p, o->content);
	p.gpus = o->gpus;
	p.seed = o->seed;
	p.chunks = o->gpus * o->chunks;
	p.chunk = calloc((size_t)p.chunks, sizeof *p.chunk);
	if (!p.chunk) {
		perror("gpuwork: chunks");
		exit(1);
	}
	for (int g = 0; g < p.gpus; g++) {
		p.ordinal[g] = (o->gpu + g) % have;
		p.gpu[g] = gpu_open(p.ordinal[g]);
		p.bad[g] = gpu_alloc(sizeof(uint64_t));
		for (int i = g * o->chunks; i < (g + 1) * o->chunks; i++) {
			struct chunk *c = &p.chunk[i];
			c->gpu = g;
			c->words = o->bytes / (unsigned)o->chunks / sizeof(uint64_t);
			c->address = gpu_alloc(c->words * sizeof(uint64_t));
			fill(&p, c, SLICES, seed_of(&p, i));
		}
	}
	host_begin(&p, o);
	puts("ready");
	udp_serve(s, answer, &p);
}
