// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// The six cuCheckpointProcess calls, as made by another process. The restore thread's id is read out
// of the target's memory, so that it is to be had of a stopped or frozen process too; the other
// calls are sent to its control thread and wait for it, for ever if it is not let run, but no longer
// than the process lives. All as seen on driver 580.159, the error codes too.

#include <errno.h>
#include <fcntl.h>
#include <dirent.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "softcuda.h"

// find_magic looks through one writable mapping of the target's libcuda.
static bool find_magic(int pid, unsigned long from, unsigned long to, struct endpoint *found)
{
	size_t len = to - from;
	char *copy = malloc(len);
	bool ok = false;

	if (!copy)
		return false;
	struct iovec local = {copy, len}, remote = {(void *)from, len};
	if (process_vm_readv(pid, &local, 1, &remote, 1, 0) == (ssize_t)len) {
		for (size_t at = 0; !ok && at + sizeof *found <= len; at += _Alignof(struct endpoint)) {
			if (memcmp(copy + at, endpoint.magic, sizeof endpoint.magic))
				continue;
			memcpy(found, copy + at, sizeof *found);
			ok = true;
		}
	}
	free(copy);
	return ok;
}

static bool is_libcuda(const char *path)
{
	const char *slash = strrchr(path, '/');
	return slash && !strncmp(slash + 1, "libcuda.so", strlen("libcuda.so"));
}

// innermost_id is the last number of the NSpid line of a status file: the id in the process's own
// pid namespace. 0 if there is none.
static int innermost_id(const char *path)
{
	char line[256];
	int id = 0;
	FILE *f = fopen(path, "re");

	while (f && fgets(line, sizeof line, f)) {
		if (strncmp(line, "NSpid:", 6))
			continue;
		const char *last = strrchr(line, '\t');
		id = last ? atoi(last) : 0;
	}
	if (f)
		fclose(f);
	return id;
}

// find reads the target's endpoint. OPERATING_SYSTEM: no such process; NOT_INITIALIZED: it has not
// called cuInit, or has lost CUDA by a fork.
static CUresult find(int pid, struct endpoint *found)
{
	char path[64], line[4352], file[4096], perms[8];
	unsigned long from, to;
	bool ok = false;

	snprintf(path, sizeof path, "/proc/%d/maps", pid);
	FILE *maps = fopen(path, "re");
	if (!maps) // another user's process, for one
		return access(path, F_OK) ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_ERROR_NOT_INITIALIZED;
	while (!ok && fgets(line, sizeof line, maps)) {
		if (sscanf(line, "%lx-%lx %7s %*s %*s %*s %4095[^\n]", &from, &to, perms, file) != 4)
			continue;
		if (!strcmp(perms, "rw-p") && is_libcuda(file))
			ok = find_magic(pid, from, to, found);
	}
	fclose(maps);
	snprintf(path, sizeof path, "/proc/%d/status", pid);
	if (!ok || !found->ready || found->pid != innermost_id(path))
		return CUDA_ERROR_NOT_INITIALIZED;
	return CUDA_SUCCESS;
}

bool remote_reaches(int pid)
{
	struct endpoint target;

	return !find(pid, &target) && target.reach[0] + target.reach[1] > 0;
}

static CUresult supported(void)
{
	struct config config;
	config_load(&config);
	return config_has_checkpoint(&config) ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *tid)
{
	struct endpoint target;
	char path[300];
	CUresult r = supported();

	if (r || (r = tid ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE))
		return r;
	if ((r = find(pid, &target)))
		return r;
	// The endpoint has the thread's id in its own pid namespace; the caller's may be another.
	r = CUDA_ERROR_INVALID_VALUE;
	snprintf(path, sizeof path, "/proc/%d/task", pid);
	DIR *tasks = opendir(path);
	for (struct dirent *e; tasks && (e = readdir(tasks));) {
		snprintf(path, sizeof path, "/proc/%d/task/%s/status", pid, e->d_name);
		if (e->d_name[0] == '.' || innermost_id(path) != target.tid)
			continue;
		*tid = atoi(e->d_name);
		r = CUDA_SUCCESS;
	}
	if (tasks)
		closedir(tasks);
	return r;
}

struct channel {
	int process; // pidfd
	int request, reply;
};

static void channel_close(struct channel *c)
{
	close(c->process);
	close(c->request);
	close(c->reply);
}

static int open_pipe(int pid, int fd, int flags)
{
	char path[64];
	struct stat st;

	snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
	int opened = open(path, flags | O_CLOEXEC | O_NOCTTY);
	if (opened >= 0 && (fstat(opened, &st) || !S_ISFIFO(st.st_mode))) {
		close(opened);
		return -1;
	}
	return opened;
}

// channel_open also takes the channel for this caller alone; a caller that dies lets go of it.
static CUresult channel_open(int pid, struct channel *c)
{
	struct endpoint target;
	CUresult r;

	c->process = c->request = c->reply = -1;
	if ((c->process = (int)syscall(SYS_pidfd_open, pid, 0)) < 0) // so for a pid <= 0
		return CUDA_ERROR_OPERATING_SYSTEM;
	if (!(r = find(pid, &target))) {
		// Opened for reading too, so that a target gone is no SIGPIPE.
		c->request = open_pipe(pid, target.request[1], O_RDWR);
		c->reply = open_pipe(pid, target.reply[0], O_RDONLY | O_NONBLOCK);
		if (c->request < 0 || c->reply < 0)
			r = CUDA_ERROR_NOT_INITIALIZED;
	}
	while (!r && flock(c->request, LOCK_EX))
		if (errno != EINTR)
			r = CUDA_ERROR_OPERATING_SYSTEM;
	if (r)
		channel_close(c);
	return r;
}

