// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Custom storage, on a driver that has it (CUDA 13.4): the memory of the target in the caller, the states,
// what is refused, and a caller that dies. On the software GPU the switch SOFTCUDA_DRIVER makes such a driver.

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "harness.h"

static struct {
	CUresult (*proc)(const char *, void **, int, uint64_t, int *);
	CUresult (*complete)(CUcheckpointOperationHandle);
	CUresult (*retain)(CUcontext *, CUdevice);
	CUresult (*set_current)(CUcontext);
	CUresult (*stream_context)(CUstream, CUcontext *);
	CUresult (*out)(void *, CUdeviceptr, size_t);
	CUresult (*in)(CUdeviceptr, const void *, size_t);
} more;

enum { CUDA_13_4 = 13040 };

// has_custom finds the calls, and reports whether the driver has custom storage.
static bool has_custom(void)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW), *complete = NULL;
	struct {
		void *to;
		const char *name;
	} calls[] = {
		{&more.proc, "cuGetProcAddress_v2"},
		{&more.retain, "cuDevicePrimaryCtxRetain"},
		{&more.set_current, "cuCtxSetCurrent"},
		{&more.stream_context, "cuStreamGetCtx"},
		{&more.out, "cuMemcpyDtoH_v2"},
		{&more.in, "cuMemcpyHtoD_v2"},
	};
	for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
		void *address = dlsym(library, calls[i].name);
		if (!address)
			return false;
		memcpy(calls[i].to, &address, sizeof address);
	}
	if (more.proc("cuCheckpointOperationComplete", &complete, CUDA_13_4, 0, NULL) || !complete)
		return false;
	memcpy(&more.complete, &complete, sizeof complete);
	return true;
}

// retain_all has this process retain the primary context of each GPU, which a caller must.
static void retain_all(void)
{
	CUcontext context;
	int n = 0;

	WANT(cu.init(0), CUDA_SUCCESS);
	WANT(cu.count(&n), CUDA_SUCCESS);
	for (int i = 0; i < n; i++)
		WANT(more.retain(&context, i), CUDA_SUCCESS);
}

static CUresult begin(const char *step, pid_t pid, CUcheckpointCustomStorageInfo **info)
{
	CUcheckpointCheckpointArgs c = {.customStorageInfo_out = info};
	CUcheckpointRestoreArgs r = {.customStorageInfo_out = info};

	*info = NULL;
	return strcmp(step, "restore") ? cu.checkpoint(pid, &c) : cu.restore(pid, &r);
}

int custom_call(const char *step, pid_t pid)
{
	CUcheckpointCustomStorageInfo *info;

	if (!has_custom())
		return 99;
	retain_all();
	return begin(step, pid, &info);
}

// saved is the memory of one GPU.
struct saved {
	char *bytes;
	size_t size;
};

static void enter(const CUcheckpointCustomStoragePerDeviceData *d)
{
	CUcontext context;

	WANT(more.stream_context(d->stream, &context), CUDA_SUCCESS);
	WANT(more.set_current(context), CUDA_SUCCESS);
}

static int save(pid_t pid, struct saved *to)
{
	CUcheckpointCustomStorageInfo *info;

	if (!WANT(begin("checkpoint", pid, &info), CUDA_SUCCESS))
		return 0;
	WANT(state_of(pid), CU_PROCESS_STATE_CHECKPOINTING);
	int n = (int)info->deviceCount;
	for (int i = 0; i < n; i++) {
		CUcheckpointCustomStoragePerDeviceData *d = &info->perDeviceData[i];
		to[i] = (struct saved){malloc(d->size), d->size};
		enter(d);
		WANT(more.out(to[i].bytes, d->devPtr, d->size), CUDA_SUCCESS);
	}
	WANT(more.complete(info->handle), CUDA_SUCCESS);
	WANT(state_of(pid), CU_PROCESS_STATE_CHECKPOINTED);
	return n;
}

