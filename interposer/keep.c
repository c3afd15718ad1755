// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// GPU memory that stays on the GPU while the driver checkpoints the process. Memory of cuMemCreate lives for as long as
// anybody has a descriptor of it open, whatever becomes of the process that made it (driver 580.159). So the blocks are
// exported, the shim takes the descriptors, and the blocks are given back to the driver. On the way back the shim hands
// descriptors over in pieces, which are the blocks' memory in the order of the blocks:
//
//	exported --keep_release--> on the shim --keep_take, often--> taken --keep_return--> here
//
// Driver 580 never restores a process that was checkpointed with an import mapped. So the program does not get the kept
// memory: its blocks are made anew and filled by a copy within the GPU. A piece is mapped for that copy alone. Others may
// have it for longer, while the program's threads run: keep_wait is for these.
//
// Pieces of a restored process are no blocks that were exported: one may begin and end within a block.

#include "block.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

// What a GPU must have free beside what is asked for: a context has some hundreds of MiB, the driver's own memory comes
// and goes in a checkpoint, and the program may want some.
#define SPARE ((size_t)1 << 30)

// import is a piece that is mapped for a copy.
struct import {
	CUdeviceptr address;
	uint64_t bytes;
	CUhandle handle;
	CUcontext context;
};

static bool begun; // keep_export was called
static size_t exported;
static struct owned batch[KEEP_BATCH];
static uint32_t batched;
static struct owned sock_ours = {.fd = -1}; // LOCK_MEETING: the program's threads look at it
static struct owned sock_shims = {.fd = -1};
static bool on_shim;     // the memory is nowhere but with the shim
static bool partly_back; // some of it may be back
static uint64_t taken;   // bytes that are back, from the first block on
static uint32_t pieces;  // in which they came
static uint32_t doubled; // it is back, and the GPU may have it once more

void keep_offered(void)
{
	while (batched) // the program's threads were held, unless the shim has ended
		owned_end(&batch[--batched]);
	owned_end(&sock_shims);
}

void keep_forget(void)
{
	keep_offered();
	begun = on_shim = partly_back = false;
	exported = 0;
	taken = pieces = 0;
}

// room returns whether each GPU with blocks has SPARE free, and what the blocks take that have no memory.
static CUresult room(void)
{
	for (CUdevice d = 0; d < MAX_DEVICES; d++) {
		size_t wanted = 0, has, whole;
		CUcontext c = NULL;

		for (struct block *b = blocks; b; b = b->next) {
			if (!block_is_taken(b) || b->device != d)
				continue;
			wanted += b->mapped ? 0 : b->bytes;
			c = b->context;
		}
		CUresult r = c ? driver.cuCtxSetCurrent(c) : CUDA_SUCCESS;
		if (c && !r)
			r = driver.cuMemGetInfo_v2(&has, &whole);
		if (c && !r && (has < wanted || has - wanted < SPARE))
			r = CUDA_ERROR_OUT_OF_MEMORY;
		if (r)
			return r;
	}
	return CUDA_SUCCESS;
}

static CUresult look(void)
{
	if (!driver_serves(KEEPING))
		return CUDA_ERROR_NOT_SUPPORTED;
	for (struct block *b = blocks; b; b = b->next)
		if (block_is_taken(b) && !b->exportable)
			return CUDA_ERROR_NOT_SUPPORTED;
	return room();
}

CUresult keep_export(int32_t fds[KEEP_BATCH], uint64_t sizes[KEEP_BATCH], uint32_t *written)
{
	CUresult r = CUDA_SUCCESS;
	size_t i = 0;

	*written = 0;
	if (on_shim)
		return CUDA_ERROR_ILLEGAL_STATE;
	if (!begun && (r = look()))
		return r;
	begun = true;
	for (struct block *b = blocks; b && batched < KEEP_BATCH; b = b->next) {
		if (!block_is_taken(b) || i++ < exported)
			continue;
		int fd = -1;
		r = driver.cuCtxSetCurrent(b->context);
		if (r || (r = driver.cuMemExportToShareableHandle(&fd, b->handle, CU_POSIX_FD, 0)))
			break;
		sizes[batched] = b->bytes;
		batch[batched] = owned(fd);
		fds[batched] = fd;
		batched++;
		exported++;
	}
	*written = r ? 0 : batched;
	return r;
}

