// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Looks at 16 pages of its own as CRIU does, in both ways, and prints how many it finds in each; or for the
// data of a file, and prints where they begin.

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 16 };

struct region {
	uint64_t start, end, categories;
};
struct scan {
	uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
	uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};

int main(int argc, char **argv)
{
	if (argc > 1) {
		off_t at = lseek(open(argv[1], O_RDONLY), 0, SEEK_DATA);
		return at < 0 ? puts("none") < 0 : printf("%ld\n", (long)at) < 0;
	}
	char *at = mmap((void *)0x100000000000, PAGES * PAGE, PROT_READ | PROT_WRITE,
			MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
	if (at == MAP_FAILED)
		return 1;
	memset(at, 1, PAGES * PAGE);
	char name[64];
	snprintf(name, sizeof(name), "/proc/%d/pagemap", getpid());
	int fd = open(name, O_RDONLY);

	struct region found[2];
	struct scan s = {
		.size = sizeof(s), .start = (uintptr_t)at, .end = (uintptr_t)at + PAGES * PAGE, .vec = (uintptr_t)found, .vec_len = 2,
		.category_anyof_mask = 1 << 3 | 1 << 4, .return_mask = 1 << 3 | 1 << 4, // present or swapped
	};
	int scanned = 0, ends = 0;
	while (s.start < s.end) {
		int n = ioctl(fd, _IOWR('f', 16, struct scan), &s);
		if (n < 0) {
			scanned = -1; // a kernel before 6.7
			break;
		}
		for (int i = 0; i < n; i++)
			scanned += (found[i].end - found[i].start) / PAGE;
		s.start = s.walk_end;
		ends++;
	}
	uint64_t entries[PAGES];
	int read = 0;
	if (pread(fd, entries, sizeof(entries), (uintptr_t)at / PAGE * 8) != sizeof(entries))
		return 1;
	for (int i = 0; i < PAGES; i++)
		read += entries[i] != 0;
	printf("scanned %d, read %d\n", scanned, read);
	return 0;
}
