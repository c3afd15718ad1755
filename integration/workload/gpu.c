// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// The CUDA calls that the workloads make.

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "gpu.h"
#include "kernels.h"

// CALLS lists every function taken from libcuda, as member name and symbol.
#define CALLS(X)                                            \
	X(Init, cuInit)                                             \
	X(GetErrorName, cuGetErrorName)                             \
	X(DeviceGetCount, cuDeviceGetCount)                         \
	X(DeviceGet, cuDeviceGet)                                   \
	X(DeviceGetUuid, cuDeviceGetUuid_v2)                        \
	X(DevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain)         \
	X(CtxSetCurrent, cuCtxSetCurrent)                           \
	X(CtxSynchronize, cuCtxSynchronize)                         \
	X(CtxEnablePeerAccess, cuCtxEnablePeerAccess)               \
	X(MemAlloc, cuMemAlloc_v2)                                  \
	X(MemAllocManaged, cuMemAllocManaged)                       \
	X(MemHostAlloc, cuMemHostAlloc)                             \
	X(MemHostRegister, cuMemHostRegister_v2)                    \
	X(MemHostGetDevicePointer, cuMemHostGetDevicePointer_v2)    \
	X(MemAddressReserve, cuMemAddressReserve)                   \
	X(MemCreate, cuMemCreate)                                   \
	X(MemMap, cuMemMap)                                         \
	X(MemSetAccess, cuMemSetAccess)                             \
	X(MemUnmap, cuMemUnmap)                                     \
	X(MemRelease, cuMemRelease)                                 \
	X(MemExport, cuMemExportToShareableHandle)                  \
	X(MemImport, cuMemImportFromShareableHandle)                \
	X(IpcGetMemHandle, cuIpcGetMemHandle)                       \
	X(IpcOpenMemHandle, cuIpcOpenMemHandle_v2)                  \
	X(IpcGetEventHandle, cuIpcGetEventHandle)                   \
	X(IpcOpenEventHandle, cuIpcOpenEventHandle)                 \
	X(EventCreate, cuEventCreate)                               \
	X(EventRecord, cuEventRecord)                               \
	X(EventDestroy, cuEventDestroy_v2)                          \
	X(StreamWaitEvent, cuStreamWaitEvent)                       \
	X(MemcpyHtoD, cuMemcpyHtoD_v2)                              \
	X(MemcpyDtoH, cuMemcpyDtoH_v2)                              \
	X(ModuleLoadData, cuModuleLoadData)                         \
	X(ModuleGetFunction, cuModuleGetFunction)                   \
	X(ModuleGetGlobal, cuModuleGetGlobal_v2)                    \
	X(LaunchKernel, cuLaunchKernel)

static struct {
#define MEMBER(name, symbol) __typeof__(&symbol) name;
	CALLS(MEMBER)
} cu;

#define CHECK(call) check(cu.call, #call)

static void check(CUresult result, const char *call)
{
	const char *name = NULL;

	if (!result)
		return;
	if (cu.GetErrorName(result, &name) || !name)
		name = "an error without a name";
	fprintf(stderr, "gpuwork: cu%s: %s (%d)\n", call, name, result);
	exit(1);
}

static void *symbol(void *library, const char *name)
{
	void *address = dlsym(library, name);
	if (!address) {
		fprintf(stderr, "gpuwork: %s\n", dlerror());
		exit(1);
	}
	return address;
}

static void load(void)
{
	if (cu.Init)
		return;
	void *library = dlopen("libcuda.so.1", RTLD_NOW);
	if (!library) {
		fprintf(stderr, "gpuwork: %s\n", dlerror());
		exit(1);
	}
#define BIND(name, entry) cu.name = (__typeof__(cu.name))symbol(library, #entry);
	CALLS(BIND)
	CHECK(Init(0));
}

void gpu_with(const char *what)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW);
	char name[64];
	CUresult (*begin)(void);

	snprintf(name, sizeof name, "softcuda_%s", what);
	begin = (__typeof__(begin))symbol(library, name);
	if (!begin())
		return;
	fprintf(stderr, "gpuwork: %s failed\n", name);
	exit(1);
}

