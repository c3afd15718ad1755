// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Copies between "GPU" memory, which is this program's, and host memory: what was zeros on the way out is not
// read on the way back, and everything else is. Answers nothing and ends with 0, or says what is wrong.

#include "driver.c"
#include "lock.c"
#include "copy.c"

#include <stdio.h>
#include <sys/mman.h>

#include "want.h"

enum { PIECES = 3, BLOCK = 6 << 20 }; // a chunk and a half each

void gate_exempt(void)
{
}

static CUresult set_current(CUcontext c)
{
	(void)c;
	return CUDA_SUCCESS;
}

static CUresult out(void *to, CUdeviceptr from, size_t bytes)
{
	memcpy(to, (void *)from, bytes);
	return CUDA_SUCCESS;
}

static CUresult in(CUdeviceptr to, const void *from, size_t bytes)
{
	memcpy((void *)to, from, bytes);
	return CUDA_SUCCESS;
}

static CUresult host_alloc(void **at, size_t bytes, unsigned flags)
{
	(void)flags;
	*at = malloc(bytes);
	return CUDA_SUCCESS;
}

static CUresult free_host(void *at)
{
	free(at);
	return CUDA_SUCCESS;
}

static CUresult stream_create(CUstream *s, unsigned flags)
{
	*s = (CUstream)(uintptr_t)(1 + flags);
	return CUDA_SUCCESS;
}

static CUresult stream(CUstream s)
{
	(void)s;
	return CUDA_SUCCESS;
}

static CUresult out_async(void *to, CUdeviceptr from, size_t bytes, CUstream s)
{
	(void)s;
	return out(to, from, bytes);
}

static CUresult in_async(CUdeviceptr to, const void *from, size_t bytes, CUstream s)
{
	(void)s;
	return in(to, from, bytes);
}

static CUresult set_async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream s)
{
	(void)s;
	memset((void *)to, value, bytes);
	return CUDA_SUCCESS;
}

static bool has_set = true;

void *interposer_real(const char *name)
{
	static const struct {
		const char *name;
		void *function;
	} all[] = {
		{"cuCtxSetCurrent", set_current}, {"cuMemcpyDtoH_v2", out}, {"cuMemcpyHtoD_v2", in},
		{"cuMemHostAlloc", host_alloc}, {"cuMemFreeHost", free_host}, {"cuStreamCreate", stream_create},
		{"cuStreamSynchronize", stream}, {"cuStreamDestroy_v2", stream}, {"cuMemcpyDtoHAsync_v2", out_async},
		{"cuMemcpyHtoDAsync_v2", in_async}, {"cuMemsetD8Async", set_async},
	};
	for (size_t i = 0; i < sizeof all / sizeof *all; i++)
		if (!strcmp(all[i].name, name))
			return strcmp(name, "cuMemsetD8Async") || has_set ? all[i].function : NULL;
	return NULL;
}

int main(void)
{
	char *device = aligned_alloc(UNIT, PIECES * BLOCK), *was = malloc(PIECES * BLOCK);
	char *host = mmap(NULL, PIECES * BLOCK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct piece pieces[PIECES];

	driver_look();
	WANT(driver_serves(COPIES | STREAMS | ZEROS));
	for (int i = 0; i < PIECES; i++)
		pieces[i] = (struct piece){NULL, (CUdeviceptr)(device + i * BLOCK), host + i * BLOCK, BLOCK};
	// The second block is zeros. Of the first a unit in the middle is, and of the last all but a byte.
	memset(device, 0, PIECES * BLOCK);
	memset(device, 7, UNIT);
	memset(device + 2 * UNIT, 8, UNIT);
	device[PIECES * BLOCK - 1] = 9;
	memcpy(was, device, PIECES * BLOCK);

	WANT(!copy_all(pieces, PIECES, host, PIECES * BLOCK, true));
	WANT(!memcmp(host, was, PIECES * BLOCK));
	memset(device, 1, PIECES * BLOCK);
	WANT(!mprotect(host + BLOCK, BLOCK, PROT_NONE)); // a read of it ends the program
	WANT(!copy_all(pieces, PIECES, host, PIECES * BLOCK, false));
	WANT(!memcmp(device, was, PIECES * BLOCK));

	// The first block alone, as after a failure on the way.
	memset(device, 1, BLOCK);
	WANT(!copy_all(pieces, 1, host, PIECES * BLOCK, false));
	WANT(!memcmp(device, was, BLOCK));

	// Of other host memory nothing is known, nor by a driver without the function.
	for (int i = 0; i < 2; i++) {
		WANT(!mprotect(host, PIECES * BLOCK, PROT_READ | PROT_WRITE));
		has_set = !i;
		look();
		if (i)
			WANT(!copy_all(pieces, PIECES, host, PIECES * BLOCK, true));
		memset(host, 5, PIECES * BLOCK);
		WANT(!copy_all(pieces, PIECES, host, (i ? PIECES : PIECES - 1) * BLOCK, false));
		WANT(device[BLOCK] == 5 && device[PIECES * BLOCK - 1] == 5);
	}
	return 0;
}
