// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Counters: each packet adds one and is answered with the new value. In a variable in device
// memory, as in the demonstration of cuda-checkpoint on NVIDIA's blog; in managed memory, where the host counts
// as well; and in host memory, for a container without CUDA. With a log each value is written to it.

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/netlink.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "gpu.h"
#include "udp.h"
#include "workloads.h"

static int log_file = -1;

// open_log opens the log for appending, or an earlier file from its beginning.
static void open_log(const struct options *o)
{
	const char *path = o->log ? o->log : o->file;

	if (path && (log_file = open(path, O_RDWR | O_CREAT | O_CLOEXEC | (o->log ? O_APPEND : 0), 0644)) < 0) {
		fprintf(stderr, "gpuwork: open %s: %s\n", path, strerror(errno));
		exit(1);
	}
}

static void say(uint64_t value, char *reply)
{
	snprintf(reply, UDP_TEXT, "%" PRIu64, value);
	puts(reply);
	if (log_file >= 0)
		dprintf(log_file, "%" PRIu64 "\n", value);
}

static void count_on_gpu(void *arg, const char *request, char *reply)
{
	const struct gpu *g = arg;
	(void)request;
	say(gpu_increment(g, g->counter), reply);
}

static void count_on_host(void *arg, const char *request, char *reply)
{
	(void)request;
	say(++*(uint64_t *)arg, reply);
}

void run_counter(const struct options *o)
{
	int s = udp_listen(o->port);
	struct gpu g = gpu_open(o->gpu);

	open_log(o);
	gpu_write(g.counter, o->start);
	udp_serve(s, count_on_gpu, &g);
}

struct peer {
	struct gpu near;
	CUdeviceptr small, large; // on the other GPU: the driver's memory, and with the interposer its own
	uint64_t large_words;
};

// Each packet, GPU 0 counts in the small memory, and in the first and the last word of the large one.
static void count_on_peer(void *arg, const char *request, char *reply)
{
	struct peer *p = arg;
	CUdeviceptr last = p->large + (p->large_words - 1) * sizeof(uint64_t);

	(void)request;
	gpu_increment(&p->near, p->small);
	gpu_increment(&p->near, p->large);
	gpu_increment(&p->near, last);
	uint64_t small = gpu_read(p->small), large = gpu_read(p->large);
	if (small == large && large == gpu_read(last))
		say(small, reply);
	else
		snprintf(reply, UDP_TEXT, "%" PRIu64 " in the small memory, %" PRIu64 " in the large", small, large);
}

void run_peer(const struct options *o)
{
	int s = udp_listen(o->port);
	struct gpu far = gpu_open(1);
	struct peer p = {.large_words = o->bytes / sizeof(uint64_t)};
	int mapped = !strcmp(o->share, "handle");

	if (mapped) {
		p.small = gpu_create_for_both(1, 0, 2 << 20);
		p.large = gpu_create_for_both(1, 0, p.large_words * sizeof(uint64_t));
	} else {
		p.small = gpu_alloc(sizeof(uint64_t));
		p.large = gpu_alloc(p.large_words * sizeof(uint64_t));
	}
	gpu_write(p.small, o->start);
	gpu_write(p.large, o->start);
	gpu_write(p.large + (p.large_words - 1) * sizeof(uint64_t), o->start);
	p.near = gpu_open(0); // which is in use from here on
	if (!mapped)
		gpu_reach(&far);
	udp_serve(s, count_on_peer, &p);
}

struct managed {
	struct gpu gpu;
	uint64_t *first, *last; // of the memory, as the host reads and writes it
	uint64_t start;
};

// Each packet, the GPU counts the first word and the last, and the host the last once more.
static void count_on_both(void *arg, const char *request, char *reply)
{
	struct managed *m = arg;

	(void)request;
	gpu_increment(&m->gpu, (CUdeviceptr)m->first);
	gpu_increment(&m->gpu, (CUdeviceptr)m->last);
	++*m->last;
	if (*m->last - m->start == 2 * (*m->first - m->start))
		say(*m->first, reply);
	else
		snprintf(reply, UDP_TEXT, "%" PRIu64 " by the GPU alone, %" PRIu64 " with the host", *m->first, *m->last);
}

void run_managed(const struct options *o)
{
	int s = udp_listen(o->port);
	struct managed m = {.gpu = gpu_open(o->gpu), .start = o->start};

	if (o->bytes < 2 * sizeof *m.first) {
		fprintf(stderr, "gpuwork: managed takes at least 16 bytes\n");
		exit(2);
	}
	m.first = (uint64_t *)gpu_alloc_managed(o->bytes);
	m.last = m.first + o->bytes / sizeof *m.first - 1;
	*m.first = *m.last = o->start;
	udp_serve(s, count_on_both, &m);
}

// apart gives the program what not every one has: a root of its own, mounts of its own, or a netlink socket that is connected.
static void apart(const char *what)
{
	const char *jail = "/srv/jail";
	struct sockaddr_nl kernel = {.nl_family = AF_NETLINK};
	int failed = 1;

	if (!strcmp(what, "chroot"))
		failed = (mkdir("/srv", 0755) && errno != EEXIST) || mkdir(jail, 0755) || chroot(jail) || chdir("/");
	else if (!strcmp(what, "mounts"))
		failed = unshare(CLONE_NEWNS);
	else if (!strcmp(what, "netlink"))
		failed = connect(socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE), (void *)&kernel, sizeof kernel);
	if (failed) {
		fprintf(stderr, "gpuwork: --apart %s: %s\n", what, strerror(errno));
		exit(1);
	}
}

void run_plain(const struct options *o)
{
	static uint64_t counter;

	if (o->apart)
		apart(o->apart);
	open_log(o);
	counter = o->start;
	udp_serve(udp_listen(o->port), count_on_host, &counter);
}
