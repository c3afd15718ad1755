// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// All blocks' memory goes to host memory and to the driver, and comes back. The worker does it, while nobody is inside the
// gate.

#include "block.h"

#include <stdlib.h>
#include <sys/mman.h>

uint64_t memory_total(void)
{
	uint64_t bytes = 0;

	lock(LOCK_BLOCKS);
	for (struct block *b = blocks; b; b = b->next)
		bytes += block_is_taken(b) ? b->bytes : 0;
	unlock(LOCK_BLOCKS);
	return bytes;
}

// pieces_of returns what is to be copied from or to host memory: all blocks that are taken, or the new ones of these.
// NULL: there is no memory for the list. The caller frees it.
static struct piece *pieces_of(char *host, bool all, size_t *count)
{
	size_t n = 0;

	*count = 0;
	for (struct block *b = blocks; b; b = b->next)
		n++;
	struct piece *pieces = calloc(n + 1, sizeof *pieces);
	for (struct block *b = blocks; b && pieces; b = b->next) {
		if (!block_is_taken(b))
			continue;
		if (all || b->is_new)
			pieces[(*count)++] = (struct piece){b->context, b->address, host, b->bytes};
		host += b->bytes;
	}
	return pieces;
}

CUresult blocks_have(void)
{
	CUresult r = CUDA_SUCCESS;

	for (struct block *b = blocks; b && !r; b = b->next) {
		if (!block_is_taken(b) || b->mapped)
			continue;
		if (!(r = driver.cuCtxSetCurrent(b->context)) && !(r = block_have(b)))
			b->is_new = true;
	}
	return r;
}

void blocks_settle(bool stay)
{
	for (struct block *b = blocks; b; b = b->next) {
		if (b->is_new && !stay)
			block_give(b);
		b->is_new = b->is_new && !stay && b->mapped;
	}
}

// bring maps the blocks that are not mapped, and fills them from host memory of so many bytes. On an error
// those are unmapped again.
static CUresult bring(char *host, uint64_t bytes)
{
	CUresult r = blocks_have();
	size_t count = 0;

	struct piece *pieces = r ? NULL : pieces_of(host, false, &count);
	if (!r)
		r = pieces ? copy_all(pieces, count, host, bytes, false) : CUDA_ERROR_OUT_OF_MEMORY;
	free(pieces);
	blocks_settle(!r);
	return r;
}

static char *area; // host memory that is not in use; NULL when there is none
static uint64_t area_bytes;

static char *area_of(uint64_t bytes)
{
	if (area && area_bytes == bytes)
		return area;
	memory_no_area();
	// In this form exactly, as the driver maps its own: the shim's tracer looks for it, drops
	// MAP_POPULATE and puts a file behind it.
	char *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	if (at == MAP_FAILED)
		return NULL;
	area = at;
	area_bytes = bytes;
	return at;
}

void memory_no_area(void)
{
	if (area)
		munmap(area, area_bytes);
	area = NULL;
}

// use_area has the area's bytes from here on.
static void use_area(uint64_t *start, uint64_t *bytes)
{
	*start = (uint64_t)area;
	*bytes = area ? area_bytes : 0;
	area = NULL;
}

// give_all gives all blocks that are taken back to the driver. On an error some are.
static CUresult give_all(void)
{
	CUresult r = CUDA_SUCCESS;

	for (struct block *b = blocks; b && !r; b = b->next)
		if (block_is_taken(b) && !(r = driver.cuCtxSetCurrent(b->context)))
			r = block_give(b);
	return r;
}

// A huge page of x86-64: a file that is mapped to an area that begins with one can be read by huge pages.
#define HUGE_PAGE ((size_t)2 << 20)

// empty_area returns host memory in another form than area_of: the shim has a file for it by itself.
static char *empty_area(uint64_t bytes)
{
	char *all = mmap(NULL, bytes + HUGE_PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	size_t before = -(uintptr_t)all % HUGE_PAGE;

	if (all == MAP_FAILED)
		return NULL;
	if (before)
		munmap(all, before);
	munmap(all + before + bytes, HUGE_PAGE - before);
	return all + before;
}

CUresult memory_keep(uint64_t *start, uint64_t *bytes)
{
	uint64_t total = memory_total();
	char *host = total ? empty_area(total) : NULL;
	CUresult r = total && !host ? CUDA_ERROR_OUT_OF_MEMORY : peers_end();

	if (r && host)
		munmap(host, total);
	if (r)
		return r;
	*start = (uint64_t)host;
	*bytes = total;
	return give_all();
}

static CUresult save(uint64_t *start, uint64_t *size)
{
	uint64_t bytes = memory_total();
	CUresult r;
	size_t count;

	*start = *size = 0;
	if (!bytes)
		return CUDA_SUCCESS;
	char *host = area_of(bytes);
	if (!host)
		return CUDA_ERROR_OUT_OF_MEMORY;
	struct piece *pieces = pieces_of(host, true, &count);
	r = pieces ? copy_all(pieces, count, host, bytes, true) : CUDA_ERROR_OUT_OF_MEMORY;
	free(pieces);
	if (!r && !(r = give_all())) {
		use_area(start, size);
		return CUDA_SUCCESS;
	}
	CUresult back = bring(host, bytes);
	if (back) { // some of it is nowhere else
		use_area(start, size);
		return back;
	}
	memory_no_area();
	return r;
}

CUresult memory_save(uint64_t *start, uint64_t *size)
{
	CUresult r = peers_end();

	if (!r && (r = save(start, size)) && !*size)
		peers_allow();
	return r;
}

CUresult memory_restore(uint64_t start, uint64_t bytes)
{
	CUresult r = peers_allow();

	r = r ? r : bring((char *)start, bytes);
	if (!r && bytes)
		munmap((void *)start, bytes);
	return r;
}
