// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// A counter in device memory that sends each value through a TCP connection to itself, as programs
// of several processes do. It answers "N open", or "N closed" when the value does not come back.

#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "gpu.h"
#include "udp.h"
#include "workloads.h"

struct loop {
	struct gpu gpu;
	int near, far; // the connection's ends
};

static void fail(const char *what)
{
	fprintf(stderr, "gpuwork: %s: %s\n", what, strerror(errno));
	exit(1);
}

static void make_connection(struct loop *l)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t size = sizeof address;
	int listener = socket(AF_INET, SOCK_STREAM, 0);

	if (listener < 0 || bind(listener, (struct sockaddr *)&address, size) || listen(listener, 1) ||
	    getsockname(listener, (struct sockaddr *)&address, &size))
		fail("listen");
	l->near = socket(AF_INET, SOCK_STREAM, 0);
	if (l->near < 0 || connect(l->near, (struct sockaddr *)&address, size))
		fail("connect");
	l->far = accept(listener, NULL, NULL);
	if (l->far < 0)
		fail("accept");
	close(listener);
}

static void count(void *arg, const char *request, char *reply)
{
	struct loop *l = arg;
	uint64_t value = gpu_increment(&l->gpu, l->gpu.counter), back = 0;
	int open = send(l->near, &value, sizeof value, MSG_NOSIGNAL) == sizeof value &&
		   recv(l->far, &back, sizeof back, MSG_WAITALL) == sizeof back && back == value;

	(void)request;
	snprintf(reply, UDP_TEXT, "%" PRIu64 " %s", value, open ? "open" : "closed");
	puts(reply);
}

void run_loop(const struct options *o)
{
	int s = udp_listen(o->port);
	struct loop l = {.gpu = gpu_open(o->gpu)};

	gpu_write(l.gpu.counter, o->start);
	make_connection(&l);
	udp_serve(s, count, &l);
}
