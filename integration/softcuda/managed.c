// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// What a program says and asks of managed memory, and asks of any address, as the CUDA driver API manual has it (group
// CUDA_UNIFIED). Nothing moves here: host and kernels have the same memory. What is said of a part of an allocation is
// taken for all of it; a real driver has it by pages.

#include <string.h>

#include "softcuda.h"

static CUmemLocation location_of(CUdevice device)
{
	return device == CU_DEVICE_CPU ? (CUmemLocation){CU_MEM_LOCATION_TYPE_HOST, 0} : (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, device};
}

static CUresult check_location(CUmemLocation l)
{
	if (l.type == CU_MEM_LOCATION_TYPE_DEVICE)
		return l.id >= 0 && l.id < process.gpus ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
	return l.type >= CU_MEM_LOCATION_TYPE_HOST && l.type <= CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

struct asked {
	int what; // the advice, or the attribute
	CUmemLocation place;
	void *data;
	size_t bytes;
};

static CUresult take_advice(struct advice *a, void *arg)
{
	const struct asked *q = arg;
	bool set = q->what % 2; // 1, 3 and 5 set what 2, 4 and 6 unset

	if (q->what < CU_MEM_ADVISE_SET_READ_MOSTLY || q->what > CU_MEM_ADVISE_UNSET_ACCESSED_BY)
		return CUDA_ERROR_INVALID_VALUE;
	if (q->what <= CU_MEM_ADVISE_UNSET_READ_MOSTLY) {
		a->read_mostly = set;
		return CUDA_SUCCESS;
	}
	CUresult r = q->what == CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION ? CUDA_SUCCESS : check_location(q->place);
	if (r)
		return r;
	if (q->what <= CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION) {
		a->preferred = set ? q->place : (CUmemLocation){CU_MEM_LOCATION_TYPE_INVALID, 0};
		return CUDA_SUCCESS;
	}
	if (q->place.type > CU_MEM_LOCATION_TYPE_HOST)
		return CUDA_ERROR_INVALID_VALUE;
	a->accessed[q->place.type == CU_MEM_LOCATION_TYPE_HOST ? MAX_GPUS : q->place.id] = set;
	return CUDA_SUCCESS;
}

static CUresult take_prefetch(struct advice *a, void *arg)
{
	const struct asked *q = arg;
	CUresult r = check_location(q->place);

	if (!r)
		a->fetched = q->place;
	return r;
}

static CUresult take_discard(struct advice *a, void *arg)
{
	(void)a, (void)arg;
	return CUDA_SUCCESS;
}

static int number_of(CUmemLocation l)
{
	return l.type == CU_MEM_LOCATION_TYPE_DEVICE ? l.id : l.type == CU_MEM_LOCATION_TYPE_INVALID ? CU_DEVICE_INVALID : CU_DEVICE_CPU;
}

static CUresult answer(struct advice *a, void *arg)
{
	const struct asked *q = arg;
	int value, *list = q->data;
	size_t n = q->bytes / sizeof value, at = 0;

	if (!q->data || !n || q->bytes % sizeof value || (n > 1 && q->what != CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY))
		return CUDA_ERROR_INVALID_VALUE;
	switch (q->what) {
	case CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY: value = a->read_mostly; break;
	case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION: value = number_of(a->preferred); break;
	case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION: value = number_of(a->fetched); break;
	case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE: value = a->preferred.type; break;
	case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID: value = a->preferred.id; break;
	case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE: value = a->fetched.type; break;
	case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID: value = a->fetched.id; break;
	case CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY:
		for (int d = 0; d <= MAX_GPUS && at < n; d++)
			if (a->accessed[d])
				list[at++] = d == MAX_GPUS ? CU_DEVICE_CPU : d;
		while (at < n)
			list[at++] = CU_DEVICE_INVALID;
		return CUDA_SUCCESS;
	default:
		return CUDA_ERROR_INVALID_VALUE;
	}
	*list = value;
	return CUDA_SUCCESS;
}

// tell enters the gate with a current context, and has an allocation's advice used.
static CUresult tell(CUdeviceptr address, size_t bytes, CUresult (*use)(struct advice *, void *), struct asked q)
{
	CUresult r = gate_enter();

	if (r)
		return r;
	if (!context_current())
		return gate_leave(CUDA_ERROR_INVALID_CONTEXT);
	return gate_leave(memory_managed(address, bytes, use, &q));
}

CUresult cuMemAdvise_v2(CUdeviceptr address, size_t bytes, int advice, CUmemLocation location)
{
	return tell(address, bytes, take_advice, (struct asked){.what = advice, .place = location});
}

CUresult cuMemAdvise(CUdeviceptr address, size_t bytes, int advice, CUdevice device)
{
	return cuMemAdvise_v2(address, bytes, advice, location_of(device));
}

CUresult cuMemPrefetchAsync_v2(CUdeviceptr address, size_t bytes, CUmemLocation to, unsigned int flags, CUstream stream)
{
	(void)stream;
	if (flags)
		return CUDA_ERROR_INVALID_VALUE;
	return tell(address, bytes, take_prefetch, (struct asked){.place = to});
}

CUresult cuMemPrefetchAsync(CUdeviceptr address, size_t bytes, CUdevice to, CUstream stream)
{
	return cuMemPrefetchAsync_v2(address, bytes, location_of(to), 0, stream);
}

CUresult cuMemPrefetchBatchAsync(CUdeviceptr *addresses, size_t *bytes, size_t count, CUmemLocation *to, size_t *from,
                                 size_t places, unsigned long long flags, CUstream stream)
{
	CUresult r = flags || !stream || !addresses || !bytes || !to || !from || !places || places > count || *from ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;

	for (size_t i = 0, k = 0; !r && i < count; i++) {
		if (k + 1 < places && from[k + 1] == i)
			k++;
		r = cuMemPrefetchAsync_v2(addresses[i], bytes[i], to[k], 0, stream);
	}
	return r;
}

CUresult cuMemDiscardBatchAsync(CUdeviceptr *addresses, size_t *bytes, size_t count, unsigned long long flags, CUstream stream)
{
	CUresult r = flags || !stream || !addresses || !bytes ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;

	for (size_t i = 0; !r && i < count; i++)
		r = tell(addresses[i], bytes[i], take_discard, (struct asked){0});
	return r;
}

CUresult cuMemDiscardAndPrefetchBatchAsync(CUdeviceptr *addresses, size_t *bytes, size_t count, CUmemLocation *to, size_t *from,
                                           size_t places, unsigned long long flags, CUstream stream)
{
	CUresult r = cuMemDiscardBatchAsync(addresses, bytes, count, flags, stream);

	return r ? r : cuMemPrefetchBatchAsync(addresses, bytes, count, to, from, places, flags, stream);
}

CUresult cuMemRangeGetAttribute(void *data, size_t bytes, int attribute, CUdeviceptr address, size_t range)
{
	return tell(address, range, answer, (struct asked){.what = attribute, .data = data, .bytes = bytes});
}

CUresult cuMemRangeGetAttributes(void **data, size_t *bytes, int *attributes, size_t count, CUdeviceptr address, size_t range)
{
	CUresult r = data && bytes && attributes ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;

	for (size_t i = 0; !r && i < count; i++)
		r = cuMemRangeGetAttribute(data[i], bytes[i], attributes[i], address, range);
	return r;
}

CUresult cuStreamAttachMemAsync(CUstream stream, CUdeviceptr address, size_t bytes, unsigned int flags)
{
	(void)stream;
	if (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST && flags != CU_MEM_ATTACH_SINGLE)
		return CUDA_ERROR_INVALID_VALUE;
	return tell(address, bytes ? bytes : 1, take_discard, (struct asked){0});
}

static CUresult about(void *data, int attribute, CUdeviceptr address, const struct about *a)
{
	const unsigned type = a->host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
	const CUdeviceptr device = address, host = a->host || a->managed ? address : 0;
	const unsigned managed = a->managed;

	switch (attribute) {
	case CU_POINTER_ATTRIBUTE_CONTEXT: memcpy(data, &a->context, sizeof a->context); break;
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: memcpy(data, &type, sizeof type); break;
	case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: memcpy(data, &device, sizeof device); break;
	case CU_POINTER_ATTRIBUTE_HOST_POINTER:
		if (!host)
			return CUDA_ERROR_INVALID_VALUE;
		memcpy(data, &host, sizeof host);
		break;
	case CU_POINTER_ATTRIBUTE_IS_MANAGED: memcpy(data, &managed, sizeof managed); break;
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: memcpy(data, &a->context->ordinal, sizeof a->context->ordinal); break;
	case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: memcpy(data, &a->base, sizeof a->base); break;
	case CU_POINTER_ATTRIBUTE_RANGE_SIZE: memcpy(data, &a->bytes, sizeof a->bytes); break;
	default: return CUDA_ERROR_INVALID_VALUE;
	}
	return CUDA_SUCCESS;
}

// Memory that cuMemMap has mapped is not known here.
CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr address)
{
	struct about a;
	CUresult r = gate_enter();

	if (r)
		return r;
	if (!data || !memory_about(address, &a))
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	return gate_leave(about(data, attribute, address, &a));
}

// What has no answer is all zeros, and no error.
CUresult cuPointerGetAttributes(unsigned int count, int *attributes, void **data, CUdeviceptr address)
{
	struct about a;
	CUresult r = gate_enter();

	if (r)
		return r;
	if (!attributes || !data)
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	bool known = memory_about(address, &a);
	for (unsigned i = 0; i < count; i++) {
		bool wide = attributes[i] != CU_POINTER_ATTRIBUTE_MEMORY_TYPE && attributes[i] != CU_POINTER_ATTRIBUTE_IS_MANAGED &&
		            attributes[i] != CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
		if (!known || about(data[i], attributes[i], address, &a))
			memset(data[i], 0, wide ? sizeof(void *) : sizeof(int));
	}
	return gate_leave(CUDA_SUCCESS);
}
