// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Layouts and numbers are those of the CUDA driver API manual, preview of release 13.4, group CUDA_CHECKPOINT.

#include "custom.h"

#include <dlfcn.h>
#include <string.h>

typedef struct {
	uint64_t address;
	size_t bytes;
	void *stream; // of the GPU's primary context
} part;
typedef struct {
	void *handle;
	part *parts;
	unsigned count;
} operation; // CUcheckpointCustomStorageInfo
struct save_args { operation **out; uint64_t reserved[7]; };
struct fill_args { gk_pair *pairs; unsigned count, padding; operation **out; uint64_t reserved[5]; };

_Static_assert(sizeof(struct save_args) == 64, "CUcheckpointCheckpointArgs");
_Static_assert(sizeof(struct fill_args) == 64, "CUcheckpointRestoreArgs");

enum { CUDA_13_4 = 13040, NOT_SUPPORTED = 801, MOST = 1024 };

static struct {
	int looked; // 1: all are there, -1: the driver has no custom storage
	int (*save)(int, struct save_args *);
	int (*fill)(int, struct fill_args *);
	int (*complete)(void *);
	int (*context_of)(void *, void **);
	int (*device)(int *);
	int (*uuid)(gk_uuid *, int);
} cu;

// by_version asks the driver for a function in the form of CUDA 13.4. dlsym returns the oldest one.
static int by_version(const char *name, void *to)
{
	int (*ask)(const char *, void **, int, uint64_t, int *) = NULL;
	void *found = dlsym(gk_library, "cuGetProcAddress_v2");
	int status = 0;

	if (found == NULL)
		return 0;
	memcpy(&ask, &found, sizeof found);
	found = NULL;
	if (ask(name, &found, CUDA_13_4, 0, &status) || status || found == NULL)
		return 0;
	memcpy(to, &found, sizeof found);
	return 1;
}

static int by_name(const char *name, void *to)
{
	void *found = dlsym(gk_library, name);

	memcpy(to, &found, sizeof found);
	return found != NULL;
}

int gk_custom(void)
{
	if (!cu.looked)
		cu.looked = by_version("cuCheckpointOperationComplete", &cu.complete) &&
			by_version("cuCheckpointProcessCheckpoint", &cu.save) && by_version("cuCheckpointProcessRestore", &cu.fill) &&
			by_name("cuStreamGetCtx", &cu.context_of) && by_name("cuCtxGetDevice", &cu.device) &&
			by_name("cuDeviceGetUuid_v2", &cu.uuid) ? 1 : -1;
	return cu.looked > 0;
}

int gk_custom_save(int pid, void **to)
{
	operation *o = NULL;
	struct save_args args = { .out = &o };

	int r = gk_custom() ? cu.save(pid, &args) : NOT_SUPPORTED;

	*to = o;
	return r;
}

int gk_custom_fill(int pid, gk_pair *pairs, unsigned count, void **to)
{
	operation *o = NULL;
	struct fill_args args = { .pairs = pairs, .count = count, .out = &o };

	int r = gk_custom() ? cu.fill(pid, &args) : NOT_SUPPORTED;

	*to = o;
	return r;
}

int gk_custom_count(void *to)
{
	operation *o = to;

	return o && o->handle && (o->parts || !o->count) && o->count <= MOST ? (int)o->count : -1;
}

int gk_custom_part(void *o, int index, gk_memory *m, gk_uuid *gpu)
{
	part *p = &((operation *)o)->parts[index];
	void *context;
	int device, r;

	// The context must be the thread's for the rest, and tells which GPU it is.
	if ((r = cu.context_of(p->stream, &context)) || (r = gk_set_current(context)) || (r = cu.device(&device)) ||
	    (r = cu.uuid(gpu, device)))
		return r;
	*m = (gk_memory){ .address = p->address, .bytes = p->bytes };
	return gk_ordinal(gpu, &m->ordinal);
}

int gk_custom_complete(void *o) { return cu.complete(((operation *)o)->handle); }
