// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Events that two processes share by CUDA IPC. The same with the interposer preloaded (LD_PRELOAD=libgpuckpt.so), whose
// events they are then: all here holds for both, but a capture and the checkpoint. Work that does not end by itself is a
// wait for a word of the process's own.

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <signal.h>
#include <unistd.h>

#include "harness.h"

#define F(name) ((__typeof__(&name))find(#name))
static void *find(const char *name)
{
	void *f = dlsym(RTLD_DEFAULT, name);

	if (!f)
		f = dlsym(dlopen("libcuda.so.1", RTLD_NOW), name);
	if (!f)
		die("the driver has no %s", name);
	return f;
}

struct message {
	char what;
	CUresult result;
	CUipcMemHandle handle;
};

static CUcontext context;
static CUstream stream;
static CUevent event;
static volatile uint64_t *word;
static CUdeviceptr word_at;

static CUresult begin(void)
{
	CUresult r = F(cuInit)(0);

	r = r ? r : F(cuDevicePrimaryCtxRetain)(&context, 0);
	r = r ? r : F(cuCtxSetCurrent)(context);
	r = r ? r : F(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING);
	r = r ? r : F(cuMemHostAlloc)((void **)&word, sizeof *word, CU_MEMHOSTALLOC_DEVICEMAP);
	return r ? r : F(cuMemHostGetDevicePointer_v2)(&word_at, (void *)word, 0);
}

static CUresult ordinary(CUipcMemHandle *handle)
{
	CUevent e;
	CUresult r = F(cuEventCreate)(&e, CU_EVENT_DISABLE_TIMING);

	if (!r && !F(cuIpcGetEventHandle)(handle, e))
		die("an ordinary event has a handle");
	return r ? r : F(cuEventDestroy_v2)(e);
}

// capture has the event recorded and waited for in a graph, where that is not a record.
static CUresult capture(void)
{
	void *graph;
	CUresult r = F(cuStreamBeginCapture_v2)(stream, 2);

	r = r ? r : F(cuEventRecord)(event, stream);
	r = r ? r : F(cuStreamWaitEvent)(stream, event, 0);
	CUresult end = F(cuStreamEndCapture)(stream, &graph);
	return r ? r : end;
}

static CUresult many(void)
{
	CUresult r = CUDA_SUCCESS;

	for (int i = 0; i < 20 && !r; i++)
		r = i % 2 ? F(cuEventRecord_ptsz)(event, stream) : F(cuEventRecord)(event, stream);
	return r;
}

static CUresult obey(struct message *m)
{
	float ms;

	switch (m->what) {
	case 'b': return begin();
	case 'c': return F(cuEventCreate)(&event, CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS);
	case 'T': return F(cuEventCreate)(&event, CU_EVENT_INTERPROCESS);
	case 'O': return ordinary(&m->handle);
	case 'g': return F(cuIpcGetEventHandle)(&m->handle, event);
	case 'o': return F(cuIpcOpenEventHandle)(&event, m->handle);
	case 'h': *word = 0; return F(cuStreamWaitValue64_v2)(stream, word_at, 1, 0);
	case 'l': *word = 1; return CUDA_SUCCESS;
	case 'r': return F(cuEventRecord)(event, stream);
	case 'R': return F(cuEventRecordWithFlags)(event, stream, 0);
	case 'm': return many();
	case 'w': return F(cuStreamWaitEvent)(stream, event, 0);
	case 'W': return F(cuStreamWaitEvent_ptsz)(stream, event, 0);
	case 'q': return F(cuEventQuery)(event);
	case 'y': return F(cuEventSynchronize)(event);
	case 'Q': return F(cuStreamQuery)(stream);
	case 's': return F(cuStreamSynchronize)(stream);
	case 't': return F(cuEventElapsedTime)(&ms, event, event);
	case 'C': return capture();
	case 'd': return F(cuEventDestroy_v2)(event);
	}
	die("no command %c", m->what);
}

void events_program(int s)
{
	struct message m;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	while (recv(s, &m, sizeof m, 0) == sizeof m) {
		m.result = obey(&m);
		send(s, &m, sizeof m, 0);
	}
	exit(0);
}

struct program {
	pid_t pid;
	int socket;
};
static CUipcMemHandle handle; // the last one that a program had

static struct program begin_program(void)
{
	struct program p;
	int pair[2];
	char number[16], self[256];

