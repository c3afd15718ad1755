// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Device memory. Each allocation is a shared mapping of a memory file named after its GPU
// ("softcuda-N", gpu.c), at an address that is never used for anything else, so that a restore can put it
// back where the program's pointers point. Pinned host memory is ordinary memory of the process.

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "softcuda.h"

#define PAGE ((size_t)4096)

// Device addresses: 1 TiB for each ordinal from 16 TiB up, far below where Linux on x86-64 and
// arm64 places libraries, stacks and position-independent programs. Sanitizers want that for themselves, and
// leave less.
#ifndef FIRST_ADDRESS
#define FIRST_ADDRESS 0x100000000000
#define SPAN_BITS 40
#endif
#define BASE ((CUdeviceptr)FIRST_ADDRESS)
#define SPAN ((CUdeviceptr)1 << SPAN_BITS)

struct pinned {
	struct pinned *next;
	char *address;
	size_t bytes;
	bool registered; // the program's own memory
	CUcontext context;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct allocation *allocations;
static struct pinned *pinned;
static CUdeviceptr next_address[MAX_GPUS];

struct allocation *memory_first(void)
{
	return allocations;
}

// is_left tells whether imported memory is one that its maker has no more: somebody must count it.
static bool is_left(const struct allocation *a)
{
	return a->export >= 0 && fcntl(a->export, F_GET_SEALS) & F_SEAL_SHRINK;
}

static size_t in_use(int ordinal)
{
	size_t sum = 0;
	for (struct allocation *a = allocations; a; a = a->next)
		if (a->context->ordinal == ordinal && (a->kind != KIND_IMPORTED || is_left(a)) && a->kind != KIND_HOST)
			sum += a->bytes;
	return sum;
}

int memory_ordinal(CUdeviceptr address)
{
	return address >= BASE && address < BASE + MAX_GPUS * SPAN ? (int)((address - BASE) / SPAN) : -1;
}

size_t memory_in_use(int ordinal)
{
	pthread_mutex_lock(&mutex);
	size_t sum = in_use(ordinal);
	pthread_mutex_unlock(&mutex);
	return sum;
}

bool memory_has_managed(void)
{
	bool found = false;
	pthread_mutex_lock(&mutex);
	for (struct allocation *a = allocations; a; a = a->next)
		found |= a->kind == KIND_MANAGED;
	pthread_mutex_unlock(&mutex);
	return found;
}

CUresult memory_managed(CUdeviceptr address, size_t bytes, CUresult (*use)(struct advice *, void *), void *arg)
{
	CUresult r = CUDA_ERROR_INVALID_VALUE;

	pthread_mutex_lock(&mutex);
	for (struct allocation *a = allocations; a; a = a->next)
		if (a->kind == KIND_MANAGED && address >= a->address && address - a->address < a->bytes && bytes &&
		    bytes <= a->bytes - (address - a->address))
			r = use(&a->advice, arg);
	pthread_mutex_unlock(&mutex);
	return r;
}

bool memory_about(CUdeviceptr address, struct about *about)
{
	bool found = false;

	pthread_mutex_lock(&mutex);
	for (struct allocation *a = allocations; a && !found; a = a->next) {
		if (a->kind == KIND_HOST || a->kind == KIND_CONTEXT || address < a->address || address - a->address >= a->bytes)
			continue;
		*about = (struct about){a->address, a->bytes, a->context, a->kind == KIND_MANAGED, false};
		found = true;
	}
	for (struct pinned *p = pinned; p && !found; p = p->next) {
		if (address < (CUdeviceptr)p->address || address - (CUdeviceptr)p->address >= p->bytes)
			continue;
		*about = (struct about){(CUdeviceptr)p->address, p->bytes, p->context, false, true};
		found = true;
	}
	pthread_mutex_unlock(&mutex);
	return found;
}

// memory_file makes a memory file for an allocation; -1 on error.
static int memory_file(const struct allocation *a)
{
	char name[100];

	gpu_memory_name(&process.gpu[a->context->ordinal], name, sizeof name);
	int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd >= 0 && ftruncate(fd, (off_t)a->bytes)) {
		close(fd);
		return -1;
	}
	return fd;
}

