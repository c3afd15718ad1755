// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// A program that forks after it began to use CUDA, as PyTorch's DataLoader and gunicorn with
// --preload do: the child keeps the parent's open files of the GPU, and can do nothing with them.

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "gpu.h"
#include "workloads.h"

// forked runs in the parent, and plain on the next port in a child.
static _Noreturn void forked(const struct options *o, void (*run)(const struct options *))
{
	struct options mine = *o;
	pid_t pid = fork();

	if (pid < 0) {
		perror("gpuwork: fork");
		exit(1);
	}
	if (pid) {
		mine.apart = NULL;
		run(&mine);
	}
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	mine.port++;
	run_plain(&mine);
}

void run_forked(const struct options *o)
{
	gpu_open(o->gpu); // the counter retains the same context
	forked(o, run_counter);
}

void run_twice(const struct options *o)
{
	forked(o, run_plain);
}

static void *idles(void *unused)
{
	for (;;)
		pause();
	return unused;
}

// A child that has nothing of a GPU, with a thread beside the one that counts.
static void beside(const struct options *o)
{
	struct options mine = *o;
	pthread_t thread;
	pid_t pid = fork();

	if (pid < 0) {
		perror("gpuwork: fork");
		exit(1);
	}
	if (pid)
		return;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (pthread_create(&thread, NULL, idles, NULL))
		abort();
	mine.port++;
	run_plain(&mine);
}

void run_beside(const struct options *o)
{
	beside(o);
	run_counter(o);
}

void run_plainbeside(const struct options *o)
{
	beside(o);
	run_plain(o);
}

// oddly has names that are no text: its own, and that of a file on a volume that it has locked and not open.
void run_oddly(const struct options *o)
{
	static const char name[] = "/volume/odd\x1b[31m\nlevel=fatal msg=forged \xff";

	keep_hidden_lock(name);
	prctl(PR_SET_NAME, "\xff\x1b[31m");
	if (o->gpu < 0)
		run_plain(o);
	run_counter(o);
}

// A child lives for a moment. Fork blocks signals and gives them back, whenever it is interrupted.
static void *forks(void *unused)
{
	for (;;) {
		sigset_t blocked;
		pid_t pid = fork();
		if (!pid) {
			usleep(50000);
			_exit(0);
		}
		if (pthread_sigmask(SIG_BLOCK, NULL, &blocked) || sigismember(&blocked, SIGUSR2))
			abort();
		usleep(10000);
		while (waitpid(-1, NULL, WNOHANG) > 0)
			;
	}
	return unused;
}

void run_forking(const struct options *o)
{
	pthread_t thread;

	gpu_open(o->gpu); // the counter retains the same context
	if (pthread_create(&thread, NULL, forks, NULL))
		abort();
	run_counter(o);
}

// A child of vfork shares the memory of its parent, a thread of which waits in the kernel until the
// child executes another program or ends. This one takes its time.
static void *vforks(void *unused)
{
	for (;;) {
		struct timespec while_waiting = {.tv_nsec = 50000000}, between = {.tv_nsec = 20000000};
		pid_t pid = vfork();
		if (!pid) {
			nanosleep(&while_waiting, NULL);
			_exit(0);
		}
		while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
			;
		nanosleep(&between, NULL);
	}
	return unused;
}

void run_vforking(const struct options *o)
{
	pthread_t thread;

	gpu_open(o->gpu); // the counter retains the same context
	if (pthread_create(&thread, NULL, vforks, NULL))
		abort();
	run_counter(o);
}
