// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Managed memory: what a program has, and is told, of 64 KiB of it. The same with the interposer preloaded
// (LD_PRELOAD=libgpuckpt.so), whose memory it is then: all here holds for both, but the checkpoint.

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "harness.h"

enum { BYTES = 64 << 10 };

// By their names, as a preloaded library is asked for them, too.
#define F(name) ((__typeof__(&name))find(#name))
static void *find(const char *name)
{
	void *f = dlsym(RTLD_DEFAULT, name);

	if (!f)
		f = dlsym(dlopen("libcuda.so.1", RTLD_NOW), name);
	if (!f)
		die("the driver has no %s", name);
	return f;
}

static bool has(const char *name)
{
	return dlsym(dlopen("libcuda.so.1", RTLD_NOW), name) != NULL;
}

static bool with_interposer(void)
{
	const char *preload = getenv("LD_PRELOAD");

	return preload && strstr(preload, "libgpuckpt.so");
}

static CUcontext context;
static CUstream stream;

static CUdeviceptr new_memory(void)
{
	CUdeviceptr p = 0;

	if (!WANT(F(cuMemAllocManaged)(&p, BYTES, CU_MEM_ATTACH_GLOBAL), CUDA_SUCCESS))
		die("there is no managed memory");
	return p;
}

// The host and the driver's copies have one memory.
static void bytes(void)
{
	CUdeviceptr p = new_memory(), other = new_memory();
	volatile uint64_t *word = (uint64_t *)p;
	uint64_t value = 7, back = 0;

	WANT(word[0], 0);
	WANT(word[BYTES / 8 - 1], 0);
	WANT(F(cuMemcpyHtoD_v2)(p + 8, &value, sizeof value), CUDA_SUCCESS);
	WANT(word[1], 7);
	word[2] = 9;
	WANT(F(cuMemcpyDtoH_v2)(&back, p + 16, sizeof back), CUDA_SUCCESS);
	WANT(back, 9);
	WANT(F(cuMemsetD8_v2)(p, 0x11, 8), CUDA_SUCCESS);
	WANT(F(cuCtxSynchronize)(), CUDA_SUCCESS);
	WANT(word[0], 0x1111111111111111);
	WANT(F(cuMemcpyDtoDAsync_v2)(other, p, BYTES, stream), CUDA_SUCCESS);
	WANT(F(cuStreamSynchronize)(stream), CUDA_SUCCESS);
	WANT(((volatile uint64_t *)other)[2], 9);
	WANT(F(cuMemFree_v2)(other), CUDA_SUCCESS);
	WANT(F(cuMemFree_v2)(p), CUDA_SUCCESS);
	WANT(F(cuMemFree_v2)(p), CUDA_ERROR_INVALID_VALUE);
}

static uint64_t attribute(CUdeviceptr p, int what)
{
	uint64_t value = 0;

	WANT(F(cuPointerGetAttribute)(&value, what, p), CUDA_SUCCESS);
	return value;
}

static void attributes(void)
{
	CUdeviceptr p = new_memory(), base = 0, host = 0;
	CUipcMemHandle handle;
	size_t size = 0;
	unsigned managed = 0, type = 0;
	int what[] = {CU_POINTER_ATTRIBUTE_IS_MANAGED, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_HOST_POINTER};
	void *data[] = {&managed, &type, &host};

	WANT(attribute(p + 5, CU_POINTER_ATTRIBUTE_IS_MANAGED), 1);
	WANT(attribute(p + 5, CU_POINTER_ATTRIBUTE_MEMORY_TYPE), CU_MEMORYTYPE_DEVICE);
	WANT(attribute(p + 5, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL), 0);
	WANT(attribute(p + 5, CU_POINTER_ATTRIBUTE_DEVICE_POINTER), p + 5);
	WANT(attribute(p + 5, CU_POINTER_ATTRIBUTE_HOST_POINTER), p + 5);
	WANT(attribute(p + 5, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR), p);
	WANT(attribute(p + 5, CU_POINTER_ATTRIBUTE_RANGE_SIZE), BYTES);
	WANT(attribute(p + 5, CU_POINTER_ATTRIBUTE_CONTEXT) == (uint64_t)context, true);
	WANT(F(cuPointerGetAttributes)(3, what, data, p + 5), CUDA_SUCCESS);
	WANT(managed, 1);
	WANT(type, CU_MEMORYTYPE_DEVICE);
	WANT(host, p + 5);
	WANT(F(cuMemGetAddressRange_v2)(&base, &size, p + BYTES - 1), CUDA_SUCCESS);
	WANT(base, p);
	WANT(size, BYTES);
	WANT(F(cuIpcGetMemHandle)(&handle, p), CUDA_ERROR_INVALID_VALUE);
	WANT(F(cuMemFreeHost)((void *)p) != CUDA_SUCCESS, true);
	WANT(attribute(p, CU_POINTER_ATTRIBUTE_IS_MANAGED), 1); // it is still there
	WANT(F(cuMemFree_v2)(p), CUDA_SUCCESS);

	CUdeviceptr other = 0;
	WANT(F(cuMemAlloc_v2)(&other, BYTES), CUDA_SUCCESS);
	WANT(attribute(other, CU_POINTER_ATTRIBUTE_IS_MANAGED), 0);
	WANT(F(cuMemFree_v2)(other), CUDA_SUCCESS);
	WANT(F(cuMemAllocManaged)(&other, BYTES, 0), CUDA_ERROR_INVALID_VALUE);
	WANT(F(cuMemAllocManaged)(&other, BYTES, CU_MEM_ATTACH_SINGLE), CUDA_ERROR_INVALID_VALUE);
	WANT(F(cuMemAllocManaged)(&other, 0, CU_MEM_ATTACH_GLOBAL), CUDA_ERROR_INVALID_VALUE);
	WANT(F(cuMemAllocManaged)(NULL, BYTES, CU_MEM_ATTACH_GLOBAL), CUDA_ERROR_INVALID_VALUE);
}

