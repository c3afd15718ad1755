// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// keeptest MIB...: a program with the interposer, on the software GPU, that has so much memory of cuMemAlloc, at most two
// pieces, and changes it or has more for a moment as stdin says: "set N" writes a byte all over, "is" answers it, "alloc
// MIB", "share KIND", "map ADDRESS BYTES FILE" (private), "replace FD" (by another file), "look NAME" (a function up), "load
// LIBRARY" (with its own libraries first), "loads LIBRARY" (and another one again and again) and "copy LIBRARY" (of the driver)
// answer "ok" or an error. All by lines.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef unsigned long long CUdeviceptr;

#define CALL(name, parameters, arguments) ((int (*) parameters)dlsym(library, name)) arguments

struct handle {
	char bytes[64];
};

// drivers_event returns a handle of the software GPU's, of a process that has no interposer.
static struct handle drivers_event(void)
{
	struct {
		char magic[8];
		int pid, fd;
	} is = {"softevt", 0, (int)syscall(SYS_memfd_create, "softcuda/cuda.shm.0", 0)};
	struct handle handle = {{0}};

	pid_t parent = getpid();

	is.pid = fork();
	if (!is.pid) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (getppid() == parent) // else it has ended before the call
			pause();
		_exit(0);
	}
	memcpy(&handle, &is, sizeof is);
	return handle;
}

// share uses a way to share that the interposer does not bring back.
static int share(void *library, const char *kind)
{
	struct {
		int type, types;
		struct {
			int type, id;
		} location;
		void *none;
		unsigned char flags[8];
	} fabric = {1, 8, {1, 0}, NULL, {0}};
	struct handle handle = {{0}};
	unsigned long long memory;
	void *object;
	int r;

	if (!strcmp(kind, "event")) { // which the driver makes where the GPU cannot do as the interposer's need
		r = CALL("cuEventCreate", (void **, unsigned), (&object, 6));
		return r ? r : CALL("cuIpcGetEventHandle", (struct handle *, void *), (&handle, object));
	}
	if (!strcmp(kind, "event-of-another")) {
		handle = drivers_event();
		return CALL("cuIpcOpenEventHandle", (void **, struct handle), (&object, handle));
	}
	if (!strcmp(kind, "pool"))
		return CALL("cuMemPoolExportToShareableHandle", (void *, void *, int, uint64_t), (&handle, NULL, 1, 0));
	if (!strcmp(kind, "pool-of-another"))
		return CALL("cuMemPoolImportFromShareableHandle", (void **, void *, int, uint64_t), (&object, NULL, 1, 0));
	if (!strcmp(kind, "external-memory"))
		return CALL("cuImportExternalMemory", (void **, void *), (&object, NULL));
	if (!strcmp(kind, "external-semaphore"))
		return CALL("cuImportExternalSemaphore", (void **, void *), (&object, NULL));
	if (!strcmp(kind, "multicast"))
		return CALL("cuMulticastCreate", (unsigned long long *, void *), (&memory, NULL));
	if (!strncmp(kind, "host", strlen("host"))) {
		fabric.types = 1;
		fabric.location.type = 3;
		r = CALL("cuMemCreate", (unsigned long long *, size_t, void *, uint64_t), (&memory, 2 << 20, &fabric, 0));
		if (!r && !strcmp(kind, "host-exported"))
			r = CALL("cuMemExportToShareableHandle", (void *, unsigned long long, int, uint64_t), (&handle, memory, 1, 0));
		return r || !strcmp(kind, "host") ? r : CALL("cuMemRelease", (unsigned long long), (memory));
	}
	if (!strcmp(kind, "fabric")) {
		r = CALL("cuMemCreate", (unsigned long long *, size_t, void *, uint64_t), (&memory, 2 << 20, &fabric, 0));
		return r ? r : CALL("cuMemExportToShareableHandle", (void *, unsigned long long, int, uint64_t), (&handle, memory, 8, 0));
	}
	return -1;
}

static void *load_and_unload(void *path)
{
	for (void *stays = dlopen(path, RTLD_NOW); stays;)
		dlclose(dlopen("libm.so.6", RTLD_NOW));
	return NULL;
}

int main(int argc, char **argv)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW), *context;
	size_t bytes[2], count = (size_t)argc - 1, n, at;
	CUdeviceptr memory[2], more;
	char line[512], path[400], kind[32];

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (!library || count > 2 || CALL("cuInit", (unsigned), (0)) ||
	    CALL("cuDevicePrimaryCtxRetain", (void **, int), (&context, 0)) || CALL("cuCtxSetCurrent", (void *), (context)))
		return 1;
	for (size_t i = 0; i < count; i++) {
		bytes[i] = (size_t)atoi(argv[i + 1]) << 20;
		if (CALL("cuMemAlloc_v2", (CUdeviceptr *, size_t), (&memory[i], bytes[i])))
			return 1;
	}
	puts("ready");
	while (fgets(line, sizeof line, stdin)) {
		int r = 0, is = -1;
		if (sscanf(line, "set %zu", &n) == 1) {
			for (size_t i = 0; i < count && !r; i++)
				r = CALL("cuMemsetD8_v2", (CUdeviceptr, unsigned char, size_t), (memory[i], (unsigned char)n, bytes[i]));
		} else if (sscanf(line, "alloc %zu", &n) == 1) {
			r = CALL("cuMemAlloc_v2", (CUdeviceptr *, size_t), (&more, n << 20));
			r = r ? r : CALL("cuMemFree_v2", (CUdeviceptr), (more));
		} else if (sscanf(line, "share %31s", kind) == 1) {
			r = share(library, kind);
		} else if (sscanf(line, "map %zu %zu %399s", &at, &n, path) == 3) {
			int fd = open(path, O_RDONLY);
			// By a system call: no sanitizer sees that the shim has the interposer read there only afterwards.
			r = syscall(SYS_mmap, at, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, fd, 0) == -1;
			close(fd);
		} else if (sscanf(line, "look %31s", kind) == 1) {
			r = !dlsym(library, kind);
		} else if (sscanf(line, "loads %399s", path) == 1) {
			pthread_t thread;
			r = pthread_create(&thread, NULL, load_and_unload, strdup(path));
		} else if (sscanf(line, "load %399s", path) == 1) {
			r = !dlopen(path, RTLD_NOW | RTLD_DEEPBIND);
		} else if (sscanf(line, "copy %399s", path) == 1) { // in which cuInit was not called
			void *copy = dlopen(path, RTLD_NOW);
			r = !copy || ((int (*)(CUdeviceptr *, size_t))dlsym(copy, "cuMemAlloc_v2"))(&more, 8 << 20) != 3;
		} else if (sscanf(line, "replace %zu", &n) == 1) {
			int fd = open("/dev/null", O_RDONLY);
			r = dup2(fd, (int)n) < 0;
			close(fd);
		} else if (!strcmp(line, "is\n")) {
			for (size_t i = 0; i < count && !r; i++) {
				unsigned char *all = malloc(bytes[i]);
				r = CALL("cuMemcpyDtoH_v2", (void *, CUdeviceptr, size_t), (all, memory[i], bytes[i]));
				if (!r && ((is >= 0 && is != all[0]) || memcmp(all, all + 1, bytes[i] - 1)))
					r = -1;
				is = all[0];
				free(all);
			}
		}
		if (r)
			printf("error %d\n", r);
		else if (is >= 0)
			printf("%d\n", is);
		else
			puts("ok");
	}
	return 0;
}
