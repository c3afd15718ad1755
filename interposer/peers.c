// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// What cuCtxEnablePeerAccess has allowed: kernels of one GPU reach memory of another. Memory of cuMemCreate asks for that to
// be said of each block, and the driver loses at a checkpoint what was allowed for its own (580, measured).

#include "block.h"

#include <stdlib.h>

// peer is what a cuCtxEnablePeerAccess has allowed: from's kernels reach memory of to's.
struct peer {
	struct peer *next;
	CUcontext from, to;
	bool ended; // by peers_end
};

static struct peer *peers;
static uint64_t may_access[MAX_DEVICES]; // devices whose kernels reach the memory of one, as bits

bool peers_may(CUdevice from, CUdevice to)
{
	return from == to || may_access[to] >> from & 1;
}

static void note_peer(CUcontext from, CUcontext to)
{
	struct peer *p = calloc(1, sizeof *p);

	if (!p) {
		interposer_say("no memory to note cuCtxEnablePeerAccess: kernels that need it fail after a restore");
		return;
	}
	p->from = from;
	p->to = to;
	lock(LOCK_BLOCKS);
	p->next = peers;
	peers = p;
	unlock(LOCK_BLOCKS);
}

void peers_forget(CUcontext from, CUcontext to)
{
	lock(LOCK_BLOCKS);
	for (struct peer **l = &peers; *l;) {
		struct peer *p = *l;
		if ((from && p->from != from) || (to && p->to != to)) {
			l = &p->next;
			continue;
		}
		*l = p->next;
		free(p);
	}
	unlock(LOCK_BLOCKS);
}

static CUresult disable_peer(CUcontext peer)
{
	CUresult r = driver.cuCtxDisablePeerAccess(peer);
	CUcontext c;

	if (!r && block_ready() && !driver.cuCtxGetCurrent(&c))
		peers_forget(c, peer);
	return r;
}

CUresult peers_allow(void)
{
	CUresult first = CUDA_SUCCESS;

	for (struct peer *p = peers; p; p = p->next) {
		if (!p->ended)
			continue;
		CUresult r = driver.cuCtxSetCurrent(p->from);
		r = r ? r : driver.cuCtxEnablePeerAccess(p->to, 0);
		p->ended = r != CUDA_SUCCESS;
		first = first ? first : r;
	}
	return first;
}

CUresult peers_end(void)
{
	CUresult r = CUDA_SUCCESS;

	for (struct peer *p = peers; p && !r; p = p->next) {
		r = driver.cuCtxSetCurrent(p->from);
		r = r ? r : driver.cuCtxDisablePeerAccess(p->to);
		p->ended = !r;
	}
	if (r)
		peers_allow();
	return r;
}

uint32_t memory_peers(void)
{
	uint32_t n = 0;

	lock(LOCK_BLOCKS);
	for (struct peer *p = peers; p; p = p->next)
		n++;
	unlock(LOCK_BLOCKS);
	return n;
}

static CUresult enable_peer(CUcontext peer, unsigned flags)
{
	CUresult r = driver.cuCtxEnablePeerAccess(peer, flags);
	CUdevice here, there;
	CUcontext c;

	if (r || !block_ready() || driver.cuCtxGetCurrent(&c))
		return r;
	note_peer(c, peer);
	if (driver.cuCtxGetDevice(&here) || driver.cuCtxSetCurrent(peer))
		return r;
	bool failed = driver.cuCtxGetDevice(&there);
	driver.cuCtxSetCurrent(c);
	if (failed || here < 0 || here >= MAX_DEVICES || there < 0 || there >= MAX_DEVICES)
		return r;
	lock(LOCK_BLOCKS);
	contexts_note(c, -1);
	may_access[there] |= 1ull << here;
	for (struct block *b = blocks; b && !r; b = b->next)
		if (b->device == there && b->mapped && b->address)
			r = block_allow(b);
	unlock(LOCK_BLOCKS);
	return r;
}

const struct override peers_overrides[] = {
	{"cuCtxEnablePeerAccess", enable_peer}, {"cuCtxDisablePeerAccess", disable_peer},
	{NULL, NULL},
};