// await reads replies until this request's; earlier ones belong to callers that died.
static CUresult await(const struct channel *c, uint64_t sequence, struct reply *reply)
{
	struct pollfd fds[] = {{.fd = c->reply, .events = POLLIN}, {.fd = c->process, .events = POLLIN}};

	for (;;) {
		if (read(c->reply, reply, sizeof *reply) == sizeof *reply) {
			if (reply->sequence == sequence)
				return reply->result;
			continue;
		}
		if (fds[0].revents & POLLHUP || fds[1].revents)
			return CUDA_ERROR_OPERATING_SYSTEM; // exec'd another program, or died
		if (poll(fds, 2, -1) < 0 && errno != EINTR)
			return CUDA_ERROR_OPERATING_SYSTEM;
	}
}

// send_request answers the step's result; state, if not NULL, gets the state after it.
static CUresult send_request(int pid, struct request *request, CUprocessState *state)
{
	struct channel c;
	struct reply reply;
	CUresult r = supported();

	if (r || (r = channel_open(pid, &c)))
		return r;
	while (read(c.reply, &reply, sizeof reply) == sizeof reply)
		; // stale ones, to make room
	if (getrandom(&request->sequence, sizeof request->sequence, 0) !=
	            sizeof request->sequence ||
	    write(c.request, request, sizeof *request) != sizeof *request)
		r = CUDA_ERROR_OPERATING_SYSTEM;
	else
		r = await(&c, request->sequence, &reply);
	if (!r && state)
		*state = reply.state;
	channel_close(&c);
	return r;
}

// uses_nvml reports whether a process has NVML in use: its library, and nvidiactl open. It is for a
// process whose NVML found no libcuda, or was told to do without (nvml_alone).
static bool uses_nvml(int pid)
{
	char path[300], to[4352];
	bool mapped = false, opened = false;

	snprintf(path, sizeof path, "/proc/%d/maps", pid);
	FILE *maps = fopen(path, "re");
	while (maps && !mapped && fgets(to, sizeof to, maps))
		mapped = strstr(to, "/libnvidia-ml.so") != NULL;
	if (maps)
		fclose(maps);
	snprintf(path, sizeof path, "/proc/%d/fd", pid);
	DIR *files = mapped ? opendir(path) : NULL;
	for (struct dirent *e; files && !opened && (e = readdir(files));) {
		snprintf(path, sizeof path, "/proc/%d/fd/%s", pid, e->d_name);
		ssize_t len = readlink(path, to, sizeof to - 1);
		to[len < 0 ? 0 : len] = 0;
		opened = strstr(to, "/nvidiactl") != NULL;
	}
	if (files)
		closedir(files);
	return opened;
}

// A process that uses NVML without libcuda is RUNNING, though it has no restore thread and cannot be locked.
CUresult cuCheckpointProcessGetState(int pid, CUprocessState *state)
{
	struct request request = {.step = ASK_STATE};
	CUresult r = state ? send_request(pid, &request, state) : CUDA_ERROR_INVALID_VALUE;

	if (r != CUDA_ERROR_NOT_INITIALIZED || !uses_nvml(pid))
		return r;
	*state = CU_PROCESS_STATE_RUNNING;
	return CUDA_SUCCESS;
}

static bool all_zero(const void *bytes, size_t len)
{
	const char *b = bytes;
	for (size_t i = 0; i < len; i++)
		if (b[i])
			return false;
	return true;
}

CUresult cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *args)
{
	struct request request = {.step = STEP_LOCK, .timeout_ms = args ? args->timeoutMs : 0};

	if (args && (args->reserved0 || !all_zero(args->reserved1, sizeof args->reserved1)))
		return CUDA_ERROR_INVALID_VALUE;
	return send_request(pid, &request, NULL);
}

CUresult cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs *args)
{
	struct request request = {.step = STEP_CHECKPOINT};

	if (args && !all_zero(args, sizeof *args))
		return CUDA_ERROR_INVALID_VALUE;
	return send_request(pid, &request, NULL);
}

CUresult cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs *args)
{
	struct request request = {.step = STEP_UNLOCK};

	if (args && !all_zero(args, sizeof *args))
		return CUDA_ERROR_INVALID_VALUE;
	return send_request(pid, &request, NULL);
}

// caller_view is what cuInit found in this process, or would find.
static void caller_view(struct request *request)
{
	struct config config;
	struct gpu gpus[MAX_GPUS];
	int n;

	if (process.initialised) {
		n = process.gpus;
		memcpy(gpus, process.gpu, sizeof gpus);
	} else {
		config_load(&config);
		n = gpus_usable(&config, gpus);
	}
	for (int i = 0; i < n; i++)
		request->seen[request->visible++] = gpus[i].uuid;
}

CUresult cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *args)
{
	struct request request = {.step = STEP_RESTORE};

	if (args) {
		request.pairs = args->gpuPairsCount;
		if (request.pairs > MAX_GPUS || (request.pairs && !args->gpuPairs) ||
		    !all_zero(args->reserved, sizeof args->reserved))
			return CUDA_ERROR_INVALID_VALUE;
		if (request.pairs)
			memcpy(request.pair, args->gpuPairs, request.pairs * sizeof *args->gpuPairs);
	}
	caller_view(&request);
	return send_request(pid, &request, NULL);
}