static int asked(CUdeviceptr p, int what)
{
	int value = -99;

	WANT(F(cuMemRangeGetAttribute)(&value, sizeof value, what, p, BYTES), CUDA_SUCCESS);
	return value;
}

static void advice(void)
{
	CUdeviceptr p = new_memory();
	int list[3] = {-99, -99, -99}, mostly = -99, preferred = -99;
	size_t sizes[] = {4, 4};
	int what[] = {CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION};
	void *data[] = {&mostly, &preferred};

	WANT(asked(p, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY), 0);
	WANT(asked(p, CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION), CU_DEVICE_INVALID);
	WANT(asked(p, CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION), CU_DEVICE_INVALID);
	WANT(F(cuMemAdvise)(p, BYTES, CU_MEM_ADVISE_SET_READ_MOSTLY, 0), CUDA_SUCCESS);
	WANT(asked(p, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY), 1);
	WANT(F(cuMemAdvise)(p, BYTES, CU_MEM_ADVISE_UNSET_READ_MOSTLY, 0), CUDA_SUCCESS);
	WANT(F(cuMemAdvise)(p, BYTES, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, 0), CUDA_SUCCESS);
	WANT(asked(p, CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION), 0);
	WANT(F(cuMemAdvise)(p, BYTES, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, CU_DEVICE_CPU), CUDA_SUCCESS);
	WANT(F(cuMemAdvise)(p, BYTES, CU_MEM_ADVISE_SET_ACCESSED_BY, 0), CUDA_SUCCESS);
	WANT(F(cuMemRangeGetAttribute)(list, sizeof list, CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, p, BYTES), CUDA_SUCCESS);
	WANT(list[0], 0);
	WANT(list[1], CU_DEVICE_INVALID);
	WANT(F(cuMemRangeGetAttributes)(data, sizes, what, 2, p, BYTES), CUDA_SUCCESS);
	WANT(mostly, 0);
	WANT(preferred, CU_DEVICE_CPU);
	WANT(F(cuMemAdvise)(p, BYTES, CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION, 0), CUDA_SUCCESS);
	WANT(asked(p, CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION), CU_DEVICE_INVALID);
	WANT(F(cuMemAdvise)(p, BYTES, 99, 0), CUDA_ERROR_INVALID_VALUE);
	WANT(F(cuMemAdvise)(p, BYTES, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, 99), CUDA_ERROR_INVALID_DEVICE);
	WANT(F(cuMemRangeGetAttribute)(list, 1, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, p, BYTES), CUDA_ERROR_INVALID_VALUE);
	WANT(F(cuMemRangeGetAttribute)(list, 4, 99, p, BYTES), CUDA_ERROR_INVALID_VALUE);

	WANT(F(cuMemPrefetchAsync)(p, BYTES, 0, stream), CUDA_SUCCESS);
	WANT(asked(p, CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION), 0);
	WANT(F(cuMemPrefetchAsync)(p, BYTES, CU_DEVICE_CPU, stream), CUDA_SUCCESS);
	WANT(asked(p, CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION), CU_DEVICE_CPU);
	WANT(F(cuStreamAttachMemAsync)(stream, p, 0, CU_MEM_ATTACH_GLOBAL), CUDA_SUCCESS);
	WANT(F(cuStreamSynchronize)(stream), CUDA_SUCCESS);
	WANT(F(cuMemFree_v2)(p), CUDA_SUCCESS);
}

