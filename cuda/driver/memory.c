// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// GPU memory that lives by descriptors: it is imported or made, mapped, and let go of.

#include "memory.h"

#include <dlfcn.h>
#include <string.h>

#include "libcuda.h"

// What is needed of cuda.h beside libcuda.h.
typedef struct { int type, id; } location;
typedef struct {
	int type, handle_types;
	location location;
	void *win32;
	unsigned char flags[8];
} properties;
typedef struct { location location; int flags; } access;
enum { PINNED = 1, DEVICE = 1, READWRITE = 3, POSIX_FD = 1 };
enum { NOT_FOUND = 500, INVALID_VALUE = 1 };

static struct {
	int (*device_get)(int *, int);
	int (*device_uuid)(gk_uuid *, int);
	int (*retain)(void **, int);
	int (*set_current)(void *);
	int (*reserve)(uint64_t *, size_t, size_t, uint64_t, uint64_t);
	int (*unreserve)(uint64_t, size_t);
	int (*create)(uint64_t *, size_t, const properties *, uint64_t);
	int (*release)(uint64_t);
	int (*map)(uint64_t, size_t, size_t, uint64_t, uint64_t);
	int (*unmap)(uint64_t, size_t);
	int (*set_access)(uint64_t, size_t, const access *, size_t);
	int (*export)(void *, uint64_t, int, uint64_t);
	int (*import)(uint64_t *, void *, int);
	int (*properties)(properties *, uint64_t);
	int (*host_alloc)(void **, size_t, unsigned);
	int (*stream_create)(void **, unsigned);
	int (*stream_wait)(void *);
	int (*out)(void *, uint64_t, size_t, void *);
	int (*in)(uint64_t, const void *, size_t, void *);
	int (*set)(uint64_t, unsigned char, size_t, void *);
	int (*module_load)(void **, const void *);
	int (*module_function)(void **, void *, const char *);
	int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
} cu;

static const struct { const char *name; void *at; } symbols[] = {
	{ "cuDeviceGet", &cu.device_get },
	{ "cuDeviceGetUuid_v2", &cu.device_uuid },
	{ "cuDevicePrimaryCtxRetain", &cu.retain },
	{ "cuCtxSetCurrent", &cu.set_current },
	{ "cuMemAddressReserve", &cu.reserve },
	{ "cuMemAddressFree", &cu.unreserve },
	{ "cuMemCreate", &cu.create },
	{ "cuMemRelease", &cu.release },
	{ "cuMemMap", &cu.map },
	{ "cuMemUnmap", &cu.unmap },
	{ "cuMemSetAccess", &cu.set_access },
	{ "cuMemExportToShareableHandle", &cu.export },
	{ "cuMemImportFromShareableHandle", &cu.import },
	{ "cuMemGetAllocationPropertiesFromHandle", &cu.properties },
	{ "cuMemHostAlloc", &cu.host_alloc },
	{ "cuStreamCreate", &cu.stream_create },
	{ "cuStreamSynchronize", &cu.stream_wait },
	{ "cuMemcpyDtoHAsync_v2", &cu.out },
	{ "cuMemcpyHtoDAsync_v2", &cu.in },
	{ "cuMemsetD8Async", &cu.set },
	{ "cuModuleLoadData", &cu.module_load },
	{ "cuModuleGetFunction", &cu.module_function },
	{ "cuLaunchKernel", &cu.launch },
};

int gk_memory_load(void)
{
	for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
		void *found = dlsym(gk_library, symbols[i].name);
		if (found == NULL)
			return NOT_FOUND;
		memcpy(symbols[i].at, &found, sizeof found);
	}
	return 0;
}

int gk_ordinal(const gk_uuid *uuid, int *ordinal)
{
	int count, device, r = gk_device_count(&count);

	for (int i = 0; i < count && !r; i++) {
		gk_uuid found;
		if ((r = cu.device_get(&device, i)) || (r = cu.device_uuid(&found, device)))
			break;
		*ordinal = i;
		if (!memcmp(&found, uuid, sizeof found))
			return 0;
	}
	return r ? r : INVALID_VALUE;
}

int gk_context(int ordinal, void **context)
{
	int device, r = cu.device_get(&device, ordinal);

	return r ? r : cu.retain(context, device);
}

int gk_set_current(void *context) { return cu.set_current(context); }

int gk_import(int fd, gk_memory *m, int only)
{
	properties found = { 0 };
	int r = cu.import(&m->handle, (void *)(intptr_t)fd, POSIX_FD);

	if (r)
		return r;
	m->ordinal = only;
	if (!cu.properties(&found, m->handle) && found.type == PINNED && found.location.type == DEVICE)
		m->ordinal = found.location.id;
	if (m->ordinal >= 0)
		return 0;
	cu.release(m->handle);
	return INVALID_VALUE;
}

int gk_create(gk_memory *m)
{
	properties wanted = { .type = PINNED, .handle_types = POSIX_FD, .location = { DEVICE, m->ordinal } };

	return cu.create(&m->handle, m->bytes, &wanted, 0);
}

int gk_map(gk_memory *m)
{
	access access = { { DEVICE, m->ordinal }, READWRITE };
	uint64_t address;
	int r = cu.reserve(&address, m->bytes, 0, 0, 0);

	if (r)
		return r;
	if (!(r = cu.map(address, m->bytes, 0, m->handle, 0))) {
		if (!(r = cu.set_access(address, m->bytes, &access, 1))) {
			m->address = address;
			return 0;
		}
		cu.unmap(address, m->bytes);
	}
	cu.unreserve(address, m->bytes);
	return r;
}

int gk_export(const gk_memory *m, int *fd) { return cu.export(fd, m->handle, POSIX_FD, 0); }

void gk_let_go(const gk_memory *m)
{
	if (m->address)
		cu.unmap(m->address, m->bytes);
	cu.release(m->handle);
	if (m->address)
		cu.unreserve(m->address, m->bytes);
}

int gk_buffer(void **buffer, size_t bytes) { return cu.host_alloc(buffer, bytes, 1); } // CU_MEMHOSTALLOC_PORTABLE
int gk_stream(void **stream) { return cu.stream_create(stream, 1); }                   // CU_STREAM_NON_BLOCKING
int gk_wait(void *stream) { return cu.stream_wait(stream); }

int gk_out(void *to, uint64_t from, size_t bytes, void *stream) { return cu.out(to, from, bytes, stream); }
int gk_in(uint64_t to, const void *from, size_t bytes, void *stream) { return cu.in(to, from, bytes, stream); }
int gk_zero(uint64_t to, size_t bytes, void *stream) { return cu.set(to, 0, bytes, stream); }

int gk_compile(const char *text, const char *name, void **function)
{
	void *module;
	int r = cu.module_load(&module, text);

	return r ? r : cu.module_function(function, module, name);
}

int gk_digest(void *function, unsigned blocks, unsigned threads, uint64_t memory, void *results, uint32_t first, void *stream)
{
	void *arguments[] = { &memory, &results, &first };

	return cu.launch(function, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, NULL);
}
