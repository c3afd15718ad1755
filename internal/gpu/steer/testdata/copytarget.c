// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// A process whose driver copies, areas of as many bytes as its argument says: it
// answers orders on its standard input.
//
//	map           map an area as the driver does, and copy into it
//	back          copy the area back, and add up what arrives
//	odd           copy in all kinds of ways, and compare
//	churn         have a further thread copy without end, from now on
//	registers     have a further thread compute, from now on, and tell its number
//	sequences     have a further thread make restartable sequences, and tell its number
//	hole          map some pages and unmap them again
//	fill          map pages there again, at that address
//	threads       count threads
//	executable    count executable mappings that are of no file
//
// Another thread makes small copies all the while, and looks at each.

#define _GNU_SOURCE
#include <dirent.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/rseq.h>
#include <unistd.h>

#define PIECE (2u << 20)
#define HOLE 8192 // as large as what a tracer maps

void driver_copy(void *to, const void *from, size_t bytes);

static size_t area_bytes = 9 << 20;
static unsigned char *gpu, *returned, *area, *hole;

static unsigned char *pages(size_t bytes, int flags)
{
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
	if (p == MAP_FAILED) {
		puts("no memory");
		exit(2);
	}
	return p;
}

static void pattern(unsigned char *p, size_t bytes, uint64_t seed)
{
	for (size_t i = 0; i < bytes; i++) {
		seed = seed * 6364136223846793005u + 1442695040888963407u;
		p[i] = seed >> 56;
	}
}

static uint64_t sum(const unsigned char *p, size_t bytes)
{
	uint64_t s = 14695981039346656037u;
	for (size_t i = 0; i < bytes; i++)
		s = (s ^ p[i]) * 1099511628211u;
	return s;
}

static void in_pieces(unsigned char *to, const unsigned char *from)
{
	for (size_t at = 0; at < area_bytes; at += PIECE)
		driver_copy(to + at, from + at, area_bytes - at < PIECE ? area_bytes - at : PIECE);
}

static void broken(const char *what)
{
	printf("%s\n", what);
	fflush(stdout);
	_exit(3);
}

static void *small_copies(void *unused)
{
	unsigned char from[300], to[300];
	for (uint64_t n = 0;; n++) {
		size_t bytes = n % sizeof from;
		pattern(from, sizeof from, n);
		memset(to, 0, sizeof to);
		driver_copy(to, from, bytes);
		if (memcmp(to, from, bytes))
			broken("a small copy went wrong");
	}
	return unused;
}

static void *large_copies(void *unused)
{
	unsigned char *from = pages(PIECE, MAP_POPULATE), *to = pages(PIECE, MAP_POPULATE);
	for (uint64_t n = 0;; n++) {
		pattern(from, 4096, n);
		driver_copy(to, from, PIECE);
		if (memcmp(to, from, PIECE))
			broken("a large copy went wrong");
	}
	return unused;
}

// The widest vector registers that there are. A loop leaves them alone for a while.
#define EACH16(DO, R) DO(R, 0) DO(R, 1) DO(R, 2) DO(R, 3) DO(R, 4) DO(R, 5) DO(R, 6) DO(R, 7) \
	DO(R, 8) DO(R, 9) DO(R, 10) DO(R, 11) DO(R, 12) DO(R, 13) DO(R, 14) DO(R, 15)
#define EACH32(DO, R) EACH16(DO, R) DO(R, 16) DO(R, 17) DO(R, 18) DO(R, 19) DO(R, 20) DO(R, 21) DO(R, 22) DO(R, 23) \
	DO(R, 24) DO(R, 25) DO(R, 26) DO(R, 27) DO(R, 28) DO(R, 29) DO(R, 30) DO(R, 31)
