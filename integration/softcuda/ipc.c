// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// cuIpc*: device memory of one process that another one maps. The handle names the exporter and the
// descriptor of its memory file, which stays open from the first handle on.
//
// Exporter and importer map one page of a file of /dev/shm, cuda.shm.UID.PID.1 with the exporter's
// user and pid in hexadecimal digits. Driver 580.159 has such a file too; what is in it is not known.
// The mapping stays for the rest of the process's life.
//
// As driver 580.159 does, a checkpoint of either process succeeds and its restore fails for good
// (checkpoint.c).

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "softcuda.h"

struct handle {
	char magic[8];
	int32_t pid, fd; // of the exporter
	int32_t shm;     // the exporter's descriptor of its file in /dev/shm
	uint64_t bytes;
};
_Static_assert(sizeof(struct handle) <= sizeof(CUipcMemHandle), "the handle is too small");

static const char magic[8] = "softipc";

static struct {
	char path[64];
	int fd;
	pid_t pid; // the process whose file it is, 0 for none; a forked child has none of its own
} shm;

__attribute__((destructor)) static void remove_shm(void)
{
	if (shm.pid == getpid())
		unlink(shm.path);
}

// map_shm maps a file of /dev/shm for the rest of the process's life.
static CUresult map_shm(int fd)
{
	void *at = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	return at == MAP_FAILED ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}

// make_shm makes this process's file, once.
static CUresult make_shm(void)
{
	if (shm.pid == getpid())
		return CUDA_SUCCESS;
	snprintf(shm.path, sizeof shm.path, "/dev/shm/cuda.shm.%x.%x.1", getuid(), getpid());
	shm.fd = open(shm.path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	if (shm.fd < 0)
		return CUDA_ERROR_OPERATING_SYSTEM;
	shm.pid = getpid();
	return ftruncate(shm.fd, 4096) ? CUDA_ERROR_OPERATING_SYSTEM : map_shm(shm.fd);
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr address)
{
	struct handle h = {.pid = getpid()};
	size_t bytes;
	CUresult r = gate_enter();

	if (r)
		return r;
	if (!context_current())
		return gate_leave(CUDA_ERROR_INVALID_CONTEXT);
	if (!out)
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	if ((r = memory_export(address, &h.fd, &bytes)) || (r = make_shm()))
		return gate_leave(r);
	h.shm = shm.fd;
	memcpy(h.magic, magic, sizeof magic);
	h.bytes = bytes;
	memset(out, 0, sizeof *out);
	memcpy(out, &h, sizeof h);
	return gate_leave(CUDA_SUCCESS);
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle in, unsigned int flags)
{
	struct handle h;
	char path[64];
	CUresult r = gate_enter();

	if (r)
		return r;
	CUcontext c = context_current();
	if (!c)
		return gate_leave(CUDA_ERROR_INVALID_CONTEXT);
	memcpy(&h, &in, sizeof h);
	if (!address || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS || memcmp(h.magic, magic, sizeof magic))
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	if (h.pid == getpid()) // the exporter has it already
		return gate_leave(CUDA_ERROR_INVALID_CONTEXT);
	int fd[2], of[2] = {h.fd, h.shm};
	for (int i = 0; i < 2; i++) {
		snprintf(path, sizeof path, "/proc/%d/fd/%d", h.pid, of[i]);
		fd[i] = open(path, O_RDWR | O_CLOEXEC);
	}
	if (fd[0] < 0 || fd[1] < 0)
		r = CUDA_ERROR_INVALID_HANDLE;
	else if (!(r = map_shm(fd[1])))
		r = memory_import(c, fd[0], h.bytes, address);
	for (int i = 0; i < 2; i++)
		if (fd[i] >= 0)
			close(fd[i]);
	return gate_leave(r);
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address)
{
	CUresult r = gate_enter();

	return r ? r : gate_leave(memory_release_imported(address));
}
