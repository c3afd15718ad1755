// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// The part of the CUDA driver's binary interface that the software GPU exports and the workloads
// call: names, numbers and layouts as in the CUDA driver API manual of release 13.0 (groups
// CUDA_TYPES and CUDA_CHECKPOINT). Declared here because machines without a GPU have no cuda.h.

#ifndef GPUCKPT_CUDA_ABI_H
#define GPUCKPT_CUDA_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
enum {
	CUDA_SUCCESS = 0,
	CUDA_ERROR_INVALID_VALUE = 1,
	CUDA_ERROR_OUT_OF_MEMORY = 2,
	CUDA_ERROR_NOT_INITIALIZED = 3,
	CUDA_ERROR_DEINITIALIZED = 4,
	CUDA_ERROR_NO_DEVICE = 100,
	CUDA_ERROR_INVALID_DEVICE = 101,
	CUDA_ERROR_INVALID_IMAGE = 200,
	CUDA_ERROR_INVALID_CONTEXT = 201,
	CUDA_ERROR_OPERATING_SYSTEM = 304,
	CUDA_ERROR_INVALID_HANDLE = 400,
	CUDA_ERROR_ILLEGAL_STATE = 401,
	CUDA_ERROR_NOT_FOUND = 500,
	CUDA_ERROR_NOT_READY = 600,
	CUDA_ERROR_ILLEGAL_ADDRESS = 700,
	CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,
	CUDA_ERROR_PEER_ACCESS_NOT_ENABLED = 705,
	CUDA_ERROR_LAUNCH_FAILED = 719,
	CUDA_ERROR_NOT_PERMITTED = 800,
	CUDA_ERROR_NOT_SUPPORTED = 801,
	CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
	CUDA_ERROR_CAPTURED_EVENT = 907,
	CUDA_ERROR_UNKNOWN = 999,
};

typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct {
	unsigned char bytes[16];
} CUuuid;

enum {
	CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
	CU_DEVICE_ATTRIBUTE_PCI_BUS_ID = 33,
	CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID = 34,
	CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING = 41,
	CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID = 50,
	CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
	CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
	CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY = 83,
	CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS = 122,
};

enum { CU_MEM_ATTACH_GLOBAL = 1, CU_MEM_ATTACH_HOST = 2, CU_MEM_ATTACH_SINGLE = 4 };
enum { CU_DEVICE_CPU = -1, CU_DEVICE_INVALID = -2 };
enum {
	CU_MEM_ADVISE_SET_READ_MOSTLY = 1,
	CU_MEM_ADVISE_UNSET_READ_MOSTLY,
	CU_MEM_ADVISE_SET_PREFERRED_LOCATION,
	CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION,
	CU_MEM_ADVISE_SET_ACCESSED_BY,
	CU_MEM_ADVISE_UNSET_ACCESSED_BY,
};
enum {
	CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY = 1,
	CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION,
	CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY,
	CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION,
	CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE,
	CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID,
	CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE,
	CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID,
};
enum {
	CU_POINTER_ATTRIBUTE_CONTEXT = 1,
	CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
	CU_POINTER_ATTRIBUTE_DEVICE_POINTER = 3,
	CU_POINTER_ATTRIBUTE_HOST_POINTER = 4,
	CU_POINTER_ATTRIBUTE_IS_MANAGED = 8,
	CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
	CU_POINTER_ATTRIBUTE_RANGE_START_ADDR = 11,
	CU_POINTER_ATTRIBUTE_RANGE_SIZE = 12,
};
enum { CU_MEMORYTYPE_HOST = 1, CU_MEMORYTYPE_DEVICE = 2 };
enum { CU_MEMHOSTALLOC_DEVICEMAP = 2 };
enum { CU_MEMHOSTREGISTER_DEVICEMAP = 2 };
enum { CU_EVENT_BLOCKING_SYNC = 1, CU_EVENT_DISABLE_TIMING = 2, CU_EVENT_INTERPROCESS = 4 };
enum { CU_STREAM_NON_BLOCKING = 1 };
enum { CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1 };