static CUresult map_file(const struct allocation *a, int fd, int flags)
{
	int mark = a->kind == KIND_IMPORTED ? PROT_EXEC : 0; // what gpu.c knows it by
	void *at = mmap((void *)a->address, a->bytes, PROT_READ | PROT_WRITE | mark, MAP_SHARED | flags, fd, 0);
	if (at == MAP_FAILED)
		return CUDA_ERROR_OUT_OF_MEMORY;
	madvise(at, a->bytes, MADV_DONTFORK); // a forked child has no GPU
	return CUDA_SUCCESS;
}

CUresult memory_map(struct allocation *a)
{
	int fd = memory_file(a);
	if (fd < 0)
		return CUDA_ERROR_OPERATING_SYSTEM;
	CUresult r = map_file(a, fd, MAP_FIXED_NOREPLACE);
	if (!r && a->kind == KIND_HANDLE)
		a->export = fd;
	else
		close(fd);
	return r;
}

void memory_unmap(struct allocation *a)
{
	munmap((void *)a->address, a->bytes);
	if (a->export >= 0 && a->kind == KIND_HANDLE)
		fcntl(a->export, F_ADD_SEALS, F_SEAL_SHRINK); // for is_left
	if (a->export >= 0)
		close(a->export);
	a->export = -1;
}

// add makes an allocation of whole pages; fd is the memory file of an imported one.
static CUresult add(CUcontext context, enum kind kind, size_t bytes, int fd, CUdeviceptr *address)
{
	int ordinal = context->ordinal;

	if (next_address[ordinal] + bytes + PAGE > SPAN)
		return CUDA_ERROR_OUT_OF_MEMORY;
	struct allocation *a = calloc(1, sizeof *a);
	if (!a)
		return CUDA_ERROR_OUT_OF_MEMORY;
	a->address = BASE + (CUdeviceptr)ordinal * SPAN + next_address[ordinal];
	a->bytes = bytes;
	a->kind = kind;
	a->context = context;
	a->export = -1;
	CUresult r = CUDA_SUCCESS;
	if (kind == KIND_HOST)
		a->export = fd; // it is where vmm.c maps it, and nowhere else
	else
		r = kind == KIND_IMPORTED ? map_file(a, fd, MAP_FIXED_NOREPLACE) : memory_map(a);
	if (r) {
		free(a);
		return r;
	}
	next_address[ordinal] += bytes + PAGE; // an unmapped page catches what overruns
	a->next = allocations;
	allocations = a;
	*address = a->address;
	return CUDA_SUCCESS;
}

static CUresult allocate(CUcontext context, enum kind kind, size_t bytes, CUdeviceptr *address)
{
	struct config config;

	config_load(&config);
	size_t total = process.gpu[context->ordinal].total, used = in_use(context->ordinal) + config.taken;

	if (bytes > total || used + (bytes = (bytes + PAGE - 1) & ~(PAGE - 1)) > total)
		return CUDA_ERROR_OUT_OF_MEMORY;
	return add(context, kind, bytes, -1, address);
}

CUresult memory_allocate(CUcontext context, enum kind kind, size_t bytes, CUdeviceptr *address)
{
	if (!bytes || !address)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&mutex);
	CUresult r = allocate(context, kind, bytes, address);
	pthread_mutex_unlock(&mutex);
	return r;
}

static void drop(struct allocation **link)
{
	struct allocation *a = *link;
	memory_unmap(a);
	*link = a->next;
	free(a);
}