int gpu_count(void)
{
	int n;

	load();
	CHECK(DeviceGetCount(&n));
	return n;
}

struct gpu gpu_open(int ordinal)
{
	struct gpu g;
	CUdevice device;
	CUmodule module;

	load();
	CHECK(DeviceGet(&device, ordinal));
	CHECK(DevicePrimaryCtxRetain(&g.context, device));
	gpu_use(&g);
	CHECK(ModuleLoadData(&module, kernels_ptx));
	CHECK(ModuleGetFunction(&g.increment, module, "increment"));
	CHECK(ModuleGetFunction(&g.fill, module, "fill"));
	CHECK(ModuleGetFunction(&g.check, module, "check"));
	CHECK(ModuleGetFunction(&g.spin, module, "spin"));
	CHECK(ModuleGetFunction(&g.meet, module, "meet"));
	CHECK(ModuleGetGlobal(&g.counter, NULL, module, "counter"));
	return g;
}

void gpu_use(const struct gpu *gpu)
{
	CHECK(CtxSetCurrent(gpu->context));
}

void gpu_uuid(int ordinal, char text[41])
{
	CUuuid uuid;
	int at = sprintf(text, "GPU-");

	load();
	CHECK(DeviceGetUuid(&uuid, ordinal));
	for (int i = 0; i < 16; i++)
		at += sprintf(text + at, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x",
		              uuid.bytes[i]);
}

CUdeviceptr gpu_alloc(size_t bytes)
{
	CUdeviceptr p;
	CHECK(MemAlloc(&p, bytes));
	return p;
}

CUdeviceptr gpu_alloc_managed(size_t bytes)
{
	CUdeviceptr p;
	CHECK(MemAllocManaged(&p, bytes, CU_MEM_ATTACH_GLOBAL));
	return p;
}

void *gpu_alloc_pinned(size_t bytes, CUdeviceptr *device)
{
	void *p;
	CHECK(MemHostAlloc(&p, bytes, CU_MEMHOSTALLOC_DEVICEMAP));
	CHECK(MemHostGetDevicePointer(device, p, 0));
	return p;
}

CUdeviceptr gpu_register(void *memory, size_t bytes)
{
	CUdeviceptr p;
	CHECK(MemHostRegister(memory, bytes, CU_MEMHOSTREGISTER_DEVICEMAP));
	CHECK(MemHostGetDevicePointer(&p, memory, 0));
	return p;
}

CUipcMemHandle gpu_export(CUdeviceptr address)
{
	CUipcMemHandle handle;
	CHECK(IpcGetMemHandle(&handle, address));
	return handle;
}

