// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Virtual memory management: memory (cuMemCreate) and addresses (cuMemAddressReserve) are had apart,
// and memory is mapped at addresses, exported to other processes and imported from them.
//
// Memory is an allocation of memory.c's, mapped at an address of its own that the program does not
// know, so that it is counted, checkpointed and restored as any other. A program's mapping is another
// one of the same memory file. Host memory has no other mapping than the program's. Exported and imported memory leaves no trace in /proc, and its restore
// fails, as ipc.c's.

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "softcuda.h"

#define GRANULARITY ((size_t)2 << 20)
#ifndef FIRST_RESERVED // see memory.c
#define FIRST_RESERVED 0x302000000 // as driver 580; below all addresses of memory.c
#endif

struct view {
	struct view *next;
	struct allocation *of;
	CUdeviceptr address;
	unsigned reach; // the GPUs that may, by ordinals; 1 for host memory that the program may reach
};

struct range {
	struct range *next;
	CUdeviceptr address;
	size_t bytes;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
// Memory belongs to a GPU and to no context.
static struct CUctx_st owners[MAX_GPUS];
static struct view *views;
static struct range *ranges;
static CUdeviceptr next_address = FIRST_RESERVED;

static bool usable(const CUmemAllocationProp *p)
{
	if (!p || p->type != CU_MEM_ALLOCATION_TYPE_PINNED)
		return false;
	if (p->location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA)
		return p->location.id == 0;
	return p->location.type == CU_MEM_LOCATION_TYPE_DEVICE && p->location.id >= 0 && p->location.id < process.gpus;
}

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop, int option)
{
	CUresult r = gate_enter();
	if (r)
		return r;
	(void)option; // minimum and recommended are the same
	if (!granularity || !usable(prop))
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	*granularity = GRANULARITY;
	return gate_leave(CUDA_SUCCESS);
}

static CUresult reserve(CUdeviceptr *address, size_t bytes)
{
	struct range *r = calloc(1, sizeof *r);

	if (!r)
		return CUDA_ERROR_OUT_OF_MEMORY;
	r->address = next_address;
	r->bytes = bytes;
	if (mmap((void *)r->address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0) == MAP_FAILED) {
		free(r);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	next_address += bytes + GRANULARITY;
	r->next = ranges;
	ranges = r;
	*address = r->address;
	return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr wanted, uint64_t flags)
{
	CUresult r = gate_enter();
	if (r)
		return r;
	(void)wanted; // a wish, as in the real driver
	if (!address || !bytes || bytes % GRANULARITY || alignment > GRANULARITY || flags)
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	pthread_mutex_lock(&mutex);
	r = reserve(address, bytes);
	pthread_mutex_unlock(&mutex);
	return gate_leave(r);
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes)
{
	CUresult r = gate_enter();
	if (r)
		return r;
	r = CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&mutex);
	for (struct range **l = &ranges; *l; l = &(*l)->next) {
		struct range *found = *l;
		if (found->address != address || found->bytes != bytes)
			continue;
		for (struct view *v = views; v; v = v->next)
			if (v->address >= address && v->address < address + bytes)
				goto out; // still mapped
		*l = found->next;
		munmap((void *)address, bytes);
		free(found);
		r = CUDA_SUCCESS;
		break;
	}
out:
	pthread_mutex_unlock(&mutex);
	return gate_leave(r);
}

static CUcontext owner(int ordinal)
{
	owners[ordinal].ordinal = ordinal;
	return &owners[ordinal];
}

// A handle is its allocation's address.
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop, uint64_t flags)
{
	CUresult r = gate_enter();
	if (r)
		return r;
	if (!handle || !bytes || bytes % GRANULARITY || flags || !usable(prop))
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	if (prop->location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA)
		r = memory_host(owner(0), -1, bytes, handle);
	else
		r = memory_allocate(owner(prop->location.id), KIND_HANDLE, bytes, handle);
	if (!r) {
		memory_handle(*handle)->held = 1;
		memory_handle(*handle)->prop = *prop;
	}
	return gate_leave(r);
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
	CUresult r = gate_enter();
	if (r)
		return r;
	r = CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&mutex);
	struct allocation *a = memory_handle(handle);
	if (a && a->held) {
		if (!--a->held && !a->views) // else it goes with its last view
			memory_drop(a);
		r = CUDA_SUCCESS;
	}
	pthread_mutex_unlock(&mutex);
	return gate_leave(r);
}

