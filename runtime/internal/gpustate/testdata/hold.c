// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// A C library of a program's own, by LD_PRELOAD: it keeps a second mapping of each area that the driver maps.
#define _GNU_SOURCE
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

void *mmap(void *at, size_t bytes, int access, int flags, int fd, off_t offset)
{
	void *area = (void *)syscall(SYS_mmap, at, bytes, access, flags, fd, offset);
	if (area != MAP_FAILED && flags & MAP_POPULATE && fd < 0)
		syscall(SYS_mremap, area, 0, bytes, MREMAP_MAYMOVE, 0); // of shared memory alone
	return area;
}

void *mmap64(void *at, size_t bytes, int access, int flags, int fd, off_t offset)
{
	return mmap(at, bytes, access, flags, fd, offset);
}