CUdeviceptr gpu_import(CUipcMemHandle handle)
{
	CUdeviceptr p;
	CHECK(IpcOpenMemHandle(&p, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
	return p;
}

CUevent gpu_event(CUipcMemHandle *handle)
{
	CUevent e;

	CHECK(EventCreate(&e, CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS));
	gpu_record(e);
	CHECK(IpcGetEventHandle(handle, e));
	return e;
}

CUevent gpu_open_event(CUipcMemHandle handle)
{
	CUevent e;
	CUresult r = cu.IpcOpenEventHandle(&e, handle);

	if (r == CUDA_ERROR_INVALID_HANDLE)
		return NULL;
	check(r, "IpcOpenEventHandle");
	return e;
}

void gpu_record(CUevent event)
{
	CHECK(EventRecord(event, NULL));
}

void gpu_wait_for(CUevent event)
{
	CHECK(StreamWaitEvent(NULL, event, 0));
}

void gpu_end_event(CUevent event)
{
	CHECK(EventDestroy(event));
}

static CUmemGenericAllocationHandle mapped; // the last
static CUdeviceptr dropped;                 // where gpu_drop has left a place

// map maps memory for a GPU, and for the processors if it is in the host's memory.
static CUdeviceptr map(int ordinal, size_t bytes, CUmemGenericAllocationHandle handle, bool host)
{
	CUmemAccessDesc access[] = {
		{.location = {CU_MEM_LOCATION_TYPE_DEVICE, ordinal}, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE},
		{.location = {CU_MEM_LOCATION_TYPE_HOST_NUMA, 0}, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE},
	};
	CUdeviceptr p = dropped;

	mapped = handle;
	dropped = 0;
	if (!p)
		CHECK(MemAddressReserve(&p, bytes, 0, 0, 0));
	CHECK(MemMap(p, bytes, 0, handle, 0));
	CHECK(MemSetAccess(p, bytes, access, host ? 2 : 1));
	return p;
}

void gpu_drop(CUdeviceptr address, size_t bytes)
{
	CHECK(MemUnmap(address, bytes));
	CHECK(MemRelease(mapped));
	dropped = address;
}

CUdeviceptr gpu_create_for_both(int ordinal, int other, size_t bytes)
{
	CUmemAllocationProp prop = {
		.type = CU_MEM_ALLOCATION_TYPE_PINNED,
		.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
		.location = {CU_MEM_LOCATION_TYPE_DEVICE, ordinal},
	};
	CUmemAccessDesc access = {.location = {CU_MEM_LOCATION_TYPE_DEVICE, other}, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
	CUmemGenericAllocationHandle handle;

	CHECK(MemCreate(&handle, bytes, &prop, 0));
	CUdeviceptr p = map(ordinal, bytes, handle, false);
	CHECK(MemSetAccess(p, bytes, &access, 1));
	return p;
}

static CUdeviceptr create(int ordinal, CUmemLocation where, size_t bytes, int *fd)
{
	CUmemAllocationProp prop = {
		.type = CU_MEM_ALLOCATION_TYPE_PINNED,
		.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
		.location = where,
	};
	CUmemGenericAllocationHandle handle;

	CHECK(MemCreate(&handle, bytes, &prop, 0));
	CHECK(MemExport(fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
	return map(ordinal, bytes, handle, where.type != CU_MEM_LOCATION_TYPE_DEVICE);
}

CUdeviceptr gpu_create(int ordinal, size_t bytes, int *fd)
{
	return create(ordinal, (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, ordinal}, bytes, fd);
}

CUdeviceptr gpu_create_host(int ordinal, size_t bytes, int *fd)
{
	return create(ordinal, (CUmemLocation){CU_MEM_LOCATION_TYPE_HOST_NUMA, 0}, bytes, fd);
}

static CUdeviceptr import(int ordinal, size_t bytes, int fd, bool host)
{
	CUmemGenericAllocationHandle handle;

	CHECK(MemImport(&handle, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
	return map(ordinal, bytes, handle, host);
}

CUdeviceptr gpu_map(int ordinal, size_t bytes, int fd)
{
	return import(ordinal, bytes, fd, false);
}

CUdeviceptr gpu_map_host(int ordinal, size_t bytes, int fd)
{
	return import(ordinal, bytes, fd, true);
}

void gpu_reach(const struct gpu *other)
{
	CHECK(CtxEnablePeerAccess(other->context, 0));
}

void gpu_write(CUdeviceptr to, uint64_t value)
{
	CHECK(MemcpyHtoD(to, &value, sizeof value));
}

uint64_t gpu_read(CUdeviceptr from)
{
	uint64_t value;
	CHECK(MemcpyDtoH(&value, from, sizeof value));
	return value;
}

void gpu_launch(CUfunction kernel, unsigned blocks, unsigned threads, void **params)
{
	CHECK(LaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, 0, NULL, params, NULL));
}

void gpu_wait(void)
{
	CHECK(CtxSynchronize());
}

uint64_t gpu_increment(const struct gpu *gpu, CUdeviceptr counter)
{
	void *params[] = {&counter};
	gpu_launch(gpu->increment, 1, 1, params);
	gpu_wait();
	return gpu_read(counter);
}
