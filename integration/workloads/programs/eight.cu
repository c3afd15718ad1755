/* Copyright The gpuckpt Authors. */
/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Eight processes on one GPU, each with memory and a stream of its own. Their parent, which has no
 * CUDA, asks each for a step and keeps the record.
 */

#include "kernels.cuh"

enum { PROCESSES = 8, WORDS = 4 << 20 };

/* Computes a step for each number that comes in, and sends the sum out. */
static void work(int in, int out, int number)
{
	word *x, *sum, k;
	cudaStream_t stream;

	CHECK(cudaStreamCreate(&stream));
	CHECK(cudaMalloc(&x, WORDS * sizeof(word)));
	CHECK(cudaMalloc(&sum, sizeof *sum));
	CHECK(cudaMemset(x, number + 1, WORDS * sizeof(word)));
	CHECK(cudaDeviceSynchronize());
	while (read(in, &k, sizeof k) == sizeof k) {
		word answer;
		if (k == UINT64_MAX) { /* a bit is lost */
			flip_bit<<<1, 1, 0, stream>>>(x + 777);
			CHECK(cudaStreamSynchronize(stream));
			continue;
		}
		mix<<<64, 256, 0, stream>>>(x, WORDS, k);
		CHECK(cudaMemsetAsync(sum, 0, sizeof *sum, stream));
		fold<<<64, 256, 0, stream>>>(x, WORDS, sum);
		CHECK(cudaGetLastError());
		CHECK(cudaMemcpyAsync(&answer, sum, sizeof answer, cudaMemcpyDeviceToHost, stream));
		CHECK(cudaStreamSynchronize(stream));
		if (write(out, &answer, sizeof answer) != sizeof answer)
			break;
	}
	exit(0);
}

static void ask(int to, word k)
{
	if (write(to, &k, sizeof k) != sizeof k) {
		perror("write to a child");
		exit(1);
	}
}

int main(int argc, char **argv)
{
	struct record r = begin(argc, argv);
	int to[PROCESSES], from[PROCESSES];

	for (int i = 0; i < PROCESSES; i++) {
		int in[2], out[2];
		if (pipe(in) || pipe(out)) {
			perror("pipe");
			return 1;
		}
		if (fork() == 0) {
			close(in[1]);
			close(out[0]);
			work(in[0], out[1], i);
		}
		close(in[0]);
		close(out[1]);
		to[i] = in[1];
		from[i] = out[0];
	}
	while (r.number < r.steps) {
		char value[256] = "";
		if (flips(&r))
			ask(to[5], UINT64_MAX);
		for (int i = 0; i < PROCESSES; i++)
			ask(to[i], r.number);
		for (int i = 0; i < PROCESSES; i++) {
			word answer;
			if (read(from[i], &answer, sizeof answer) != sizeof answer) {
				fprintf(stderr, "child %d has ended\n", i);
				return 1;
			}
			size_t length = strlen(value);
			snprintf(value + length, sizeof value - length, "%s%016llx", i ? "-" : "", answer);
		}
		step(&r, value);
	}
	done(&r);
}
