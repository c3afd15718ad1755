/* Copyright The gpuckpt Authors. */
/* SPDX-License-Identifier: Apache-2.0 */

/* Managed memory (UVM), which host and GPU write in turns. A checkpoint of it is refused. */

#include "kernels.cuh"

enum { WORDS = 1 << 20 };

int main(int argc, char **argv)
{
	struct record r = begin(argc, argv);
	word *x;

	CHECK(cudaMallocManaged(&x, WORDS * sizeof(word)));
	memset(x, 3, WORDS * sizeof(word));
	while (r.number < r.steps) {
		char value[32];
		word s = 0;
		x[r.number % WORDS] += 1;
		mix<<<64, 256>>>(x, WORDS, r.number);
		CHECK(cudaGetLastError());
		CHECK(cudaDeviceSynchronize());
		if (flips(&r))
			x[777] ^= 1;
		for (size_t i = 0; i < WORDS; i++)
			s += x[i] * (2 * i + 1);
		snprintf(value, sizeof value, "%016llx", s);
		step(&r, value);
	}
	done(&r);
}
