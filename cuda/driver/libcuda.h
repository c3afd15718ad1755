// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// The part of the CUDA driver API that the helper calls, bound with dlopen.
// Types and layouts are those of cuda.h (CUDA 12.8 and newer).

#ifndef GPUCKPT_LIBCUDA_H
#define GPUCKPT_LIBCUDA_H

#include <stddef.h>
#include <stdint.h>

typedef struct { unsigned char bytes[16]; } gk_uuid;               // CUuuid
typedef struct { gk_uuid old_uuid, new_uuid; } gk_pair;            // CUcheckpointGpuPair
typedef struct { uint64_t own, imported; } gk_memory_on;

// gk_load loads libcuda.so.1. 0: done. -1: it does not load; why says why.
int gk_load(char *why, size_t size);
// gk_library is what gk_load has loaded.
extern void *gk_library;
// gk_can_checkpoint is 0 for a driver without the checkpoint functions.
int gk_can_checkpoint(void);

// The functions below return a CUresult. gk_load comes first.
int gk_init(void);
int gk_driver_version(int *version); // 1000 * major + 10 * minor of CUDA
int gk_device_count(int *count);
int gk_device(int index, gk_uuid *uuid, char *name, int name_size,
	      uint64_t *memory, char *bus_id, int bus_id_size);
int gk_state(int pid, int *state);
int gk_restore_thread(int pid, int *tid);
int gk_lock(int pid, unsigned timeout_ms);
int gk_checkpoint(int pid);
int gk_restore(int pid, gk_pair *pairs, unsigned count);
int gk_unlock(int pid);

// gk_memory_of tells how many bytes of the memory of the GPUs /dev/nvidiaN, N in minors[0..count), a process
// has allocated, and how many it has mapped that another process allocated. It opens the GPUs' nodes
// meanwhile. -1: the kernel module does not report it; why says at which step. gk_load comes first.
int gk_memory_of(int pid, const int *minors, int count, gk_memory_on *has, char *why, size_t size);

// gk_reaches tells in peers whether memory of one GPU is mapped for another in a process, or may be by
// cuCtxEnablePeerAccess: 0 or 1. -1: as gk_memory_of.
int gk_reaches(int pid, int *peers, char *why, size_t size);

// gk_text gives the driver's words for a CUresult, or NULL.
const char *gk_text(int result);

#endif
