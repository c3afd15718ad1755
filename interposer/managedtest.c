// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// A program with the interposer preloaded, on the software GPU: which managed memory is the interposer's. Managed memory
// of that driver's has addresses in the GPU's range, that of the interposer's has not. Where the interposer is off
// (GPUCKPT_INTERPOSER=off), all is the driver's. Ends with 0, or says what is wrong.

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef unsigned long long CUdeviceptr;

#include "want.h"

enum { KIB = 1 << 10, MIB = 1 << 20, SMALL = 5000, THREADS = 4, EACH = 300 };

static int (*alloc)(CUdeviceptr *, size_t, unsigned), (*release)(CUdeviceptr), (*attribute)(void *, int, CUdeviceptr);
static int (*current)(void *);
static void *context;

// As in integration/softcuda/memory.c.
#ifndef FIRST_ADDRESS
#define FIRST_ADDRESS 0x100000000000
#define SPAN_BITS 40
#endif

static bool is_drivers(CUdeviceptr p)
{
	return p >= FIRST_ADDRESS && (p - FIRST_ADDRESS) >> SPAN_BITS < 16;
}

// make makes memory that must be the interposer's or the driver's, and is zeros.
static CUdeviceptr make(size_t bytes, bool drivers)
{
	CUdeviceptr p = 0;

	WANT(!alloc(&p, bytes, 1));
	WANT(is_drivers(p) == drivers);
	for (size_t i = 0; i < bytes; i++)
		WANT(!((char *)p)[i]);
	memset((void *)p, 0x5a, bytes); // whoever has it next
	return p;
}

static unsigned managed(CUdeviceptr p)
{
	unsigned is = 2;

	return attribute(&is, 8, p) ? 2 : is;
}

static int compare(const void *a, const void *b)
{
	CUdeviceptr p = *(const CUdeviceptr *)a, q = *(const CUdeviceptr *)b;

	return p < q ? -1 : p > q;
}

// Many small ones, freed in another order than they were made in.
static void many(void)
{
	static CUdeviceptr all[SMALL], sorted[SMALL];

	for (int i = 0; i < SMALL; i++)
		all[i] = sorted[i] = make(16 + i % 3, false);
	qsort(sorted, SMALL, sizeof *sorted, compare);
	for (int i = 1; i < SMALL; i++)
		WANT(sorted[i] - sorted[i - 1] >= 16);
	for (int i = 0; i < SMALL; i++) {
		int k = (int)((long)i * 2741 % SMALL); // a prime: each once
		WANT(managed(all[k]) == 1 && managed(all[k] + 15) == 1);
		WANT(release(all[k] + 1) == 1); // where nothing begins
		WANT(!release(all[k]));
		WANT(release(all[k]) == 1);
	}
}

// As many as there may be, and no more until some are free.
static void limits(void)
{
	CUdeviceptr all[64];

	WANT(!release(make(MIB, false)) && !release(make(MIB + 1, true)) && !release(make(4 * MIB, true)));
	for (int round = 0; round < 2; round++) {
		for (int i = 0; i < 64; i++)
			all[i] = make(MIB, false);
		WANT(!release(make(1, true)));
		WANT(!release(all[7]));
		all[7] = make(MIB - 4096, false);
		CUdeviceptr last = make(1, false);
		WANT(!release(make(4096, true)));
		for (int i = 0; i < 64; i++)
			WANT(!release(all[i]));
		WANT(!release(last));
	}
}

static void *make_and_free(void *arg)
{
	CUdeviceptr p[EACH];

	(void)arg;
	WANT(!current(context));
	for (int i = 0; i < EACH; i++)
		p[i] = make(64 * (size_t)(i + 1), false);
	for (int i = 0; i < EACH; i++)
		WANT(managed(p[i]) == 1 && !release(p[i]));
	return NULL;
}

static void by_threads(void)
{
	pthread_t threads[THREADS];

	for (int i = 0; i < THREADS; i++)
		WANT(!pthread_create(&threads[i], NULL, make_and_free, NULL));
	for (int i = 0; i < THREADS; i++)
		WANT(!pthread_join(threads[i], NULL));
}

// A child has no CUDA: the driver's error is what it gets, and no memory of its parent's is freed.
static void in_a_child(void)
{
	CUdeviceptr p = make(KIB, false), other;
	int status = 0;
	pid_t child = fork();

	if (!child)
		_exit(release(p) == 3 && alloc(&other, KIB, 1) == 3 && managed(p) == 2 ? 0 : 1);
	WANT(waitpid(child, &status, 0) == child && !status);
	WANT(managed(p) == 1 && !release(p));
}

// Memory that goes with its context may be made again.
static void by_contexts(void *create, void *destroy)
{
	for (int i = 0; i < 3; i++) {
		void *other;
		CUdeviceptr mine = make(MIB, false);
		WANT(!((int (*)(void **, unsigned, int))create)(&other, 0, 0));
		for (int k = 0; k < 63; k++)
			make(MIB, false);
		WANT(!((int (*)(void *))destroy)(other) && !current(context));
		WANT(managed(mine) == 1 && !release(mine));
	}
}

int main(void)
{
	const char *set = getenv("GPUCKPT_INTERPOSER");
	void *library = dlopen("libcuda.so.1", RTLD_NOW);
	CUdeviceptr none = 0;

	WANT(library);
	int (*init)(unsigned) = dlsym(library, "cuInit"), (*retain)(void **, int) = dlsym(library, "cuDevicePrimaryCtxRetain");
	alloc = dlsym(library, "cuMemAllocManaged");
	release = dlsym(library, "cuMemFree_v2");
	attribute = dlsym(library, "cuPointerGetAttribute");
	current = dlsym(library, "cuCtxSetCurrent");
	WANT(init && retain && alloc && release && attribute && current);
	WANT(alloc(&none, KIB, 1) == 3); // before cuInit
	WANT(!init(0));
	WANT(alloc(&none, KIB, 1) == 201); // without a context
	WANT(!retain(&context, 0) && !current(context));
	if (set && !strcmp(set, "off")) {
		WANT(!release(make(KIB, true)));
		return 0;
	}
	many();
	limits();
	by_threads();
	in_a_child();
	by_contexts(dlsym(library, "cuCtxCreate_v2"), dlsym(library, "cuCtxDestroy_v2"));
	return 0;
}
