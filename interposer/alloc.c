// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Memory of cuMemAlloc, from MIN_BYTES on, is a block:
//
//	cuMemAlloc --> mapped --memory_save--> reserved --memory_restore--> mapped --> cuMemFree

#include "block.h"

#include <stdlib.h>
#include <string.h>

// The driver gives memory by pieces of 2 MiB, and several small allocations share one. A handle has
// pieces of its own. What would waste a third of them or more is the driver's; PyTorch and NCCL ask for whole pieces.
#define MIN_BYTES ((size_t)2 << 20)

static CUresult alloc(CUdeviceptr *address, size_t bytes)
{
	struct block *b = NULL;
	CUdevice device;
	size_t piece = 0;
	CUresult r;

	if (!block_ready() || !address || bytes < MIN_BYTES || driver.cuCtxGetDevice(&device) || device < 0 || device >= MAX_DEVICES)
		goto drivers;
	CUmemAllocationProp prop = block_prop(device);
	if (driver.cuMemGetAllocationGranularity(&piece, &prop, 0) || !piece || bytes > SIZE_MAX - piece || !(b = calloc(1, sizeof *b)))
		goto drivers;
	b->asked = bytes;
	b->bytes = (bytes + piece - 1) / piece * piece;
	if (b->bytes - bytes >= b->bytes / 3)
		goto drivers;
	b->device = device;
	b->visible = true;
	if (driver.cuCtxGetCurrent(&b->context) || driver.cuMemAddressReserve(&b->address, b->bytes, 0, 0, 0))
		goto drivers;
	r = block_have(b);
	if (r == CUDA_ERROR_OUT_OF_MEMORY && keep_wait())
		r = block_have(b);
	if (r) {
		driver.cuMemAddressFree(b->address, b->bytes);
		goto drivers;
	}
	*address = b->address;
	return CUDA_SUCCESS;

drivers: // whose error, if there is one, is the program's
	free(b);
	r = driver.cuMemAlloc_v2(address, bytes);
	return r == CUDA_ERROR_OUT_OF_MEMORY && keep_wait() ? driver.cuMemAlloc_v2(address, bytes) : r;
}

// As the driver's, it waits until nothing uses the memory any more.
static CUresult free_memory(CUdeviceptr address)
{
	struct block *b = address ? block_at(address) : NULL;
	CUresult r;

	if (b && block_is_import(b))
		return CUDA_ERROR_INVALID_VALUE;
	if (!b && managed_free(address, &r))
		return r;
	if (!b || b->address != address)
		return driver.cuMemFree_v2(address);
	if ((r = block_in_context(b->context, block_unused, b->address)))
		return r;
	if (vmm_keeps(b))
		return CUDA_SUCCESS;
	return block_end(b);
}

static CUresult get_address_range(CUdeviceptr *base, size_t *bytes, CUdeviceptr p)
{
	struct block *b = block_at(p);

	if (!b && managed_range(p, base, bytes))
		return CUDA_SUCCESS;
	if (!b)
		return driver.cuMemGetAddressRange_v2(base, bytes, p);
	if (base)
		*base = b->address;
	if (bytes)
		*bytes = b->asked;
	return CUDA_SUCCESS;
}

// CU_POINTER_ATTRIBUTE_*: what the driver would answer otherwise for memory of cuMemAlloc.
enum { ATTRIBUTE_CONTEXT = 1, ATTRIBUTE_RANGE_START = 11, ATTRIBUTE_RANGE_SIZE = 12 };

static bool attribute_of(const struct block *b, void *data, int attribute)
{
	switch (attribute) {
	case ATTRIBUTE_CONTEXT:
		memcpy(data, &b->context, sizeof b->context);
		return true;
	case ATTRIBUTE_RANGE_START:
		memcpy(data, &b->address, sizeof b->address);
		return true;
	case ATTRIBUTE_RANGE_SIZE:
		memcpy(data, &b->asked, sizeof b->asked);
		return true;
	}
	return false;
}

static CUresult pointer_attribute(void *data, int attribute, CUdeviceptr p)
{
	struct block *b = block_at(p);

	if (b && data && attribute_of(b, data, attribute))
		return CUDA_SUCCESS;
	CUresult r = driver.cuPointerGetAttribute(data, attribute, p);
	return managed_attribute(p, attribute, data) ? CUDA_SUCCESS : r;
}

static CUresult pointer_attributes(unsigned n, int *attributes, void **data, CUdeviceptr p)
{
	struct block *b = block_at(p);
	CUresult r = driver.cuPointerGetAttributes(n, attributes, data, p);

	for (unsigned i = 0; !r && i < n; i++)
		if (!b || !attribute_of(b, data[i], attributes[i]))
			managed_attribute(p, attributes[i], data[i]);
	return r;
}

static CUresult range_handle(void *handle, CUdeviceptr p, size_t bytes, int type, unsigned long long flags)
{
	struct block *b = block_at(p);
	CUresult r = driver.cuMemGetHandleForAddressRange(handle, p, bytes, type, flags);

	b = b ? b : vmm_block(p);
	if (!r && b)
		block_is_given(b);
	return r;
}

const struct override alloc_overrides[] = {
	{"cuMemAlloc_v2", alloc}, {"cuMemAlloc", alloc},
	{"cuMemFree_v2", free_memory}, {"cuMemFree", free_memory},
	{"cuMemGetAddressRange_v2", get_address_range}, {"cuMemGetAddressRange", get_address_range},
	{"cuPointerGetAttribute", pointer_attribute}, {"cuPointerGetAttributes", pointer_attributes},
	{"cuMemGetHandleForAddressRange", range_handle},
	{NULL, NULL},
};
