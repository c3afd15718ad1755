// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Memory that processes share by CUDA IPC. A program has a ticket for a handle (share.c), and who opens it has the block
// mapped as well: an import. That is not saved there, but given back before the exporter saves it, and had again from the
// exporter after that:
//
//	cuIpcOpenMemHandle --> mapped --memory_leave--> away --memory_join--> mapped --> cuIpcCloseMemHandle

#include "block.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static CUresult ipc_get(void *handle, CUdeviceptr p)
{
	struct block *b = block_at(p);
	struct ticket t;

	if (!b && managed_has(p))
		return CUDA_ERROR_INVALID_VALUE;
	if (!b)
		return driver.cuIpcGetMemHandle(handle, p);
	if (!handle || block_is_import(b))
		return CUDA_ERROR_INVALID_VALUE;
	if (!block_ticket(b, &t)) {
		interposer_say("CUDA IPC (cuIpcGetMemHandle) cannot share memory of the interposer's here: start the program without dev.gpuckpt.interposer");
		return CUDA_ERROR_NOT_SUPPORTED;
	}
	memcpy(handle, &t, sizeof t);
	return CUDA_SUCCESS;
}

static struct block *import_of(const struct ticket *t, CUcontext c)
{
	struct block *b;

	lock(LOCK_BLOCKS);
	for (b = blocks; b && !(block_is_import(b) && b->visible && b->context == c && b->from.number == t->number && !memcmp(b->from.exporter, t->exporter, sizeof t->exporter)); b = b->next)
		;
	unlock(LOCK_BLOCKS);
	return b;
}

// map_import maps memory of another process for the first time.
static CUresult map_import(CUdeviceptr *address, const struct ticket *t, CUcontext c)
{
	struct block *b = calloc(1, sizeof *b);
	CUresult r;

	if (!b)
		return CUDA_ERROR_OUT_OF_MEMORY;
	b->from = *t;
	b->asked = t->asked;
	b->bytes = t->bytes;
	b->context = c;
	b->opened = 1;
	b->visible = true;
	if (!(r = driver.cuCtxGetDevice(&b->device)) && b->device >= 0 && b->device < MAX_DEVICES &&
	    !(r = driver.cuMemAddressReserve(&b->address, b->bytes, 0, 0, 0)) && (r = block_have(b)))
		driver.cuMemAddressFree(b->address, b->bytes);
	if (r || !b->mapped) {
		free(b);
		return r && r != CUDA_ERROR_NOT_FOUND ? r : CUDA_ERROR_INVALID_HANDLE;
	}
	*address = b->address;
	return CUDA_SUCCESS;
}

// A handle that is opened once more has the address that it has.
static CUresult ipc_open(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags)
{
	CUcontext c = NULL;
	struct ticket t;
	CUresult r;

	memcpy(&t, &handle, sizeof t);
	if (!share_known(&t))
		return driver.cuIpcOpenMemHandle_v2(address, handle, flags);
	if (!block_ready())
		return CUDA_ERROR_INVALID_HANDLE;
	if (!address || flags != 1) // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
		return CUDA_ERROR_INVALID_VALUE;
	if ((r = driver.cuCtxGetCurrent(&c)) || !c || share_own(&t)) // as the driver, which has it already
		return r ? r : CUDA_ERROR_INVALID_CONTEXT;
	lock(LOCK_IMPORTING);
	struct block *b = import_of(&t, c);
	if (b) {
		b->opened++;
		*address = b->address;
	} else {
		r = map_import(address, &t, c);
	}
	unlock(LOCK_IMPORTING);
	return r;
}

