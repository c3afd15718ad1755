// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Contexts. Each holds a piece of device memory of its own (the real driver's is some 550 MB), so
// that a checkpoint has something to carry even for a program without allocations, and a restore
// can tell whether the data that came back is what went out.

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "softcuda.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct CUctx_st primary[MAX_GPUS];
static __thread CUcontext current;

CUcontext context_current(void)
{
	return current && current->alive ? current : NULL;
}

static CUresult open_context(CUcontext c, int ordinal)
{
	enum { IMAGE_BYTES = 2 << 20 };
	struct config config;
	CUresult r;

	if (ordinal < 0 || ordinal >= process.gpus)
		return CUDA_ERROR_INVALID_DEVICE;
	if ((r = events_start()))
		return r;
	c->ordinal = ordinal;
	config_load(&config);
	pause_ms(config.context_delay_ms);
	if ((r = memory_allocate(c, KIND_CONTEXT, IMAGE_BYTES, &c->image)))
		return r;
	uint64_t *word = memory_at(c->image, IMAGE_BYTES);
	for (size_t i = 0; i < IMAGE_BYTES / sizeof *word; i++)
		word[i] = mix(c->image + i);
	if ((r = timer_watch(c->image)))
		return r;
	c->alive = true;
	return CUDA_SUCCESS;
}

static void close_context(CUcontext c)
{
	c->alive = false;
	timer_forget(c->image);
	memory_release_context(c);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
	CUresult r = gate_enter();
	if (r)
		return r;
	if (!context)
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	pthread_mutex_lock(&mutex);
	if (device < 0 || device >= process.gpus)
		r = CUDA_ERROR_INVALID_DEVICE;
	else if (!primary[device].alive)
		r = open_context(&primary[device], device);
	if (!r) {
		primary[device].retained++;
		*context = &primary[device];
	}
	pthread_mutex_unlock(&mutex);
	return gate_leave(r);
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
	CUresult r = gate_enter();
	if (r)
		return r;
	pthread_mutex_lock(&mutex);
	if (device < 0 || device >= process.gpus)
		r = CUDA_ERROR_INVALID_DEVICE;
	else if (!primary[device].retained)
		r = CUDA_ERROR_INVALID_CONTEXT;
	else if (!--primary[device].retained)
		close_context(&primary[device]);
	pthread_mutex_unlock(&mutex);
	return gate_leave(r);
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active)
{
	CUresult r = gate_enter();
	if (r)
		return r;
	if (!flags || !active || device < 0 || device >= process.gpus)
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	*flags = 0;
	pthread_mutex_lock(&mutex);
	*active = primary[device].alive;
	pthread_mutex_unlock(&mutex);
	return gate_leave(CUDA_SUCCESS);
}

CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device)
{
	CUresult r = gate_enter();
	if (r)
		return r;
	(void)flags; // scheduling hints
	CUcontext c = context ? calloc(1, sizeof *c) : NULL;
	if (!c)
		return gate_leave(context ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE);
	pthread_mutex_lock(&mutex);
	r = open_context(c, device);
	pthread_mutex_unlock(&mutex);
	if (r)
		free(c);
	else
		*context = current = c;
	return gate_leave(r);
}

CUresult cuCtxCreate_v4(CUcontext *context, void *params, unsigned int flags, CUdevice device)
{
	if (params) // execution affinity and the like
		return CUDA_ERROR_NOT_SUPPORTED;
	return cuCtxCreate_v2(context, flags, device);
}

CUresult cuCtxDestroy_v2(CUcontext context)
{
	CUresult r = gate_enter();
	if (r)
		return r;
	bool is_primary = context >= primary && context < primary + MAX_GPUS;
	if (!context || is_primary || !context->alive)
		return gate_leave(CUDA_ERROR_INVALID_CONTEXT);
	pthread_mutex_lock(&mutex);
	close_context(context); // not freed: other threads may still have it as current
	pthread_mutex_unlock(&mutex);
	if (current == context)
		current = NULL;
	return gate_leave(CUDA_SUCCESS);
}

CUresult cuCtxSetCurrent(CUcontext context)
{
	CUresult r = gate_enter();
	if (r)
		return r;
	if (context && !context->alive)
		return gate_leave(CUDA_ERROR_INVALID_CONTEXT);
	current = context;
	return gate_leave(CUDA_SUCCESS);
}

CUresult cuCtxGetCurrent(CUcontext *context)
{
	CUresult r = gate_enter();
	if (r)
		return r;
	if (!context)
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	*context = current;
	return gate_leave(CUDA_SUCCESS);
}

CUresult cuCtxGetDevice(CUdevice *device)
{
	CUresult r = gate_enter();
	if (r)
		return r;
	CUcontext c = context_current();
	if (!c || !device)
		return gate_leave(c ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_CONTEXT);
	*device = c->ordinal;
	return gate_leave(CUDA_SUCCESS);
}

// What is allowed, by ordinals. A kernel here reaches the memory of all GPUs of its process, but for
// what was allowed at a checkpoint: driver 580.159 was seen to lose that, and the kernel to fail, on two
// H200s. On two H100s it went on. Whether the access counts as allowed was not measured.
static bool peer_allowed[MAX_GPUS][MAX_GPUS], peer_lost[MAX_GPUS][MAX_GPUS];

void peers_lose(void)
{
	memcpy(peer_lost, peer_allowed, sizeof peer_lost);
}

bool peer_reaches(int from, int to)
{
	return from < 0 || to < 0 || !peer_lost[from][to];
}

static CUresult change_peer(CUcontext peer, bool allow)
{
	CUcontext c = context_current();

	if (!c || !peer || !peer->alive || peer->ordinal == c->ordinal)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (peer_allowed[c->ordinal][peer->ordinal] == allow)
		return allow ? CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
	peer_allowed[c->ordinal][peer->ordinal] = allow;
	endpoint.reach[0] += allow ? 1 : -1;
	peer_lost[c->ordinal][peer->ordinal] = false;
	return CUDA_SUCCESS;
}

CUresult cuCtxDisablePeerAccess(CUcontext peer)
{
	CUresult r = gate_enter();
	return r ? r : gate_leave(change_peer(peer, false));
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags)
{
	CUresult r = gate_enter();
	if (r)
		return r;
	return gate_leave(flags ? CUDA_ERROR_INVALID_VALUE : change_peer(peer, true));
}
