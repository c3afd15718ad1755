// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// A counter in device memory that sends each value through a TCP connection to itself, as programs
// of several processes do. It answers "N open", or "N closed" when the value does not come back; with
// a connection to a peer also "peer open" or "peer closed".

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
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
	int peer;      // or -1
	int listener;  // each request accepts one connection, if there is any, which stays open
};

static void fail(const char *what)
{
	fprintf(stderr, "gpuwork: %s: %s\n", what, strerror(errno));
	exit(1);
}

// address_of returns the first IPv4 address of an interface.
static struct in_addr address_of(const char *interface)
{
	struct ifaddrs *all;

	if (getifaddrs(&all))
		fail("getifaddrs");
	for (struct ifaddrs *i = all; i; i = i->ifa_next)
		if (!strcmp(i->ifa_name, interface) && i->ifa_addr && i->ifa_addr->sa_family == AF_INET)
			return ((struct sockaddr_in *)i->ifa_addr)->sin_addr;
	fprintf(stderr, "gpuwork: %s has no address\n", interface);
	exit(1);
}

// connect_peer connects to "10.0.0.1:80".
static int connect_peer(const char *peer)
{
	struct sockaddr_in address = {.sin_family = AF_INET};
	char host[64];
	unsigned short port;
	int s = socket(AF_INET, SOCK_STREAM, 0);

	if (sscanf(peer, "%63[^:]:%hu", host, &port) != 2 || inet_pton(AF_INET, host, &address.sin_addr) != 1) {
		fprintf(stderr, "gpuwork: --peer %s is not ADDRESS:PORT\n", peer);
		exit(2);
	}
	address.sin_port = htons(port);
	if (s < 0 || connect(s, (struct sockaddr *)&address, sizeof address))
		fail("connect to the peer");
	return s;
}

// make_connection connects to a listener without SO_REUSEADDR, as NCCL's are, which stays.
static void make_connection(struct loop *l, const char *interface)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t size = sizeof address;
	int listener = socket(AF_INET, SOCK_STREAM, 0);

	if (interface)
		address.sin_addr = address_of(interface);
	if (listener < 0 || bind(listener, (struct sockaddr *)&address, size) || listen(listener, 8) ||
	    getsockname(listener, (struct sockaddr *)&address, &size))
		fail("listen");
	l->near = socket(AF_INET, SOCK_STREAM, 0);
	if (l->near < 0 || connect(l->near, (struct sockaddr *)&address, size))
		fail("connect");
	l->far = accept(listener, NULL, NULL);
	if (l->far < 0)
		fail("accept");
	if (fcntl(listener, F_SETFL, O_NONBLOCK))
		fail("fcntl");
	l->listener = listener;
}

static void count(void *arg, const char *request, char *reply)
{
	struct loop *l = arg;
	uint64_t value = gpu_increment(&l->gpu, l->gpu.counter), back = 0;
	int open = send(l->near, &value, sizeof value, MSG_NOSIGNAL) == sizeof value &&
		   recv(l->far, &back, sizeof back, MSG_WAITALL) == sizeof back && back == value;

	(void)request;
	(void)!accept(l->listener, NULL, NULL);
	int n = snprintf(reply, UDP_TEXT, "%" PRIu64 " %s", value, open ? "open" : "closed");
	if (l->peer >= 0)
		snprintf(reply + n, UDP_TEXT - n, " peer %s", send(l->peer, "x", 1, MSG_NOSIGNAL) == 1 ? "open" : "closed");
	puts(reply);
}

void run_loop(const struct options *o)
{
	int s = udp_listen(o->port);
	struct loop l = {.gpu = gpu_open(o->gpu), .peer = o->peer ? connect_peer(o->peer) : -1};

	gpu_write(l.gpu.counter, o->start);
	make_connection(&l, o->interface);
	udp_serve(s, count, &l);
}
