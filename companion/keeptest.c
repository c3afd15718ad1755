// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// keeptest MIB: a program with the companion, on the software GPU, that has so much memory of cuMemAlloc and changes it
// or has more for a moment as stdin says: "set N" writes a byte all over, "is" answers it, "alloc MIB", "end" (of the context)
// and "map ADDRESS BYTES OFFSET FILE" (shared) answer "ok" or an error. All by lines.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef unsigned long long CUdeviceptr;

#define CALL(name, parameters, arguments) ((int (*) parameters)dlsym(library, name)) arguments

int main(int argc, char **argv)
{
	size_t bytes = (size_t)atoi(argv[argc - 1]) << 20, n;
	void *library = dlopen("libcuda.so.1", RTLD_NOW), *context;
	CUdeviceptr memory, more;
	char line[512], path[400], *all = malloc(bytes);
	size_t at, offset;

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (!library || CALL("cuInit", (unsigned), (0)) || CALL("cuDevicePrimaryCtxRetain", (void **, int), (&context, 0)) ||
	    CALL("cuCtxSetCurrent", (void *), (context)) || CALL("cuMemAlloc_v2", (CUdeviceptr *, size_t), (&memory, bytes)))
		return 1;
	puts("ready");
	while (fgets(line, sizeof line, stdin)) {
		int r = 0;
		if (sscanf(line, "set %zu", &n) == 1) {
			r = CALL("cuMemsetD8_v2", (CUdeviceptr, unsigned char, size_t), (memory, (unsigned char)n, bytes));
		} else if (sscanf(line, "alloc %zu", &n) == 1) {
			r = CALL("cuMemAlloc_v2", (CUdeviceptr *, size_t), (&more, n << 20));
			r = r ? r : CALL("cuMemFree_v2", (CUdeviceptr), (more));
		} else if (sscanf(line, "map %zu %zu %zu %399s", &at, &n, &offset, path) == 4) {
			int fd = open(path, O_RDWR);
			r = mmap((void *)at, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, (off_t)offset) == MAP_FAILED;
			close(fd);
		} else if (!strcmp(line, "end\n")) {
			r = CALL("cuDevicePrimaryCtxRelease_v2", (int), (0));
		} else if (!strcmp(line, "is\n")) {
			r = CALL("cuMemcpyDtoH_v2", (void *, CUdeviceptr, size_t), (all, memory, bytes));
			if (!r && memcmp(all, all + 1, bytes - 1))
				r = -1;
			if (!r) {
				printf("%d\n", all[0]);
				continue;
			}
		}
		if (r)
			printf("error %d\n", r);
		else
			puts("ok");
	}
	return 0;
}
