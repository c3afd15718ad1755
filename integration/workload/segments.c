// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Shared memory of every kind that a checkpoint treats alike or not: large, in many small pieces, with
// pages of zeros and pages that were never written, mapped in parts, sealed against changes of its size,
// of shmget(2), a little of far more that could be there, mapped to be read alone, and a sealed memfd that nobody has mapped. A child has all of it.
//
// Requests: "verify" answers the number of words that are wrong, "bad=N", and the child's. Each "verify"
// changes a word, which the child must see. "write S" writes the memory again from the seed S.

#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/shm.h>
#include <unistd.h>

#include "udp.h"
#include "workloads.h"

enum { PAGE = 4096, ZEROED = 7, UNTOUCHED = 11, SMALL = 4 << 20, PIECES = 8, TAIL = 100 };

#define SPARSE (64ull << 30)

// part is a piece of memory; what can only be read is not written again.
struct part {
	unsigned char *at;
	size_t bytes;
	int sparse, fixed;
	uint64_t seed;
};

static struct {
	struct part parts[PIECES + 7];
	int n, unmapped; // a memfd
	int ask, answer; // the child's pipes
	uint64_t stamp;
} s;

static void *must(void *p)
{
	if (p == MAP_FAILED) {
		perror("gpuwork: shared memory");
		exit(1);
	}
	return p;
}

static void *map(size_t bytes, int prot, int fd, off_t offset)
{
	return must(mmap(NULL, bytes, prot, MAP_SHARED | (fd < 0 ? MAP_ANONYMOUS : 0), fd, offset));
}

static int file(size_t bytes)
{
	int fd = memfd_create("segment", MFD_ALLOW_SEALING);
	if (fd < 0 || ftruncate(fd, (off_t)bytes)) {
		perror("gpuwork: memfd");
		exit(1);
	}
	return fd;
}

static void seal(int fd, int seals)
{
	if (fcntl(fd, F_ADD_SEALS, seals)) {
		perror("gpuwork: seals");
		exit(1);
	}
}

static uint64_t word(const struct part *p, size_t i)
{
	size_t page = i * 8 / PAGE;
	if (p->sparse && (page % ZEROED == 3 || page % UNTOUCHED == 5))
		return 0;
	return (i + 1) * 0x9e3779b97f4a7c15ull ^ p->seed;
}

static void fill(struct part *p)
{
	for (size_t i = 0; i < p->bytes / 8; i++)
		if (!p->sparse || i * 8 / PAGE % UNTOUCHED != 5)
			((uint64_t *)p->at)[i] = word(p, i);
}

static struct part *add(void *at, size_t bytes, int sparse)
{
	struct part *p = &s.parts[s.n++];
	*p = (struct part){.at = at, .bytes = bytes, .sparse = sparse, .seed = (uint64_t)s.n};
	fill(p);
	return p;
}

// stamp is a word that both processes have: the first of the first part is left to it.
static volatile uint64_t *stamp(void) { return (uint64_t *)s.parts[0].at; }

static uint64_t verify(uint64_t expected)
{
	uint64_t bad = *stamp() != expected;
	for (int k = 0; k < s.n; k++)
		for (size_t i = k == 0; i < s.parts[k].bytes / 8; i++)
			bad += ((uint64_t *)s.parts[k].at)[i] != word(&s.parts[k], i);
	struct part p = {.seed = 99};
	for (size_t i = 0; i < SMALL / 8; i += PAGE / 8) {
		uint64_t has = 0;
		bad += pread(s.unmapped, &has, sizeof has, (off_t)(i * 8)) != sizeof has || has != word(&p, i);
	}
	return bad;
}

static void answer(void *unused, const char *request, char *reply)
{
	uint64_t childs[2] = {0};

	(void)unused;
	if (!strncmp(request, "write ", 6)) {
		childs[1] = strtoull(request + 6, NULL, 10);
		for (int k = 0; k < s.n; k++) {
			if (s.parts[k].fixed)
				continue;
			s.parts[k].seed = childs[1] + (uint64_t)k;
			fill(&s.parts[k]);
		}
	}
	childs[0] = *stamp() = ++s.stamp;
	if (write(s.ask, childs, sizeof childs) != sizeof childs || read(s.answer, childs, sizeof *childs) != sizeof *childs)
		snprintf(reply, UDP_TEXT, "the child is gone");
	else
		snprintf(reply, UDP_TEXT, "bad=%" PRIu64 ",%" PRIu64, verify(s.stamp), childs[0]);
}

static void child(int ask, int reply)
{
	uint64_t asked[2];

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	while (read(ask, asked, sizeof asked) == sizeof asked) {
		for (int k = 0; asked[1] && k < s.n; k++)
			if (!s.parts[k].fixed)
				s.parts[k].seed = asked[1] + (uint64_t)k;
		uint64_t bad = verify(asked[0]);
		if (write(reply, &bad, sizeof bad) != sizeof bad)
			break;
	}
	_exit(0);
}

void run_segments(const struct options *o)
{
	size_t half = (size_t)o->bytes / 2 & ~(size_t)(2 * PAGE - 1);
	int socket = udp_listen(o->port), ask[2], reply[2];

	add(map(half, PROT_READ | PROT_WRITE, -1, 0), half, 1);
	int fd = file(half + TAIL); // mapped in three parts: the last ends in a page
	seal(fd, F_SEAL_SHRINK | F_SEAL_GROW);
	add(map(half / 2, PROT_READ | PROT_WRITE, fd, (off_t)half / 2), half / 2, 0);
	add(map(half / 2, PROT_READ | PROT_WRITE, fd, 0), half / 2, 0);
	add(map(TAIL, PROT_READ | PROT_WRITE, fd, (off_t)half), TAIL, 0);
	close(fd);
	for (int i = 0; i < PIECES; i++)
		add(map(SMALL, PROT_READ | PROT_WRITE, -1, 0), SMALL, 0);
	int id = shmget(IPC_PRIVATE, SMALL, 0600);
	add(must(shmat(id, NULL, 0)), SMALL, 0);
	fd = file(SPARSE);
	add(map(SMALL, PROT_READ | PROT_WRITE, fd, (off_t)(SPARSE / 2)), SMALL, 0);
	close(fd);
	fd = file(SMALL);
	struct part *p = add(map(SMALL, PROT_READ | PROT_WRITE, fd, 0), SMALL, 0);
	munmap(p->at, SMALL);
	p->at = map(SMALL, PROT_READ, fd, 0);
	p->fixed = 1;
	s.unmapped = file(SMALL);
	struct part written = {.at = map(SMALL, PROT_READ | PROT_WRITE, s.unmapped, 0), .bytes = SMALL, .seed = 99};
	fill(&written);
	munmap(written.at, SMALL);
	seal(s.unmapped, F_SEAL_WRITE);
	if (pipe(ask) || pipe(reply)) {
		perror("gpuwork: pipe");
		exit(1);
	}
	if (!fork())
		child(ask[0], reply[1]);
	s.ask = ask[1];
	s.answer = reply[0];
	udp_serve(socket, answer, NULL);
}
