// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// The target's side of the channel: two pipes and the thread that answers them (the real driver's
// "restore thread"). All of it lives inside the process, so that CRIU carries it along: pipes with
// both ends in the process, a thread blocked in read, and the endpoint that says which is which.
// remote.c finds the endpoint by its magic in this library's data in /proc/PID/maps.

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include "softcuda.h"

// Initialised, so that it is in the library's own data mapping and not in anonymous memory after it.
struct endpoint endpoint = {.magic = ENDPOINT_MAGIC, .ready = 0};

// Requests and replies are shorter than PIPE_BUF, so each is written and read whole.
static void *serve(void *unused)
{
	struct request request;
	struct reply reply;

	(void)unused;
	__atomic_store_n(&endpoint.tid, gettid(), __ATOMIC_RELAXED);
	__atomic_store_n(&endpoint.ready, 1, __ATOMIC_RELEASE);
	for (;;) {
		ssize_t n = read(endpoint.request[0], &request, sizeof request);
		if (n < 0 && errno == EINTR)
			continue;
		if (n != sizeof request)
			return NULL;
		reply = (struct reply){.sequence = request.sequence};
		if (request.step != ASK_STATE)
			reply.result = checkpoint_step(&request);
		reply.state = checkpoint_state();
		while (write(endpoint.reply[1], &reply, sizeof reply) < 0 && errno == EINTR)
			;
	}
}

CUresult thread_start(const char *name, void *(*run)(void *))
{
	sigset_t all, before;
	pthread_t thread;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before); // the thread inherits the mask
	int failed = pthread_create(&thread, NULL, run, NULL);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (failed)
		return CUDA_ERROR_OPERATING_SYSTEM;
	pthread_setname_np(thread, name);
	pthread_detach(thread);
	return CUDA_SUCCESS;
}

static void close_pipe(int32_t ends[2])
{
	close(ends[0]);
	close(ends[1]);
}

CUresult control_start(void)
{
	if (pipe2(endpoint.request, O_CLOEXEC))
		return CUDA_ERROR_OPERATING_SYSTEM;
	if (pipe2(endpoint.reply, O_CLOEXEC)) {
		close_pipe(endpoint.request);
		return CUDA_ERROR_OPERATING_SYSTEM;
	}
	endpoint.pid = getpid();
	CUresult r = thread_start("cuda00000000001", serve); // the real one's is such a number, too
	if (r) {
		close_pipe(endpoint.request);
		close_pipe(endpoint.reply);
		return r;
	}
	while (!__atomic_load_n(&endpoint.ready, __ATOMIC_ACQUIRE))
		usleep(100);
	return CUDA_SUCCESS;
}

void control_forget_after_fork(void)
{
	if (!endpoint.ready)
		return;
	endpoint.ready = endpoint.reach[0] = endpoint.reach[1] = 0;
	close_pipe(endpoint.request);
	close_pipe(endpoint.reply);
}
