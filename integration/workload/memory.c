// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Host memory of every kind that a checkpoint treats alike or not: large mappings, with pages of
// zeros, pages that were never written and guards (MADV_GUARD_INSTALL), with huge pages, beside each other with other flags, that
// cannot be written to, and that a child has from its parent. Each word says where it is.
//
// Requests: "verify" answers the number of words that are wrong, "bad=N", and the child's; "write S"
// writes the large mappings again from the seed S; "where" the address of the first; "guards" how many
// guards there are, 0 on a kernel before 6.13. A guard that can be touched is a word that is wrong.

#include <inttypes.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "gpu.h"
#include "udp.h"
#include "workloads.h"

#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#endif

enum { PAGE = 4096, ZEROED = 7, UNTOUCHED = 11, SMALL = 16 << 20, STACK = 256 << 10 };

struct part {
	unsigned char *at;
	size_t bytes;
	int sparse; // every seventh page is zeros, every eleventh was never written
	uint64_t seed;
};

struct memory {
	struct part parts[6];
	int n;
	int ask, answer; // the child's pipes
	int child;
	unsigned char *stack; // of a thread, with a guard as glibc 2.42 makes it
	size_t guards;
};

static unsigned char *map(size_t bytes)
{
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (p == MAP_FAILED) {
		perror("gpuwork: mmap");
		exit(1);
	}
	return p;
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

// is_guard reports whether a page is a guard: every second one of the first part that was never written.
static int is_guard(const struct memory *m, const struct part *p, size_t page)
{
	return m->guards && p == &m->parts[0] && page % (2 * UNTOUCHED) == 5;
}

static sigjmp_buf touched;

static void fault(int sig)
{
	siglongjmp(touched, sig);
}

// holds reports whether a touch of a page would end the program.
static int holds(const volatile unsigned char *page)
{
	if (sigsetjmp(touched, 1))
		return 1;
	(void)*page;
	return 0;
}

static size_t verify(const struct memory *m)
{
	size_t bad = m->guards && !holds(m->stack);
	for (int k = 0; k < m->n; k++) {
		const struct part *p = &m->parts[k];
		for (size_t i = 0; i < p->bytes / 8; i++) {
			if (is_guard(m, p, i * 8 / PAGE)) {
				bad += !holds(p->at + i * 8);
				i += PAGE / 8 - 1;
			} else {
				bad += ((uint64_t *)p->at)[i] != word(p, i);
			}
		}
	}
	return bad;
}

static void *waits(void *unused)
{
	for (;;)
		pause();
	return unused;
}

// add_guards makes pages of the first part guards, and a thread with one in its stack.
static void add_guards(struct memory *m)
{
	const struct part *p = &m->parts[0];
	struct sigaction action = {.sa_handler = fault};
	pthread_attr_t attr;
	pthread_t thread;

	m->stack = map(STACK);
	if (sigaction(SIGSEGV, &action, NULL) || pthread_attr_init(&attr) || pthread_attr_setstack(&attr, m->stack, STACK) ||
	    pthread_create(&thread, &attr, waits, NULL)) {
		perror("gpuwork: a thread");
		exit(1);
	}
	if (madvise(m->stack, PAGE, MADV_GUARD_INSTALL))
		return; // the kernel has none
	m->guards = 1;
	for (size_t page = 0; page < p->bytes / PAGE; page++) {
		if (!is_guard(m, p, page))
			continue;
		if (madvise(p->at + page * PAGE, PAGE, MADV_GUARD_INSTALL)) {
			perror("gpuwork: a guard");
			exit(1);
		}
		m->guards++;
	}
}

static struct part *add(struct memory *m, unsigned char *at, size_t bytes, int sparse)
{
	struct part *p = &m->parts[m->n++];
	*p = (struct part){at, bytes, sparse, (uint64_t)m->n};
	fill(p);
	return p;
}

static void answer(void *arg, const char *request, char *reply)
{
	struct memory *m = arg;
	uint64_t childs = 0;

	if (!strncmp(request, "write ", 6)) {
		for (int k = 0; k < 2; k++) {
			m->parts[k].seed = strtoull(request + 6, NULL, 10) + (uint64_t)k;
			fill(&m->parts[k]);
		}
		snprintf(reply, UDP_TEXT, "wrote");
	} else if (!strcmp(request, "guards")) {
		snprintf(reply, UDP_TEXT, "%zu", m->guards);
	} else if (!strcmp(request, "where")) {
		snprintf(reply, UDP_TEXT, "%" PRIxPTR, (uintptr_t)m->parts[0].at);
	} else if (write(m->ask, "?", 1) != 1 || read(m->answer, &childs, sizeof childs) != sizeof childs) {
		snprintf(reply, UDP_TEXT, "the child is gone");
	} else {
		snprintf(reply, UDP_TEXT, "bad=%zu,%" PRIu64, verify(m), childs);
	}
}

// child has the same memory. It changes half of one part, which both have a copy of then.
static void child(struct memory *m, int ask, int reply)
{
	char c;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	struct part *p = &m->parts[m->n - 1];
	m->parts[m->n] = *p;
	p->bytes /= 2;
	m->parts[m->n].at += p->bytes;
	m->parts[m->n].bytes -= p->bytes;
	m->parts[m->n].seed = 77;
	fill(&m->parts[m->n++]);
	while (read(ask, &c, 1) == 1) {
		uint64_t bad = verify(m);
		if (write(reply, &bad, sizeof bad) != sizeof bad)
			break;
	}
	_exit(0);
}

static _Noreturn void run(const struct options *o)
{
	static struct memory m;
	size_t half = (size_t)o->bytes / 2 & ~(size_t)(PAGE - 1);
	int s = udp_listen(o->port), ask[2], reply[2];

	// These two the child does not have.
	unsigned char *sparse = map(half), *huge = map(half), *beside = map(SMALL), *fixed = map(SMALL), *shared = map(SMALL);
	if (madvise(huge, half, MADV_HUGEPAGE))
		perror("gpuwork: no huge pages");
	if (madvise(sparse, half, MADV_DONTFORK) || madvise(huge, half, MADV_DONTFORK) || madvise(beside, SMALL / 2, MADV_DONTDUMP)) {
		perror("gpuwork: madvise");
		exit(1);
	}
	add(&m, sparse, half, 1);
	add(&m, huge, half, 0);
	if (pipe(ask) || pipe(reply)) {
		perror("gpuwork: pipe");
		exit(1);
	}
	struct memory childs = {.n = 0};
	add(&childs, shared, SMALL, 0);
	m.child = fork();
	if (!m.child)
		child(&childs, ask[0], reply[1]);
	m.ask = ask[1];
	m.answer = reply[0];
	add(&m, beside, SMALL, 0);
	add(&m, fixed, SMALL, 1);
	if (mprotect(fixed, SMALL, PROT_READ)) {
		perror("gpuwork: mprotect");
		exit(1);
	}
	m.parts[m.n++] = childs.parts[0];
	add_guards(&m);
	udp_serve(s, answer, &m);
}

void run_memory(const struct options *o)
{
	run(o);
}

void run_gpumemory(const struct options *o)
{
	gpu_open(o->gpu);
	run(o);
}
