// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// The contexts that the program has, or has memory in.

#include "block.h"

enum { MAX_CONTEXTS = 256 };

struct context {
	CUcontext it;
	int primary_of; // a device; -1
};

static struct context contexts[MAX_CONTEXTS]; // LOCK_BLOCKS
static int context_count;

void contexts_note(CUcontext c, int primary_of)
{
	int i;

	for (i = 0; i < context_count && contexts[i].it != c; i++)
		;
	if (i < MAX_CONTEXTS) {
		contexts[i] = (struct context){c, primary_of >= 0 || i == context_count ? primary_of : contexts[i].primary_of};
		context_count += i == context_count;
	}
}

static void note_context(CUcontext c, int primary_of)
{
	lock(LOCK_BLOCKS);
	contexts_note(c, primary_of);
	unlock(LOCK_BLOCKS);
}

// The driver frees the memory of a context with it.
static void context_ended(CUcontext c)
{
	peers_forget(c, NULL);
	peers_forget(NULL, c);
	managed_context_ended(c);
	events_context_ended(c);
	for (;;) {
		struct block *b;
		lock(LOCK_BLOCKS);
		for (b = blocks; b && b->context != c; b = b->next)
			;
		unlock(LOCK_BLOCKS);
		if (!b)
			break;
		if (!b->visible) { // memory with a handle stays, and there is no context to copy it in
			lock(LOCK_BLOCKS);
			b->context = NULL;
			b->given = true;
			unlock(LOCK_BLOCKS);
		} else if (block_end(b)) {
			block_forget(b);
		}
	}
	lock(LOCK_BLOCKS);
	for (int i = 0; i < context_count; i++)
		if (contexts[i].it == c)
			contexts[i] = contexts[--context_count];
	unlock(LOCK_BLOCKS);
}

#define CREATED(name, symbol, parameters, arguments)                             \
	static CUresult name parameters                                          \
	{                                                                        \
		CUresult r = driver.symbol arguments;                            \
		if (!r && context)                                               \
			note_context(*context, -1);                              \
		return r;                                                        \
	}
CREATED(create_v2, cuCtxCreate_v2, (CUcontext *context, unsigned f, CUdevice d), (context, f, d))
CREATED(create_v3, cuCtxCreate_v3, (CUcontext *context, void *p, int n, unsigned f, CUdevice d), (context, p, n, f, d))
CREATED(create_v4, cuCtxCreate_v4, (CUcontext *context, void *p, unsigned f, CUdevice d), (context, p, f, d))

static CUresult primary_retain(CUcontext *context, CUdevice d)
{
	CUresult r = driver.cuDevicePrimaryCtxRetain(context, d);

	if (!r)
		note_context(*context, d);
	return r;
}

static CUresult destroy(CUcontext c)
{
	CUresult r = driver.cuCtxDestroy_v2(c);

	if (!r)
		context_ended(c);
	return r;
}

static CUcontext primary_of(CUdevice d)
{
	CUcontext c = NULL;

	lock(LOCK_BLOCKS);
	for (int i = 0; i < context_count && !c; i++)
		c = contexts[i].primary_of == d ? contexts[i].it : NULL;
	unlock(LOCK_BLOCKS);
	return c;
}

// primary_ended is called after a call that may have ended a primary context, with the call's result.
static CUresult primary_ended(CUresult r, CUdevice d)
{
	unsigned flags;
	int active = 1;

	if (r || driver.cuDevicePrimaryCtxGetState(d, &flags, &active) || active)
		return r;
	CUcontext c = primary_of(d);
	if (c)
		context_ended(c);
	return r;
}

static CUresult primary_release(CUdevice d)
{
	return primary_ended(driver.cuDevicePrimaryCtxRelease_v2(d), d);
}

static CUresult primary_reset(CUdevice d)
{
	return primary_ended(driver.cuDevicePrimaryCtxReset_v2(d), d);
}

const struct override contexts_overrides[] = {
	{"cuCtxCreate_v2", create_v2}, {"cuCtxCreate_v3", create_v3}, {"cuCtxCreate_v4", create_v4},
	{"cuCtxDestroy_v2", destroy}, {"cuCtxDestroy", destroy},
	{"cuDevicePrimaryCtxRetain", primary_retain},
	{"cuDevicePrimaryCtxRelease_v2", primary_release}, {"cuDevicePrimaryCtxRelease", primary_release},
	{"cuDevicePrimaryCtxReset_v2", primary_reset}, {"cuDevicePrimaryCtxReset", primary_reset},
	{NULL, NULL},
};

CUresult memory_synchronize(void)
{
	CUcontext all[MAX_CONTEXTS];
	CUresult r = CUDA_SUCCESS;
	int n = 0;

	lock(LOCK_BLOCKS); // which is not held while the GPU works
	for (; n < context_count; n++)
		all[n] = contexts[n].it;
	unlock(LOCK_BLOCKS);
	for (int i = 0; i < n && !r; i++)
		if (!(r = driver.cuCtxSetCurrent(all[i])))
			r = driver.cuCtxSynchronize();
	return r;
}
