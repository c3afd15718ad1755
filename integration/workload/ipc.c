// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Two processes that share device memory: by CUDA IPC, as PyTorch's multiprocessing does, or with
// --share handle by an exported handle, as NCCL does. With --share host it is host memory, as NCCL's
// is from 2.28 on. CUDA IPC is of 1 MiB, with --share large of --bytes, and with handles it is an exported handle, which
// the first fills with a pattern; "verify" checks it, in either. The second is forked before any CUDA call, and has the next GPU of --gpus. Both
// count in the memory of the first; "pid" is answered with the process's.
//
// With --share handle "drop" gives the memory back, in each of the two, and "remake" has it again at the same
// address: new in the first, with the value 1000, and imported once more in the second.
//
// With --share events it is as large, and the two take turns all the time: each has its GPU wait for the other one's
// event, checks and adds to a word of the memory, and records its own event. The handle of a new event goes with each
// eighth turn. "turns" is answered with their number, and how many words were wrong.
//
// With --procs 1 there is no second process: memory that is exported, and nobody imports.

#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "gpu.h"
#include "udp.h"
#include "workloads.h"

enum { BYTES = 2 << 20, SMALL = 1 << 20, SEED = 1 };

static struct {
	struct gpu gpu;
	CUdeviceptr counter;  // and the pattern from the next word on
	CUdeviceptr bad;      // this process's
	uint64_t words;       // of the pattern
	size_t bytes;
	int ordinal;
	int first, second; // sockets: of the first process, and of the second
	CUdeviceptr turn;  // the word of the turns, after the pattern
	uint64_t turns, wrong;
} shared;

static void run_pattern_kernel(CUfunction kernel)
{
	CUdeviceptr at = shared.counter + sizeof(uint64_t);
	uint64_t seed = SEED, keep = ~0ull, fixed = 0;
	void *params[] = {&at, &shared.words, &seed, &keep, &fixed, &shared.bad};

	gpu_launch(kernel, 1024, 256, params);
	gpu_wait();
}

static uint64_t verify(void)
{
	gpu_write(shared.bad, 0);
	run_pattern_kernel(shared.gpu.check);
	return gpu_read(shared.bad);
}

static void send_handle(int to, CUipcMemHandle *handle, int fd);
static int receive_handle(int from, CUipcMemHandle *handle);

static void remake(void)
{
	CUipcMemHandle none = {{0}};
	int fd = -1;

	if (shared.first >= 0) {
		shared.counter = gpu_create(shared.ordinal, shared.bytes, &fd);
		gpu_write(shared.counter, 1000);
		send_handle(shared.first, &none, fd);
	} else {
		fd = receive_handle(shared.second, &none);
		shared.counter = gpu_map(shared.ordinal, shared.bytes, fd);
	}
	close(fd);
}

// turn has the memory for one turn, after another's event and before one of its own.
static void turn(CUevent theirs, CUevent mine)
{
	void *params[] = {&shared.turn};

	gpu_wait_for(theirs);
	uint64_t before = gpu_read(shared.turn);
	gpu_launch(shared.gpu.increment, 1, 1, params);
	gpu_record(mine);
	// Both count: the other one has had each second turn.
	uint64_t want = 2 * __atomic_load_n(&shared.turns, __ATOMIC_SEQ_CST) + (shared.first < 0);
	if (before != want)
		__atomic_add_fetch(&shared.wrong, 1, __ATOMIC_SEQ_CST);
	__atomic_add_fetch(&shared.turns, 1, __ATOMIC_SEQ_CST);
}

enum { FRESH = 8, TURN_NS = 5000000 };

// hear waits for a message of the other process's, and reports whether that lives.
static bool hear(int s, CUipcMemHandle *handle)
{
	return recv(s, handle, sizeof *handle, MSG_WAITALL) == sizeof *handle;
}

static bool tell(int s, const CUipcMemHandle *handle)
{
	return send(s, handle, sizeof *handle, MSG_NOSIGNAL) == sizeof *handle;
}

// take_turns hands the memory over and has it back, until the other process ends. A message without a handle has bytes of 0.
static void *take_turns(void *unused)
{
	static const CUipcMemHandle none;
	const struct timespec nap = {.tv_nsec = TURN_NS};
	int s = shared.first >= 0 ? shared.first : shared.second;
	CUipcMemHandle handle;
	CUevent theirs, mine;

	(void)unused;
	gpu_use(&shared.gpu);
	mine = gpu_event(&handle);
	if (!tell(s, &handle) || !hear(s, &handle) || !(theirs = gpu_open_event(handle)))
		return NULL;
	for (uint64_t n = 0;; n++) {
		if (n || shared.first < 0) {
			if (!hear(s, &handle))
				return NULL;
			if (memcmp(&handle, &none, sizeof none)) {
				gpu_end_event(theirs);
				if (!(theirs = gpu_open_event(handle)))
					return NULL;
			}
		}
		turn(theirs, mine);
		nanosleep(&nap, NULL);
		handle = none;
		if (n % FRESH == FRESH - 1) { // the other one waits for it, and not for the last one
			gpu_end_event(mine);
			mine = gpu_event(&handle);
		}
		if (!tell(s, &handle))
			return NULL;
	}
}

