// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Streams, events, and what a stream waits for. One token stands for all streams: work is in order with everything
// else, and is done when it is submitted. But a wait for a word or for another process's event that is not there yet is
// left pending, and all that is submitted to a stream after it: the process's calls look at it again. Copies and
// kernels wait until nothing is pending.
//
// An event is two numbers: of the last record that was submitted, and of the last one that is done. Events that
// processes share (CU_EVENT_INTERPROCESS) have them in a file that both map, whose name is as driver 580.159's in
// /proc/PID/maps. The mapping stays when the event is destroyed: a refusal because of it stays with the driver.

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "softcuda.h"

struct numbers {
	uint64_t recorded, done;
};

struct CUevent_st {
	unsigned flags;
	struct numbers *numbers;
	int fd; // of the file; -1: it has none
	bool imported, captured;
	CUcontext context;
};

struct handle {
	char magic[8];
	int32_t pid, fd; // of the exporter
};
_Static_assert(sizeof(struct handle) <= sizeof(CUipcMemHandle), "the handle is too small");
static const char magic[8] = "softevt";

// pending is work that is not done yet: a word that is to be so large, that becomes so, or that becomes so unless it is
// larger: a later record of another thread or process may be done before this one.
struct pending {
	struct pending *next;
	uint64_t *word, value;
	enum effect { WAITS, WRITES, RAISES } what;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct pending *first, **last = &first;
static bool capturing;
static char token; // for each stream

static uint64_t load(const uint64_t *word)
{
	return __atomic_load_n(word, __ATOMIC_SEQ_CST);
}

// progress does what can be done, and tells whether nothing is pending. The mutex is held.
static bool progress(void)
{
	while (first && (first->what != WAITS || load(first->word) >= first->value)) {
		struct pending *s = first;
		if (s->what == WRITES)
			__atomic_store_n(s->word, s->value, __ATOMIC_SEQ_CST);
		for (uint64_t now; s->what == RAISES && (now = load(s->word)) < s->value;)
			__atomic_compare_exchange_n(s->word, &now, s->value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
		if (!(first = s->next))
			last = &first;
		free(s);
	}
	return !first;
}

static bool idle(void)
{
	pthread_mutex_lock(&mutex);
	bool is = progress();
	pthread_mutex_unlock(&mutex);
	return is;
}

// submit has work done behind all that is pending. counter, unless NULL, gives the value: one more than it was.
static CUresult submit(uint64_t *word, uint64_t value, uint64_t *counter, enum effect what)
{
	struct pending *s = calloc(1, sizeof *s);

	if (!s)
		return CUDA_ERROR_OUT_OF_MEMORY;
	pthread_mutex_lock(&mutex); // or who waits for the counter's number could come before who writes it
	*s = (struct pending){NULL, word, counter ? __atomic_add_fetch(counter, 1, __ATOMIC_SEQ_CST) : value, what};
	*last = s;
	last = &s->next;
	progress();
	pthread_mutex_unlock(&mutex);
	return CUDA_SUCCESS;
}

bool streams_settle(unsigned timeout_ms)
{
	for (unsigned ms = 0; !idle(); ms++) {
		if (timeout_ms && ms >= timeout_ms)
			return false;
		pause_ms(1);
	}
	return true;
}

// enter enters the gate and asks for a current context; on an error the gate has been left.
static CUresult enter(const void *argument)
{
	CUresult r = gate_enter();

	if (r)
		return r;
	if (!context_current())
		return gate_leave(CUDA_ERROR_INVALID_CONTEXT);
	return argument ? CUDA_SUCCESS : gate_leave(CUDA_ERROR_INVALID_VALUE);
}

static CUresult enter_event(CUevent e)
{
	CUresult r = enter(&token);

	return r || e ? r : gate_leave(CUDA_ERROR_INVALID_HANDLE);
}

CUresult cuStreamCreate(CUstream *stream, unsigned int flags)
{
	CUresult r = enter(stream);

	(void)flags;
	if (r)
		return r;
	*stream = (CUstream)&token;
	return gate_leave(CUDA_SUCCESS);
}

CUresult cuCtxSynchronize(void)
{
	CUresult r = enter(&token);

	if (r)
		return r;
	streams_settle(0);
	return gate_leave(CUDA_SUCCESS);
}

CUresult cuStreamSynchronize(CUstream stream)
{
	(void)stream;
	return cuCtxSynchronize();
}

CUresult cuStreamQuery(CUstream stream)
{
	CUresult r = enter(&token);

	(void)stream;
	return r ? r : gate_leave(idle() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
}

CUresult cuStreamDestroy_v2(CUstream stream)
{
	CUresult r = gate_enter();
	if (r)
		return r;
	return gate_leave(stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE);
}

// A capture keeps nothing of what is submitted.
CUresult cuStreamBeginCapture_v2(CUstream stream, int mode)
{
	CUresult r = enter(stream);

	(void)mode;
	if (!r)
		capturing = true;
	return r ? r : gate_leave(CUDA_SUCCESS);
}

CUresult cuStreamEndCapture(CUstream stream, void **graph)
{
	CUresult r = enter(graph);

	(void)stream;
	if (r)
		return r;
	capturing = false;
	*graph = &token;
	return gate_leave(CUDA_SUCCESS);
}

CUresult cuStreamIsCapturing(CUstream stream, int *status)
{
	CUresult r = enter(status);

	(void)stream;
	if (r)
		return r;
	*status = capturing;
	return gate_leave(CUDA_SUCCESS);
}

static CUresult value(CUdeviceptr address, uint64_t number, unsigned flags, enum effect what)
{
	CUresult r = enter(&token);

	if (r)
		return r;
	uint64_t *word = memory_at(address, sizeof *word);
	if (!word || address % sizeof *word || flags) // greater or equal, and a write with its barrier
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	return gate_leave(capturing ? CUDA_SUCCESS : submit(word, number, NULL, what));
}

CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr address, uint64_t number, unsigned int flags)
{
	(void)stream;
	return value(address, number, flags, WRITES);
}

CUresult cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr address, uint64_t number, unsigned int flags)
{
	(void)stream;
	return value(address, number, flags, WAITS);
}

// share_numbers puts an event's numbers into a file; fd is one of another process, or -1.
static CUresult share_numbers(CUevent e, int fd)
{
	static int files;
	char name[80];

	snprintf(name, sizeof name, "softcuda/cuda.shm.%x.%x.%x", getuid(), getpid(), ++files);
	if (fd < 0)
		fd = (int)syscall(SYS_memfd_create, name, 1 /* MFD_CLOEXEC */);
	void *p = fd < 0 || ftruncate(fd, sizeof *e->numbers) ? MAP_FAILED : mmap(NULL, sizeof *e->numbers, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (p == MAP_FAILED) {
		if (fd >= 0)
			close(fd);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	e->numbers = p;
	e->fd = fd;
	return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent *event, unsigned int flags)
{
	CUresult r = enter(event);

	if (r)
		return r;
	if (flags & CU_EVENT_INTERPROCESS && !(flags & CU_EVENT_DISABLE_TIMING))
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	CUevent e = calloc(1, sizeof *e);
	if (!e)
		return gate_leave(CUDA_ERROR_OUT_OF_MEMORY);
	*e = (struct CUevent_st){.flags = flags, .fd = -1, .context = context_current()};
	if (flags & CU_EVENT_INTERPROCESS)
		r = share_numbers(e, -1);
	else if (!(e->numbers = calloc(1, sizeof *e->numbers)))
		r = CUDA_ERROR_OUT_OF_MEMORY;
	if (r)
		free(e);
	else
		*event = e;
	return gate_leave(r);
}

CUresult cuEventDestroy_v2(CUevent e)
{
	CUresult r = enter_event(e);

	if (r)
		return r;
	if (e->fd >= 0)
		close(e->fd);
	if (e->fd < 0 && idle()) // else pending work has it
		free(e->numbers);
	free(e);
	return gate_leave(CUDA_SUCCESS);
}

CUresult cuEventRecordWithFlags(CUevent e, CUstream stream, unsigned int flags)
{
	CUresult r = enter_event(e);

	(void)stream, (void)flags;
	if (r)
		return r;
	if (!e->context || e->context != context_current())
		return gate_leave(CUDA_ERROR_INVALID_HANDLE);
	if (capturing && e->flags & CU_EVENT_INTERPROCESS) // driver 580.159
		return gate_leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	if ((e->captured = capturing))
		return gate_leave(CUDA_SUCCESS);
	return gate_leave(submit(&e->numbers->done, 0, &e->numbers->recorded, RAISES));
}

CUresult cuEventRecord(CUevent e, CUstream stream)
{
	return cuEventRecordWithFlags(e, stream, 0);
}

static bool is_done(CUevent e)
{
	idle();
	return load(&e->numbers->done) >= load(&e->numbers->recorded);
}

CUresult cuEventQuery(CUevent e)
{
	CUresult r = enter_event(e);

	if (r)
		return r;
	if (e->captured)
		return gate_leave(CUDA_ERROR_CAPTURED_EVENT);
	return gate_leave(is_done(e) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
}

CUresult cuEventSynchronize(CUevent e)
{
	CUresult r = enter_event(e);

	if (r)
		return r;
	if (e->captured)
		return gate_leave(CUDA_ERROR_CAPTURED_EVENT);
	while (!is_done(e))
		pause_ms(1);
	return gate_leave(CUDA_SUCCESS);
}

CUresult cuEventElapsedTime(float *ms, CUevent from, CUevent to)
{
	CUresult r = enter_event(from);

	if (r)
		return r;
	if (!to || (from->flags | to->flags) & CU_EVENT_DISABLE_TIMING)
		return gate_leave(CUDA_ERROR_INVALID_HANDLE);
	*ms = 0;
	return gate_leave(CUDA_SUCCESS);
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent e, unsigned int flags)
{
	CUresult r = enter_event(e);

	(void)stream, (void)flags;
	if (r || capturing)
		return r ? r : gate_leave(CUDA_SUCCESS);
	return gate_leave(submit(&e->numbers->done, load(&e->numbers->recorded), NULL, WAITS));
}

CUresult cuIpcGetEventHandle(CUipcMemHandle *out, CUevent e)
{
	struct handle h = {.pid = getpid()};
	CUresult r = enter_event(e);

	if (r)
		return r;
	if (!out || e->fd < 0 || e->imported)
		return gate_leave(out ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE);
	memcpy(h.magic, magic, sizeof magic);
	h.fd = e->fd;
	memset(out, 0, sizeof *out);
	memcpy(out, &h, sizeof h);
	return gate_leave(CUDA_SUCCESS);
}

CUresult cuIpcOpenEventHandle(CUevent *event, CUipcMemHandle in)
{
	struct handle h;
	char path[64];
	CUresult r = enter(event);

	if (r)
		return r;
	memcpy(&h, &in, sizeof h);
	if (memcmp(h.magic, magic, sizeof magic))
		return gate_leave(CUDA_ERROR_INVALID_HANDLE);
	if (h.pid == getpid())
		return gate_leave(CUDA_ERROR_INVALID_CONTEXT);
	snprintf(path, sizeof path, "/proc/%d/fd/%d", h.pid, h.fd);
	CUevent e = calloc(1, sizeof *e);
	if (!e)
		return gate_leave(CUDA_ERROR_OUT_OF_MEMORY);
	*e = (struct CUevent_st){.flags = CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS, .imported = true, .context = context_current()};
	int fd = open(path, O_RDWR | O_CLOEXEC);
	r = fd < 0 ? CUDA_ERROR_INVALID_HANDLE : share_numbers(e, fd);
	if (r)
		free(e);
	else
		*event = e;
	return gate_leave(r);
}

// An event that is made part of a graph, of which nothing is here.
CUresult cuGraphAddEventRecordNode(void **node, void *graph, const void *before, size_t count, CUevent e)
{
	CUresult r = enter_event(e);

	(void)graph, (void)before, (void)count;
	if (!r && node)
		*node = &token;
	return r ? r : gate_leave(node ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

// The same in streams of 0 that are each thread's own.
CUresult cuEventRecord_ptsz(CUevent e, CUstream stream)
{
	return cuEventRecord(e, stream);
}

CUresult cuStreamWaitEvent_ptsz(CUstream stream, CUevent e, unsigned int flags)
{
	return cuStreamWaitEvent(stream, e, flags);
}

CUresult cuStreamIsCapturing_ptsz(CUstream stream, int *status)
{
	return cuStreamIsCapturing(stream, status);
}

CUresult cuStreamWriteValue64_v2_ptsz(CUstream stream, CUdeviceptr address, uint64_t number, unsigned int flags)
{
	return cuStreamWriteValue64_v2(stream, address, number, flags);
}

CUresult cuStreamWaitValue64_v2_ptsz(CUstream stream, CUdeviceptr address, uint64_t number, unsigned int flags)
{
	return cuStreamWaitValue64_v2(stream, address, number, flags);
}
