// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// The state machine, on the control thread alone:
//
//	RUNNING --lock--> LOCKED --checkpoint--> CHECKPOINTED --restore--> LOCKED --unlock--> RUNNING
//
// A step in any other state is CUDA_ERROR_ILLEGAL_STATE. A step that fails leaves the state as it
// was, except a restore whose data came back changed: that process is FAILED for good.

#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "softcuda.h"

static CUprocessState state = CU_PROCESS_STATE_RUNNING;

// The real driver moves data through a buffer of this size, a memcpy each.
#define PIECE (2 << 20)

// While CHECKPOINTED: the device memory of all GPUs, allocation after allocation.
static char *staging;
static size_t staged;

// The error of every restore, if the process shared device memory with another one, or had host
// memory with a handle, when it was checkpointed; else CUDA_SUCCESS. Driver 580.159 answers one of the two; which to whom was not
// measured.
static CUresult lost;

void checkpoint_forget_after_fork(void)
{
	state = CU_PROCESS_STATE_RUNNING;
	staging = NULL;
	staged = 0;
	lost = CUDA_SUCCESS;
}

void pause_ms(unsigned ms)
{
	struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L};
	while (nanosleep(&t, &t)) // a signal
		;
}

long long now_ms(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000LL + t.tv_nsec / 1000000;
}

// A driver that is slow is at work, as the real one is while it waits for the bus. One that hangs
// sleeps, until the file of the configuration has it go on.
static void slow_or_hung(struct config *config, enum step step)
{
	for (long long end = now_ms() + config->piece_ms; config->piece_ms && now_ms() < end;)
		;
	while (config->hang[step]) {
		pause_ms(500);
		config_load(config);
	}
}

static void copy(struct config *config, enum step step, char *to, const char *from, size_t bytes)
{
	for (size_t at = 0; at < bytes; at += PIECE) {
		memcpy(to + at, from + at, bytes - at < PIECE ? bytes - at : PIECE);
		slow_or_hung(config, step);
	}
}

// injected is the fault that the configuration asks of this step, after its delay, which the file of
// the configuration can end.
static CUresult injected(const struct config *config, enum step step)
{
	static unsigned done[STEPS];
	struct config now = *config;

	for (long long left, begin = now_ms(); (left = begin + now.delay_ms[step] - now_ms()) > 0; config_load(&now))
		pause_ms(left < 20 ? (unsigned)left : 20);
	const struct fault *fault = &config->fail[step];
	for (int i = 0; i < process.gpus && !fault->code; i++)
		if (memory_in_use(i))
			fault = &config->gpu_fail[process.gpu[i].minor][step];
	if (!fault->code)
		return CUDA_SUCCESS;
	if (fault->times && done[step] >= fault->times)
		return CUDA_SUCCESS;
	done[step]++;
	return fault->code;
}

// What a driver maps later on may lie where a staging area was. So does this page, from the first
// restore on, and nobody may write to it.
static uint64_t *later;
#define LATER 0x4c41544552ull

static void map_later(void)
{
	if (later)
		return;
	later = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (later == MAP_FAILED)
		later = NULL;
	else
		*later = LATER;
}

static CUresult lock(const struct config *config, unsigned timeout_ms)
{
	CUresult r = injected(config, STEP_LOCK);
	if (r)
		return r;
	if (profiled())
		return CUDA_ERROR_NOT_SUPPORTED;
	events_settle();
	if (!gate_close(timeout_ms))
		return CUDA_ERROR_NOT_READY;
	if (streams_settle(timeout_ms))
		return CUDA_SUCCESS;
	gate_open();
	return CUDA_ERROR_NOT_READY;
}

static CUresult unlock(const struct config *config)
{
	CUresult r = injected(config, STEP_UNLOCK);
	if (!r)
		gate_open();
	return r;
}

static bool same(const CUuuid *a, const CUuuid *b)
{
	return !memcmp(a, b, sizeof *a);
}