static void fill(pid_t pid, const struct saved *from, int n)
{
	CUcheckpointCustomStorageInfo *info;

	if (!WANT(begin("restore", pid, &info), CUDA_SUCCESS))
		return;
	WANT(state_of(pid), CU_PROCESS_STATE_RESTORING);
	if (WANT(info->deviceCount, n))
		for (int i = 0; i < n; i++) {
			CUcheckpointCustomStoragePerDeviceData *d = &info->perDeviceData[i];
			enter(d);
			if (WANT(d->size, from[i].size))
				WANT(more.in(d->devPtr, from[i].bytes, d->size), CUDA_SUCCESS);
		}
	WANT(more.complete(info->handle), CUDA_SUCCESS);
	WANT(state_of(pid), CU_PROCESS_STATE_LOCKED);
}

static void there_and_back(void)
{
	struct target t = start_with_memory("pattern --bytes 8M", "");
	CUcheckpointCustomStorageInfo *info;
	struct saved saved[16];

	want_reply(t, "verify", "bad=0");
	WANT(begin("checkpoint", t.pid, &info), CUDA_ERROR_ILLEGAL_STATE);
	WANT(lock(t.pid, 10000), CUDA_SUCCESS);
	int n = save(t.pid, saved);
	WANT(n > 0, true);
	WANT(gpu_fds(t.pid), 0);
	WANT(begin("checkpoint", t.pid, &info), CUDA_ERROR_ILLEGAL_STATE);
	fill(t.pid, saved, n);
	WANT(begin("restore", t.pid, &info), CUDA_ERROR_ILLEGAL_STATE);
	WANT(cu.unlock(t.pid, NULL), CUDA_SUCCESS);
	want_reply(t, "verify", "bad=0");
	want_cycle(t.pid); // the usual way
	want_reply(t, "verify", "bad=0");
	stop(t);
	for (int i = 0; i < n; i++)
		free(saved[i].bytes);
}

// died has callers die in the middle. The software GPU undoes their step, which is assumed of the original.
static void died(void)
{
	struct target t = start_with_memory("pattern --bytes 8M", "");
	struct saved saved[16];

	WANT(lock(t.pid, 10000), CUDA_SUCCESS);
	WANT(finish(call_elsewhere("custom-checkpoint", t.pid)), CUDA_SUCCESS);
	WANT(state_of(t.pid), CU_PROCESS_STATE_LOCKED);
	int n = save(t.pid, saved);
	WANT(finish(call_elsewhere("custom-restore", t.pid)), CUDA_SUCCESS);
	WANT(state_of(t.pid), CU_PROCESS_STATE_CHECKPOINTED);
	WANT(restore(t.pid, 0, NULL), CUDA_ERROR_ILLEGAL_STATE); // there is nothing in host memory
	fill(t.pid, saved, n);
	WANT(cu.unlock(t.pid, NULL), CUDA_SUCCESS);
	want_reply(t, "verify", "bad=0");
	stop(t);

	t = start("counter", "SOFTCUDA_STUCK=1");
	WANT(lock(t.pid, 10000), CUDA_SUCCESS);
	WANT(finish(call_elsewhere("custom-checkpoint", t.pid)), CUDA_SUCCESS);
	WANT(state_of(t.pid), CU_PROCESS_STATE_CHECKPOINTING);
	WANT(cu.unlock(t.pid, NULL), CUDA_ERROR_ILLEGAL_STATE);
	stop(t);
}

// without is a driver that does not have it: what is asked for is a reserved byte that is not zero.
static void without(void)
{
	struct target t = start("counter", "");
	CUcheckpointCustomStorageInfo *info;

	WANT(lock(t.pid, 10000), CUDA_SUCCESS);
	WANT(begin("checkpoint", t.pid, &info), CUDA_ERROR_INVALID_VALUE);
	WANT(state_of(t.pid), CU_PROCESS_STATE_LOCKED);
	WANT(cu.unlock(t.pid, NULL), CUDA_SUCCESS);
	stop(t);
}

void test_custom(void)
{
	if (!real_driver) {
		setenv("SOFTCUDA_DRIVER", "580.0-softcuda", 1);
		WANT(has_custom(), false);
		without();
		setenv("SOFTCUDA_DRIVER", "615.0-softcuda", 1);
	}
	if (!has_custom()) {
		if (!real_driver)
			FAIL("the driver has no custom storage");
		return;
	}
	retain_all();
	there_and_back();
	if (!real_driver)
		died();
}
