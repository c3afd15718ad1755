// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// The kernels that the software GPU can run. It reads no PTX instructions: an entry runs if its
// name is here, and does what integration/workload/kernels.h says in PTX under that name, or
// cuda/driver/ptx.go.

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
	bool reaches = peer_reaches(c ? c->ordinal : -1, memory_ordinal(address)) && (!c || vmm_reaches(c->ordinal, address));
	return reaches ? memory_at(address, bytes) : NULL;
}

// wait_a_little is for a kernel that waits; a GPU would take no CPU time either. false: the driver ends it.
static bool wait_a_little(long ns)
{
	struct timespec pause = {.tv_nsec = ns};

	nanosleep(&pause, NULL);
	return !slice_lost(process.gpu[context_current()->ordinal].minor);
}

// increment(u64 *counter)
static CUresult increment(void **params, unsigned blocks)
{
	(void)blocks;
	uint64_t *counter = reach(word_param(params, 0), sizeof *counter);
	if (!counter)
		return CUDA_ERROR_ILLEGAL_ADDRESS;
	++*counter;
	return CUDA_SUCCESS;
}

// fill(u64 *words, u64 count, u64 seed, u64 keep, u64 fixed): word i is mix(i + seed) & keep | fixed
static CUresult fill(void **params, unsigned blocks)
{
	(void)blocks;
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
static CUresult check(void **params, unsigned blocks)
{
	(void)blocks;
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
static CUresult spin(void **params, unsigned blocks)
{
	(void)blocks;
	uint32_t *flag = reach(word_param(params, 0), sizeof *flag);
	if (!flag)
		return CUDA_ERROR_ILLEGAL_ADDRESS;
	while (!__atomic_load_n(flag, __ATOMIC_ACQUIRE))
		if (!wait_a_little(1000000))
			return CUDA_ERROR_LAUNCH_FAILED;
	return CUDA_SUCCESS;
}

// meet(u64 *board, u64 ranks, u64 rank, u64 *state): one step of an all-reduce. The rank writes its
// word of this step to the board and waits until all have; state is the number of the step and the
// sum of all words so far, from which the next word follows.
static CUresult meet(void **params, unsigned blocks)
{
	(void)blocks;
	uint64_t ranks = word_param(params, 1), rank = word_param(params, 2);
	uint64_t *board = reach(word_param(params, 0), 3 * 64 * sizeof *board);
	uint64_t *state = reach(word_param(params, 3), 2 * sizeof *state);
	if (!board || !state || ranks > 64)
		return CUDA_ERROR_ILLEGAL_ADDRESS;
	uint64_t step = state[0] + 1, *words = board + 64 + 64 * (step & 1);
	words[rank] = mix(state[1] + step + (rank << 32));
	__atomic_store_n(&board[rank], step, __ATOMIC_RELEASE);
	for (uint64_t i = 0; i < ranks; i++) {
		while (__atomic_load_n(&board[i], __ATOMIC_ACQUIRE) < step)
			if (!wait_a_little(20000))
				return CUDA_ERROR_LAUNCH_FAILED;
		state[1] += words[i];
	}
	state[0] = step;
	return CUDA_SUCCESS;
}

static const uint32_t blake_iv[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

static uint32_t rotate(uint32_t x, int by)
{
	return x >> by | x << (32 - by);
}

// compress makes h the chaining value of a block of BLAKE3.
static void compress(uint32_t h[8], const uint32_t block[16], uint32_t counter, uint32_t flags)
{
	static const uint8_t at[8][4] = {{0, 4, 8, 12}, {1, 5, 9, 13}, {2, 6, 10, 14}, {3, 7, 11, 15}, {0, 5, 10, 15}, {1, 6, 11, 12}, {2, 7, 8, 13}, {3, 4, 9, 14}};
	static const uint8_t permute[16] = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};
	uint32_t v[16], m[16], next[16];

	memcpy(v, h, 32);
	memcpy(v + 8, blake_iv, 16);
	v[12] = counter, v[13] = 0, v[14] = 64, v[15] = flags;
	memcpy(m, block, sizeof m);
#pragma GCC unroll 7
	for (int round = 0; round < 7; round++) {
#pragma GCC unroll 8
		for (int i = 0; i < 8; i++) {
			uint32_t *a = v + at[i][0], *b = v + at[i][1], *c = v + at[i][2], *d = v + at[i][3];
			*a += *b + m[2 * i], *d = rotate(*d ^ *a, 16), *c += *d, *b = rotate(*b ^ *c, 12);
			*a += *b + m[2 * i + 1], *d = rotate(*d ^ *a, 8), *c += *d, *b = rotate(*b ^ *c, 7);
		}
#pragma GCC unroll 16
		for (int i = 0; i < 16; i++)
			next[i] = m[permute[i]];
		memcpy(m, next, sizeof m);
	}
	for (int i = 0; i < 8; i++)
		h[i] = v[i] ^ v[i + 8];
}

// digest_part digests a MiB, by its number among the blocks of threads.
static CUresult digest_part(void **params, unsigned block)
{
	enum { CHUNKS = 1024 };
	static _Thread_local uint32_t values[CHUNKS][8];
	const uint8_t *memory = reach(word_param(params, 0) + ((uint64_t)block << 20), 1 << 20);
	uint32_t *result = (uint32_t *)(uintptr_t)word_param(params, 1) + 9 * block; // pinned host memory
	uint32_t first = (*(uint32_t *)params[2] + block) % 64 * CHUNKS, any = 0;
	if (!memory)
		return CUDA_ERROR_ILLEGAL_ADDRESS;
	for (uint32_t chunk = 0; chunk < CHUNKS; chunk++) {
		memcpy(values[chunk], blake_iv, sizeof blake_iv);
		for (int i = 0; i < 16; i++) {
			uint32_t words[16];
			memcpy(words, memory + 1024 * chunk + 64 * i, sizeof words);
			for (int k = 0; k < 16; k++)
				any |= words[k];
			compress(values[chunk], words, first + chunk, i == 0 ? 1 : i == 15 ? 2 : 0);
		}
	}
	for (int n = CHUNKS / 2; n; n /= 2)
		for (int i = 0; i < n; i++) {
			uint32_t words[16];
			memcpy(words, values[2 * i], sizeof words);
			memcpy(values[i], blake_iv, sizeof blake_iv);
			compress(values[i], words, 0, 4);
		}
	memcpy(result, values[0], sizeof values[0]);
	__atomic_store_n(&result[8], any ? 1 : 2, __ATOMIC_RELEASE);
	return CUDA_SUCCESS;
}

// gpuckpt_digest(u8 *memory, u32 *results, u32 first): BLAKE3's chaining value of each MiB, of which
// the first is part first of what is digested, and whether it is zeros
static CUresult digest(void **params, unsigned blocks)
{
	CUresult r = CUDA_SUCCESS;
	for (unsigned block = 0; block < blocks && !r; block++)
		r = digest_part(params, block);
	return r;
}

const struct kernel *kernel_named(const char *name, size_t len)
{
	static const struct kernel kernels[] = {
		{"increment", increment},
		{"fill", fill},
		{"check", check},
		{"spin", spin},
		{"meet", meet},
		{"gpuckpt_digest", digest},
	};

	for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
		if (strlen(kernels[i].name) == len && !strncmp(kernels[i].name, name, len))
			return &kernels[i];
	return NULL;
}
