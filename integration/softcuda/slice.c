// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Processes take turns on a GPU: it interrupts one's kernel for another's. Those of a process that was
// restored it does not interrupt any more. Others wait until such a kernel ends, and if that takes some 5 s the
// driver ends it, and the process with it (driver 580.159: Xid 109, CTX SWITCH TIMEOUT). Such a kernel has a
// socket with an abstract name. Who waits is connected to it. So it is known in a network namespace alone.

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "softcuda.h"

enum { LIMIT_MS = 5000 };

struct slice {
	pthread_mutex_t mutex;
	int kernels;     // of this process that run
	int socket;      // listens while they do
	long long since; // when it began to
};
static struct slice slices[MAX_GPUS] = {[0 ... MAX_GPUS - 1] = {.mutex = PTHREAD_MUTEX_INITIALIZER}}; // by number
static bool restored;

void slice_restored(void)
{
	__atomic_store_n(&restored, true, __ATOMIC_RELEASE);
}

void slice_forget_after_fork(void)
{
	for (int i = 0; i < MAX_GPUS; i++) {
		if (slices[i].kernels)
			close(slices[i].socket);
		slices[i].kernels = 0;
		pthread_mutex_init(&slices[i].mutex, NULL); // another thread may have held it
	}
	restored = false;
}

// name_of returns the length of an address: of a GPU, where the same processes and nodes are seen.
static socklen_t name_of(int minor, struct sockaddr_un *a)
{
	struct stat pids = {0};
	const char *folder = getenv("SOFTCUDA_DEV");

	stat("/proc/self/ns/pid", &pids);
	*a = (struct sockaddr_un){.sun_family = AF_UNIX};
	int n = snprintf(a->sun_path + 1, sizeof a->sun_path - 1, "softcuda-slice-%d-%lu-%s", minor, (unsigned long)pids.st_ino, folder ? folder : "");
	int most = (int)sizeof a->sun_path - 2;
	return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)(n < most ? n : most));
}

// wait_for waits until the kernel that has the socket has ended. false: there is none.
static bool wait_for(const struct sockaddr_un *a, socklen_t length)
{
	int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	char end;

	if (s < 0 || connect(s, (const struct sockaddr *)a, length)) {
		if (s >= 0)
			close(s);
		return false;
	}
	while (recv(s, &end, 1, 0) < 0 && errno == EINTR)
		;
	close(s);
	return true;
}

// take has the GPU for a kernel that is not interrupted. Returns the socket, -1 where there can be none.
static int take(const struct sockaddr_un *a, socklen_t length)
{
	int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	while (s >= 0 && bind(s, (const struct sockaddr *)a, length)) {
		if (errno != EADDRINUSE) {
			close(s);
			return -1;
		}
		if (!wait_for(a, length))
			pause_ms(1); // it is about to listen, or has just ended
	}
	if (s >= 0)
		listen(s, 64);
	return s;
}

void slice_begin(int minor)
{
	struct sockaddr_un a;
	socklen_t length = name_of(minor, &a);
	struct slice *mine = &slices[minor];

	if (!__atomic_load_n(&restored, __ATOMIC_ACQUIRE)) {
		while (wait_for(&a, length))
			;
		return;
	}
	pthread_mutex_lock(&mine->mutex);
	if (!mine->kernels) {
		mine->socket = take(&a, length);
		mine->since = now_ms();
	}
	mine->kernels++;
	pthread_mutex_unlock(&mine->mutex);
}

void slice_end(int minor)
{
	struct slice *mine = &slices[minor];

	pthread_mutex_lock(&mine->mutex);
	if (mine->kernels && !--mine->kernels)
		close(mine->socket);
	pthread_mutex_unlock(&mine->mutex);
}

bool slice_lost(int minor)
{
	struct slice *mine = &slices[minor];

	pthread_mutex_lock(&mine->mutex);
	bool late = mine->kernels && now_ms() - mine->since > LIMIT_MS;
	struct pollfd who = {.fd = mine->socket, .events = POLLIN};
	late = late && poll(&who, 1, 0) == 1;
	pthread_mutex_unlock(&mine->mutex);
	return late;
}