static CUresult ipc_close(CUdeviceptr address)
{
	struct block *b = address ? block_at(address) : NULL;
	CUresult r = CUDA_SUCCESS;

	if (!b)
		return driver.cuIpcCloseMemHandle(address);
	if (!block_is_import(b) || b->address != address)
		return CUDA_ERROR_INVALID_VALUE;
	lock(LOCK_IMPORTING);
	bool last = b->opened == 1;
	b->opened -= !last;
	unlock(LOCK_IMPORTING); // which is not held while the GPU works
	if (!last || (r = block_in_context(b->context, block_unused, b->address)))
		return r;
	lock(LOCK_IMPORTING);
	if (b->opened > 1) // meanwhile
		b->opened--;
	else if (!vmm_keeps(b))
		r = block_end(b);
	unlock(LOCK_IMPORTING);
	return r;
}

const struct override ipc_overrides[] = {
	{"cuIpcGetMemHandle", ipc_get},
	{"cuIpcOpenMemHandle_v2", ipc_open}, {"cuIpcOpenMemHandle", ipc_open}, {"cuIpcCloseMemHandle", ipc_close},
	{NULL, NULL},
};

uint32_t memory_imports(void)
{
	uint32_t n = 0;

	lock(LOCK_BLOCKS);
	for (struct block *b = blocks; b; b = b->next)
		n += block_is_import(b) && b->mapped;
	unlock(LOCK_BLOCKS);
	return n;
}

bool memory_away(void)
{
	bool away = false;

	lock(LOCK_BLOCKS);
	for (struct block *b = blocks; b; b = b->next)
		away |= b->away;
	unlock(LOCK_BLOCKS);
	return away;
}

CUresult memory_join(void)
{
	CUresult first = CUDA_SUCCESS;

	for (struct block *b = blocks; b; b = b->next) {
		if (!b->away)
			continue;
		CUresult r = driver.cuCtxSetCurrent(b->context);
		r = r ? r : block_have(b);
		b->away = r && r != CUDA_ERROR_NOT_FOUND;
		if (r == CUDA_ERROR_NOT_FOUND)
			interposer_say("the process that shared GPU memory with this one has ended: that memory is lost");
		if (r && (!first || first == CUDA_ERROR_NOT_FOUND))
			first = r;
	}
	return first;
}

static CUresult leave(struct block *b, uint64_t cut)
{
	if (b->given)
		return CUDA_ERROR_NOT_PERMITTED;
	CUresult r = driver.cuCtxSetCurrent(b->context);
	r = r ? r : share_ask(&b->from, SHARE_LEAVE, cut, NULL);
	if (r)
		return r == CUDA_ERROR_NOT_FOUND ? CUDA_ERROR_NOT_PERMITTED : r;
	r = block_give(b);
	b->away = !b->mapped;
	if (b->mapped) { // the exporter is to count it again
		int fd = -1;
		if (!share_ask(&b->from, SHARE_OPEN, 0, &fd))
			close(fd);
	}
	return r;
}

CUresult memory_leave(uint64_t cut)
{
	CUresult r = CUDA_SUCCESS;

	for (struct block *b = blocks; b && !r; b = b->next)
		if (block_is_import(b) && b->mapped)
			r = leave(b, cut);
	if (r)
		memory_join();
	return r;
}

// exported returns a block that is mapped, by its number, and reports whether a checkpoint would save it.
static struct block *exported(uint64_t number, bool *saved)
{
	struct block *b;

	lock(LOCK_BLOCKS);
	for (b = blocks; b && (!number || b->number != number); b = b->next)
		;
	b = b && b->mapped ? b : NULL;
	*saved = b && !b->given;
	unlock(LOCK_BLOCKS);
	return b;
}

bool memory_exports(uint64_t number)
{
	bool saved;

	exported(number, &saved);
	return saved;
}

CUresult memory_export(uint64_t number, int *fd)
{
	CUresult r = CUDA_ERROR_INVALID_HANDLE;
	bool saved;

	lock(LOCK_EXPORTING);
	struct block *b = exported(number, &saved);
	if (b && !(r = driver.cuCtxSetCurrent(b->context)))
		r = driver.cuMemExportToShareableHandle(fd, b->handle, CU_POSIX_FD, 0);
	unlock(LOCK_EXPORTING);
	return r;
}
