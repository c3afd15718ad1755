// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// GPU memory that a program makes by cuMemCreate so that other processes can import it, and what it
// imports from them. The program has numbers of the interposer's for handles, and for descriptors files
// with a ticket (share.c). So the driver's can be others after a checkpoint.
//
// The interposer has such memory mapped once more, at an address of its own, from which it is saved.

#include "block.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/memfd.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ID_BASE ((CUhandle)0x67706b74 << 32) // no address, as the driver's are

static CUhandle last_id = ID_BASE;

static struct block *block_of(CUhandle id)
{
	struct block *b;

	lock(LOCK_BLOCKS);
	for (b = blocks; b && (b->id != id || !id); b = b->next)
		;
	unlock(LOCK_BLOCKS);
	return b;
}

struct block *vmm_block(CUdeviceptr p)
{
	struct block *found = NULL;

	lock(LOCK_BLOCKS);
	for (struct block *b = blocks; b && !found; b = b->next)
		for (struct view *v = b->views; v && !found; v = v->next)
			if (p >= v->address && p - v->address < v->bytes)
				found = b;
	unlock(LOCK_BLOCKS);
	return found;
}

static CUresult show(struct block *b);

CUresult vmm_hide(struct block *b)
{
	CUresult r = CUDA_SUCCESS;

	for (struct view *v = b->views; v && !r; v = v->next)
		if (v->shown && !(r = driver.cuMemUnmap(v->address, v->bytes)))
			v->shown = false;
	if (r)
		show(b);
	return r;
}

static CUresult show(struct block *b)
{
	CUresult r = CUDA_SUCCESS;

	for (struct view *v = b->views; v && !r; v = v->next) {
		if (v->shown || (r = driver.cuMemMap(v->address, v->bytes, v->offset, b->handle, v->flags)))
			continue;
		v->shown = true;
		if (v->count)
			r = driver.cuMemSetAccess(v->address, v->bytes, v->access, v->count);
	}
	return r;
}

CUresult vmm_show(struct block *b)
{
	CUresult r = show(b);

	if (r)
		vmm_hide(b);
	return r;
}

// is_ours reports whether memory is for other processes, which may import it by a descriptor.
static bool is_ours(const CUmemAllocationProp *p)
{
	return p && p->type == CU_PINNED && p->location.type == CU_DEVICE && p->requestedHandleTypes & CU_POSIX_FD;
}

// is_host reports whether memory is the host's, by whichever of CUDA's names.
static bool is_host(const CUmemAllocationProp *p)
{
	return p && p->location.type != CU_DEVICE;
}

// name has a number for a block that is not in the list yet, and that the program is to hold.
static struct block *name(struct block *b)
{
	lock(LOCK_HANDLES);
	b->id = ++last_id;
	b->held = 1;
	unlock(LOCK_HANDLES);
	return b;
}

// note_host notes host memory by the driver's handle, and returns what the program has for a handle. The memory stays
// the driver's, which does not restore it: a checkpoint is refused until the program has given it back. NCCL makes
// such memory once to see whether it can, and has none of it between GPUs that reach each other.
static CUhandle note_host(CUhandle handle, size_t bytes)
{
	struct block *b = block_ready() ? calloc(1, sizeof *b) : NULL;

	if (!b) {
		block_lost(LOST_HOST);
		return handle;
	}
	*b = (struct block){.handle = handle, .bytes = bytes, .asked = bytes, .mapped = true, .given = true, .host = true};
	block_add(name(b));
	return b->id;
}

static CUresult create(CUhandle *handle, size_t bytes, const CUmemAllocationProp *prop, uint64_t flags)
{
	struct block *b = NULL;
	CUresult r;

	if (!block_ready() || !handle || !bytes || flags || !is_ours(prop) || !(b = block_here(bytes)) || b->device != prop->location.id ||
	    driver.cuMemAddressReserve(&b->address, bytes, 0, 0, 0))
		goto drivers;
	b->prop = *prop;
	r = block_have(name(b));
	if (r == CUDA_ERROR_OUT_OF_MEMORY && keep_wait())
		r = block_have(b);
	if (!r) {
		*handle = b->id;
		return r;
	}
	block_end(b);
	b = NULL;
drivers: // whose error, if there is one, is the program's
	free(b);
	r = driver.cuMemCreate(handle, bytes, prop, flags);
	if (r == CUDA_ERROR_OUT_OF_MEMORY && keep_wait())
		r = driver.cuMemCreate(handle, bytes, prop, flags);
	if (!r && is_host(prop))
		*handle = note_host(*handle, bytes);
	return r;
}

