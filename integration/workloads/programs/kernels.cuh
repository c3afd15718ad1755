/* Copyright The gpuckpt Authors. */
/* SPDX-License-Identifier: Apache-2.0 */

/* What the CUDA programs have in common: a check of each call, two kernels. */

#include <cuda_runtime.h>

#include "record.h"

#define CHECK(call)                                                                                  \
	do {                                                                                         \
		cudaError_t error_ = (call);                                                         \
		if (error_ != cudaSuccess) {                                                         \
			fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call,                \
				cudaGetErrorString(error_));                                         \
			exit(1);                                                                     \
		}                                                                                    \
	} while (0)

typedef unsigned long long word;

/* Makes each word a function of what it was. */
__global__ void mix(word *x, size_t n, word k)
{
	for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (size_t)blockDim.x)
		x[i] = x[i] * 6364136223846793005ull + k + i;
}

/* Adds up the words, each with an odd factor of its own: one flipped bit changes the sum. */
__global__ void fold(const word *x, size_t n, word *sum)
{
	word own = 0;
	for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (size_t)blockDim.x)
		own += x[i] * (2 * i + 1);
	atomicAdd(sum, own);
}

__global__ void flip_bit(word *x)
{
	*x ^= 1;
}
