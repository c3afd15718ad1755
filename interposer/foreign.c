// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// What a program shares with other processes or other libraries in ways that the interposer does not bring back: pools,
// and memory and semaphores that others than CUDA have made. The driver does it as without the
// interposer. That it was done is noted, and a checkpoint refused.

#include "block.h"

#include <string.h>

// NOTED is the driver's function, which is noted when it succeeds.
#define NOTED(name, parameters, arguments)                                   \
	static CUresult noted_##name parameters                              \
	{                                                                    \
		CUresult r = driver.name arguments;                          \
		if (!r)                                                      \
			block_lost(LOST_UNKNOWN);                                     \
		return r;                                                    \
	}

NOTED(cuMemPoolExportToShareableHandle, (void *shareable, void *pool, int type, uint64_t flags), (shareable, pool, type, flags))
NOTED(cuMemPoolImportFromShareableHandle, (void **pool, void *shareable, int type, uint64_t flags), (pool, shareable, type, flags))
NOTED(cuImportExternalMemory, (void **memory, const void *what), (memory, what))
NOTED(cuImportExternalSemaphore, (void **semaphore, const void *what), (semaphore, what))

#define OF(name) {#name, noted_##name}
const struct override foreign_overrides[] = {
	OF(cuMemPoolExportToShareableHandle), OF(cuMemPoolImportFromShareableHandle), OF(cuImportExternalMemory),
	OF(cuImportExternalSemaphore),
	{NULL, NULL},
};