// show maps a view, with or without access.
static CUresult show(const struct view *v)
{
	int access = v->reach ? PROT_READ | PROT_WRITE : PROT_NONE;

	if (v->of->kind == KIND_IMPORTED)
		access |= PROT_EXEC; // what gpu.c knows it by
	int populate = v->of->kind == KIND_HOST ? MAP_POPULATE : 0; // as the kernel module
	void *at = mmap((void *)v->address, v->of->bytes, access, MAP_SHARED | MAP_FIXED | populate, v->of->export, 0);
	return at == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

static void hide(const struct view *v)
{
	mmap((void *)v->address, v->of->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

// is_free tells whether a range of addresses is reserved and nothing is mapped there.
static bool is_free(CUdeviceptr address, size_t bytes)
{
	for (struct view *v = views; v; v = v->next)
		if (v->address < address + bytes && address < v->address + v->of->bytes)
			return false;
	for (struct range *r = ranges; r; r = r->next)
		if (address >= r->address && address + bytes <= r->address + r->bytes)
			return true;
	return false;
}

static CUresult add_view(CUdeviceptr address, struct allocation *a)
{
	struct view *v = calloc(1, sizeof *v);
	CUresult r;

	if (!v)
		return CUDA_ERROR_OUT_OF_MEMORY;
	v->of = a;
	v->address = address;
	if ((r = show(v))) {
		free(v);
		return r;
	}
	a->views++;
	v->next = views;
	views = v;
	return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, uint64_t flags)
{
	CUresult r = gate_enter();
	if (r)
		return r;
	struct allocation *a = memory_handle(handle);
	if (!a || !a->held || offset || flags || bytes != a->bytes)
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	pthread_mutex_lock(&mutex);
	r = is_free(address, bytes) ? add_view(address, a) : CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_unlock(&mutex);
	return gate_leave(r);
}

// reaches_another tells whether memory of a GPU is mapped for another one.
static bool reaches_another(const struct view *v)
{
	return v->of->kind != KIND_HOST && v->reach & ~(1u << v->of->context->ordinal);
}

static void allow(struct view *v, const CUmemAccessDesc *desc)
{
	unsigned bit = desc->location.type == CU_MEM_LOCATION_TYPE_DEVICE ? 1u << (desc->location.id & 31) : 1;

	endpoint.reach[1] -= reaches_another(v);
	if (desc->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
		v->reach |= bit;
	else
		v->reach &= ~bit;
	endpoint.reach[1] += reaches_another(v);
}

static CUresult change(CUdeviceptr address, size_t bytes, bool unmap, const CUmemAccessDesc *desc, size_t count)
{
	bool found = false;

	for (struct view **l = &views; *l;) {
		struct view *v = *l;
		if (v->address < address || v->address + v->of->bytes > address + bytes) {
			l = &v->next;
			continue;
		}
		found = true;
		if (!unmap) {
			for (size_t i = 0; i < count; i++)
				allow(v, &desc[i]);
			show(v);
			l = &v->next;
			continue;
		}
		*l = v->next;
		endpoint.reach[1] -= reaches_another(v);
		hide(v);
		if (!--v->of->views && !v->of->held)
			memory_drop(v->of);
		free(v);
	}
	return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes)
{
	struct config config;
	CUresult r = gate_enter();
	if (r)
		return r;
	config_load(&config);
	if (config.unmap_code)
		return gate_leave(config.unmap_code);
	pthread_mutex_lock(&mutex);
	r = change(address, bytes, true, NULL, 0);
	pthread_mutex_unlock(&mutex);
	return gate_leave(r);
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *desc, size_t count)
{
	CUresult r = gate_enter();
	if (r)
		return r;
	if (!desc || !count)
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	for (size_t i = 0; i < count; i++)
		if (desc[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE && (desc[i].location.id < 0 || desc[i].location.id >= process.gpus))
			return gate_leave(CUDA_ERROR_INVALID_DEVICE);
	pthread_mutex_lock(&mutex);
	r = change(address, bytes, false, desc, count);
	pthread_mutex_unlock(&mutex);
	return gate_leave(r);
}

static struct view *view_at(CUdeviceptr address)
{
	struct view *v;

	for (v = views; v && (address < v->address || address - v->address >= v->of->bytes); v = v->next)
		;
	return v;
}

CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr address)
{
	CUresult r = gate_enter();
	if (r)
		return r;
	if (!flags || !location || location->type != CU_MEM_LOCATION_TYPE_DEVICE || location->id < 0 || location->id >= process.gpus)
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	pthread_mutex_lock(&mutex);
	struct view *v = view_at(address);
	if (v)
		*flags = v->reach >> location->id & 1 ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : 0;
	pthread_mutex_unlock(&mutex);
	return gate_leave(v ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

bool vmm_reaches(int ordinal, CUdeviceptr address)
{
	pthread_mutex_lock(&mutex);
	struct view *v = view_at(address);
	bool reaches = !v || v->of->kind == KIND_HOST || v->reach >> ordinal & 1;
	pthread_mutex_unlock(&mutex);
	return reaches;
}

CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle, int type, uint64_t flags)
{
	CUresult r = gate_enter();
	if (r)
		return r;
	struct allocation *a = memory_handle(handle);
	if (!shareable || !a || !a->held || !(a->prop.requestedHandleTypes & type) || flags)
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	if (type == CU_MEM_HANDLE_TYPE_FABRIC) {
		memset(shareable, 0, sizeof(CUipcMemHandle)); // which is as large
		return gate_leave(foreign_share());
	}
	if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	int fd = fcntl(a->export, F_DUPFD_CLOEXEC, 0);
	if (fd < 0)
		return gate_leave(CUDA_ERROR_OPERATING_SYSTEM);
	*(int *)shareable = fd;
	return gate_leave(CUDA_SUCCESS);
}

// maker returns the ordinal of the GPU that has the memory of a file; otherwise if that is not known.
static int maker(int fd, int otherwise)
{
	char path[64], file[200], name[160] = "/memfd:";

	snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
	ssize_t n = readlink(path, file, sizeof file - 1);
	file[n < 0 ? 0 : n] = '\0';
	for (int i = 0; i < process.gpus; i++) {
		gpu_memory_name(&process.gpu[i], name + strlen("/memfd:"), sizeof name - strlen("/memfd:"));
		size_t length = strlen(name);
		if (!strncmp(file, name, length) && (!file[length] || file[length] == ' '))
			return i;
	}
	return otherwise;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *os_handle, int type)
{
	CUresult r = gate_enter();
	if (r)
		return r;
	CUcontext c = context_current();
	off_t bytes = lseek((int)(intptr_t)os_handle, 0, SEEK_END);
	if (!handle || !c || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || bytes <= 0)
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	// A file with a name, once, is host memory.
	if (fcntl((int)(intptr_t)os_handle, F_GET_SEALS) & F_SEAL_SEAL)
		r = memory_host(owner(0), (int)(intptr_t)os_handle, (size_t)bytes, handle);
	else
		r = memory_import_handle(owner(maker((int)(intptr_t)os_handle, c->ordinal)), (int)(intptr_t)os_handle, (size_t)bytes, handle);
	if (!r) {
		struct allocation *a = memory_handle(*handle);
		a->held = 1;
		a->prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
		a->prop.location = (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, a->context->ordinal};
		if (a->kind == KIND_HOST)
			a->prop.location = (CUmemLocation){CU_MEM_LOCATION_TYPE_HOST_NUMA, 0};
	}
	return gate_leave(r);
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
	CUresult r = gate_enter();
	if (r)
		return r;
	r = CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&mutex);
	for (struct view *v = views; v && handle; v = v->next) {
		if ((CUdeviceptr)address < v->address || (CUdeviceptr)address - v->address >= v->of->bytes)
			continue;
		v->of->held++;
		*handle = v->of->address;
		r = CUDA_SUCCESS;
	}
	pthread_mutex_unlock(&mutex);
	return gate_leave(r);
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)
{
	CUresult r = gate_enter();
	if (r)
		return r;
	struct allocation *a = memory_handle(handle);
	if (!prop || !a || !a->held || !a->prop.type)
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	*prop = a->prop;
	return gate_leave(CUDA_SUCCESS);
}

bool vmm_has(CUdeviceptr address, size_t bytes)
{
	bool found = false;

	pthread_mutex_lock(&mutex);
	for (struct view *v = views; v; v = v->next)
		found |= v->reach && address >= v->address && address - v->address <= v->of->bytes &&
		         bytes <= v->of->bytes - (address - v->address);
	pthread_mutex_unlock(&mutex);
	return found;
}

bool vmm_reaches_exportable(void)
{
	bool found = false;

	for (struct view *v = views; v; v = v->next)
		found |= reaches_another(v) && v->of->prop.requestedHandleTypes;
	return found;
}

void vmm_hide(void)
{
	for (struct view *v = views; v; v = v->next)
		hide(v);
}

CUresult vmm_show(void)
{
	for (struct view *v = views; v; v = v->next) {
		CUresult r = show(v);
		if (r)
			return r;
	}
	return CUDA_SUCCESS;
}
