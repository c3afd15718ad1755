// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// What NVIDIA's other libraries do: CUPTI, by which profilers work, and those for graphics.

#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "softcuda.h"

static bool at_work;

bool profiled(void)
{
	return __atomic_load_n(&at_work, __ATOMIC_RELAXED);
}

// load maps a page by the name of a library, which is all that others see of it.
static bool load(const char *library)
{
	int fd = memfd_create(library, MFD_CLOEXEC);
	bool done = fd >= 0 && !ftruncate(fd, 4096) && mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, fd, 0) != MAP_FAILED;

	if (fd >= 0)
		close(fd);
	return done;
}

// softcuda_profile loads CUPTI and begins a profile.
CUDA_API CUresult softcuda_profile(void)
{
	__atomic_store_n(&at_work, true, __ATOMIC_RELAXED);
	return load("/libcupti.so.13") ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

// softcuda_draw begins to use GPU 0 for graphics, which a checkpoint does not end.
CUDA_API CUresult softcuda_draw(void)
{
	int fd = gpu_host_file(4096);

	if (fd < 0 || gpu_open(-1) < 0 || gpu_open(0) < 0 || !load("/libnvidia-eglcore.so.580.0") ||
	    mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED)
		return CUDA_ERROR_OPERATING_SYSTEM;
	close(fd);
	return CUDA_SUCCESS;
}