typedef struct {
	char reserved[64];
} CUipcMemHandle;

typedef unsigned long long CUmemGenericAllocationHandle;
typedef struct {
	int type, id;
} CUmemLocation;
typedef struct {
	int type, requestedHandleTypes;
	CUmemLocation location;
	void *win32HandleMetaData;
	struct {
		unsigned char compressionType, gpuDirectRDMACapable;
		unsigned short usage;
		unsigned char reserved[4];
	} allocFlags;
} CUmemAllocationProp;
typedef struct {
	CUmemLocation location;
	int flags;
} CUmemAccessDesc;
enum { CU_MEM_ALLOCATION_TYPE_PINNED = 1 };
enum {
	CU_MEM_LOCATION_TYPE_INVALID = 0,
	CU_MEM_LOCATION_TYPE_DEVICE = 1,
	CU_MEM_LOCATION_TYPE_HOST = 2,
	CU_MEM_LOCATION_TYPE_HOST_NUMA = 3,
	CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT = 4,
};
enum { CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1, CU_MEM_HANDLE_TYPE_FABRIC = 8 };
enum { CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3 };

typedef int CUprocessState;
enum {
	CU_PROCESS_STATE_RUNNING = 0,
	CU_PROCESS_STATE_LOCKED = 1,
	CU_PROCESS_STATE_CHECKPOINTED = 2,
	CU_PROCESS_STATE_FAILED = 3,
};

// Every argument block is 64 bytes and its reserved bytes must be zero.
typedef struct {
	unsigned int timeoutMs; // 0: wait for ever
	unsigned int reserved0;
	uint64_t reserved1[7];
} CUcheckpointLockArgs;

typedef struct {
	uint64_t reserved[8];
} CUcheckpointCheckpointArgs;

typedef struct {
	CUuuid oldUuid; // the GPU that was checkpointed
	CUuuid newUuid; // the GPU to restore onto
} CUcheckpointGpuPair;

typedef struct {
	CUcheckpointGpuPair *gpuPairs;
	unsigned int gpuPairsCount;
	char reserved[64 - sizeof(CUcheckpointGpuPair *) - sizeof(unsigned int)];
} CUcheckpointRestoreArgs;

typedef struct {
	uint64_t reserved[8];
} CUcheckpointUnlockArgs;

#define CUDA_API __attribute__((visibility("default")))

CUDA_API CUresult cuInit(unsigned int flags);
CUDA_API CUresult cuDriverGetVersion(int *version);
CUDA_API CUresult cuGetErrorName(CUresult error, const char **name);
CUDA_API CUresult cuGetErrorString(CUresult error, const char **text);
CUDA_API CUresult cuGetProcAddress_v2(const char *symbol, void **address, int cudaVersion,
                                      uint64_t flags, int *status);

CUDA_API CUresult cuDeviceGetCount(int *count);
CUDA_API CUresult cuDeviceGet(CUdevice *device, int ordinal);
CUDA_API CUresult cuDeviceGetName(char *name, int len, CUdevice device);
CUDA_API CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device);
CUDA_API CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device);
CUDA_API CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device);
CUDA_API CUresult cuDeviceGetPCIBusId(char *id, int len, CUdevice device);
CUDA_API CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device);

CUDA_API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
CUDA_API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device);
CUDA_API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active);
CUDA_API CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device);
CUDA_API CUresult cuCtxCreate_v4(CUcontext *context, void *params, unsigned int flags,
                                 CUdevice device);
CUDA_API CUresult cuCtxDestroy_v2(CUcontext context);
CUDA_API CUresult cuCtxSetCurrent(CUcontext context);
CUDA_API CUresult cuCtxGetCurrent(CUcontext *context);
CUDA_API CUresult cuCtxGetDevice(CUdevice *device);
CUDA_API CUresult cuCtxSynchronize(void);
CUDA_API CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags);
CUDA_API CUresult cuCtxDisablePeerAccess(CUcontext peer);

