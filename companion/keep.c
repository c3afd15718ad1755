// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// GPU memory that stays on the GPU while the driver checkpoints the process. Memory of cuMemCreate lives for as long as
// anybody has a descriptor of it open, whatever becomes of the process that made it (driver 580.159). So the blocks are
// exported, the shim takes the descriptors, and the blocks are given back to the driver:
//
//	exported --keep_release--> away --keep_take--> mapped --keep_return--> mapped --keep_drain--> gone
//
// Driver 580 never restores a process that was checkpointed with an import mapped. So the program does not get the kept
// memory: its blocks are made anew and filled by a copy within the GPU, and what is kept is mapped at addresses of its
// own until it is copied out. The program's threads run meanwhile, and may free the blocks.

#include "block.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

// What a GPU must have free beside its blocks: the driver's own memory comes and goes in a checkpoint, and the program
// may want some. A context has some hundreds of MiB.
#define SPARE ((size_t)1 << 30)

struct kept {
	CUdeviceptr address; // 0 before it is taken
	size_t bytes;
	CUhandle handle;
	CUcontext context;
	CUdevice device;
};

// own is a descriptor that the program may have closed, and then have another file by the same number.
struct own {
	int fd;
	dev_t dev;
	ino_t ino;
};

static struct kept *all; // NULL when there is none
static size_t count, exported, taken;
static int batch[KEEP_BATCH];
static uint32_t batched;
static struct own near = {.fd = -1}, far = {.fd = -1};
static bool away;       // the memory is nowhere but with the shim
static struct {
	void *start;
	size_t bytes;
} host; // where it is copied out to, once the program has its memory again; bytes 0 for nowhere
static uint32_t mapped; // some of it is mapped here: the program's threads look at it

static struct {
	CUresult (*CtxSetCurrent)(CUcontext);
	CUresult (*GetInfo)(size_t *, size_t *);
	CUresult (*AddressReserve)(CUdeviceptr *, size_t, size_t, CUdeviceptr, uint64_t);
	CUresult (*AddressFree)(CUdeviceptr, size_t);
	CUresult (*Release)(CUhandle);
	CUresult (*Map)(CUdeviceptr, size_t, size_t, CUhandle, uint64_t);
	CUresult (*Unmap)(CUdeviceptr, size_t);
	CUresult (*SetAccess)(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);
	CUresult (*Export)(void *, CUhandle, int, uint64_t);
	CUresult (*Import)(CUhandle *, void *, int);
	CUresult (*Copy)(CUdeviceptr, CUdeviceptr, size_t, CUstream);
} cu;

static const struct {
	const char *name;
	void *function;
} functions[] = {
	{"cuCtxSetCurrent", &cu.CtxSetCurrent},
	{"cuMemGetInfo_v2", &cu.GetInfo},
	{"cuMemAddressReserve", &cu.AddressReserve},
	{"cuMemAddressFree", &cu.AddressFree},
	{"cuMemRelease", &cu.Release},
	{"cuMemMap", &cu.Map},
	{"cuMemUnmap", &cu.Unmap},
	{"cuMemSetAccess", &cu.SetAccess},
	{"cuMemExportToShareableHandle", &cu.Export},
	{"cuMemImportFromShareableHandle", &cu.Import},
	{"cuMemcpyDtoDAsync_v2", &cu.Copy},
};

static bool ready(void)
{
	for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
		void *f = companion_real(functions[i].name);
		if (!f)
			return false;
		memcpy(functions[i].function, &f, sizeof f);
	}
	return true;
}

// By a system call: an older C library has no such function.
static bool file_of(int fd, struct stat *st)
{
	return fd >= 0 && !syscall(SYS_fstat, fd, st);
}

static struct own own(int fd)
{
	struct own o = {.fd = fd};
	struct stat st;

	if (!file_of(fd, &st))
		return (struct own){.fd = -1};
	o.dev = st.st_dev;
	o.ino = st.st_ino;
	return o;
}

static bool is_there(const struct own *o)
{
	struct stat st;

	return file_of(o->fd, &st) && st.st_dev == o->dev && st.st_ino == o->ino;
}

static void end(struct own *o)
{
	if (is_there(o))
		close(o->fd);
	o->fd = -1;
}

void keep_offered(void)
{
	while (batched) // the program's threads are held
		close(batch[--batched]);
	end(&far);
}

void keep_forget(void)
{
	keep_offered();
	if (taken)
		return;
	free(all);
	all = NULL;
	count = exported = 0;
	away = false;
}

