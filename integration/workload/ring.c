// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// A counter in device memory with io_uring in use, where the kernel has it, and an MPTCP socket that
// listens. Requests: "ring" and "mptcp" answer "open", or why there is none; anything else counts.

#include <errno.h>
#include <inttypes.h>
#include <linux/io_uring.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "gpu.h"
#include "udp.h"
#include "workloads.h"

struct ring {
	struct gpu gpu;
	int error; // of io_uring_setup
	int mptcp; // of socket
};

static void answer(void *arg, const char *request, char *reply)
{
	struct ring *r = arg;

	if (!strcmp(request, "ring"))
		snprintf(reply, UDP_TEXT, "%s", r->error ? strerrorname_np(r->error) : "open");
	else if (!strcmp(request, "mptcp"))
		snprintf(reply, UDP_TEXT, "%s", r->mptcp ? strerrorname_np(r->mptcp) : "open");
	else
		snprintf(reply, UDP_TEXT, "%" PRIu64, gpu_increment(&r->gpu, r->gpu.counter));
}

void run_ring(const struct options *o)
{
	static struct ring r;
	struct io_uring_params params = {0};
	int s = udp_listen(o->port);

	if (syscall(SYS_io_uring_setup, 4, &params) < 0)
		r.error = errno;
	int listener = socket(AF_INET, SOCK_STREAM, IPPROTO_MPTCP);
	if (listener < 0 || listen(listener, 1))
		r.mptcp = errno;
	r.gpu = gpu_open(o->gpu);
	gpu_write(r.gpu.counter, o->start);
	udp_serve(s, answer, &r);
}