CUDA_API CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total);
CUDA_API CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes);
CUDA_API CUresult cuMemFree_v2(CUdeviceptr address);
CUDA_API CUresult cuMemAllocManaged(CUdeviceptr *address, size_t bytes, unsigned int flags);
CUDA_API CUresult cuMemAllocHost_v2(void **address, size_t bytes);
CUDA_API CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned int flags);
CUDA_API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *host,
                                               unsigned int flags);
CUDA_API CUresult cuMemFreeHost(void *address);
CUDA_API CUresult cuMemHostRegister_v2(void *address, size_t bytes, unsigned int flags);
CUDA_API CUresult cuMemHostUnregister(void *address);
CUDA_API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes);
CUDA_API CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes);
CUDA_API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream);
CUDA_API CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream);
CUDA_API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address);
CUDA_API CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t bytes);
CUDA_API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream);
CUDA_API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream);

CUDA_API CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr address);
CUDA_API CUresult cuPointerGetAttributes(unsigned int count, int *attributes, void **data, CUdeviceptr address);
CUDA_API CUresult cuMemAdvise(CUdeviceptr address, size_t bytes, int advice, CUdevice device);
CUDA_API CUresult cuMemAdvise_v2(CUdeviceptr address, size_t bytes, int advice, CUmemLocation location);
CUDA_API CUresult cuMemPrefetchAsync(CUdeviceptr address, size_t bytes, CUdevice to, CUstream stream);
CUDA_API CUresult cuMemPrefetchAsync_v2(CUdeviceptr address, size_t bytes, CUmemLocation to,
                                        unsigned int flags, CUstream stream);
CUDA_API CUresult cuMemPrefetchBatchAsync(CUdeviceptr *addresses, size_t *bytes, size_t count,
                                          CUmemLocation *to, size_t *from, size_t places,
                                          unsigned long long flags, CUstream stream);
CUDA_API CUresult cuMemDiscardBatchAsync(CUdeviceptr *addresses, size_t *bytes, size_t count,
                                         unsigned long long flags, CUstream stream);
CUDA_API CUresult cuMemDiscardAndPrefetchBatchAsync(CUdeviceptr *addresses, size_t *bytes, size_t count,
                                                    CUmemLocation *to, size_t *from, size_t places,
                                                    unsigned long long flags, CUstream stream);
CUDA_API CUresult cuMemRangeGetAttribute(void *data, size_t bytes, int attribute, CUdeviceptr address,
                                         size_t range);
CUDA_API CUresult cuMemRangeGetAttributes(void **data, size_t *bytes, int *attributes, size_t count,
                                          CUdeviceptr address, size_t range);
CUDA_API CUresult cuStreamAttachMemAsync(CUstream stream, CUdeviceptr address, size_t bytes,
                                         unsigned int flags);

CUDA_API CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                                int option);
CUDA_API CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment,
                                      CUdeviceptr wanted, uint64_t flags);
CUDA_API CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes);
CUDA_API CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                              const CUmemAllocationProp *prop, uint64_t flags);
CUDA_API CUresult cuMemRelease(CUmemGenericAllocationHandle handle);
CUDA_API CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset,
                           CUmemGenericAllocationHandle handle, uint64_t flags);
CUDA_API CUresult cuMemUnmap(CUdeviceptr address, size_t bytes);
CUDA_API CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *desc,
                                 size_t count);
CUDA_API CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr address);
CUDA_API CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                               int type, uint64_t flags);
CUDA_API CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle,
                                                 void *os_handle, int type);

CUDA_API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address);
CUDA_API CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop,
                                                         CUmemGenericAllocationHandle handle);

CUDA_API CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address);
CUDA_API CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle,
                                        unsigned int flags);
