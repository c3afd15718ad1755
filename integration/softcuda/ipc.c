// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// cuIpc*: device memory of one process that another one maps. The handle names the exporter and the
// descriptor of its memory file, which stays open from the first handle on.
//
// Memory that is shared so leaves no trace in /proc: the kernel module alone knows the importer
// (module_calls.c).
//
// As driver 580.159 does, a checkpoint of either process succeeds and its restore fails for good
// (checkpoint.c).

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "softcuda.h"

struct handle {
	char magic[8];
	int32_t pid, fd; // of the exporter
	uint64_t bytes;
};
_Static_assert(sizeof(struct handle) <= sizeof(CUipcMemHandle), "the handle is too small");

static const char magic[8] = "softipc";

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
	if ((r = memory_export(address, &h.fd, &bytes)))
		return gate_leave(r);
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
	snprintf(path, sizeof path, "/proc/%d/fd/%d", h.pid, h.fd);
	int fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0)
		return gate_leave(CUDA_ERROR_INVALID_HANDLE);
	r = memory_import(c, fd, h.bytes, address);
	close(fd);
	return gate_leave(r);
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address)
{
	CUresult r = gate_enter();

	return r ? r : gate_leave(memory_release_imported(address));
}