// Places by type and number: CUDA 12.2, and in batches: CUDA 13.
static void places(void)
{
	CUmemLocation gpu = {CU_MEM_LOCATION_TYPE_DEVICE, 0}, host = {CU_MEM_LOCATION_TYPE_HOST, 0}, both[] = {gpu, host};
	CUdeviceptr p = new_memory(), p2 = new_memory(), large = 0, all[3];
	size_t sizes[] = {BYTES, BYTES, 4 << 20}, from[] = {0, 1};

	if (!has("cuMemAdvise_v2") || !has("cuMemPrefetchAsync_v2"))
		die("the driver is older than CUDA 12.2");
	WANT(F(cuMemAdvise_v2)(p, BYTES, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, gpu), CUDA_SUCCESS);
	WANT(asked(p, CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION), 0);
	WANT(asked(p, CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE), CU_MEM_LOCATION_TYPE_DEVICE);
	WANT(F(cuMemPrefetchAsync_v2)(p, BYTES, host, 0, stream), CUDA_SUCCESS);
	WANT(asked(p, CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE), CU_MEM_LOCATION_TYPE_HOST);
	WANT(F(cuMemPrefetchAsync_v2)(p, BYTES, gpu, 1, stream), CUDA_ERROR_INVALID_VALUE);
	// One that is the driver's, with the interposer as well, is among them.
	WANT(F(cuMemAllocManaged)(&large, sizes[2], CU_MEM_ATTACH_GLOBAL), CUDA_SUCCESS);
	all[0] = p, all[1] = p2, all[2] = large;
	if (has("cuMemPrefetchBatchAsync")) {
		WANT(F(cuMemPrefetchBatchAsync)(all, sizes, 3, both, from, 2, 0, stream), CUDA_SUCCESS);
		WANT(asked(p, CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION), 0);
		WANT(asked(p2, CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION), CU_DEVICE_CPU);
		WANT(asked(large, CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION), CU_DEVICE_CPU);
		WANT(F(cuMemDiscardBatchAsync)(all, sizes, 3, 0, stream), CUDA_SUCCESS);
		WANT(F(cuMemDiscardAndPrefetchBatchAsync)(all, sizes, 3, &gpu, from, 1, 0, stream), CUDA_SUCCESS);
		WANT(asked(p2, CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION), 0);
		WANT(F(cuMemPrefetchBatchAsync)(all, sizes, 3, &gpu, from, 1, 0, NULL) != CUDA_SUCCESS, true);
	} else {
		printf("      the driver has no batches (CUDA 13)\n");
	}
	WANT(F(cuStreamSynchronize)(stream), CUDA_SUCCESS);
	for (int i = 0; i < 3; i++)
		WANT(F(cuMemFree_v2)(all[i]), CUDA_SUCCESS);
}

// Memory goes with its context.
static void with_its_context(void)
{
	CUcontext other = NULL;
	CUdeviceptr p;
	unsigned managed = 0;

	WANT(F(cuCtxCreate_v2)(&other, 0, 0), CUDA_SUCCESS);
	p = new_memory();
	WANT(F(cuCtxDestroy_v2)(other), CUDA_SUCCESS);
	WANT(F(cuCtxSetCurrent)(context), CUDA_SUCCESS);
	WANT(F(cuPointerGetAttribute)(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, p) != CUDA_SUCCESS, true);
	WANT(F(cuMemFree_v2)(p) != CUDA_SUCCESS, true);
}

// The driver refuses a checkpoint of its own; the interposer's comes back at its address, with what is in it.
static void checkpointed(void)
{
	struct target t = start("managed --bytes 64K", "");

	want_reply(t, "", "101");
	if (with_interposer()) {
		want_cycle(t.pid);
		want_reply(t, "", "102");
		want_cycle(t.pid);
		want_reply(t, "", "103");
		stop(t);
		t = start("managed --bytes 4M", "");
		want_reply(t, "", "101");
	}
	WANT(lock(t.pid, 0), CUDA_SUCCESS);
	WANT(cu.checkpoint(t.pid, NULL), CUDA_ERROR_NOT_SUPPORTED);
	WANT(state_of(t.pid), CU_PROCESS_STATE_LOCKED);
	WANT(cu.unlock(t.pid, NULL), CUDA_SUCCESS);
	for (int i = 102; i < 104; i++) {
		char text[16];
		snprintf(text, sizeof text, "%d", i);
		want_reply(t, "", text);
	}
	stop(t);
}

void test_managed(void)
{
	checkpointed();
	WANT(cu.init(0), CUDA_SUCCESS);
	WANT(F(cuDevicePrimaryCtxRetain)(&context, 0), CUDA_SUCCESS);
	WANT(F(cuCtxSetCurrent)(context), CUDA_SUCCESS);
	WANT(F(cuStreamCreate)(&stream, 0), CUDA_SUCCESS);
	bytes();
	attributes();
	advice();
	places();
	with_its_context();
}
