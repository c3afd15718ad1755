/* Copyright The gpuckpt Authors. */
/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The record of a workload in C: the options and the lines that workload.py has.
 * Each step is one line "step NUMBER VALUE", in --file and on standard output.
 */

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct record {
	int steps, number;
	int flip; /* flip one bit before this step, as if it had been lost; 0 is never */
	const char *parts; /* names of parts, with a comma after each; NULL is all */
	double pause;
	FILE *file;
	uint64_t digest;
};

static inline struct record begin(int argc, char **argv)
{
	struct record r = {};
	const char *file = "/tmp/steps";

	r.steps = 200;
	r.digest = 14695981039346656037u;
	for (int i = 1; i + 1 < argc; i += 2) {
		if (!strcmp(argv[i], "--steps"))
			r.steps = atoi(argv[i + 1]);
		else if (!strcmp(argv[i], "--pause"))
			r.pause = atof(argv[i + 1]);
		else if (!strcmp(argv[i], "--file"))
			file = argv[i + 1];
		else if (!strcmp(argv[i], "--flip"))
			r.flip = atoi(argv[i + 1]);
		else if (!strcmp(argv[i], "--parts"))
			r.parts = argv[i + 1];
		else {
			fprintf(stderr, "there is no option %s\n", argv[i]);
			exit(2);
		}
	}
	r.file = fopen(file, "w");
	if (!r.file) {
		perror(file);
		exit(1);
	}
	return r;
}

/* Whether a bit is to be flipped before the next step. */
static inline int flips(const struct record *r)
{
	return r->flip == r->number + 1;
}

static inline void step(struct record *r, const char *value)
{
	r->number++;
	for (const char *c = value; *c; c++)
		r->digest = (r->digest ^ (unsigned char)*c) * 1099511628211u;
	fprintf(r->file, "step %d %s\n", r->number, value);
	fflush(r->file);
	printf("step %d %s\n", r->number, value);
	fflush(stdout);
	usleep((useconds_t)(r->pause * 1e6));
}

static inline void done(struct record *r)
{
	printf("done %016" PRIx64 "\n", r->digest);
	fflush(stdout);
	for (;;)
		pause();
}