	if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair))
		die("no socketpair");
	ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
	if (n < 0 || (p.pid = fork()) < 0)
		die("no program");
	self[n] = 0;
	if (!p.pid) {
		close(pair[0]);
		snprintf(number, sizeof number, "%d", pair[1]);
		execl(self, self, "--events", number, NULL);
		_exit(127);
	}
	close(pair[1]);
	p.socket = pair[0];
	return p;
}

static CUresult tell(struct program p, char what)
{
	struct message m = {.what = what, .handle = handle};

	if (send(p.socket, &m, sizeof m, 0) != sizeof m || recv(p.socket, &m, sizeof m, 0) != sizeof m)
		die("the program has ended: %c", what);
	handle = m.handle;
	return m.result;
}

// all tells a program several things that are to succeed.
static void all(struct program p, const char *what)
{
	for (; *what; what++) {
		CUresult r = tell(p, *what);
		if (r)
			FAIL("%c: error %d", *what, r);
	}
}

// waits_for has one program record behind work that does not end, and the other one wait for it.
static void waits_for(struct program waiter, const char *waits, struct program recorder, const char *records)
{
	all(recorder, "h");
	all(recorder, records);
	WANT(tell(recorder, 'q'), CUDA_ERROR_NOT_READY);
	WANT(tell(waiter, 'q'), CUDA_ERROR_NOT_READY);
	all(waiter, waits);
	WANT(tell(waiter, 'Q'), CUDA_ERROR_NOT_READY);
	all(recorder, "ls");
	all(waiter, "ysq");
	all(recorder, "yq");
}

static void end_program(struct program p)
{
	close(p.socket);
	kill(p.pid, SIGKILL);
	waitpid(p.pid, NULL, 0);
}

void test_events(void)
{
	const char *preload = getenv("LD_PRELOAD");
	bool interposer = preload && strstr(preload, "libgpuckpt.so");
	struct program a = begin_program(), b = begin_program();

	all(a, "b");
	all(b, "b");
	WANT(tell(a, 'T'), CUDA_ERROR_INVALID_VALUE); // with timing
	all(a, "O");
	// An event that has no handle is as any other.
	all(a, "cqywhr");
	WANT(tell(a, 'q'), CUDA_ERROR_NOT_READY);
	// Its handle is had, and opened, before the record is done.
	all(a, "g");
	WANT(tell(a, 'o') != CUDA_SUCCESS, true);
	all(b, "o");
	WANT(tell(b, 'q'), CUDA_ERROR_NOT_READY);
	all(b, "w");
	WANT(tell(b, 'Q'), CUDA_ERROR_NOT_READY);
	all(a, "lsq");
	all(b, "ysq");
	// Each records, and the other one waits.
	waits_for(b, "w", a, "r");
	waits_for(a, "w", b, "r");
	waits_for(b, "W", a, "R");
	waits_for(b, "w", a, "m");
	waits_for(a, "W", b, "m");
	waits_for(b, "ww", a, "rwr");
	WANT(tell(a, 't'), CUDA_ERROR_INVALID_HANDLE);
	WANT(tell(b, 't'), CUDA_ERROR_INVALID_HANDLE);
	WANT(tell(b, 'g') != CUDA_SUCCESS, true);
	WANT(tell(a, 'C'), interposer ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	all(b, "ws");
	all(a, "r");
	all(b, "d");
	all(a, "dcrg");
	all(b, "o");
	waits_for(b, "w", a, "r");
	if (!interposer) { // both are checkpointed, and restored in place
		WANT(lock(a.pid, 10000), CUDA_SUCCESS);
		WANT(lock(b.pid, 10000), CUDA_SUCCESS);
		WANT(cu.checkpoint(a.pid, NULL), CUDA_SUCCESS);
		WANT(cu.checkpoint(b.pid, NULL), CUDA_SUCCESS);
		WANT(restore(a.pid, 0, NULL), CUDA_SUCCESS);
		WANT(restore(b.pid, 0, NULL), CUDA_SUCCESS);
		WANT(cu.unlock(a.pid, NULL), CUDA_SUCCESS);
		WANT(cu.unlock(b.pid, NULL), CUDA_SUCCESS);
		waits_for(b, "w", a, "r");
		waits_for(a, "w", b, "r");
	}
	end_program(a);
	end_program(b);
}