#define GET_xmm(R, N) "movups 16*" #N "(%0), %%" #R #N "\n"
#define PUT_xmm(R, N) "movups %%" #R #N ", 16*" #N "(%1)\n"
#define GET_ymm(R, N) "vmovups 32*" #N "(%0), %%" #R #N "\n"
#define PUT_ymm(R, N) "vmovups %%" #R #N ", 32*" #N "(%1)\n"
#define GET_zmm(R, N) "vmovups 64*" #N "(%0), %%" #R #N "\n"
#define PUT_zmm(R, N) "vmovups %%" #R #N ", 64*" #N "(%1)\n"
#define KEEP(EACH, R) \
	asm volatile(EACH(GET_##R, R) "mov $100000, %%ecx\n1: dec %%ecx\njnz 1b\n" EACH(PUT_##R, R) \
	             : : "r"(from), "r"(to) : "memory", "rcx", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", \
	               "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15")

static void *vectors(void *unused)
{
	static unsigned char from[32 * 64], to[32 * 64];
	printf("%d\n", gettid());
	for (uint64_t n = 0;; n++) {
		pattern(from, sizeof from, n);
		if (__builtin_cpu_supports("avx512f"))
			KEEP(EACH32, zmm);
		else if (__builtin_cpu_supports("avx"))
			KEEP(EACH16, ymm);
		else
			KEEP(EACH16, xmm);
		size_t bytes = __builtin_cpu_supports("avx512f") ? 32 * 64 : __builtin_cpu_supports("avx") ? 16 * 32 : 16 * 16;
		if (memcmp(from, to, bytes))
			broken("a vector register has changed");
	}
	return unused;
}

// A sequence ends where it began, at the first or at its restart, with what told the
// kernel of it in place: the kernel takes that away when it finds the thread elsewhere.
static void *sequences(void *unused)
{
	volatile __u64 *current = &((struct rseq *)((char *)__builtin_thread_pointer() + __rseq_offset))->rseq_cs;
	uint64_t told;

	printf("%d\n", __rseq_size ? gettid() : 0);
	for (;;) {
		asm volatile(".pushsection .data\n"
		             ".balign 32\n"
		             "1: .long 0, 0\n" // struct rseq_cs
		             ".quad 2f, 4f - 2f, 5f\n"
		             ".popsection\n"
		             ".pushsection .text.unlikely\n"
		             ".long 0x53053053\n" // RSEQ_SIG
		             "5: mov $1, %0\n"
		             "jmp 4f\n"
		             ".popsection\n"
		             "lea 1b(%%rip), %0\n"
		             "mov %0, (%1)\n"
		             "2: mov $100000, %%ecx\n"
		             "3: dec %%ecx\n"
		             "jnz 3b\n"
		             "mov (%1), %0\n"
		             "4:\n"
		             : "=&r"(told) : "r"(current) : "memory", "rcx", "cc");
		if (!told)
			broken("a restartable sequence was not restarted");
	}
	return unused;
}

// Sizes around what is copied in slices, and addresses that are not even; from
// either side of an overlap as well, which is right one way only with memcpy.
static void odd(void)
{
	static const size_t sizes[] = {1, 63, 64, 4096, (512 << 10) - 64, 512 << 10, (512 << 10) + 64, (512 << 10) + 1, (512 << 10) + (20 << 10) + 64, PIECE, PIECE + 192, 5 << 20, 16 << 20, (16 << 20) + 64};
	static const size_t shifts[] = {0, 1, 8, 64, 4032};
	const size_t most = (17 << 20) + 8192;
	unsigned char *from = pages(most, 0), *to = pages(most, 0), *want = pages(most, 0);

	pattern(from, most, 1);
	for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
		size_t room = sizes[i] + 8192;
		for (size_t a = 0; a < sizeof shifts / sizeof *shifts; a++)
			for (size_t b = 0; b < sizeof shifts / sizeof *shifts; b++) {
				memset(to, 0xee, room);
				memset(want, 0xee, room);
				memmove(want + shifts[a], from + shifts[b], sizes[i]);
				driver_copy(to + shifts[a], from + shifts[b], sizes[i]);
				if (memcmp(to, want, room)) {
					printf("%zu bytes to %zu from %zu\n", sizes[i], shifts[a], shifts[b]);
					return;
				}
			}
	}
	munmap(from, most);
	munmap(to, most);
	munmap(want, most);
	puts("ok");
}

static int threads(void)
{
	int n = 0;
	DIR *d = opendir("/proc/self/task");
	for (struct dirent *e; (e = readdir(d));)
		n += e->d_name[0] != '.';
	closedir(d);
	return n;
}

static int executable(void)
{
	char line[512], mode[8];
	unsigned long inode;
	int n = 0;
	FILE *f = fopen("/proc/self/maps", "r");
	while (fgets(line, sizeof line, f))
		n += sscanf(line, "%*x-%*x %7s %*x %*x:%*x %lu", mode, &inode) == 2 && mode[2] == 'x' && !inode && !strchr(line, '[');
	fclose(f);
	return n;
}

static void begin(void *(*what)(void *))
{
	pthread_t t;
	if (pthread_create(&t, NULL, what, NULL))
		broken("no thread");
}

int main(int argc, char **argv)
{
	char order[64];

	if (argc > 1)
		area_bytes = strtoull(argv[1], NULL, 10);

	setvbuf(stdout, NULL, _IOLBF, 0);
	gpu = pages(area_bytes, 0);
	returned = pages(area_bytes, 0);
	pattern(gpu, area_bytes, 7);
	in_pieces(returned, gpu); // memcpy has been called
	begin(small_copies);
	while (fgets(order, sizeof order, stdin)) {
		order[strcspn(order, "\n")] = 0;
		if (!strcmp(order, "map")) {
			area = pages(area_bytes, MAP_POPULATE);
			in_pieces(area, gpu);
			printf("%llx\n", (unsigned long long)sum(area, area_bytes));
		} else if (!strcmp(order, "back")) {
			memset(returned, 0, area_bytes);
			in_pieces(returned, area ? area : gpu);
			printf("%llx\n", (unsigned long long)sum(returned, area_bytes));
		} else if (!strcmp(order, "odd")) {
			odd();
		} else if (!strcmp(order, "churn")) {
			begin(large_copies);
			puts("churning");
		} else if (!strcmp(order, "registers")) {
			begin(vectors);
		} else if (!strcmp(order, "sequences")) {
			begin(sequences);
		} else if (!strcmp(order, "hole")) {
			hole = pages(HOLE, 0);
			munmap(hole, HOLE);
			puts("made");
		} else if (!strcmp(order, "fill")) {
			void *p = mmap(hole, HOLE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
			puts(p == hole ? "filled" : "taken");
		} else if (!strcmp(order, "threads")) {
			printf("%d\n", threads());
		} else if (!strcmp(order, "executable")) {
			printf("%d\n", executable());
		} else {
			puts("what?");
		}
	}
	return 0;
}
