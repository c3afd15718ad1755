// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Custom storage (CUDA 13.4), the caller's side: the GPU memory of a process that is being checkpointed
// or restored, mapped into the caller GPU by GPU, until cuCheckpointOperationComplete. As the manual's
// preview of 13.4 has it; no driver that has it was at hand.

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include "softcuda.h"

// A GPU's memory is mapped as whole pieces of this size. What is behind it is zeros, and lost.
#define GRANULE ((size_t)2 << 20)

struct CUcheckpointOperation_st {
	struct CUcheckpointOperation_st *next;
	int pid, hold;
	CUcheckpointCustomStorageInfo info;
	CUcheckpointCustomStoragePerDeviceData devices[MAX_GPUS];
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static CUcheckpointOperationHandle operations;

bool custom_has(CUdeviceptr address, size_t bytes)
{
	bool found = false;

	pthread_mutex_lock(&mutex);
	for (CUcheckpointOperationHandle o = operations; o; o = o->next)
		for (unsigned i = 0; i < o->info.deviceCount; i++)
			found |= address >= o->devices[i].devPtr && address - o->devices[i].devPtr <= o->devices[i].size &&
			         bytes <= o->devices[i].size - (address - o->devices[i].devPtr);
	pthread_mutex_unlock(&mutex);
	return found;
}

// map_block maps a block of the target's at an address here.
static CUresult map_block(int pid, const struct block *b, char *at)
{
	char path[100];

	snprintf(path, sizeof path, "/proc/%d/map_files/%lx-%lx", pid, (unsigned long)b->address,
	         (unsigned long)(b->address + b->bytes));
	int fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0)
		return CUDA_ERROR_NOT_PERMITTED; // the caller may not trace the target
	// Executable is what gpu.c knows memory of others by, if that is allowed here.
	void *got = mmap(at, b->bytes, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_SHARED | MAP_FIXED, fd, 0);
	if (got == MAP_FAILED)
		got = mmap(at, b->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
	close(fd);
	return got == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

// map_gpu maps the blocks of one GPU, the first n, one behind the other.
static CUresult map_gpu(CUcheckpointOperationHandle o, const struct block *blocks, size_t n)
{
	CUcheckpointCustomStoragePerDeviceData *d = &o->devices[o->info.deviceCount];
	CUcontext context = NULL;
	size_t bytes = 0;

	for (int i = 0; i < process.gpus; i++)
		if (!memcmp(&process.gpu[i].uuid, &blocks->gpu, sizeof blocks->gpu))
			context = context_primary(i);
	if (!context) // the caller does not see the GPU, or has not retained its primary context
		return CUDA_ERROR_INVALID_CONTEXT;
	for (size_t i = 0; i < n; i++)
		bytes += blocks[i].bytes;
	bytes = (bytes + GRANULE - 1) & ~(GRANULE - 1);
	char *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (at == MAP_FAILED)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*d = (CUcheckpointCustomStoragePerDeviceData){(CUdeviceptr)at, bytes, (CUstream)context};
	o->info.deviceCount++;
	for (size_t i = 0; i < n; at += blocks[i++].bytes) {
		CUresult r = map_block(o->pid, &blocks[i], at);
		if (r)
			return r;
	}
	return CUDA_SUCCESS;
}

static CUresult map_all(CUcheckpointOperationHandle o, const struct reply *reply)
{
	size_t bytes = reply->count * sizeof(struct block), n = 0;
	struct block *blocks = malloc(bytes + 1);
	struct iovec local = {blocks, bytes}, remote = {(void *)(uintptr_t)reply->blocks, bytes};
	CUresult r = CUDA_SUCCESS;

	if (!blocks)
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (bytes && process_vm_readv(o->pid, &local, 1, &remote, 1, 0) != (ssize_t)bytes)
		r = CUDA_ERROR_NOT_PERMITTED;
	for (size_t i = 0; !r && i < reply->count; i += n) {
		n = 1;
		while (i + n < reply->count && !memcmp(&blocks[i + n].gpu, &blocks[i].gpu, sizeof blocks[i].gpu))
			n++;
		r = map_gpu(o, &blocks[i], n);
	}
	free(blocks);
	return r;
}

// end unmaps the memory, and lets go of the target.
static void end(CUcheckpointOperationHandle o)
{
	for (unsigned i = 0; i < o->info.deviceCount; i++)
		munmap((void *)o->devices[i].devPtr, o->devices[i].size);
	close(o->hold);
	free(o);
}

CUresult custom_begin(int pid, int hold, const struct reply *reply, CUcheckpointCustomStorageInfo **info)
{
	CUcheckpointOperationHandle o = calloc(1, sizeof *o);

	if (!o) {
		close(hold);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	o->pid = pid;
	o->hold = hold;
	o->info.handle = o;
	o->info.perDeviceData = o->devices;
	CUresult r = map_all(o, reply);
	if (r) {
		end(o); // the target sees that nobody has the operation in hand
		return r;
	}
	pthread_mutex_lock(&mutex);
	o->next = operations;
	operations = o;
	pthread_mutex_unlock(&mutex);
	*info = &o->info;
	return CUDA_SUCCESS;
}

// The operation is over whatever the target answers. Copies are done when their calls return, so there is
// nothing to wait for.
CUresult cuCheckpointOperationComplete(CUcheckpointOperationHandle handle)
{
	struct request request = {.step = COMPLETE};
	struct reply reply;

	pthread_mutex_lock(&mutex);
	CUcheckpointOperationHandle *link = &operations;
	while (*link && *link != handle)
		link = &(*link)->next;
	if (*link)
		*link = handle->next;
	else
		handle = NULL;
	pthread_mutex_unlock(&mutex);
	if (!handle)
		return CUDA_ERROR_INVALID_HANDLE;
	CUresult r = remote_request(handle->pid, &request, &reply);
	end(handle);
	return r;
}
