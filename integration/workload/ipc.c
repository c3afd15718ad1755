// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Two processes that share device memory by CUDA IPC, as PyTorch's multiprocessing and NCCL do.
// The second is forked before any CUDA call. Both count in the memory of the first; "pid" is
// answered with the process's.

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "gpu.h"
#include "udp.h"
#include "workloads.h"

static struct {
	struct gpu gpu;
	CUdeviceptr counter;
} shared;

static void answer(void *unused, const char *request, char *reply)
{
	(void)unused;
	if (!strcmp(request, "pid"))
		snprintf(reply, UDP_TEXT, "%d", getpid());
	else
		snprintf(reply, UDP_TEXT, "%" PRIu64, gpu_increment(&shared.gpu, shared.counter));
}

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

void run_ipc(const struct options *o)
{
	CUipcMemHandle handle;
	int to_child[2];

	if (pipe(to_child))
		fail("gpuwork: pipe");
	pid_t pid = fork();
	if (pid < 0)
		fail("gpuwork: fork");
	int s = udp_listen(o->port + !pid);
	if (pid) {
		shared.gpu = gpu_open(o->gpu);
		shared.counter = gpu_alloc(2 << 20);
		gpu_write(shared.counter, o->start);
		handle = gpu_export(shared.counter);
		if (write(to_child[1], &handle, sizeof handle) != sizeof handle)
			fail("gpuwork: write the handle");
	} else {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (read(to_child[0], &handle, sizeof handle) != sizeof handle)
			fail("gpuwork: read the handle");
		shared.gpu = gpu_open(o->gpu);
		shared.counter = gpu_import(handle);
	}
	close(to_child[0]);
	close(to_child[1]);
	udp_serve(s, answer, NULL);
}
