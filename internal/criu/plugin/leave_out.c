// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Memory that CRIU leaves out of a dump. For a dump the shim has this library loaded into CRIU before
// any other (LD_PRELOAD), and names a file with ranges of addresses in GPUCKPT_LEFT_OUT. CRIU asks the
// kernel which pages a process has, by the file pagemap of /proc/PID, and is answered here: none in
// these ranges. It asks for those of shared memory by lseek(2), and is answered: none in these files.
// CRIU then dumps the mappings without what is in them, which the shim does itself.
// Nothing is changed in the process. A CRIU that asks in another way dumps all, and the shim sees that.
//
// The file has lines of a process's id and the first and the last address plus one, in hexadecimal; or
// of 0 and the device and the inode of shared memory.
#define _GNU_SOURCE
#include <errno.h>
#include <linux/ioctl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))

enum { PAGE = 4096, ENTRY = 8 };

struct range {
	int pid;
	uint64_t start, end; // of pid 0 device and inode
};

static struct range *ranges; // of each process ascending
static size_t range_count;

__attribute__((constructor)) static void read_ranges(void)
{
	const char *name = getenv("GPUCKPT_LEFT_OUT");
	FILE *f = name ? fopen(name, "re") : NULL;
	struct range r;

	while (f && fscanf(f, "%d %lx %lx", &r.pid, &r.start, &r.end) == 3) {
		struct range *more = realloc(ranges, (range_count + 1) * sizeof(*ranges));
		if (!more)
			break;
		ranges = more;
		ranges[range_count++] = r;
	}
	if (f)
		fclose(f);
}

// pagemap_of returns the process whose pagemap a file is, 0 for any other file.
static int pagemap_of(int fd)
{
	char link[64], path[128];
	int pid = 0, end = 0;

	if (!range_count)
		return 0;
	int err = errno;
	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	ssize_t n = readlink(link, path, sizeof(path) - 1);
	path[n < 0 ? 0 : n] = 0;
	errno = err;
	if (sscanf(path, "/proc/%d/pagemap%n", &pid, &end) != 1 || !end || path[end])
		return 0;
	return pid;
}

// next_range returns a process's first range that ends behind an address. CRIU goes through a process from its first
// address on, so it begins where the last look ended.
static const struct range *next_range(int pid, uint64_t at)
{
	static size_t last;

	if (last >= range_count || ranges[last].pid != pid || ranges[last].start > at)
		last = 0;
	for (; last < range_count; last++)
		if (ranges[last].pid == pid && ranges[last].end > at)
			return &ranges[last];
	return NULL;
}

// linux/fs.h has these from Linux 6.7 on.
struct region {
	uint64_t start, end, categories;
};
struct scan {
	uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
	uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};
#define SCAN _IOWR('f', 16, struct scan)
#define IS_GUARD (1 << 8) // a page that madvise(2) has made a guard: it is of the mapping, not of what is in it

// scan asks the kernel for what is between the ranges.
static int scan(int fd, int pid, struct scan *all)
{
	struct region *found = (struct region *)(uintptr_t)all->vec;
	uint64_t at = all->start, n = 0;

	while (at < all->end && n < all->vec_len) {
		const struct range *r = next_range(pid, at);
		struct scan part = *all;
		if (r && r->start <= at) {
			at = r->end;
			continue;
		}
		part.start = at;
		part.end = r && r->start < all->end ? r->start : all->end;
		part.vec = (uintptr_t)(found + n);
		part.vec_len = all->vec_len - n;
		long got = syscall(SYS_ioctl, fd, SCAN, &part);
		if (got < 0)
			return -1;
		n += (uint64_t)got;
		at = part.walk_end;
		if (at < part.end)
			break;
	}
	all->walk_end = at < all->end ? at : all->end;
	return (int)n;
}

EXPORTED int ioctl(int fd, unsigned long request, ...)
{
	va_list list;
	va_start(list, request);
	void *arg = va_arg(list, void *);
	va_end(list);
	if (request == SCAN) {
		struct scan *s = arg;
		int pid = s && !s->flags && !s->max_pages && s->vec_len && !(s->category_mask & IS_GUARD) ? pagemap_of(fd) : 0;
		if (pid)
			return scan(fd, pid, s);
	}
	return (int)syscall(SYS_ioctl, fd, request, arg);
}

static ssize_t read_at(int fd, void *buf, size_t bytes, off_t offset)
{
	ssize_t n = syscall(SYS_pread64, fd, buf, bytes, offset);
	int pid = n > 0 ? pagemap_of(fd) : 0;

	if (!pid)
		return n;
	uint64_t from = (uint64_t)offset / ENTRY * PAGE, to = ((uint64_t)offset + (uint64_t)n) / ENTRY * PAGE;
	for (const struct range *r; from < to && (r = next_range(pid, from)) && r->start < to; from = r->end) {
		uint64_t first = r->start > from ? r->start : from, last = r->end < to ? r->end : to;
		memset((char *)buf + (first / PAGE * ENTRY - (uint64_t)offset), 0, (last - first) / PAGE * ENTRY);
	}
	return n;
}

EXPORTED ssize_t pread(int fd, void *buf, size_t bytes, off_t offset) { return read_at(fd, buf, bytes, offset); }
EXPORTED ssize_t pread64(int fd, void *buf, size_t bytes, off_t offset) { return read_at(fd, buf, bytes, offset); }

EXPORTED ssize_t __pread_chk(int fd, void *buf, size_t bytes, off_t offset, size_t room)
{
	return bytes > room ? (errno = EFAULT, -1) : read_at(fd, buf, bytes, offset);
}

EXPORTED ssize_t __pread64_chk(int fd, void *buf, size_t bytes, off_t offset, size_t room)
{
	return bytes > room ? (errno = EFAULT, -1) : read_at(fd, buf, bytes, offset);
}

static off_t seek(int fd, off_t offset, int whence)
{
	struct stat st;

	if (whence == SEEK_DATA && range_count && !fstat(fd, &st))
		for (size_t i = 0; i < range_count; i++)
			if (!ranges[i].pid && ranges[i].start == st.st_dev && ranges[i].end == st.st_ino)
				return errno = ENXIO, -1;
	return syscall(SYS_lseek, fd, offset, whence);
}

EXPORTED off_t lseek(int fd, off_t offset, int whence) { return seek(fd, offset, whence); }
EXPORTED off_t lseek64(int fd, off_t offset, int whence) { return seek(fd, offset, whence); }