// room returns whether each GPU has as much memory free as its blocks take, and SPARE.
static CUresult room(void)
{
	for (CUdevice d = 0; d < MAX_DEVICES; d++) {
		size_t wanted = 0, has, whole;
		CUcontext c = NULL;

		for (size_t i = 0; i < count; i++) {
			if (all[i].device != d)
				continue;
			wanted += all[i].bytes;
			c = all[i].context;
		}
		CUresult r = c ? cu.CtxSetCurrent(c) : CUDA_SUCCESS;
		if (c && !r)
			r = cu.GetInfo(&has, &whole);
		if (c && !r && (has < wanted || has - wanted < SPARE))
			r = CUDA_ERROR_OUT_OF_MEMORY;
		if (r)
			return r;
	}
	return CUDA_SUCCESS;
}

// list lists the blocks, if all can be kept, and has an area of their size.
static CUresult list(void)
{
	uint64_t bytes = memory_total();
	CUresult r = CUDA_SUCCESS;
	size_t n = 0;

	for (struct block *b = blocks; b; b = b->next) {
		if (block_is_taken(b) && !b->exportable)
			return CUDA_ERROR_NOT_SUPPORTED;
		n++;
	}
	if (!(all = calloc(n + 1, sizeof *all)))
		return CUDA_ERROR_OUT_OF_MEMORY;
	for (struct block *b = blocks; b; b = b->next)
		if (block_is_taken(b))
			all[count++] = (struct kept){.bytes = b->bytes, .context = b->context, .device = b->device};
	if (!(r = room()) && count && !memory_area(bytes))
		r = CUDA_ERROR_OUT_OF_MEMORY;
	if (r)
		keep_forget();
	return r;
}

CUresult keep_export(int32_t fds[KEEP_BATCH], uint32_t *written)
{
	CUresult r = CUDA_SUCCESS;
	size_t i = 0;

	*written = 0;
	if (away || taken)
		return CUDA_ERROR_ILLEGAL_STATE;
	if (!ready())
		return CUDA_ERROR_NOT_SUPPORTED;
	if (!all && (r = list()))
		return r;
	for (struct block *b = blocks; b && !r && batched < KEEP_BATCH; b = b->next) {
		if (!block_is_taken(b) || i++ < exported)
			continue;
		int fd = -1;
		r = cu.CtxSetCurrent(b->context);
		if (r || (r = cu.Export(&fd, b->handle, CU_POSIX_FD, 0)))
			break;
		batch[batched] = fds[batched] = fd;
		batched++;
		exported++;
	}
	*written = r ? 0 : batched;
	return r;
}

CUresult keep_release(uint64_t *start, uint64_t *bytes)
{
	if (!all || exported != count)
		return CUDA_ERROR_ILLEGAL_STATE;
	copy_forget(); // nothing is copied to the area
	CUresult r = memory_keep(start, bytes);
	away = *bytes;
	return r;
}

bool keep_away(void)
{
	return away;
}

CUresult keep_meet(int32_t *fd, uint32_t *so_far)
{
	int pair[2];

	if (!away)
		return CUDA_ERROR_ILLEGAL_STATE;
	end(&near);
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair))
		return CUDA_ERROR_OPERATING_SYSTEM;
	near = own(pair[0]);
	far = own(pair[1]);
	*fd = pair[1];
	*so_far = (uint32_t)taken;
	return CUDA_SUCCESS;
}

