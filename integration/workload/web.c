// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// An HTTP server, one connection at a time: GET /count adds one in GPU memory and answers the new
// value, any other path answers "ready". It has --bytes of GPU memory that does not compress.

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
#include "workloads.h"

void run_web(const struct options *o)
{
	struct sockaddr_in any = {.sin_family = AF_INET, .sin_port = htons((uint16_t)o->port)};
	int yes = 1, s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	struct gpu g = gpu_open(o->gpu);
	CUdeviceptr noise = gpu_alloc(o->bytes);
	uint64_t words = o->bytes / sizeof(uint64_t), seed = o->seed, keep = UINT64_MAX, fixed = 0;
	void *fill[] = {&noise, &words, &seed, &keep, &fixed, &noise};

	gpu_launch(g.fill, 1024, 256, fill);
	gpu_wait();
	gpu_write(g.counter, o->start);
	if (s < 0 || setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) ||
	    bind(s, (struct sockaddr *)&any, sizeof any) || listen(s, 16)) {
		fprintf(stderr, "gpuwork: listen on TCP port %d: %s\n", o->port, strerror(errno));
		exit(1);
	}
	for (;;) {
		char request[4096], body[32], reply[256];
		int c = accept4(s, NULL, NULL, SOCK_CLOEXEC);
		ssize_t n = c < 0 ? -1 : read(c, request, sizeof request - 1);
		if (n > 0) {
			request[n] = 0;
			if (strncmp(request, "GET /count ", 11))
				snprintf(body, sizeof body, "ready");
			else
				snprintf(body, sizeof body, "%" PRIu64, gpu_increment(&g, g.counter));
			int end = snprintf(reply, sizeof reply, "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %zu\r\n\r\n%s", strlen(body), body);
			if (write(c, reply, (size_t)end) < 0)
				perror("gpuwork: answer"); // the client is gone
		}
		if (c >= 0)
			close(c);
	}
}
