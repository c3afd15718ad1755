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
		CUresult(*real) parameters = interposer_real(#name);          \
		CUresult r = real ? real arguments : CUDA_ERROR_NOT_FOUND;   \
		if (!r)                                                      \
			block_lost(LOST_UNKNOWN);                                     \
		return r;                                                    \
	}

NOTED(cuMemPoolExportToShareableHandle, (void *shareable, void *pool, int type, uint64_t flags), (shareable, pool, type, flags))
NOTED(cuMemPoolImportFromShareableHandle, (void **pool, void *shareable, int type, uint64_t flags), (pool, shareable, type, flags))
NOTED(cuImportExternalMemory, (void **memory, const void *what), (memory, what))
NOTED(cuImportExternalSemaphore, (void **semaphore, const void *what), (semaphore, what))

void *foreign_override(const char *name)
{
#define OF(name) {#name, noted_##name}
	static const struct {
		const char *name;
		void *function;
	} overrides[] = {
		OF(cuMemPoolExportToShareableHandle), OF(cuMemPoolImportFromShareableHandle), OF(cuImportExternalMemory),
		OF(cuImportExternalSemaphore),
	};

	for (size_t i = 0; i < sizeof overrides / sizeof *overrides; i++)
		if (!strcmp(name, overrides[i].name))
			return overrides[i].function;
	return NULL;
}