static void settle(struct block *b)
{
	if (!b->held && !b->views && !b->visible)
		block_end(b);
}

bool vmm_keeps(struct block *b)
{
	lock(LOCK_HANDLES);
	bool keeps = b->held || b->views;
	lock(LOCK_BLOCKS);
	b->visible = b->visible && !keeps;
	unlock(LOCK_BLOCKS);
	unlock(LOCK_HANDLES);
	return keeps;
}

static CUresult release(CUhandle handle)
{
	CUresult r = CUDA_SUCCESS;

	lock(LOCK_HANDLES);
	struct block *b = block_of(handle);
	if (b && !b->held)
		r = CUDA_ERROR_INVALID_VALUE;
	else if (b)
		b->held--, settle(b);
	unlock(LOCK_HANDLES);
	return b ? r : driver.cuMemRelease(handle);
}

static CUresult map(CUdeviceptr address, size_t bytes, size_t offset, CUhandle handle, uint64_t flags)
{
	struct block *b = block_of(handle);
	struct view *v = b ? calloc(1, sizeof *v) : NULL;

	if (!b)
		return driver.cuMemMap(address, bytes, offset, handle, flags);
	if (!v)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*v = (struct view){.address = address, .bytes = bytes, .offset = offset, .flags = flags, .shown = true};
	lock(LOCK_HANDLES);
	CUresult r = b->mapped ? driver.cuMemMap(address, bytes, offset, b->handle, flags) : CUDA_ERROR_INVALID_VALUE;
	if (!r) {
		lock(LOCK_BLOCKS);
		v->next = b->views;
		b->views = v;
		unlock(LOCK_BLOCKS);
	}
	unlock(LOCK_HANDLES);
	if (r)
		free(v);
	return r;
}

// forget_views takes a range's views from the blocks, and returns how many there were.
static unsigned forget_views(CUdeviceptr address, size_t bytes)
{
	unsigned n = 0;

	lock(LOCK_BLOCKS);
	for (struct block *b = blocks; b; b = b->next) {
		for (struct view **l = &b->views; *l;) {
			struct view *v = *l;
			if (v->address < address || v->address + v->bytes > address + bytes) {
				l = &v->next;
				continue;
			}
			*l = v->next;
			free(v);
			n++;
		}
	}
	unlock(LOCK_BLOCKS);
	return n;
}

// is_lost reports whether a range is one of a block whose memory is lost: the driver has nothing there.
static bool is_lost(CUdeviceptr address)
{
	struct block *b = vmm_block(address);
	return b && !b->mapped;
}

static struct block *unused(void)
{
	struct block *b;

	lock(LOCK_BLOCKS);
	for (b = blocks; b && !(b->id && !b->held && !b->views && !b->visible); b = b->next)
		;
	unlock(LOCK_BLOCKS);
	return b;
}

static CUresult unmap(CUdeviceptr address, size_t bytes)
{
	struct block *b;

	lock(LOCK_HANDLES);
	CUresult r = is_lost(address) ? CUDA_SUCCESS : driver.cuMemUnmap(address, bytes);
	if (!r && forget_views(address, bytes))
		while ((b = unused()) && !block_end(b))
			;
	unlock(LOCK_HANDLES);
	return r;
}

static void note_access(struct view *v, const CUmemAccessDesc *desc)
{
	unsigned i = 0;

	while (i < v->count && (v->access[i].location.type != desc->location.type || v->access[i].location.id != desc->location.id))
		i++;
	if (i == MAX_DEVICES)
		return;
	v->access[i] = *desc;
	v->count += i == v->count;
}

static CUresult set_access(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *desc, size_t count)
{
	lock(LOCK_HANDLES);
	CUresult r = driver.cuMemSetAccess(address, bytes, desc, count);
	lock(LOCK_BLOCKS);
	for (struct block *b = blocks; b && !r; b = b->next)
		for (struct view *v = b->views; v; v = v->next)
			for (size_t i = 0; i < count && v->address < address + bytes && address < v->address + v->bytes; i++)
				note_access(v, &desc[i]);
	unlock(LOCK_BLOCKS);
	unlock(LOCK_HANDLES);
	return r;
}

static CUresult retain(CUhandle *handle, void *p)
{
	struct block *b = vmm_block((CUdeviceptr)p);

	b = b ? b : block_at((CUdeviceptr)p);
	if (!b || !handle)
		return driver.cuMemRetainAllocationHandle(handle, p);
	lock(LOCK_HANDLES);
	lock(LOCK_BLOCKS);
	b->id = b->id ? b->id : ++last_id;
	unlock(LOCK_BLOCKS);
	b->held++;
	*handle = b->id;
	unlock(LOCK_HANDLES);
	return CUDA_SUCCESS;
}

