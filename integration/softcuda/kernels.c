// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// The kernels that the software GPU can run. It reads no PTX instructions: an entry runs if its
// name is here, and does what integration/workload/kernels.h says in PTX under that name.

#include <string.h>
#include <time.h>

#include "softcuda.h"

uint64_t mix(uint64_t x)
{
	x += 0x9e3779b97f4a7c15;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
	x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
	return x ^ (x >> 31);
}

static uint64_t word_param(void **params, int i)
{
	return *(uint64_t *)params[i];
}

// reach is memory_at for the kernel of the current context.
static void *reach(CUdeviceptr address, size_t bytes)
{
	CUcontext c = context_current();
	return peer_reaches(c ? c->ordinal : -1, memory_ordinal(address)) ? memory_at(address, bytes) : NULL;
}

// increment(u64 *counter)
static CUresult increment(void **params)
{
	uint64_t *counter = reach(word_param(params, 0), sizeof *counter);
	if (!counter)
		return CUDA_ERROR_ILLEGAL_ADDRESS;
	++*counter;
	return CUDA_SUCCESS;
}

// fill(u64 *words, u64 count, u64 seed, u64 keep, u64 fixed): word i is mix(i + seed) & keep | fixed
static CUresult fill(void **params)
{
	uint64_t count = word_param(params, 1), seed = word_param(params, 2);
	uint64_t keep = word_param(params, 3), fixed = word_param(params, 4);
	uint64_t *words = reach(word_param(params, 0), count * sizeof *words);
	if (!words)
		return CUDA_ERROR_ILLEGAL_ADDRESS;
	for (uint64_t i = 0; i < count; i++)
		words[i] = (mix(i + seed) & keep) | fixed;
	return CUDA_SUCCESS;
}

// check(u64 *words, u64 count, u64 seed, u64 keep, u64 fixed, u64 *bad): adds the number of words
// that differ
static CUresult check(void **params)
{
	uint64_t count = word_param(params, 1), seed = word_param(params, 2);
	uint64_t keep = word_param(params, 3), fixed = word_param(params, 4);
	uint64_t *words = reach(word_param(params, 0), count * sizeof *words);
	uint64_t *bad = reach(word_param(params, 5), sizeof *bad);
	if (!words || !bad)
		return CUDA_ERROR_ILLEGAL_ADDRESS;
	for (uint64_t i = 0; i < count; i++)
		*bad += words[i] != ((mix(i + seed) & keep) | fixed);
	return CUDA_SUCCESS;
}

// spin(u32 *flag): runs until the flag is set
static CUresult spin(void **params)
{
	uint32_t *flag = reach(word_param(params, 0), sizeof *flag);
	if (!flag)
		return CUDA_ERROR_ILLEGAL_ADDRESS;
	struct timespec pause = {.tv_nsec = 1000000};
	while (!__atomic_load_n(flag, __ATOMIC_ACQUIRE))
		nanosleep(&pause, NULL); // a GPU would take no CPU time either
	return CUDA_SUCCESS;
}

// meet(u64 *board, u64 ranks, u64 rank, u64 *state): one step of an all-reduce. The rank writes its
// word of this step to the board and waits until all have; state is the number of the step and the
// sum of all words so far, from which the next word follows.
static CUresult meet(void **params)
{
	uint64_t ranks = word_param(params, 1), rank = word_param(params, 2);
	uint64_t *board = reach(word_param(params, 0), 3 * 64 * sizeof *board);
	uint64_t *state = reach(word_param(params, 3), 2 * sizeof *state);
	if (!board || !state || ranks > 64)
		return CUDA_ERROR_ILLEGAL_ADDRESS;
	uint64_t step = state[0] + 1, *words = board + 64 + 64 * (step & 1);
	struct timespec pause = {.tv_nsec = 20000};
	words[rank] = mix(state[1] + step + (rank << 32));
	__atomic_store_n(&board[rank], step, __ATOMIC_RELEASE);
	for (uint64_t i = 0; i < ranks; i++) {
		while (__atomic_load_n(&board[i], __ATOMIC_ACQUIRE) < step)
			nanosleep(&pause, NULL); // a GPU would take no CPU time either
		state[1] += words[i];
	}
	state[0] = step;
	return CUDA_SUCCESS;
}

const struct kernel *kernel_named(const char *name, size_t len)
{
	static const struct kernel kernels[] = {
		{"increment", increment},
		{"fill", fill},
		{"check", check},
		{"spin", spin},
		{"meet", meet},
	};

	for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
		if (strlen(kernels[i].name) == len && !strncmp(kernels[i].name, name, len))
			return &kernels[i];
	return NULL;
}