static void answer(void *unused, const char *request, char *reply)
{
	(void)unused;
	if (!strcmp(request, "drop"))
		gpu_drop(shared.counter, shared.bytes);
	if (!strcmp(request, "remake"))
		remake();
	if (!strcmp(request, "pid"))
		snprintf(reply, UDP_TEXT, "%d", getpid());
	else if (!strcmp(request, "drop") || !strcmp(request, "remake"))
		snprintf(reply, UDP_TEXT, "done");
	else if (!strcmp(request, "turns"))
		snprintf(reply, UDP_TEXT, "turns=%" PRIu64 " wrong=%" PRIu64, __atomic_load_n(&shared.turns, __ATOMIC_SEQ_CST), __atomic_load_n(&shared.wrong, __ATOMIC_SEQ_CST));
	else if (!strcmp(request, "verify") && shared.words)
		snprintf(reply, UDP_TEXT, "bad=%" PRIu64, verify());
	else
		snprintf(reply, UDP_TEXT, "%" PRIu64, gpu_increment(&shared.gpu, shared.counter));
}

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

// A message is a handle of CUDA IPC, and a descriptor if fd is none of -1.
union control {
	struct cmsghdr header;
	char room[CMSG_SPACE(sizeof(int))];
};

static void send_handle(int to, CUipcMemHandle *handle, int fd)
{
	struct iovec data = {handle, sizeof *handle};
	union control control = {.header = {.cmsg_len = CMSG_LEN(sizeof fd), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
	struct msghdr m = {.msg_iov = &data, .msg_iovlen = 1};

	if (fd >= 0) {
		m.msg_control = &control;
		m.msg_controllen = sizeof control;
		memcpy(CMSG_DATA(&control.header), &fd, sizeof fd);
	}
	if (sendmsg(to, &m, 0) != sizeof *handle)
		fail("gpuwork: send the handle");
}

static int receive_handle(int from, CUipcMemHandle *handle)
{
	struct iovec data = {handle, sizeof *handle};
	union control control;
	struct msghdr m = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
	int fd = -1;

	if (recvmsg(from, &m, 0) != sizeof *handle)
		fail("gpuwork: receive the handle");
	if (CMSG_FIRSTHDR(&m))
		memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof fd);
	return fd;
}

void run_ipc(const struct options *o)
{
	bool host = !strcmp(o->share, "host"), by_handle = host || !strncmp(o->share, "handle", strlen("handle"));
	CUipcMemHandle handle = {{0}};
	bool turns = !strcmp(o->share, "events"), filled = turns || !strcmp(o->share, "large") || !strcmp(o->share, "handles");
	pthread_t thread;
	size_t bytes = filled ? o->bytes : by_handle ? BYTES : SMALL;
	int pair[2], fd = -1;

	if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair))
		fail("gpuwork: socketpair");
	pid_t pid = o->procs > 1 ? fork() : getpid();
	if (pid < 0)
		fail("gpuwork: fork");
	int s = udp_listen(o->port + !pid);
	if (pid) {
		shared.ordinal = o->gpu;
		shared.gpu = gpu_open(o->gpu);
		shared.counter = host ? gpu_create_host(o->gpu, BYTES, &fd) : by_handle ? gpu_create(o->gpu, bytes, &fd) : gpu_alloc(bytes);
		gpu_write(shared.counter, o->start);
		gpu_write(shared.counter + bytes - sizeof(uint64_t), 0);
		if (!by_handle)
			handle = gpu_export(shared.counter);
		if (o->procs > 1)
			send_handle(pair[1], &handle, fd);
	} else {
		int mine = o->gpus > 1 ? (o->gpu + 1) % o->gpus : o->gpu;
		if (!filled) // of these, tests have the first end alone
			prctl(PR_SET_PDEATHSIG, SIGKILL);
		fd = receive_handle(pair[0], &handle);
		shared.ordinal = mine;
		shared.gpu = gpu_open(mine);
		shared.counter = host ? gpu_map_host(mine, BYTES, fd) : by_handle ? gpu_map(mine, bytes, fd) : gpu_import(handle);
	}
	shared.bytes = bytes;
	if (filled) {
		shared.words = bytes / sizeof(uint64_t) - 2;
		shared.turn = shared.counter + bytes - sizeof(uint64_t);
		shared.bad = gpu_alloc(sizeof(uint64_t));
		if (pid)
			run_pattern_kernel(shared.gpu.fill);
	}
	if (fd >= 0)
		close(fd);
	shared.first = pid ? pair[1] : -1;
	shared.second = pair[0];
	for (int i = 0; i < 2; i++)
		if ((!by_handle && !turns) || host || o->procs == 1 || i == !pid)
			close(pair[i]);
	if (turns && pthread_create(&thread, NULL, take_turns, NULL))
		fail("gpuwork: start a thread");
	udp_serve(s, answer, NULL);
}
