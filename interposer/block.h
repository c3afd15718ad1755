// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// What those rooms share that make GPU memory: a block is memory of the interposer's.

#ifndef GPUCKPT_BLOCK_H
#define GPUCKPT_BLOCK_H

#include "driver.h"

enum { MAX_DEVICES = 64 };

// view is where the program has mapped a block that it holds by a number.
struct view {
	struct view *next;
	CUdeviceptr address;
	size_t bytes, offset;
	uint64_t flags;
	unsigned count; // of access
	CUmemAccessDesc access[MAX_DEVICES];
	bool shown;
};

struct block {
	struct block *next;
	CUdeviceptr address; // 0 for an import that the program maps itself
	size_t asked, bytes; // bytes: whole pieces
	CUhandle handle;
	CUdevice device;
	CUcontext context; // that was current
	bool listed;
	bool mapped;
	bool given;  // its handle has left the interposer: it stays where it is
	bool host;   // host memory, which is given as well; it has no context
	bool is_new; // it is mapped, and not filled yet
	bool exportable;    // the driver was told so when it was made
	uint64_t number;    // in tickets of it; 0 before the first
	struct ticket from; // of an import; its number is 0 otherwise
	unsigned opened;    // of an import: how often
	bool away;          // of an import: between memory_leave and memory_join

	bool visible;  // the program has the address, by cuMemAlloc or cuIpcOpenMemHandle
	CUhandle id;   // what the program has for a handle, since the driver's is another one after a checkpoint; or 0
	unsigned held; // how often the program has it
	CUmemAllocationProp prop; // of cuMemCreate; its type is 0 otherwise
	struct view *views;
};

// block.c
// LOCK_BLOCKS is of the list, of who may access the memory of which GPU, and of what is read of blocks in the list by
// other threads than the one that changes it: visible, given, id, context, mapped and views.
extern struct block *blocks;
// block_ready looks the driver over, once. false: a driver that is not known, and nothing is made here.
bool block_ready(void);
bool block_is_import(const struct block *b);
// block_have takes memory and maps it at the block's address and in its views. The block is in the list then, since what
// enables access to memory of the GPU goes by that. On an error nothing is mapped, and the list is as it was.
CUresult block_have(struct block *b);
// block_add has a block in the list that has no memory of the interposer's. block_end gives a block's memory back and
// forgets it.
void block_add(struct block *b);
CUresult block_end(struct block *b);
// block_forget frees a block that has no memory.
void block_forget(struct block *b);
// block_allow lets the kernels of all GPUs reach a block that would reach it if it were the driver's. The lock is held
// until the block is in the list.
CUresult block_allow(const struct block *b);
// block_prop is how memory on a GPU is made.
CUmemAllocationProp block_prop(CUdevice device);
// block_give gives a block's memory back to the driver, and keeps the address.
CUresult block_give(struct block *b);
// block_is_taken reports whether a block's memory is saved and kept.
bool block_is_taken(const struct block *b);

// save.c
// blocks_have maps the blocks that are taken and not mapped, and notes them as new: also on an error. blocks_settle
// has them old, or gives them back: what the driver does not take back stays new.
CUresult blocks_have(void);
void blocks_settle(bool stay);

// peers.c
// peers_may reports whether kernels of one GPU reach memory of another. The lock is held.
bool peers_may(CUdevice from, CUdevice to);
// peers_forget forgets what from's kernels reach of to's; NULL is any.
void peers_forget(CUcontext from, CUcontext to);
// peers_end ends what cuCtxEnablePeerAccess has allowed. On an error all of it is allowed. peers_allow allows it
// again, and returns the first error.
CUresult peers_end(void);
CUresult peers_allow(void);

// contexts.c
// contexts_note notes a context, which is a device's primary one or not (-1). The lock is held.
void contexts_note(CUcontext c, int primary_of);

// block.c
// block_ticket makes a ticket of a block. false: it cannot be shared.
bool block_ticket(struct block *b, struct ticket *t);
// block_here returns a block for the current context, NULL without one or without memory. The caller frees it.
struct block *block_here(size_t bytes);
// block_at returns the block that the program has at an address by cuMemAlloc or cuIpcOpenMemHandle; NULL for none.
struct block *block_at(CUdeviceptr p);
// block_in_context calls a function with an address in a context, and then has the context again that was current.
CUresult block_in_context(CUcontext c, CUresult (*call)(CUdeviceptr), CUdeviceptr p);
// block_unused waits until nothing that the current context has under way uses a block: for block_in_context.
CUresult block_unused(CUdeviceptr p);
// block_is_given notes that a block's handle has left the interposer.
void block_is_given(struct block *b);
// block_lost notes what the program has used that is not brought back. From then on the process has a thread that says so.
void block_lost(enum lost what);

// events.c
// events_wanted reports whether the program's environment does not refuse events of the interposer's.
bool events_wanted(void);
// events_context_ended forgets the events of a context, which the driver ends with it.
void events_context_ended(CUcontext c);

// managed.c
// managed_has reports whether an address is in managed memory of the interposer's.
bool managed_has(CUdeviceptr p);
// managed_free frees such memory that begins at an address, when nothing uses it any more. On an error it is there as
// before. false: nothing begins there.
bool managed_free(CUdeviceptr p, CUresult *r);
// managed_range returns where such memory begins, and its bytes, where these are not NULL. false: there is none.
bool managed_range(CUdeviceptr p, CUdeviceptr *base, size_t *bytes);
// managed_attribute writes an attribute (CU_POINTER_ATTRIBUTE_*) of such memory over what the driver has answered for
// pinned memory. false: the driver's answer is right, or there is no such memory.
bool managed_attribute(CUdeviceptr p, int attribute, void *data);
// managed_context_ended forgets the memory of a context, which the driver frees with it.
void managed_context_ended(CUcontext c);

// vmm.c
// vmm_show maps a block's views, vmm_hide unmaps them. On an error of vmm_show none is mapped.
CUresult vmm_show(struct block *b);
CUresult vmm_hide(struct block *b);
// vmm_keeps makes a block invisible that the program frees and has a handle or a view of. false: it has none.
bool vmm_keeps(struct block *b);
// vmm_block returns the block that the program has mapped at an address; NULL for none.
struct block *vmm_block(CUdeviceptr p);

// What stands in for functions of the driver's: of each room, up to a name that is NULL.
struct override {
	const char *name;
	void *function;
};
extern const struct override alloc_overrides[], ipc_overrides[], peers_overrides[], contexts_overrides[], vmm_overrides[],
	shared_events_overrides[], events_overrides[], foreign_overrides[], managed_overrides[], route_overrides[];

#endif