CUDA_API CUresult cuIpcCloseMemHandle(CUdeviceptr address);
CUDA_API CUresult cuIpcGetEventHandle(CUipcMemHandle *handle, CUevent event);
CUDA_API CUresult cuIpcOpenEventHandle(CUevent *event, CUipcMemHandle handle);
CUDA_API CUresult cuMemPoolExportToShareableHandle(void *shareable, void *pool, int type, uint64_t flags);
CUDA_API CUresult cuMemPoolImportFromShareableHandle(void **pool, void *shareable, int type,
                                                     uint64_t flags);
CUDA_API CUresult cuImportExternalMemory(void **memory, const void *what);
CUDA_API CUresult cuImportExternalSemaphore(void **semaphore, const void *what);
CUDA_API CUresult cuMulticastCreate(CUmemGenericAllocationHandle *handle, const void *prop);

CUDA_API CUresult cuModuleLoadData(CUmodule *module, const void *image);
CUDA_API CUresult cuModuleUnload(CUmodule module);
CUDA_API CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name);
CUDA_API CUresult cuModuleGetGlobal_v2(CUdeviceptr *address, size_t *bytes, CUmodule module,
                                       const char *name);
CUDA_API CUresult cuLaunchKernel(CUfunction function, unsigned int gridX, unsigned int gridY,
                                 unsigned int gridZ, unsigned int blockX, unsigned int blockY,
                                 unsigned int blockZ, unsigned int sharedBytes, CUstream stream,
                                 void **params, void **extra);
CUDA_API CUresult cuStreamCreate(CUstream *stream, unsigned int flags);
CUDA_API CUresult cuStreamSynchronize(CUstream stream);
CUDA_API CUresult cuStreamDestroy_v2(CUstream stream);
CUDA_API CUresult cuStreamQuery(CUstream stream);
CUDA_API CUresult cuStreamBeginCapture_v2(CUstream stream, int mode);
CUDA_API CUresult cuStreamEndCapture(CUstream stream, void **graph);
CUDA_API CUresult cuStreamIsCapturing(CUstream stream, int *status);
CUDA_API CUresult cuStreamIsCapturing_ptsz(CUstream stream, int *status);
CUDA_API CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr address, uint64_t value,
                                          unsigned int flags);
CUDA_API CUresult cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr address, uint64_t value,
                                         unsigned int flags);
CUDA_API CUresult cuStreamWriteValue64_v2_ptsz(CUstream stream, CUdeviceptr address, uint64_t value,
                                               unsigned int flags);
CUDA_API CUresult cuStreamWaitValue64_v2_ptsz(CUstream stream, CUdeviceptr address, uint64_t value,
                                              unsigned int flags);
CUDA_API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags);
CUDA_API CUresult cuStreamWaitEvent_ptsz(CUstream stream, CUevent event, unsigned int flags);
CUDA_API CUresult cuEventCreate(CUevent *event, unsigned int flags);
CUDA_API CUresult cuEventDestroy_v2(CUevent event);
CUDA_API CUresult cuEventRecord(CUevent event, CUstream stream);
CUDA_API CUresult cuEventRecord_ptsz(CUevent event, CUstream stream);
CUDA_API CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned int flags);
CUDA_API CUresult cuEventQuery(CUevent event);
CUDA_API CUresult cuEventSynchronize(CUevent event);
CUDA_API CUresult cuEventElapsedTime(float *ms, CUevent from, CUevent to);
CUDA_API CUresult cuGraphAddEventRecordNode(void **node, void *graph, const void *before, size_t count,
                                            CUevent event);

CUDA_API CUresult cuCheckpointProcessGetState(int pid, CUprocessState *state);
CUDA_API CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *tid);
CUDA_API CUresult cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *args);
CUDA_API CUresult cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs *args);
CUDA_API CUresult cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *args);
CUDA_API CUresult cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs *args);

#endif