// receive reads a message of so many bytes, which is there, with at most KEEP_BATCH descriptors.
static bool receive(void *data, size_t bytes, int fds[KEEP_BATCH], size_t *n)
{
	union {
		struct cmsghdr header;
		char room[CMSG_SPACE(sizeof(int) * KEEP_BATCH)];
	} control;
	struct iovec text = {data, bytes};
	struct msghdr m = {.msg_iov = &text, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};

	*n = 0;
	if (!is_there(&near))
		return false;
	ssize_t got = recvmsg(near.fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	struct cmsghdr *h = got < 0 ? NULL : CMSG_FIRSTHDR(&m);
	if (h && h->cmsg_level == SOL_SOCKET && h->cmsg_type == SCM_RIGHTS && h->cmsg_len >= CMSG_LEN(0)) {
		*n = (h->cmsg_len - CMSG_LEN(0)) / sizeof *fds;
		memcpy(fds, CMSG_DATA(h), *n * sizeof *fds);
	}
	return got == (ssize_t)bytes;
}

static CUresult take(struct kept *k, int fd)
{
	CUmemAccessDesc access = {{CU_DEVICE, k->device}, CU_READWRITE};
	CUresult r = cu.CtxSetCurrent(k->context);

	if (r || (r = cu.Import(&k->handle, (void *)(intptr_t)fd, CU_POSIX_FD)))
		return r;
	if (!(r = cu.AddressReserve(&k->address, k->bytes, 0, 0, 0))) {
		if (!(r = cu.Map(k->address, k->bytes, 0, k->handle, 0))) {
			if (!(r = cu.SetAccess(k->address, k->bytes, &access, 1)))
				return r;
			cu.Unmap(k->address, k->bytes);
		}
		cu.AddressFree(k->address, k->bytes);
	}
	cu.Release(k->handle);
	return r;
}

CUresult keep_take(uint32_t *so_far)
{
	int fds[KEEP_BATCH];
	CUresult r = CUDA_SUCCESS;
	size_t n;
	char byte;

	*so_far = (uint32_t)taken;
	if (!away)
		return CUDA_ERROR_ILLEGAL_STATE;
	if (!receive(&byte, 1, fds, &n) || !n)
		r = CUDA_ERROR_OPERATING_SYSTEM;
	for (size_t i = 0; i < n; i++) {
		if (!r && taken == count)
			r = CUDA_ERROR_INVALID_VALUE;
		if (!r && !(r = take(&all[taken], fds[i]))) {
			taken++;
			__atomic_store_n(&mapped, 1, __ATOMIC_SEQ_CST);
		}
		close(fds[i]);
	}
	*so_far = (uint32_t)taken;
	return r;
}

static CUresult fill(void)
{
	CUresult r = CUDA_SUCCESS;
	size_t i = 0;

	for (struct block *b = blocks; b && !r; b = b->next) {
		if (!block_is_taken(b))
			continue;
		struct kept *k = &all[i++];
		if (b->is_new && !(r = cu.CtxSetCurrent(b->context)))
			r = cu.Copy(b->address, k->address, b->bytes, NULL);
	}
	return r ? r : memory_synchronize();
}

CUresult keep_return(uint64_t start, uint64_t bytes)
{
	if (!away || taken != count)
		return CUDA_ERROR_ILLEGAL_STATE;
	CUresult r = peers_allow();
	if (!r && !(r = blocks_have()))
		r = fill();
	blocks_settle(!r);
	if (!r) {
		away = false;
		host.start = (void *)start;
		host.bytes = bytes;
		madvise(host.start, bytes, MADV_DONTFORK); // no child has the shim's file mapped
	}
	return r;
}

// let_go unmaps what is kept.
static void let_go(void)
{
	for (size_t i = 0; i < taken; i++) {
		struct kept *k = &all[i];
		if (cu.CtxSetCurrent(k->context))
			continue;
		cu.Unmap(k->address, k->bytes);
		cu.Release(k->handle);
		cu.AddressFree(k->address, k->bytes);
	}
	taken = 0;
	if (host.bytes)
		munmap(host.start, host.bytes);
	host.bytes = 0;
	keep_forget();
	end(&near);
	__atomic_store_n(&mapped, 0, __ATOMIC_SEQ_CST);
}

bool keep_drop(void)
{
	if (away)
		return false;
	if (taken)
		let_go();
	return true;
}

// copy_out copies what is kept to host memory.
static CUresult copy_out(char *to, uint64_t bytes)
{
	uint64_t sum = 0;

	for (size_t i = 0; i < count; i++)
		sum += all[i].bytes;
	if (!count || taken != count || bytes != sum)
		return CUDA_ERROR_INVALID_VALUE;
	struct piece *pieces = calloc(count, sizeof *pieces);
	CUresult r = pieces ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
	char *at = to;
	for (size_t i = 0; i < count && pieces; at += all[i++].bytes)
		pieces[i] = (struct piece){all[i].context, all[i].address, at, all[i].bytes};
	r = r ? r : copy_all(pieces, count, to, bytes, true);
	copy_forget();
	free(pieces);
	return r;
}

CUresult keep_drain(uint64_t start, uint64_t bytes)
{
	if (!taken)
		return CUDA_ERROR_ILLEGAL_STATE;
	CUresult r = away ? copy_out((char *)start, bytes) : copy_out(host.start, host.bytes);
	if (r && away)
		return r;
	let_go();
	return r;
}

bool keep_look(void)
{
	char byte;

	if (!taken || away)
		return taken;
	if (is_there(&near)) {
		ssize_t n = recv(near.fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
		if (n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR)))
			return true;
	}
	let_go(); // nobody will ask for it
	return false;
}

bool keep_wait(void)
{
	struct timespec nap = {.tv_nsec = 2000000};
	bool any = false;

	while (__atomic_load_n(&mapped, __ATOMIC_SEQ_CST)) {
		any = true;
		nanosleep(&nap, NULL);
	}
	return any;
}

void keep_forked(void)
{
	end(&near);
	end(&far);
	while (batched)
		close(batch[--batched]);
	all = NULL;
	count = exported = taken = 0;
	away = false;
	host.bytes = 0;
	mapped = 0;
}
