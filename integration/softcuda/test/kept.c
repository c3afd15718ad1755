// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// GPU memory that a process exports, unmaps and releases: it lives on by the descriptor that another process has, while
// the driver checkpoints its maker, which imports it again afterwards. With an import mapped a process is checkpointed
// and never restored. What the interposer relies on (../../../interposer/keep.c). Another process can have the memory
// meanwhile, and make other memory that takes its place. What the mover relies on (../../../cuda/driver/mover.go).

#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"

#define BYTES ((size_t)8 << 20)
#define WORD 0x6b657074u

// The program's calls.
#define OF(name) __typeof__(name) *p_##name = (__typeof__(name) *)dlsym(library, #name)
#define MUST(name, ...)                                                         \
	do {                                                                    \
		CUresult r_ = p_##name(__VA_ARGS__);                            \
		if (r_) {                                                       \
			fprintf(stderr, "kept: %s = %d\n", #name, r_);          \
			_exit(1);                                               \
		}                                                               \
	} while (0)

static void say(int s, int fd)
{
	char byte = 1, room[CMSG_SPACE(sizeof fd)] = {0};
	struct iovec data = {&byte, 1};
	struct msghdr m = {.msg_iov = &data, .msg_iovlen = 1};

	if (fd >= 0) {
		m.msg_control = room;
		m.msg_controllen = sizeof room;
		struct cmsghdr *h = CMSG_FIRSTHDR(&m);
		h->cmsg_level = SOL_SOCKET;
		h->cmsg_type = SCM_RIGHTS;
		h->cmsg_len = CMSG_LEN(sizeof fd);
		memcpy(CMSG_DATA(h), &fd, sizeof fd);
	}
	if (sendmsg(s, &m, MSG_NOSIGNAL) != 1)
		die("the other end of the socket is gone");
}

// hear returns the descriptor that came, or -1. It ends a process whose other end is gone.
static int hear(int s)
{
	char byte, room[CMSG_SPACE(sizeof(int))];
	struct iovec data = {&byte, 1};
	struct msghdr m = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
	int fd = -1;

	if (recvmsg(s, &m, 0) != 1)
		die("the other end of the socket says no more");
	struct cmsghdr *h = CMSG_FIRSTHDR(&m);
	if (h)
		memcpy(&fd, CMSG_DATA(h), sizeof fd);
	return fd;
}

void kept_program(int s)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW);
	CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR};
	CUmemAccessDesc access = {.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
	CUmemGenericAllocationHandle handle;
	unsigned *words = malloc(BYTES);
	CUdeviceptr at;
	CUcontext context;
	int fd;

	if (!library)
		die("%s", dlerror());
	OF(cuInit);
	OF(cuDevicePrimaryCtxRetain);
	OF(cuCtxSetCurrent);
	OF(cuMemAddressReserve);
	OF(cuMemCreate);
	OF(cuMemMap);
	OF(cuMemSetAccess);
	OF(cuMemcpyHtoD_v2);
	OF(cuMemcpyDtoH_v2);
	OF(cuMemExportToShareableHandle);
	OF(cuMemImportFromShareableHandle);
	OF(cuMemUnmap);
	OF(cuMemRelease);
	prop.location = access.location;
	MUST(cuInit, 0);
	MUST(cuDevicePrimaryCtxRetain, &context, 0);
	MUST(cuCtxSetCurrent, context);
	MUST(cuMemAddressReserve, &at, BYTES, 0, 0, 0);
	MUST(cuMemCreate, &handle, BYTES, &prop, 0);
	MUST(cuMemMap, at, BYTES, 0, handle, 0);
	MUST(cuMemSetAccess, at, BYTES, &access, 1);
	for (size_t i = 0; i < BYTES / sizeof *words; i++)
		words[i] = WORD + (unsigned)i;
	MUST(cuMemcpyHtoD_v2, at, words, BYTES);
	MUST(cuMemExportToShareableHandle, &fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
	MUST(cuMemUnmap, at, BYTES);
	MUST(cuMemRelease, handle);
	say(s, fd);
	close(fd);
	fd = hear(s); // it was checkpointed and restored
	MUST(cuMemImportFromShareableHandle, &handle, (void *)(long)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
	close(fd);
	MUST(cuMemMap, at, BYTES, 0, handle, 0);
	MUST(cuMemSetAccess, at, BYTES, &access, 1);
	memset(words, 0, BYTES);
	MUST(cuMemcpyDtoH_v2, words, at, BYTES);
	for (size_t i = 0; i < BYTES / sizeof *words; i++)
		if (words[i] != WORD + (unsigned)i)
			die("word %zu is %#x", i, words[i]);
	say(s, -1);
	for (;;)
		pause();
}

// kept_mover reads what kept_program has exported, and makes memory with the same words.
void kept_mover(int s)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW);
	CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR}, found = {0};
	CUmemAccessDesc access = {.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
	CUmemGenericAllocationHandle handle;
	unsigned *words;
	CUdeviceptr at;
	CUcontext context;
	CUstream stream;
	int fd = hear(s);

	if (!library)
		die("%s", dlerror());
	OF(cuInit);
	OF(cuDevicePrimaryCtxRetain);
	OF(cuCtxSetCurrent);
	OF(cuMemAddressReserve);
	OF(cuMemAddressFree);
	OF(cuMemCreate);
	OF(cuMemMap);
	OF(cuMemSetAccess);
	OF(cuMemHostAlloc);
	OF(cuStreamCreate);
	OF(cuStreamSynchronize);
	OF(cuMemcpyHtoDAsync_v2);
	OF(cuMemcpyDtoHAsync_v2);
	OF(cuMemsetD8Async);
	OF(cuMemExportToShareableHandle);
	OF(cuMemImportFromShareableHandle);
	OF(cuMemGetAllocationPropertiesFromHandle);
	OF(cuMemUnmap);
	OF(cuMemRelease);
	prop.location = access.location;
	MUST(cuInit, 0);
	MUST(cuDevicePrimaryCtxRetain, &context, 0);
	MUST(cuCtxSetCurrent, context);
	MUST(cuMemHostAlloc, (void **)&words, BYTES, 1);
	MUST(cuStreamCreate, &stream, 1);
	MUST(cuMemImportFromShareableHandle, &handle, (void *)(long)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
	close(fd);
	MUST(cuMemGetAllocationPropertiesFromHandle, &found, handle);
	if (found.type != prop.type || found.location.type != prop.location.type || found.location.id != prop.location.id)
		die("imported memory is of type %d, on location %d of type %d", found.type, found.location.id, found.location.type);
	MUST(cuMemAddressReserve, &at, BYTES, 0, 0, 0);
	MUST(cuMemMap, at, BYTES, 0, handle, 0);
	MUST(cuMemSetAccess, at, BYTES, &access, 1);
	MUST(cuMemcpyDtoHAsync_v2, words, at, BYTES, stream);
	MUST(cuStreamSynchronize, stream);
	for (size_t i = 0; i < BYTES / sizeof *words; i++)
		if (words[i] != WORD + (unsigned)i)
			die("word %zu is %#x in another process", i, words[i]);
	MUST(cuMemUnmap, at, BYTES);
	MUST(cuMemRelease, handle);
	MUST(cuMemCreate, &handle, BYTES, &prop, 0);
	MUST(cuMemMap, at, BYTES, 0, handle, 0);
	MUST(cuMemSetAccess, at, BYTES, &access, 1);
	MUST(cuMemsetD8Async, at, 0, BYTES, stream);
	MUST(cuMemcpyHtoDAsync_v2, at, words, BYTES, stream);
	MUST(cuStreamSynchronize, stream);
	MUST(cuMemExportToShareableHandle, &fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
	MUST(cuMemUnmap, at, BYTES);
	MUST(cuMemRelease, handle);
	MUST(cuMemAddressFree, at, BYTES);
	say(s, fd);
	exit(0);
}

// begin runs this program as one side of the test, and returns a socket to it.
static int begin(const char *side, pid_t *pid)
{
	char number[16];
	int pair[2];

	if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair))
		die("no socket");
	snprintf(number, sizeof number, "%d", pair[1]);
	*pid = fork();
	if (!*pid) {
		close(pair[0]);
		execl("/proc/self/exe", "conform", side, number, NULL);
		_exit(1);
	}
	close(pair[1]);
	return pair[0];
}