// remember_seen notes the GPUs that a restore will want a place for: those that can be opened here,
// whatever CUDA_VISIBLE_DEVICES says, and those in use.
static void remember_seen(const struct config *config)
{
	struct gpu gpus[MAX_GPUS];
	int n = gpus_usable(config, gpus);

	process.seen = 0;
	for (int i = 0; i < n; i++)
		process.seen_uuid[process.seen++] = gpus[i].uuid;
	for (int i = 0; i < process.gpus; i++) {
		bool there = false;
		for (int j = 0; j < process.seen; j++)
			there |= same(&process.seen_uuid[j], &process.gpu[i].uuid);
		if (!there && process.seen < MAX_GPUS)
			process.seen_uuid[process.seen++] = process.gpu[i].uuid;
	}
}

static CUresult checkpoint(struct config *config)
{
	size_t bytes = 0;
	char *to = NULL;

	process_wait_for_forks();
	if (memory_has_managed()) // unified memory
		return CUDA_ERROR_NOT_SUPPORTED;
	for (struct allocation *a = memory_first(); a; a = a->next)
		bytes += a->kind == KIND_IMPORTED || a->kind == KIND_HOST ? 0 : a->bytes;
	if (bytes) {
		// One call, in exactly this form, as the real driver makes it: a tracer of this
		// thread looks for it.
		to = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
		          MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
		if (to == MAP_FAILED)
			return CUDA_ERROR_OUT_OF_MEMORY;
	}
	CUresult r = injected(config, STEP_CHECKPOINT);
	if (r) {
		if (bytes)
			munmap(to, bytes);
		return r;
	}
	staging = to;
	staged = bytes;
	lost = foreign_shared() ? CUDA_ERROR_NOT_SUPPORTED : vmm_reaches_exportable() ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
	vmm_hide();
	for (struct allocation *a = memory_first(); a; a = a->next) {
		if (a->kind == KIND_IMPORTED)
			lost = CUDA_ERROR_INVALID_VALUE;
		else if (a->kind == KIND_HOST) // shared or not: driver 580.159, measured
			lost = CUDA_ERROR_UNKNOWN;
		else if (memory_imported_from(a) && !lost)
			lost = CUDA_ERROR_NOT_SUPPORTED;
		if (a->kind != KIND_IMPORTED && a->kind != KIND_HOST) {
			copy(config, STEP_CHECKPOINT, to, (char *)a->address, a->bytes);
			to += a->bytes;
		}
		memory_unmap(a);
	}
	peers_lose();
	remember_seen(config);
	process_close();
	return CUDA_SUCCESS;
}

// same_view tells whether caller and target see the same GPUs, in the same order.
static bool same_view(const struct request *request, const struct gpu *gpus, int n)
{
	if ((int)request->visible != n)
		return false;
	for (int i = 0; i < n; i++)
		if (!same(&request->seen[i], &gpus[i].uuid))
			return false;
	return true;
}

// is_bijection tells whether the pairs name every GPU that the process saw exactly once, and no new
// GPU twice.
static bool is_bijection(const struct request *request)
{
	if ((int)request->pairs != process.seen)
		return false;
	for (int i = 0; i < process.seen; i++) {
		int named = 0;
		for (int j = 0; j < process.seen; j++) {
			named += same(&request->pair[j].oldUuid, &process.seen_uuid[i]);
			if (j != i && same(&request->pair[i].newUuid, &request->pair[j].newUuid))
				return false;
		}
		if (named != 1)
			return false;
	}
	return true;
}

// choose_gpus puts into chosen, by CUDA ordinal, the GPUs to go on with.
static CUresult choose_gpus(const struct config *config, const struct request *request,
                            struct gpu *chosen)
{
	struct gpu visible[MAX_GPUS];
	int n = gpus_usable(config, visible);

