// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// A program with the interposer preloaded, on the software GPU: what the driver's functions answer for the
// interposer's memory and for the driver's own, by each way that a program has to the driver.
// Answers nothing and ends with 0, or says what is wrong.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef unsigned long long CUdeviceptr;
struct handle {
	char bytes[64];
};

#include "want.h"

enum { KIB = 1 << 10, MIB = 1 << 20 };

static int (*proc_address)(const char *, void **, int, uint64_t, int *);
static void *library;

// by_name finds a function by dlsym, by_driver by cuGetProcAddress.
static void *by_name(const char *name)
{
	void *f = dlsym(library, name);
	WANT(f);
	return f;
}

static void *by_driver(const char *name)
{
	void *f = NULL;
	WANT(!proc_address(name, &f, 12000, 0, NULL) && f);
	return f;
}

#define CALL(result, f, parameters, arguments) ((result(*) parameters)(f)) arguments

int main(int argc, char **argv)
{
	CUdeviceptr large, small, other, base;
	char *bytes = calloc(1, 16 * MIB), handle[64];
	size_t size;
	void *context, *second;
	int n = 0;

	library = dlopen("libcuda.so.1", RTLD_NOW);
	WANT(library);
	proc_address = dlsym(library, "cuGetProcAddress_v2");
	WANT(proc_address);
	// A function has one thunk, whichever way it is found, and one that needs no gate has none.
	WANT(by_name("cuMemAlloc_v2") == by_driver("cuMemAlloc"));
	WANT(by_name("cuMemAlloc_v2") == dlsym(RTLD_DEFAULT, "cuMemAlloc_v2"));
	WANT(by_name("cuInit") == by_driver("cuInit"));
	WANT(!dlsym(library, "cuThereIsNone"));
	WANT(dlsym(RTLD_NEXT, "malloc") && dlsym(RTLD_DEFAULT, "cuthereisnone") == NULL);
	if (argc > 1) // a library that comes after the interposer stands before a function of the driver
		WANT(!strcmp(argv[1], "linked") && CALL(int, dlsym(RTLD_DEFAULT, "cuCtxGetDevice"), (int *), (&n)) == 3);

	void *alloc = by_name("cuMemAlloc_v2"), *release = by_driver("cuMemFree"), *range = by_name("cuMemGetAddressRange_v2");
	void *out = by_name("cuMemcpyDtoH_v2"), *in = by_name("cuMemcpyHtoD_v2"), *ipc = by_name("cuIpcGetMemHandle");
	WANT(CALL(int, alloc, (CUdeviceptr *, size_t), (&large, 8 * MIB)) == 3); // before cuInit
	WANT(!CALL(int, by_name("cuInit"), (unsigned), (0)));
	WANT(CALL(int, alloc, (CUdeviceptr *, size_t), (&large, 8 * MIB)) == 201); // without a context
	WANT(!CALL(int, by_driver("cuDevicePrimaryCtxRetain"), (void **, int), (&context, 0)));
	WANT(!CALL(int, by_name("cuCtxSetCurrent"), (void *), (context)));
	WANT(!CALL(int, alloc, (CUdeviceptr *, size_t), (&large, 5 * MIB)));
	WANT(!CALL(int, alloc, (CUdeviceptr *, size_t), (&small, 64 * KIB)));
	WANT(CALL(int, alloc, (CUdeviceptr *, size_t), (&other, (size_t)1 << 50)) == 2);
	// Memory of the interposer's is answered for as the driver does for its own.
	WANT(!CALL(int, range, (CUdeviceptr *, size_t *, CUdeviceptr), (&base, &size, large + 5 * MIB - 1)));
	WANT(base == large && size == 5 * MIB);
	WANT(!CALL(int, range, (CUdeviceptr *, size_t *, CUdeviceptr), (&base, &size, small + 1)) && base == small);
	WANT(CALL(int, range, (CUdeviceptr *, size_t *, CUdeviceptr), (&base, &size, large + 5 * MIB)));
	for (size_t i = 0; i < 5 * MIB; i++)
		bytes[i] = (char)(i * 7);
	WANT(!CALL(int, in, (CUdeviceptr, const void *, size_t), (large + 12, bytes, 5 * MIB - 12)));
	WANT(!CALL(int, out, (void *, CUdeviceptr, size_t), (bytes + 8 * MIB, large + 12, 5 * MIB - 12)));
	WANT(!memcmp(bytes, bytes + 8 * MIB, 5 * MIB - 12));
	// The one has a ticket for a handle, the other the driver's. A process opens none of its own.
	WANT(!CALL(int, ipc, (void *, CUdeviceptr), (handle, small)));
	WANT(memcmp(handle, "gpck", 4));
	WANT(!CALL(int, ipc, (void *, CUdeviceptr), (handle, large)));
	WANT(!memcmp(handle, "gpck", 4));
	struct handle own;
	memcpy(&own, handle, sizeof own);
	void *opens = by_driver("cuIpcOpenMemHandle"), *closes = by_name("cuIpcCloseMemHandle");
	WANT(opens == by_name("cuIpcOpenMemHandle_v2"));
	WANT(CALL(int, opens, (CUdeviceptr *, struct handle, unsigned), (&other, own, 1)) == 201);
	own.bytes[8] ^= 1; // of an exporter that is not there
	memset(own.bytes + 4, 0x7f, 4);
	WANT(CALL(int, opens, (CUdeviceptr *, struct handle, unsigned), (&other, own, 1)) == 400);
	WANT(CALL(int, closes, (CUdeviceptr), (large)) == 1);
	// Memory of cuMemCreate that can be exported: a process imports its own as well, by the same number.
	struct {
		int type, types, where, id;
		void *metadata;
		char flags[8];
	} prop = {1, 1, 1, 0, NULL, {0}}, got;
	struct {
		int where, id, flags;
	} access = {1, 0, 3};
	unsigned long long memory, again, plain;
	int fd = -1;
	char word[4] = "abc", back[4] = "";
	void *create = by_name("cuMemCreate"), *map = by_name("cuMemMap"), *unmap = by_name("cuMemUnmap"), *drop = by_name("cuMemRelease");
	void *reserve = by_name("cuMemAddressReserve"), *give = by_name("cuMemAddressFree");
	WANT(!CALL(int, create, (void *, size_t, void *, uint64_t), (&memory, 4 * MIB, &prop, 0)));
	WANT(memory >> 32 == 0x67706b74);
	prop.types = 0;
	WANT(!CALL(int, create, (void *, size_t, void *, uint64_t), (&plain, 4 * MIB, &prop, 0)) && plain >> 32 != 0x67706b74);
	WANT(!CALL(int, by_name("cuMemGetAllocationPropertiesFromHandle"), (void *, unsigned long long), (&got, memory)) && got.types == 1);
	WANT(CALL(int, by_name("cuMemExportToShareableHandle"), (int *, unsigned long long, int, uint64_t), (&fd, plain, 1, 0)));
	WANT(!CALL(int, by_name("cuMemExportToShareableHandle"), (int *, unsigned long long, int, uint64_t), (&fd, memory, 1, 0)) && fd >= 0);
	WANT(!CALL(int, by_name("cuMemImportFromShareableHandle"), (void *, long, int), (&again, fd, 1)) && again == memory);
	WANT(!close(fd));
	WANT(!CALL(int, reserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, uint64_t), (&base, 8 * MIB, 0, 0, 0)));
	for (int i = 0; i < 2; i++) { // twice
		WANT(!CALL(int, map, (CUdeviceptr, size_t, size_t, unsigned long long, uint64_t), (base + 4 * MIB * i, 4 * MIB, 0, memory, 0)));
		WANT(!CALL(int, by_name("cuMemSetAccess"), (CUdeviceptr, size_t, void *, size_t), (base + 4 * MIB * i, 4 * MIB, &access, 1)));
	}
	WANT(!CALL(int, in, (CUdeviceptr, const void *, size_t), (base, word, 4)));
	WANT(!CALL(int, out, (void *, CUdeviceptr, size_t), (back, base + 4 * MIB, 4)) && !strcmp(word, back));
	WANT(!CALL(int, by_name("cuMemRetainAllocationHandle"), (void *, CUdeviceptr), (&again, base + 5 * MIB)) && again == memory);
	for (int i = 0; i < 3; i++)
		WANT(!CALL(int, drop, (unsigned long long), (memory)));
	WANT(CALL(int, drop, (unsigned long long), (memory))); // it is mapped, and has no handle any more
	WANT(!CALL(int, out, (void *, CUdeviceptr, size_t), (back, base, 4)) && !strcmp(word, back));
	WANT(!CALL(int, unmap, (CUdeviceptr, size_t), (base, 8 * MIB)) && CALL(int, unmap, (CUdeviceptr, size_t), (base, 8 * MIB)));
	WANT(!CALL(int, give, (CUdeviceptr, size_t), (base, 8 * MIB)) && !CALL(int, drop, (unsigned long long), (plain)));
	WANT(CALL(int, map, (CUdeviceptr, size_t, size_t, unsigned long long, uint64_t), (base, 4 * MIB, 0, memory, 0)));
	// Memory of cuMemAlloc has a handle too, which is as good as another, and keeps it.
	CUdeviceptr kept;
	WANT(!CALL(int, alloc, (CUdeviceptr *, size_t), (&kept, 4 * MIB)));
	WANT(!CALL(int, by_name("cuMemRetainAllocationHandle"), (void *, CUdeviceptr), (&memory, kept + 1)) && memory >> 32 == 0x67706b74);
	WANT(!CALL(int, in, (CUdeviceptr, const void *, size_t), (kept, word, 4)) && !CALL(int, release, (CUdeviceptr), (kept)));
	WANT(CALL(int, release, (CUdeviceptr), (kept)));
	WANT(!CALL(int, reserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, uint64_t), (&base, 4 * MIB, 0, 0, 0)));
	WANT(!CALL(int, map, (CUdeviceptr, size_t, size_t, unsigned long long, uint64_t), (base, 4 * MIB, 0, memory, 0)));
	WANT(!CALL(int, by_name("cuMemSetAccess"), (CUdeviceptr, size_t, void *, size_t), (base, 4 * MIB, &access, 1)));
	memset(back, 0, sizeof back);
	WANT(!CALL(int, out, (void *, CUdeviceptr, size_t), (back, base, 4)) && !strcmp(word, back));
	WANT(!CALL(int, unmap, (CUdeviceptr, size_t), (base, 4 * MIB)));
	WANT(!CALL(int, drop, (unsigned long long), (memory)) && CALL(int, drop, (unsigned long long), (memory)));
	// A child of fork has no CUDA, and does not wait for ever.
	pid_t child = fork();
	if (!child)
		_exit(CALL(int, alloc, (CUdeviceptr *, size_t), (&other, 8 * MIB)) == 3 ? 0 : 1);
	WANT(waitpid(child, &n, 0) == child && !n);
	WANT(!CALL(int, release, (CUdeviceptr), (large)));
	WANT(CALL(int, release, (CUdeviceptr), (large)));
	WANT(!CALL(int, release, (CUdeviceptr), (small)));
	// Memory goes with its context: as much as there is can be had again.
	size_t whole, left;
	WANT(!CALL(int, by_name("cuMemGetInfo_v2"), (size_t *, size_t *), (&left, &whole)));
	size_t most = (left - 64 * MIB) / (2 * MIB) * (2 * MIB);
	for (int i = 0; i < 3; i++) {
		WANT(!CALL(int, by_name("cuCtxCreate_v2"), (void **, unsigned, int), (&second, 0, 0)));
		WANT(!CALL(int, alloc, (CUdeviceptr *, size_t), (&large, most)));
		WANT(!CALL(int, by_name("cuCtxDestroy_v2"), (void *), (second)));
	}
	WANT(!CALL(int, by_name("cuCtxSetCurrent"), (void *), (context)));
	WANT(!CALL(int, alloc, (CUdeviceptr *, size_t), (&large, most)));
	WANT(!CALL(int, by_name("cuDevicePrimaryCtxRelease_v2"), (int), (0)));
	WANT(!CALL(int, by_driver("cuDevicePrimaryCtxRetain"), (void **, int), (&context, 0)));
	WANT(!CALL(int, by_name("cuCtxSetCurrent"), (void *), (context)));
	WANT(!CALL(int, alloc, (CUdeviceptr *, size_t), (&large, most)));
	return 0;
}
