// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// UDP server and client.

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "udp.h"

int udp_listen(int port)
{
	struct sockaddr_in any = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
	int s = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	if (s < 0 || bind(s, (struct sockaddr *)&any, sizeof any)) {
		fprintf(stderr, "gpuwork: listen on UDP port %d: %s\n", port, strerror(errno));
		exit(1);
	}
	return s;
}

void udp_serve(int s, void (*answer)(void *arg, const char *request, char *reply), void *arg)
{
	static char request[UDP_TEXT], reply[UDP_TEXT];
	static char *volatile nowhere;
	struct sockaddr_in from;

	for (;;) {
		socklen_t len = sizeof from;
		ssize_t n = recvfrom(s, request, sizeof request - 1, 0, (struct sockaddr *)&from, &len);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0) {
			fprintf(stderr, "gpuwork: receive: %s\n", strerror(errno));
			exit(1);
		}
		request[n] = 0;
		request[strcspn(request, "\r\n")] = 0;
		reply[0] = 0;
		if (!strcmp(request, "crash"))
			*nowhere = 0;
		answer(arg, request, reply);
		size_t end = strlen(reply);
		reply[end++] = '\n';
		// A reply that cannot be sent is like a packet lost: the client asks again.
		while (sendto(s, reply, end, 0, (struct sockaddr *)&from, len) < 0 && errno == EINTR)
			;
	}
}

int udp_ask(const char *address, const char *text)
{
	char host[256], reply[UDP_TEXT];
	const char *colon = strrchr(address, ':');
	struct addrinfo hint = {.ai_family = AF_INET, .ai_socktype = SOCK_DGRAM}, *to;
	struct timeval limit = {.tv_sec = 5};

	if (!colon || (size_t)(colon - address) >= sizeof host) {
		fprintf(stderr, "gpuwork: %s is not HOST:PORT\n", address);
		return 1;
	}
	memcpy(host, address, (size_t)(colon - address));
	host[colon - address] = 0;
	int failed = getaddrinfo(host, colon + 1, &hint, &to);
	if (failed) {
		fprintf(stderr, "gpuwork: %s: %s\n", address, gai_strerror(failed));
		return 1;
	}
	int s = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	ssize_t n = -1;
	if (s >= 0 && !setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) &&
	    !connect(s, to->ai_addr, to->ai_addrlen) && send(s, text, strlen(text), 0) >= 0) {
		do
			n = recv(s, reply, sizeof reply, 0);
		while (n < 0 && errno == EINTR);
	}
	if (n < 0)
		fprintf(stderr, "gpuwork: no reply from %s: %s\n", address, strerror(errno));
	else
		fwrite(reply, 1, (size_t)n, stdout);
	freeaddrinfo(to);
	if (s >= 0)
		close(s);
	return n < 0;
}
