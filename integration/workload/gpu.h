// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// The CUDA driver API, bound to libcuda.so.1 at run time, so that one binary runs on the real
// driver and on the software GPU. Any failure prints the call and CUDA's name for the error and
// ends the program with status 1.

#ifndef GPUCKPT_GPU_H
#define GPUCKPT_GPU_H

#include "../softcuda/cuda_abi.h"

struct gpu {
	CUcontext context;
	CUfunction increment, fill, check, spin, meet;
	CUdeviceptr counter; // u64, 100 at first
};

// gpu_count loads the driver and counts the GPUs.
int gpu_count(void);

// gpu_with has the software GPU profile this program, or draw for it.
void gpu_with(const char *what);

// gpu_open makes GPU ordinal current for this thread and loads the kernels.
struct gpu gpu_open(int ordinal);

// gpu_use makes an opened GPU current for this thread.
void gpu_use(const struct gpu *gpu);

// gpu_uuid writes "GPU-" and the UUID as NVIDIA prints it, 40 characters and a 0.
void gpu_uuid(int ordinal, char text[41]);

CUdeviceptr gpu_alloc(size_t bytes);
CUdeviceptr gpu_alloc_managed(size_t bytes);
// gpu_alloc_pinned returns host memory; *device is where the GPU sees it.
void *gpu_alloc_pinned(size_t bytes, CUdeviceptr *device);
// gpu_register makes memory of the program's own the GPU's, and returns where the GPU sees it.
CUdeviceptr gpu_register(void *memory, size_t bytes);
// gpu_export lets other processes map device memory; gpu_import maps another process's.
CUipcMemHandle gpu_export(CUdeviceptr address);
CUdeviceptr gpu_import(CUipcMemHandle handle);
// gpu_event makes an event for other processes, and records it; gpu_open_event has another process's, NULL if
// that has ended. Both are of the GPU in use, whose work waits for an event with gpu_wait_for.
CUevent gpu_event(CUipcMemHandle *handle);
CUevent gpu_open_event(CUipcMemHandle handle);
void gpu_record(CUevent event);
void gpu_wait_for(CUevent event);
void gpu_end_event(CUevent event);
// gpu_create makes device memory with a handle that other processes can import by the descriptor;
// gpu_map imports another process's. Both are for the GPU ordinal to use.
CUdeviceptr gpu_create(int ordinal, size_t bytes, int *fd);
CUdeviceptr gpu_map(int ordinal, size_t bytes, int fd);
// gpu_create_for_both makes memory of GPU ordinal that the other one reaches too, as JAX and NCCL do: with a handle
// that could be exported, and is not.
CUdeviceptr gpu_create_for_both(int ordinal, int other, size_t bytes);
// gpu_drop gives back the memory that either has mapped last. The next one is mapped at its address.
void gpu_drop(CUdeviceptr address, size_t bytes);
// gpu_create_host is gpu_create for host memory, which gpu_map_host imports.
CUdeviceptr gpu_create_host(int ordinal, size_t bytes, int *fd);
CUdeviceptr gpu_map_host(int ordinal, size_t bytes, int fd);
// gpu_reach lets kernels of the GPU in use reach another one's memory.
void gpu_reach(const struct gpu *other);
void gpu_write(CUdeviceptr to, uint64_t value);
uint64_t gpu_read(CUdeviceptr from);

// gpu_launch starts a kernel of the given grid; gpu_wait waits for all that was started.
void gpu_launch(CUfunction kernel, unsigned blocks, unsigned threads, void **params);
void gpu_wait(void);

// gpu_increment adds one to a counter in device memory and returns the new value.
uint64_t gpu_increment(const struct gpu *gpu, CUdeviceptr counter);

#endif