	if (request->pairs) {
		if (!is_bijection(request))
			return CUDA_ERROR_INVALID_VALUE;
		// The real driver refuses a remap asked for from outside the process's
		// namespaces, where GPUs have other numbers or are more.
		if (!same_view(request, visible, n))
			return CUDA_ERROR_NOT_SUPPORTED;
	}
	if (n < process.seen)
		return CUDA_ERROR_NOT_SUPPORTED;
	for (int i = 0; i < process.gpus; i++) {
		const CUuuid *want = &process.gpu[i].uuid;
		const struct gpu *found = NULL;
		for (unsigned j = 0; j < request->pairs; j++) {
			if (same(&request->pair[j].oldUuid, &process.gpu[i].uuid))
				want = &request->pair[j].newUuid;
		}
		for (int j = 0; j < n; j++)
			if (same(&visible[j].uuid, want))
				found = &visible[j];
		if (!found || strcmp(found->name, process.gpu[i].name)) // another model
			return CUDA_ERROR_NOT_SUPPORTED;
		if (memory_in_use(i) > found->total)
			return CUDA_ERROR_OUT_OF_MEMORY;
		chosen[i] = *found;
	}
	return CUDA_SUCCESS;
}

static CUresult map_all(void)
{
	for (struct allocation *a = memory_first(); a; a = a->next) {
		CUresult r = memory_map(a);
		if (r) {
			for (struct allocation *b = memory_first(); b != a; b = b->next)
				memory_unmap(b);
			return r;
		}
	}
	return vmm_show();
}

// intact tells whether a context's image is what the context wrote there.
static bool intact(const struct allocation *a)
{
	const uint64_t *word = (const uint64_t *)a->address;
	for (size_t i = 0; i < a->bytes / sizeof *word; i++)
		if (word[i] != mix(a->address + i))
			return false;
	return true;
}

static CUresult restore(struct config *config, const struct request *request)
{
	struct gpu chosen[MAX_GPUS], before[MAX_GPUS];
	bool whole = true;

	process_wait_for_forks();
	CUresult r = choose_gpus(config, request, chosen);
	if (r || (r = lost))
		return r;
	memcpy(before, process.gpu, sizeof before);
	if ((r = process_open(chosen, process.gpus)))
		return r;
	if (!(r = injected(config, STEP_RESTORE)))
		r = map_all();
	if (r) {
		process_close();
		memcpy(process.gpu, before, sizeof before);
		return r;
	}
	char *from = staging;
	for (struct allocation *a = memory_first(); a; a = a->next) {
		copy(config, STEP_RESTORE, (char *)a->address, from, a->bytes);
		whole &= a->kind != KIND_CONTEXT || intact(a);
		from += a->bytes;
	}
	if (staged)
		munmap(staging, staged);
	staging = NULL;
	staged = 0;
	if (later && *later != LATER)
		whole = false;
	map_later();
	slice_restored();
	if (whole)
		return CUDA_SUCCESS;
	state = CU_PROCESS_STATE_FAILED;
	return CUDA_ERROR_UNKNOWN;
}

CUprocessState checkpoint_state(void)
{
	return state;
}

CUresult checkpoint_step(const struct request *request)
{
	static const struct {
		CUprocessState from, to;
	} steps[STEPS] = {
		[STEP_LOCK] = {CU_PROCESS_STATE_RUNNING, CU_PROCESS_STATE_LOCKED},
		[STEP_CHECKPOINT] = {CU_PROCESS_STATE_LOCKED, CU_PROCESS_STATE_CHECKPOINTED},
		[STEP_RESTORE] = {CU_PROCESS_STATE_CHECKPOINTED, CU_PROCESS_STATE_LOCKED},
		[STEP_UNLOCK] = {CU_PROCESS_STATE_LOCKED, CU_PROCESS_STATE_RUNNING},
	};
	struct config config;
	CUresult r;

	if (request->step < 0 || request->step >= STEPS || request->pairs > MAX_GPUS ||
	    request->visible > MAX_GPUS)
		return CUDA_ERROR_INVALID_VALUE;
	if (state != steps[request->step].from)
		return CUDA_ERROR_ILLEGAL_STATE;
	config_load(&config);
	switch (request->step) {
	case STEP_LOCK:
		r = lock(&config, request->timeout_ms);
		break;
	case STEP_CHECKPOINT:
		r = checkpoint(&config);
		break;
	case STEP_RESTORE:
		r = restore(&config, request);
		break;
	default:
		r = unlock(&config);
	}
	if (!r)
		state = steps[request->step].to;
	return r;
}
