/* Copyright The gpuckpt Authors. */
/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Managed memory (UVM), which host and GPU write in turns. A checkpoint of it is refused, but for a little of it
 * (--parts small,) with the interposer.
 */

#include "kernels.cuh"

/* What a program may ask and say of it, which changes nothing. */
static void advise(word *x, size_t bytes)
{
	struct cudaPointerAttributes is;
	int mostly = -1;

	CHECK(cudaPointerGetAttributes(&is, x));
	if (is.type != cudaMemoryTypeManaged || is.hostPointer != x || is.devicePointer != x) {
		fprintf(stderr, "the memory is not known as managed\n");
		exit(1);
	}
#if CUDART_VERSION >= 13000
	struct cudaMemLocation gpu = {};
	gpu.type = cudaMemLocationTypeDevice;
	gpu.id = 0;
	CHECK(cudaMemAdvise(x, bytes, cudaMemAdviseSetReadMostly, gpu));
#else
	CHECK(cudaMemAdvise(x, bytes, cudaMemAdviseSetReadMostly, 0));
#endif
	CHECK(cudaMemRangeGetAttribute(&mostly, sizeof mostly, cudaMemRangeAttributeReadMostly, x, bytes));
	if (mostly != 1) {
		fprintf(stderr, "the advice is not known\n");
		exit(1);
	}
#if CUDART_VERSION >= 13000
	CHECK(cudaMemAdvise(x, bytes, cudaMemAdviseUnsetReadMostly, gpu));
	CHECK(cudaMemPrefetchAsync(x, bytes, gpu, 0, 0));
#else
	CHECK(cudaMemAdvise(x, bytes, cudaMemAdviseUnsetReadMostly, 0));
	CHECK(cudaMemPrefetchAsync(x, bytes, 0, 0));
#endif
}

int main(int argc, char **argv)
{
	struct record r = begin(argc, argv);
	const size_t words = r.parts && !strcmp(r.parts, "small,") ? 1 << 16 : 1 << 20;
	word *x;

	CHECK(cudaMallocManaged(&x, words * sizeof(word)));
	advise(x, words * sizeof(word));
	memset(x, 3, words * sizeof(word));
	while (r.number < r.steps) {
		char value[32];
		word s = 0;
		x[r.number % words] += 1;
		mix<<<64, 256>>>(x, words, r.number);
		CHECK(cudaGetLastError());
		CHECK(cudaDeviceSynchronize());
		if (flips(&r))
			x[777] ^= 1;
		for (size_t i = 0; i < words; i++)
			s += x[i] * (2 * i + 1);
		snprintf(value, sizeof value, "%016llx", s);
		step(&r, value);
	}
	done(&r);
}