static CUresult properties(CUmemAllocationProp *prop, CUhandle handle)
{
	struct block *b = block_of(handle);

	return driver.cuMemGetAllocationPropertiesFromHandle(prop, b ? b->handle : handle);
}

static CUresult bind(CUhandle multicast, size_t to, CUhandle handle, size_t from, size_t bytes, uint64_t flags)
{
	struct block *b = block_of(handle);
	CUresult r = driver.cuMulticastBindMem(multicast, to, b ? b->handle : handle, from, bytes, flags);

	if (!r && b)
		block_is_given(b);
	return r;
}

static CUresult multicast(CUhandle *handle, const void *prop)
{
	CUresult r = driver.cuMulticastCreate(handle, prop);

	if (!r)
		block_lost(LOST_UNKNOWN);
	return r;
}

// file_of makes a file with a ticket, which a program passes on as it would the driver's descriptor.
static int file_of(const struct ticket *t)
{
	int fd = (int)syscall(SYS_memfd_create, "gpuckpt", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	if (fd >= 0 && pwrite(fd, t, sizeof *t, 0) == sizeof *t && !fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE))
		return fd;
	if (fd >= 0)
		close(fd);
	return -1;
}

static CUresult export(void *shareable, CUhandle handle, int type, uint64_t flags)
{
	struct block *b = block_of(handle);
	struct ticket t = {.number = 0};

	if (!b || b->host || type != CU_POSIX_FD || !shareable || flags) {
		CUresult r = driver.cuMemExportToShareableHandle(shareable, b ? b->handle : handle, type, flags);
		if (!r && type != CU_POSIX_FD)
			block_lost(LOST_UNKNOWN);
		else if (!r && b && b->host) // others may have it when this process has it no more
			block_lost(LOST_HOST);
		return r;
	}
	if (block_is_import(b))
		t = b->from;
	else if (!block_ticket(b, &t))
		return CUDA_ERROR_NOT_SUPPORTED;
	int fd = file_of(&t);
	if (fd < 0)
		return CUDA_ERROR_OPERATING_SYSTEM;
	*(int *)shareable = fd;
	return CUDA_SUCCESS;
}

// own returns a block of this process's own by its ticket, held once more.
static struct block *own(const struct ticket *t)
{
	struct block *b;

	lock(LOCK_HANDLES);
	lock(LOCK_BLOCKS);
	for (b = blocks; b && !(b->id && b->number == t->number); b = b->next)
		;
	unlock(LOCK_BLOCKS);
	if (b)
		b->held++;
	unlock(LOCK_HANDLES);
	return b;
}

static CUresult import(CUhandle *handle, void *shareable, int type)
{
	CUmemAllocationProp prop;
	struct ticket t;
	struct block *b;
	CUresult r;

	if (type != CU_POSIX_FD || pread((int)(intptr_t)shareable, &t, sizeof t, 0) != sizeof t || !share_known(&t)) {
		r = driver.cuMemImportFromShareableHandle(handle, shareable, type);
		if (!r && type != CU_POSIX_FD)
			block_lost(LOST_UNKNOWN);
		else if (!r && properties(&prop, *handle) == CUDA_SUCCESS && is_host(&prop))
			block_lost(LOST_HOST);
		return r;
	}
	if (!block_ready() || !handle)
		return CUDA_ERROR_INVALID_VALUE;
	if (share_own(&t)) {
		if ((b = own(&t)))
			*handle = b->id;
		return b ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
	}
	if (!(b = block_here(t.bytes)))
		return CUDA_ERROR_INVALID_CONTEXT;
	b->from = t;
	if ((r = block_have(name(b)))) {
		free(b);
		return r == CUDA_ERROR_NOT_FOUND ? CUDA_ERROR_INVALID_VALUE : r;
	}
	*handle = b->id;
	return r;
}

const struct override vmm_overrides[] = {
	{"cuMemCreate", create}, {"cuMemRelease", release}, {"cuMemMap", map}, {"cuMemUnmap", unmap},
	{"cuMemSetAccess", set_access}, {"cuMemRetainAllocationHandle", retain},
	{"cuMemGetAllocationPropertiesFromHandle", properties}, {"cuMulticastCreate", multicast},
	{"cuMulticastBindMem", bind}, {"cuMemExportToShareableHandle", export},
	{"cuMemImportFromShareableHandle", import},
	{NULL, NULL},
};
