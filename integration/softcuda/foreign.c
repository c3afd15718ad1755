// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Ways to share memory of which nothing is here but that they were used: each call succeeds in a context, and
// what it returns can be used for nothing. A restore after a checkpoint of such a process fails, as ipc.c's: so it is
// taken to be, and was not measured.

#include <string.h>

#include "softcuda.h"

static bool shared;

CUresult foreign_share(void)
{
	shared = true;
	return CUDA_SUCCESS;
}

bool foreign_shared(void)
{
	return shared;
}

// share is a call that has an object as its result.
static CUresult share(void *result, size_t bytes)
{
	static uint64_t object;
	CUresult r = gate_enter();

	if (r)
		return r;
	if (!context_current())
		return gate_leave(CUDA_ERROR_INVALID_CONTEXT);
	if (!result)
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	object++;
	memset(result, 0, bytes);
	memcpy(result, &object, bytes < sizeof object ? bytes : sizeof object);
	return gate_leave(foreign_share());
}

CUresult cuMemPoolExportToShareableHandle(void *shareable, void *pool, int type, uint64_t flags)
{
	(void)pool;
	(void)flags;
	return share(shareable, type == CU_MEM_HANDLE_TYPE_FABRIC ? sizeof(CUipcMemHandle) : sizeof(int));
}

CUresult cuMemPoolImportFromShareableHandle(void **pool, void *shareable, int type, uint64_t flags)
{
	(void)shareable;
	(void)type;
	(void)flags;
	return share(pool, sizeof *pool);
}

CUresult cuImportExternalMemory(void **memory, const void *what)
{
	(void)what;
	return share(memory, sizeof *memory);
}

CUresult cuImportExternalSemaphore(void **semaphore, const void *what)
{
	(void)what;
	return share(semaphore, sizeof *semaphore);
}

CUresult cuMulticastCreate(CUmemGenericAllocationHandle *handle, const void *prop)
{
	(void)prop;
	return share(handle, sizeof *handle);
}
