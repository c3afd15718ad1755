// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

#include "libcuda.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

// The arguments of the checkpoint functions, 64 bytes each; what is reserved
// must be zero.
struct lock_args { unsigned timeout_ms, reserved0; uint64_t reserved1[7]; };
struct plain_args { uint64_t reserved[8]; }; // checkpoint, unlock
struct restore_args { gk_pair *pairs; unsigned count, reserved0; uint64_t reserved1[6]; };

_Static_assert(sizeof(struct lock_args) == 64, "CUcheckpointLockArgs");
_Static_assert(sizeof(struct plain_args) == 64, "CUcheckpointCheckpointArgs, CUcheckpointUnlockArgs");
_Static_assert(sizeof(struct restore_args) == 64, "CUcheckpointRestoreArgs");

static int (*p_init)(unsigned);
static int (*p_driver_version)(int *);
static int (*p_device_count)(int *);
static int (*p_device_get)(int *, int);
static int (*p_device_uuid)(gk_uuid *, int);
static int (*p_device_name)(char *, int, int);
static int (*p_device_memory)(size_t *, int);
static int (*p_device_bus_id)(char *, int, int);
static int (*p_error_string)(int, const char **);
static int (*p_state)(int, int *);
static int (*p_restore_thread)(int, int *);
static int (*p_lock)(int, struct lock_args *);
static int (*p_checkpoint)(int, struct plain_args *);
static int (*p_restore)(int, struct restore_args *);
static int (*p_unlock)(int, struct plain_args *);

static const struct { const char *name; void *at; int checkpoint; } symbols[] = {
	{ "cuInit", &p_init, 0 },
	{ "cuDriverGetVersion", &p_driver_version, 0 },
	{ "cuDeviceGetCount", &p_device_count, 0 },
	{ "cuDeviceGet", &p_device_get, 0 },
	{ "cuDeviceGetUuid_v2", &p_device_uuid, 0 },
	{ "cuDeviceGetName", &p_device_name, 0 },
	{ "cuDeviceTotalMem_v2", &p_device_memory, 0 },
	{ "cuDeviceGetPCIBusId", &p_device_bus_id, 0 },
	{ "cuGetErrorString", &p_error_string, 0 },
	{ "cuCheckpointProcessGetState", &p_state, 1 },
	{ "cuCheckpointProcessGetRestoreThreadId", &p_restore_thread, 1 },
	{ "cuCheckpointProcessLock", &p_lock, 1 },
	{ "cuCheckpointProcessCheckpoint", &p_checkpoint, 1 },
	{ "cuCheckpointProcessRestore", &p_restore, 1 },
	{ "cuCheckpointProcessUnlock", &p_unlock, 1 },
};

void *gk_library;

int gk_load(char *why, size_t size)
{
	void *lib = gk_library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
	if (lib == NULL) {
		const char *said = dlerror();
		// Nothing is said of one that only a container has: see join.c.
		snprintf(why, size, "%s", said ? said : "libcuda.so.1: not found on the host");
		return -1;
	}
	for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
		void *found = dlsym(lib, symbols[i].name);
		if (found == NULL && !symbols[i].checkpoint) {
			snprintf(why, size, "libcuda.so.1 has no %s", symbols[i].name);
			return -1;
		}
		memcpy(symbols[i].at, &found, sizeof found);
	}
	return 0;
}

int gk_can_checkpoint(void)
{
	return p_state && p_restore_thread && p_lock && p_checkpoint && p_restore && p_unlock;
}

int gk_init(void) { return p_init(0); }
int gk_driver_version(int *version) { return p_driver_version(version); }
int gk_device_count(int *count) { return p_device_count(count); }

int gk_device(int index, gk_uuid *uuid, char *name, int name_size,
	      uint64_t *memory, char *bus_id, int bus_id_size)
{
	int device, r;
	size_t bytes = 0;
	if ((r = p_device_get(&device, index)) != 0 || (r = p_device_uuid(uuid, device)) != 0 ||
	    (r = p_device_name(name, name_size, device)) != 0 ||
	    (r = p_device_memory(&bytes, device)) != 0 ||
	    (r = p_device_bus_id(bus_id, bus_id_size, device)) != 0)
		return r;
	*memory = bytes;
	return 0;
}

int gk_state(int pid, int *state) { return p_state(pid, state); }
int gk_restore_thread(int pid, int *tid) { return p_restore_thread(pid, tid); }

int gk_lock(int pid, unsigned timeout_ms)
{
	struct lock_args args = { .timeout_ms = timeout_ms };
	return p_lock(pid, &args);
}

int gk_checkpoint(int pid)
{
	struct plain_args args = { 0 };
	return p_checkpoint(pid, &args);
}

int gk_restore(int pid, gk_pair *pairs, unsigned count)
{
	struct restore_args args = { .pairs = pairs, .count = count };
	return p_restore(pid, &args);
}

int gk_unlock(int pid)
{
	struct plain_args args = { 0 };
	return p_unlock(pid, &args);
}

const char *gk_text(int result)
{
	const char *text = NULL;
	return p_error_string && p_error_string(result, &text) == 0 ? text : NULL;
}