void test_kept(void)
{
	pid_t pid;
	int s = begin("--kept", &pid), fd, status;

	fd = hear(s);
	WANT(fd >= 0, true);
	want_cycle(pid);
	say(s, fd);
	close(fd);
	hear(s);
	// What it has mapped now is an import.
	WANT(lock(pid, 10000), CUDA_SUCCESS);
	WANT(cu.checkpoint(pid, NULL), CUDA_SUCCESS);
	WANT(restore(pid, 0, NULL) != CUDA_SUCCESS, true);
	kill(pid, SIGKILL);
	WANT(waitpid(pid, &status, 0), pid);
}

void test_moved(void)
{
	pid_t pid, mover;
	int s = begin("--kept", &pid), fd, other, status;

	fd = hear(s);
	WANT(fd >= 0, true);
	WANT(lock(pid, 10000), CUDA_SUCCESS);
	WANT(cu.checkpoint(pid, NULL), CUDA_SUCCESS);
	other = begin("--mover", &mover);
	say(other, fd);
	close(fd);
	fd = hear(other);
	WANT(waitpid(mover, &status, 0), mover);
	WANT(status, 0);
	WANT(restore(pid, 0, NULL), CUDA_SUCCESS);
	WANT(cu.unlock(pid, NULL), CUDA_SUCCESS);
	say(s, fd);
	close(fd);
	hear(s);
	kill(pid, SIGKILL);
	WANT(waitpid(pid, &status, 0), pid);
}