static CUresult release(CUdeviceptr address, bool imported)
{
	CUresult r = CUDA_ERROR_INVALID_VALUE;

	pthread_mutex_lock(&mutex);
	for (struct allocation **l = &allocations; *l; l = &(*l)->next) {
		if ((*l)->address == address && (*l)->kind != KIND_CONTEXT && (*l)->kind != KIND_HANDLE && (*l)->kind != KIND_HOST &&
		    ((*l)->kind == KIND_IMPORTED) == imported) {
			drop(l);
			r = CUDA_SUCCESS;
			break;
		}
	}
	pthread_mutex_unlock(&mutex);
	return r;
}

CUresult memory_release_imported(CUdeviceptr address)
{
	return release(address, true);
}

// Until now its memory file had no name. One that stays open takes its place, with what is in it.
static CUresult make_exportable(struct allocation *a)
{
	int fd = memory_file(a);

	if (fd < 0)
		return CUDA_ERROR_OPERATING_SYSTEM;
	if (pwrite(fd, (void *)a->address, a->bytes, 0) != (ssize_t)a->bytes ||
	    map_file(a, fd, MAP_FIXED)) {
		close(fd);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	a->export = fd;
	return CUDA_SUCCESS;
}

bool memory_imported_from(const struct allocation *a)
{
	return a->export >= 0 && fcntl(a->export, F_GET_SEALS) & F_SEAL_GROW;
}

CUresult memory_export(CUdeviceptr address, int *fd, size_t *bytes)
{
	CUresult r = CUDA_ERROR_INVALID_VALUE;

	pthread_mutex_lock(&mutex);
	for (struct allocation *a = allocations; a; a = a->next) {
		if (a->address != address || a->kind != KIND_DEVICE)
			continue;
		r = a->export < 0 ? make_exportable(a) : CUDA_SUCCESS;
		*fd = a->export;
		*bytes = a->bytes;
	}
	pthread_mutex_unlock(&mutex);
	return r;
}

static struct allocation *allocation_at(CUdeviceptr address)
{
	pthread_mutex_lock(&mutex);
	struct allocation *a = allocations;
	while (a && a->address != address)
		a = a->next;
	pthread_mutex_unlock(&mutex);
	return a;
}

CUresult memory_import(CUcontext context, int fd, size_t bytes, CUdeviceptr *address)
{
	fcntl(fd, F_ADD_SEALS, F_SEAL_GROW); // so that the exporter knows
	pthread_mutex_lock(&mutex);
	CUresult r = add(context, KIND_IMPORTED, bytes, fd, address);
	pthread_mutex_unlock(&mutex);
	return r;
}

CUresult memory_import_handle(CUcontext context, int fd, size_t bytes, CUmemGenericAllocationHandle *handle)
{
	int own = fcntl(fd, F_DUPFD_CLOEXEC, 0); // the caller may close its own

	if (own < 0)
		return CUDA_ERROR_OPERATING_SYSTEM;
	CUresult r = memory_import(context, own, bytes, handle);
	if (r)
		close(own);
	else
		allocation_at(*handle)->export = own;
	return r;
}

CUresult memory_host(CUcontext context, int fd, size_t bytes, CUmemGenericAllocationHandle *handle)
{
	int own = fd < 0 ? gpu_host_file(bytes) : fcntl(fd, F_DUPFD_CLOEXEC, 0);

	if (own < 0)
		return CUDA_ERROR_OPERATING_SYSTEM;
	pthread_mutex_lock(&mutex);
	CUresult r = add(context, KIND_HOST, bytes, own, handle);
	pthread_mutex_unlock(&mutex);
	if (r)
		close(own);
	return r;
}

struct allocation *memory_handle(CUmemGenericAllocationHandle handle)
{
	struct allocation *a = allocation_at(handle);

	return a && (a->kind == KIND_HANDLE || a->kind == KIND_HOST || (a->kind == KIND_IMPORTED && a->export >= 0)) ? a : NULL;
}

void memory_drop(struct allocation *a)
{
	pthread_mutex_lock(&mutex);
	struct allocation **l = &allocations;
	while (*l != a)
		l = &(*l)->next;
	drop(l);
	pthread_mutex_unlock(&mutex);
}

static void drop_pinned(struct pinned **link)
{
	struct pinned *p = *link;

	*link = p->next;
	if (!p->registered)
		munmap(p->address, p->bytes);
	free(p);
}

void memory_release_context(CUcontext context)
{
	pthread_mutex_lock(&mutex);
	for (struct pinned **l = &pinned; *l;) {
		if ((*l)->context == context)
			drop_pinned(l);
		else
			l = &(*l)->next;
	}
	for (struct allocation **l = &allocations; *l;) {
		if ((*l)->context == context)
			drop(l);
		else
			l = &(*l)->next;
	}
	pthread_mutex_unlock(&mutex);
}

void *memory_at(CUdeviceptr address, size_t bytes)
{
	void *found = NULL;

	pthread_mutex_lock(&mutex);
	for (struct allocation *a = allocations; a; a = a->next)
		if (a->kind != KIND_HOST && address >= a->address && address - a->address <= a->bytes &&
		    bytes <= a->bytes - (address - a->address))
			found = (void *)address;
	for (struct pinned *p = pinned; p; p = p->next)
		if (address >= (CUdeviceptr)p->address && address - (CUdeviceptr)p->address <= p->bytes &&
		    bytes <= p->bytes - (address - (CUdeviceptr)p->address))
			found = (void *)address;
	pthread_mutex_unlock(&mutex);
	return found || !vmm_has(address, bytes) ? found : (void *)address;
}

// enter_context enters the gate and asks for a current context; on an error the gate has been left.
static CUresult enter_context(CUcontext *context)
{
	CUresult r = gate_enter();
	if (r)
		return r;
	*context = context_current();
	return *context ? CUDA_SUCCESS : gate_leave(CUDA_ERROR_INVALID_CONTEXT);
}

// enter_copy is enter_context for work that comes after what streams have.
static CUresult enter_copy(CUcontext *context)
{
	CUresult r = enter_context(context);

	if (!r)
		streams_settle(0);
	return r;
}

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
	CUcontext c;
	CUresult r = enter_context(&c);
	if (r)
		return r;
	if (!free_bytes || !total)
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	struct config config;
	config_load(&config);
	*total = process.gpu[c->ordinal].total;
	size_t used = memory_in_use(c->ordinal) + config.taken;
	*free_bytes = used < *total ? *total - used : 0;
	return gate_leave(CUDA_SUCCESS);
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes)
{
	CUcontext c;
	CUresult r = enter_context(&c);
	if (r)
		return r;
	return gate_leave(memory_allocate(c, KIND_DEVICE, bytes, address));
}

