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

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

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
		reply.sequence = request.sequence;
		reply.result = checkpoint_step(&request);
		while (write(endpoint.reply[1], &reply, sizeof reply) < 0 && errno == EINTR)
			;
	}
}

static CUresult start(void)
{
	sigset_t all, before;
	pthread_t thread;

	if (endpoint.ready)
		return CUDA_SUCCESS;
	if (pipe2(endpoint.request, O_CLOEXEC))
		return CUDA_ERROR_OPERATING_SYSTEM;
	if (pipe2(endpoint.reply, O_CLOEXEC)) {
		close(endpoint.request[0]);
		close(endpoint.request[1]);
		return CUDA_ERROR_OPERATING_SYSTEM;
	}
	endpoint.pid = getpid();
	endpoint.state = CU_PROCESS_STATE_RUNNING;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before); // the thread inherits the mask
	int failed = pthread_create(&thread, NULL, serve, NULL);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (failed) {
		for (int i = 0; i < 2; i++) {
			close(endpoint.request[i]);
			close(endpoint.reply[i]);
		}
		return CUDA_ERROR_OPERATING_SYSTEM;
	}
	pthread_setname_np(thread, "softcuda");
	pthread_detach(thread);
	while (!__atomic_load_n(&endpoint.ready, __ATOMIC_ACQUIRE))
		usleep(100);
	return CUDA_SUCCESS;
}

CUresult control_start(void)
{
	pthread_mutex_lock(&mutex);
	CUresult r = start();
	pthread_mutex_unlock(&mutex);
	return r;
}

void control_forget_after_fork(void)
{
	if (!endpoint.ready)
		return;
	endpoint.ready = 0;
	for (int i = 0; i < 2; i++) {
		close(endpoint.request[i]);
		close(endpoint.reply[i]);
	}
}
