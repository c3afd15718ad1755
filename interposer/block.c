// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Blocks: GPU memory of the interposer's own making, each a handle of cuMemCreate, mapped at an address that was reserved for
// it. So the memory can be given back and had again, and the address stays. Which there are is in a list.
//
// The functions that stand in for the driver's run inside the gate, and the worker changes blocks only while nobody is
// inside, but for what it tells the shim. Locks are for the program's threads among each other, and are never held across
// a call that waits for the GPU.

#include "block.h"

#include <stdlib.h>
#include <string.h>

struct block *blocks;
static uint64_t last_number; // of a block; LOCK_BLOCKS
static uint32_t lost; // what the program has used that the interposer does not bring back
static bool is_known;

static void look(void)
{
	const char *set = getenv("GPUCKPT_INTERPOSER");
	int version = 0;

	if (set && !strcmp(set, "off")) {
		interposer_say("GPUCKPT_INTERPOSER=off: it does nothing here");
		return;
	}
	if (!driver_serves(BLOCKS | COPIES)) {
		interposer_say("the driver lacks a function that the interposer needs: it does nothing here");
		return;
	}
	if (driver.cuDriverGetVersion(&version) || version < 12000 || version >= 14000) {
		interposer_say("the driver is none of CUDA 12 or 13: it does nothing here");
		return;
	}
	if (!worker_start()) {
		interposer_say("there is no thread for it: it does nothing here");
		return;
	}
	is_known = true;
}

bool block_ready(void)
{
	static pthread_once_t state = PTHREAD_ONCE_INIT;

	once(&state, look);
	return is_known;
}

struct block *block_at(CUdeviceptr p)
{
	struct block *b;

	lock(LOCK_BLOCKS);
	for (b = blocks; b && (!b->visible || p < b->address || p - b->address >= b->asked); b = b->next)
		;
	unlock(LOCK_BLOCKS);
	return b;
}

CUmemAllocationProp block_prop(CUdevice device)
{
	return (CUmemAllocationProp){.type = CU_PINNED, .requestedHandleTypes = CU_POSIX_FD, .location = {CU_DEVICE, device}};
}

CUresult block_allow(const struct block *b)
{
	CUmemAccessDesc desc[MAX_DEVICES];
	size_t n = 0;

	for (CUdevice d = 0; d < MAX_DEVICES; d++)
		if (peers_may(d, b->device))
			desc[n++] = (CUmemAccessDesc){{CU_DEVICE, d}, CU_READWRITE};
	return driver.cuMemSetAccess(b->address, b->bytes, desc, n);
}

bool block_is_import(const struct block *b)
{
	return b->from.number != 0;
}

static CUresult create(struct block *b)
{
	CUmemAllocationProp prop = b->prop.type ? b->prop : block_prop(b->device);
	CUresult r = driver.cuMemCreate(&b->handle, b->bytes, &prop, 0);

	b->exportable = !r;
	if (!r || r == CUDA_ERROR_OUT_OF_MEMORY || b->prop.type)
		return r;
	prop.requestedHandleTypes = 0; // a driver without that kind of handle
	return driver.cuMemCreate(&b->handle, b->bytes, &prop, 0);
}

static CUresult import(struct block *b)
{
	int fd = -1;
	CUresult r = share_ask(&b->from, SHARE_OPEN, 0, &fd);

	if (r)
		return r;
	r = driver.cuMemImportFromShareableHandle(&b->handle, (void *)(intptr_t)fd, CU_POSIX_FD);
	close(fd);
	if (r)
		share_ask(&b->from, SHARE_CLOSE, 0, NULL);
	return r;
}

// list has a block in the list. The lock is held.
static void list(struct block *b)
{
	if (b->listed)
		return;
	if (b->context)
		contexts_note(b->context, -1);
	b->next = blocks;
	b->listed = true;
	blocks = b;
}

void block_add(struct block *b)
{
	lock(LOCK_BLOCKS);
	list(b);
	unlock(LOCK_BLOCKS);
}

// show lets GPUs reach a block that is mapped at its address, and maps its views.
static CUresult show(struct block *b)
{
	CUresult r = vmm_show(b);

	if (r)
		return r;
	lock(LOCK_BLOCKS);
	if (!b->address || !(r = block_allow(b))) {
		b->mapped = true;
		list(b);
	}
	unlock(LOCK_BLOCKS);
	if (r)
		vmm_hide(b);
	return r;
}