CUresult cuMemAllocManaged(CUdeviceptr *address, size_t bytes, unsigned int flags)
{
	CUcontext c;
	CUresult r = enter_context(&c);
	if (r)
		return r;
	if (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST)
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	return gate_leave(memory_allocate(c, KIND_MANAGED, bytes, address));
}

CUresult cuMemFree_v2(CUdeviceptr address)
{
	CUcontext c;
	CUresult r = enter_context(&c);
	if (r)
		return r;
	return gate_leave(release(address, false));
}

// pin makes host memory known to the GPU: the program's own, or new one at *address.
static CUresult pin(CUcontext context, char **address, size_t bytes, bool registered)
{
	struct pinned *p = calloc(1, sizeof *p);
	char *at = registered ? *address : MAP_FAILED;

	if (p && !registered) // shared, as the driver's is
		at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (!p || at == MAP_FAILED) {
		free(p);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	if (!registered) // which need not be zeros
		memset(at, 0xa5, bytes < PAGE ? bytes : PAGE);
	p->address = *address = at;
	p->bytes = bytes;
	p->registered = registered;
	p->context = context;
	pthread_mutex_lock(&mutex);
	p->next = pinned;
	pinned = p;
	pthread_mutex_unlock(&mutex);
	return CUDA_SUCCESS;
}

static CUresult unpin(const void *address, bool registered)
{
	CUresult r = CUDA_ERROR_INVALID_VALUE;

	pthread_mutex_lock(&mutex);
	for (struct pinned **l = &pinned; *l; l = &(*l)->next) {
		struct pinned *p = *l;
		if (p->address != address || p->registered != registered)
			continue;
		drop_pinned(l);
		r = CUDA_SUCCESS;
		break;
	}
	pthread_mutex_unlock(&mutex);
	return r;
}

CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned int flags)
{
	CUcontext c;
	CUresult r = enter_context(&c);
	if (r)
		return r;
	(void)flags; // portable, mapped and write-combined are all the same here
	if (!address || !bytes)
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	return gate_leave(pin(c, (char **)address, bytes, false));
}

