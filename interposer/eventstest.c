// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// A program with the interposer preloaded, on the software GPU, that has events for other processes: what two processes
// do with them is a test of the software GPU's. Says one thing, that such an event cannot be part of a graph, and ends
// with 0, or says what is wrong.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "want.h"

static void *library;

static void *by_name(const char *name)
{
	void *f = dlsym(library, name);
	WANT(f);
	return f;
}

#define CALL(f, parameters, arguments) ((int (*) parameters)(f)) arguments

enum { INTERPROCESS = 6, ORDINARY = 2, MANY = 5000 };

static void *create, *destroy, *record, *query, *get, *waits;

static void *new_event(unsigned flags)
{
	void *e = NULL;
	WANT(!CALL(create, (void **, unsigned), (&e, flags)) && e);
	return e;
}

static int is_ours(void *event)
{
	return (uintptr_t)event >> 32 == 0x67706b65;
}

int main(void)
{
	char handle[64], again[64], *number = handle + 40;
	void *context, *second, *stream, *event, *plain, *graph, *node, *many[MANY];

	library = dlopen("libcuda.so.1", RTLD_NOW);
	WANT(library);
	create = by_name("cuEventCreate"), destroy = by_name("cuEventDestroy_v2"), record = by_name("cuEventRecord");
	query = by_name("cuEventQuery"), get = by_name("cuIpcGetEventHandle"), waits = by_name("cuStreamWaitEvent");
	WANT(CALL(create, (void **, unsigned), (&event, INTERPROCESS)) == 3); // before cuInit
	WANT(!CALL(by_name("cuInit"), (unsigned), (0)));
	WANT(CALL(create, (void **, unsigned), (&event, INTERPROCESS)) == 201); // without a context
	WANT(!CALL(by_name("cuDevicePrimaryCtxRetain"), (void **, int), (&context, 0)));
	WANT(!CALL(by_name("cuCtxSetCurrent"), (void *), (context)));
	WANT(!CALL(by_name("cuStreamCreate"), (void **, unsigned), (&stream, 1)));
	// Only an event for other processes is the interposer's.
	WANT(!is_ours(plain = new_event(ORDINARY)) && is_ours(event = new_event(INTERPROCESS)));
	WANT(CALL(create, (void **, unsigned), (NULL, INTERPROCESS)) == 1);
	WANT(CALL(get, (void *, void *), (NULL, event)) == 1);
	WANT(!CALL(get, (void *, void *), (handle, event)) && !memcmp(handle, "gpce", 4));
	WANT(!CALL(get, (void *, void *), (again, event)) && !memcmp(handle, again, 64));
	WANT(CALL(get, (void *, void *), (again, plain)) == 400);
	WANT(!CALL(record, (void *, void *), (event, stream)) && !CALL(query, (void *), (event)));
	// It cannot be part of a graph, by any way.
	void *add = by_name("cuGraphAddEventRecordNode");
	WANT(!CALL(add, (void **, void *, void *, size_t, void *), (&node, NULL, NULL, 0, plain)));
	WANT(CALL(add, (void **, void *, void *, size_t, void *), (&node, NULL, NULL, 0, event)) == 801);
	WANT(!CALL(by_name("cuStreamBeginCapture_v2"), (void *, int), (stream, 2)));
	void *flags = by_name("cuEventRecordWithFlags");
	WANT(CALL(flags, (void *, void *, unsigned), (event, stream, 1)) == 801);
	WANT(CALL(waits, (void *, void *, unsigned), (stream, event, 1)) == 801);
	WANT(!CALL(flags, (void *, void *, unsigned), (plain, stream, 1)));
	WANT(!CALL(by_name("cuStreamEndCapture"), (void *, void **), (stream, &graph)));
	// An event that is destroyed is none, and its number is another one's then.
	WANT(!CALL(destroy, (void *), (event)) && CALL(destroy, (void *), (event)) == 400);
	WANT(CALL(query, (void *), (event)) == 400 && CALL(record, (void *, void *), (event, stream)) == 400);
	WANT(CALL(waits, (void *, void *, unsigned), (stream, event, 0)) == 400 && CALL(get, (void *, void *), (again, event)) == 400);
	void *next = new_event(INTERPROCESS);
	WANT(!CALL(get, (void *, void *), (again, next)) && memcmp(number, again + 40, 24));
	WANT(!CALL(destroy, (void *), (next)) && !CALL(destroy, (void *), (plain)));
	// There is room for so many that have a handle, again and again.
	int had = 0;
	for (int round = 0; round < 3; round++) {
		for (int i = 0; i < MANY; i++) {
			many[i] = new_event(INTERPROCESS);
			int r = CALL(get, (void *, void *), (handle, many[i]));
			WANT(!r || (r == 2 && i == 4095));
			had += !r;
			if (r) {
				WANT(!CALL(destroy, (void *), (many[i])));
				break;
			}
		}
		for (int i = 0; i < 4095; i++)
			WANT(!CALL(destroy, (void *), (many[i])));
	}
	WANT(had == 3 * 4095);
	// Events end with their context, and the words of others are another context's then.
	WANT(!CALL(by_name("cuCtxCreate_v2"), (void **, unsigned, int), (&second, 0, 0)));
	event = new_event(INTERPROCESS);
	WANT(!CALL(get, (void *, void *), (handle, event)) && !CALL(record, (void *, void *), (event, stream)));
	WANT(!CALL(by_name("cuCtxDestroy_v2"), (void *), (second)));
	WANT(!CALL(by_name("cuCtxSetCurrent"), (void *), (context)));
	WANT(CALL(query, (void *), (event)) == 400);
	event = new_event(INTERPROCESS);
	WANT(!CALL(get, (void *, void *), (handle, event)) && !CALL(record, (void *, void *), (event, stream)) && !CALL(query, (void *), (event)));
	return 0;
}