CUresult block_have(struct block *b)
{
	CUresult r = block_is_import(b) ? import(b) : create(b);

	if (r)
		return r;
	if (!b->address || !(r = driver.cuMemMap(b->address, b->bytes, 0, b->handle, 0))) {
		if (!(r = show(b)))
			return CUDA_SUCCESS;
		if (b->address)
			driver.cuMemUnmap(b->address, b->bytes);
	}
	driver.cuMemRelease(b->handle);
	if (block_is_import(b))
		share_ask(&b->from, SHARE_CLOSE, 0, NULL);
	return r;
}

CUresult block_give(struct block *b)
{
	CUresult r = CUDA_SUCCESS;

	if (!b->mapped) // an import whose exporter has ended
		return r;
	lock(LOCK_EXPORTING);
	if (!(r = vmm_hide(b)) && b->address && (r = driver.cuMemUnmap(b->address, b->bytes)))
		vmm_show(b);
	if (!r) {
		lock(LOCK_BLOCKS);
		b->mapped = false;
		unlock(LOCK_BLOCKS);
		r = driver.cuMemRelease(b->handle);
	}
	unlock(LOCK_EXPORTING);
	return r;
}

void block_is_given(struct block *b)
{
	lock(LOCK_BLOCKS);
	b->given = true;
	unlock(LOCK_BLOCKS);
}

// One whose handle the program has stays, and an import is saved by its exporter.
bool block_is_taken(const struct block *b)
{
	return !b->given && !block_is_import(b);
}

struct block *block_here(size_t bytes)
{
	struct block *b = calloc(1, sizeof *b);

	if (b && !driver.cuCtxGetCurrent(&b->context) && b->context && !driver.cuCtxGetDevice(&b->device) && b->device >= 0 && b->device < MAX_DEVICES) {
		b->asked = b->bytes = bytes;
		return b;
	}
	free(b);
	return NULL;
}

void block_forget(struct block *gone)
{
	lock(LOCK_EXPORTING);
	lock(LOCK_BLOCKS);
	for (struct block **l = &blocks; *l; l = &(*l)->next) {
		if (*l == gone) {
			*l = gone->next;
			break;
		}
	}
	unlock(LOCK_BLOCKS);
	unlock(LOCK_EXPORTING);
	free(gone);
}

CUresult block_end(struct block *b)
{
	bool had = b->mapped;
	CUresult r = block_give(b);

	if (r)
		return r;
	if (block_is_import(b) && had)
		share_ask(&b->from, SHARE_CLOSE, 0, NULL); // who ends is missed
	if (b->address)
		r = driver.cuMemAddressFree(b->address, b->bytes);
	block_forget(b);
	return r;
}

CUresult block_in_context(CUcontext c, CUresult (*call)(CUdeviceptr), CUdeviceptr p)
{
	CUcontext before = NULL;
	CUresult r = driver.cuCtxGetCurrent(&before);

	if (r || (before != c && (r = driver.cuCtxSetCurrent(c))))
		return r;
	r = call(p);
	if (before != c)
		driver.cuCtxSetCurrent(before);
	return r;
}

CUresult block_unused(CUdeviceptr p)
{
	(void)p;
	return driver.cuCtxSynchronize();
}

bool block_ticket(struct block *b, struct ticket *t)
{
	lock(LOCK_BLOCKS);
	if (!b->number)
		b->number = ++last_number;
	*t = (struct ticket){.number = b->number, .bytes = b->bytes, .asked = b->asked};
	unlock(LOCK_BLOCKS);
	return b->exportable && share_ticket(t);
}

void block_lost(enum lost what)
{
	__atomic_or_fetch(&lost, what, __ATOMIC_SEQ_CST);
	block_ready();
}

uint32_t memory_lost(void)
{
	uint32_t all = __atomic_load_n(&lost, __ATOMIC_SEQ_CST);

	lock(LOCK_BLOCKS);
	for (struct block *b = blocks; b; b = b->next)
		all |= b->host ? LOST_HOST : 0;
	unlock(LOCK_BLOCKS);
	return all;
}