CUresult keep_release(uint64_t *start, uint64_t *bytes)
{
	size_t count = 0;

	for (struct block *b = blocks; b; b = b->next)
		count += block_is_taken(b);
	if (!begun || exported != count)
		return CUDA_ERROR_ILLEGAL_STATE;
	copy_forget(); // nothing is copied here
	CUresult r = memory_keep(start, bytes);
	on_shim = *bytes;
	return r;
}

bool keep_away(void)
{
	return on_shim;
}

CUresult keep_meet(int32_t *fd, uint32_t *so_far)
{
	int pair[2];

	if (!driver_serves(KEEPING))
		return CUDA_ERROR_NOT_SUPPORTED;
	keep_drop();
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair))
		return CUDA_ERROR_OPERATING_SYSTEM;
	lock(LOCK_MEETING);
	sock_ours = owned(pair[0]);
	unlock(LOCK_MEETING);
	sock_shims = owned(pair[1]);
	*fd = pair[1];
	*so_far = pieces;
	return CUDA_SUCCESS;
}

// receive reads a message, which is there: the sizes of at most KEEP_BATCH pieces, and as many descriptors.
static bool receive(uint64_t sizes[KEEP_BATCH], int fds[KEEP_BATCH], size_t *n)
{
	union {
		struct cmsghdr header;
		char room[CMSG_SPACE(sizeof(int) * KEEP_BATCH)];
	} control;
	struct iovec text = {sizes, sizeof *sizes * KEEP_BATCH};
	struct msghdr m = {.msg_iov = &text, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};

	*n = 0;
	if (!owned_has(&sock_ours))
		return false;
	ssize_t got = recvmsg(sock_ours.fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	struct cmsghdr *h = got < 0 ? NULL : CMSG_FIRSTHDR(&m);
	if (h && h->cmsg_level == SOL_SOCKET && h->cmsg_type == SCM_RIGHTS && h->cmsg_len >= CMSG_LEN(0)) {
		*n = (h->cmsg_len - CMSG_LEN(0)) / sizeof *fds;
		memcpy(fds, CMSG_DATA(h), *n * sizeof *fds);
	}
	return *n && got == (ssize_t)(*n * sizeof *sizes) && !(m.msg_flags & (MSG_TRUNC | MSG_CTRUNC));
}

static CUresult import(struct import *k, const struct block *b, int fd)
{
	CUmemAccessDesc access = {{CU_DEVICE, b->device}, CU_READWRITE};
	CUresult r = driver.cuCtxSetCurrent(b->context);

	k->context = b->context;
	if (r || (r = driver.cuMemImportFromShareableHandle(&k->handle, (void *)(intptr_t)fd, CU_POSIX_FD)))
		return r;
	if (!(r = driver.cuMemAddressReserve(&k->address, k->bytes, 0, 0, 0))) {
		if (!(r = driver.cuMemMap(k->address, k->bytes, 0, k->handle, 0))) {
			if (!(r = driver.cuMemSetAccess(k->address, k->bytes, &access, 1)))
				return r;
			driver.cuMemUnmap(k->address, k->bytes);
		}
		driver.cuMemAddressFree(k->address, k->bytes);
	}
	driver.cuMemRelease(k->handle);
	return r;
}

static void let_go(const struct import *k)
{
	if (driver.cuCtxSetCurrent(k->context))
		return;
	driver.cuMemUnmap(k->address, k->bytes);
	driver.cuMemRelease(k->handle);
	driver.cuMemAddressFree(k->address, k->bytes);
}

// block_in returns the block with a byte of the memory, and where in the block that is.
static struct block *block_in(uint64_t at, uint64_t *inside)
{
	struct block *b;

	for (b = blocks; b && (!block_is_taken(b) || at >= b->bytes); b = b->next)
		at -= block_is_taken(b) ? b->bytes : 0;
	*inside = at;
	return b;
}

// spread begins to copy a piece to the blocks that it is of, from a byte of the memory on.
static CUresult spread(const struct import *k, CUdevice device, uint64_t at)
{
	for (uint64_t done = 0, inside, n; done < k->bytes; done += n) {
		struct block *b = block_in(at + done, &inside);
		if (!b || b->device != device)
			return CUDA_ERROR_INVALID_VALUE;
		CUresult r = driver.cuCtxSetCurrent(b->context);
		if (!r && !b->mapped)
			r = block_have(b);
		n = b->bytes - inside < k->bytes - done ? b->bytes - inside : k->bytes - done;
		r = r ? r : driver.cuMemcpyDtoDAsync_v2(b->address + inside, k->address + done, n, NULL);
		if (r)
			return r;
	}
	return CUDA_SUCCESS;
}

CUresult keep_take(bool beside, uint32_t *so_far)
{
	struct import imports[KEEP_BATCH];
	uint64_t sizes[KEEP_BATCH], at = taken, inside;
	int fds[KEEP_BATCH];
	size_t n, has = 0;
	CUresult r = receive(sizes, fds, &n) ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;

	partly_back = true;
	r = r ? r : peers_allow();
	if (!r && beside)
		r = room();
	for (size_t i = 0; i < n; i++) {
		struct block *b = r ? NULL : block_in(at, &inside);
		if (!r && !b)
			r = CUDA_ERROR_INVALID_VALUE;
		if (!r) {
			imports[i].bytes = sizes[i];
			r = import(&imports[i], b, fds[i]);
			has += !r;
		}
		r = r ? r : spread(&imports[i], b->device, at);
		at += r ? 0 : sizes[i];
		close(fds[i]);
	}
	CUresult last = has ? memory_synchronize() : CUDA_SUCCESS;
	r = r ? r : last;
	while (has)
		let_go(&imports[--has]);
	if (!r) {
		taken = at;
		pieces += n;
	}
	*so_far = pieces;
	return r;
}

CUresult keep_return(uint64_t start, uint64_t bytes)
{
	// Less than all would be less than the program had.
	if (!bytes || taken != bytes || memory_total() != bytes)
		return CUDA_ERROR_ILLEGAL_STATE;
	munmap((void *)start, bytes);
	on_shim = partly_back = false;
	taken = pieces = 0;
	__atomic_store_n(&doubled, 1, __ATOMIC_SEQ_CST);
	return CUDA_SUCCESS;
}

void keep_abandon(void)
{
	for (struct block *b = blocks; b && partly_back; b = b->next) {
		if (!block_is_taken(b))
			continue;
		if (!driver.cuCtxSetCurrent(b->context))
			block_give(b);
		b->is_new = b->mapped; // it may be filled in part
	}
	keep_forget();
}

void keep_drop(void)
{
	lock(LOCK_MEETING);
	__atomic_store_n(&doubled, 0, __ATOMIC_SEQ_CST);
	owned_end(&sock_ours);
	unlock(LOCK_MEETING);
}

// is_doubled reports whether the GPU may have the memory once more: as long as the shim has its end of the sockets.
static bool is_doubled(void)
{
	char byte;
	ssize_t n = 0;

	if (!__atomic_load_n(&doubled, __ATOMIC_SEQ_CST))
		return false;
	lock(LOCK_MEETING);
	if (owned_has(&sock_ours))
		n = recv(sock_ours.fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
	bool is = n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR));
	unlock(LOCK_MEETING);
	return is;
}

bool keep_look(void)
{
	bool is = is_doubled();

	if (!is && __atomic_load_n(&doubled, __ATOMIC_SEQ_CST))
		keep_drop();
	return is;
}

bool keep_wait(void)
{
	struct timespec nap = {.tv_nsec = 2000000};
	bool any = false;

	while (is_doubled()) {
		any = true;
		nanosleep(&nap, NULL);
	}
	return any;
}

void keep_forked(void)
{
	owned_end(&sock_ours);
	owned_end(&sock_shims);
	keep_forget();
	doubled = 0;
}