CUresult cuMemHostRegister_v2(void *address, size_t bytes, unsigned int flags)
{
	CUcontext c;
	CUresult r = enter_context(&c);
	if (r)
		return r;
	(void)flags;
	if (!address || !bytes)
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	return gate_leave(pin(c, (char **)&address, bytes, true));
}

CUresult cuMemHostUnregister(void *address)
{
	CUcontext c;
	CUresult r = enter_context(&c);
	return r ? r : gate_leave(unpin(address, true));
}

CUresult cuMemAllocHost_v2(void **address, size_t bytes)
{
	return cuMemHostAlloc(address, bytes, 0);
}

CUresult cuMemFreeHost(void *address)
{
	CUcontext c;
	CUresult r = enter_context(&c);
	return r ? r : gate_leave(unpin(address, false));
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *host, unsigned int flags)
{
	CUcontext c;
	CUresult r = enter_context(&c);
	if (r)
		return r;
	if (!device || flags || !memory_at((CUdeviceptr)host, 1))
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	*device = (CUdeviceptr)host; // one address space, as with unified addressing
	return gate_leave(CUDA_SUCCESS);
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes)
{
	CUcontext c;
	CUresult r = enter_copy(&c);
	if (r)
		return r;
	void *at = memory_at(to, bytes);
	if (!at || !from)
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	memcpy(at, from, bytes);
	return gate_leave(CUDA_SUCCESS);
}

CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes)
{
	CUcontext c;
	CUresult r = enter_copy(&c);
	if (r)
		return r;
	void *at = memory_at(from, bytes);
	if (!at || !to)
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	memcpy(to, at, bytes);
	return gate_leave(CUDA_SUCCESS);
}

// Work is done when its call returns, whatever the stream.
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream)
{
	(void)stream;
	return cuMemcpyHtoD_v2(to, from, bytes);
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream)
{
	struct config config;

	(void)stream;
	config_load(&config);
	pause_ms(config.out_delay_ms);
	return cuMemcpyDtoH_v2(to, from, bytes);
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
	CUcontext c;
	CUresult r = enter_copy(&c);
	if (r)
		return r;
	(void)stream;
	void *target = memory_at(to, bytes), *source = memory_at(from, bytes);
	if (!target || !source)
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	memmove(target, source, bytes);
	return gate_leave(CUDA_SUCCESS);
}

// The range of what cuMemAlloc has returned.
CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address)
{
	CUresult r = gate_enter();
	if (r)
		return r;
	r = CUDA_ERROR_NOT_FOUND;
	pthread_mutex_lock(&mutex);
	for (struct allocation *a = allocations; a; a = a->next) {
		if ((a->kind != KIND_DEVICE && a->kind != KIND_MANAGED) || address < a->address || address - a->address >= a->bytes)
			continue;
		if (base)
			*base = a->address;
		if (bytes)
			*bytes = a->bytes;
		r = CUDA_SUCCESS;
	}
	pthread_mutex_unlock(&mutex);
	return gate_leave(r);
}

CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t bytes)
{
	CUcontext c;
	CUresult r = enter_copy(&c);
	if (r)
		return r;
	void *at = memory_at(to, bytes);
	if (!at)
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	memset(at, value, bytes);
	return gate_leave(CUDA_SUCCESS);
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream)
{
	(void)stream;
	return cuMemsetD8_v2(to, value, bytes);
}
