// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Custom storage (CUDA 13.4): the GPU memory of a process that is being checkpointed or restored is mapped here, until the
// operation is complete. The functions return a CUresult; gk_memory_load comes before all but gk_custom.

#ifndef GPUCKPT_CUSTOM_H
#define GPUCKPT_CUSTOM_H

#include "memory.h"

// gk_custom reports whether the driver has custom storage. gk_load comes first.
int gk_custom(void);

// gk_custom_save and gk_custom_fill begin a checkpoint and a restore. This process must have the primary context of each
// GPU that the memory is on. There is no way to give an operation up but the end of this process.
int gk_custom_save(int pid, void **operation);
int gk_custom_fill(int pid, gk_pair *pairs, unsigned count, void **operation);
// gk_custom_count is how many GPUs the operation has memory of, -1 if the driver has not said it; gk_custom_part is that of one, without a handle. It
// leaves the context of the GPU with the calling thread.
int gk_custom_count(void *operation);
int gk_custom_part(void *operation, int index, gk_memory *m, gk_uuid *gpu);
// gk_custom_complete ends the operation, also where it returns an error.
int gk_custom_complete(void *operation);

#endif
