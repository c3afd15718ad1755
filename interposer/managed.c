// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Managed memory (cuMemAllocManaged), which the driver does not checkpoint. A little of it is pinned host memory here,
// which the driver does checkpoint, and brings back at its address. The host and all GPUs reach it there, as managed
// memory. It never moves to a GPU: advice and prefetches are noted and answered for, and nothing else.
//
// The functions here run inside the gate. The lock is never held across a call that waits for the GPU.

#include "block.h"

#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

// At most so many bytes at once: flags, counters, small tables. A kernel reads 1 MiB over PCIe in some 20 us, at 55
// GB/s, which is what the driver takes to move it to the GPU by page faults. A kernel that reads more than that again and
// again wants it in the GPU's memory.
#define MOST ((size_t)1 << 20)
// In all, for a program that makes its data of many small allocations: a kernel reads so much in 1.2 ms.
#define MOST_IN_ALL ((size_t)64 << 20)
#define PAGE ((size_t)4096) // in which what is in use is counted

// The driver's numbers.
enum { ATTACH_GLOBAL = 1, ATTACH_HOST = 2, ATTACH_SINGLE = 4 };
enum { HOST_PORTABLE = 1, HOST_DEVICEMAP = 2 };
enum { DEVICE_MANAGED_MEMORY = 83 };
enum { NOWHERE = 0, ON_DEVICE = CU_DEVICE, ON_HOST = 2, ON_NODE = 3, ON_NEAREST_NODE = 4 };
enum { ID_HOST = -1, ID_NONE = -2 };
enum { SET_READ_MOSTLY = 1, UNSET_READ_MOSTLY, SET_PREFERRED, UNSET_PREFERRED, SET_ACCESSED_BY, UNSET_ACCESSED_BY };
enum { READ_MOSTLY = 1, PREFERRED, ACCESSED_BY, LAST_PREFETCH, PREFERRED_TYPE, PREFERRED_ID, LAST_PREFETCH_TYPE, LAST_PREFETCH_ID };
enum { MEMORY_TYPE_DEVICE = 2 };
enum { POINTER_CONTEXT = 1, POINTER_TYPE = 2, POINTER_MANAGED = 8, POINTER_DEVICE = 9, POINTER_START = 11, POINTER_SIZE = 12 };
#define LEGACY_STREAM ((CUstream)1)

// range is an allocation. Advice on a part of it is taken for all of it.
struct range {
	CUdeviceptr address;
	size_t bytes;
	CUcontext context;
	CUdevice device;
	bool read_mostly;
	CUmemLocation preferred, fetched; // of type NOWHERE: none
	uint64_t devices;                 // that access it, as bits
	bool host;                        // it does as well
};

// LOCK_MANAGED is of these.
static struct range *ranges; // by address
static size_t count, room;
static size_t in_use; // bytes of whole pages, also of what is about to be made

static size_t pages(size_t bytes)
{
	return (bytes + PAGE - 1) & ~(PAGE - 1);
}

// after returns how many ranges begin at or below an address.
static size_t after(CUdeviceptr p)
{
	size_t low = 0, high = count;

	while (low < high) {
		size_t middle = low + (high - low) / 2;
		if (ranges[middle].address <= p)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

// at returns the range that an address is in, NULL for none. The lock is held until it is used no more.
static struct range *at(CUdeviceptr p)
{
	size_t n = after(p);
	struct range *g = n ? &ranges[n - 1] : NULL;

	return g && p - g->address < g->bytes ? g : NULL;
}

bool managed_has(CUdeviceptr p)
{
	lock(LOCK_MANAGED);
	bool ours = at(p) != NULL;
	unlock(LOCK_MANAGED);
	return ours;
}

// within reports whether bytes are a part of a range.
static bool within(const struct range *g, CUdeviceptr p, size_t bytes)
{
	return bytes && bytes <= g->bytes - (p - g->address);
}

// reserve_room has room for one more range. It never gets less.
static bool reserve_room(void)
{
	if (count < room)
		return true;
	size_t more = room ? 2 * room : 64;
	struct range *larger = realloc(ranges, more * sizeof *ranges);
	if (!larger)
		return false;
	ranges = larger;
	room = more;
	return true;
}

// begin counts bytes as in use. false: there are too many.
static bool begin(size_t bytes)
{
	lock(LOCK_MANAGED);
	bool may = bytes <= MOST && pages(bytes) <= MOST_IN_ALL - in_use;
	in_use += may ? pages(bytes) : 0;
	unlock(LOCK_MANAGED);
	return may;
}

static void end(size_t bytes)
{
	lock(LOCK_MANAGED);
	in_use -= pages(bytes);
	unlock(LOCK_MANAGED);
}

static bool put(struct range g)
{
	lock(LOCK_MANAGED);
	bool may = reserve_room();
	if (may) {
		size_t n = after(g.address);
		memmove(&ranges[n + 1], &ranges[n], (count++ - n) * sizeof *ranges);
		ranges[n] = g;
	}
	unlock(LOCK_MANAGED);
	return may;
}

// remove_range is for who holds the lock.
static void remove_range(struct range *g)
{
	memmove(g, g + 1, (size_t)(&ranges[--count] - g) * sizeof *ranges);
}

// take removes the range that begins at an address. What it has in use stays counted.
static bool take(CUdeviceptr p, struct range *taken)
{
	lock(LOCK_MANAGED);
	struct range *g = at(p);
	bool found = g && g->address == p;
	if (found) {
		*taken = *g;
		remove_range(g);
	}
	unlock(LOCK_MANAGED);
	return found;
}

// here notes the current context and its GPU. false: there is none, or one that has no managed memory.
static bool here(struct range *g)
{
	int has = 0;

	return !driver.cuCtxGetCurrent(&g->context) && g->context && !driver.cuCtxGetDevice(&g->device) &&
	       !driver.cuDeviceGetAttribute(&has, DEVICE_MANAGED_MEMORY, g->device) && has;
}

static CUresult free_host(CUdeviceptr p)
{
	return driver.cuMemFreeHost((void *)p);
}

// As the driver's cuMemFree, it waits until nothing uses the memory any more.
static CUresult wait_and_free(CUdeviceptr p)
{
	CUresult r = driver.cuCtxSynchronize();

	return r ? r : free_host(p);
}

// make makes pinned host memory that GPUs have at the host's address. It is zeros, as managed memory is at first.
static bool make(struct range *g)
{
	void *p = NULL;

	if (driver.cuMemHostAlloc(&p, g->bytes, HOST_PORTABLE | HOST_DEVICEMAP))
		return false;
	if (!driver.cuMemHostGetDevicePointer_v2(&g->address, p, 0) && g->address == (CUdeviceptr)p) {
		memset(p, 0, g->bytes);
		if (put(*g))
			return true;
	}
	free_host((CUdeviceptr)p);
	return false;
}

static CUresult alloc(CUdeviceptr *address, size_t bytes, unsigned flags)
{
	struct range g = {.bytes = bytes};

	if (!block_ready())
		return driver.cuMemAllocManaged(address, bytes, flags);
	if (address && bytes && (flags == ATTACH_GLOBAL || flags == ATTACH_HOST) && here(&g) && begin(bytes)) {
		if (make(&g)) {
			*address = g.address;
			return CUDA_SUCCESS;
		}
		end(bytes);
	}
	CUresult r = driver.cuMemAllocManaged(address, bytes, flags); // whose error is the program's
	if (!r)
		interposer_say("managed memory of more than 1 MiB at once, or of 64 MiB in all, is left to the driver, which refuses a checkpoint of it");
	return r;
}

bool managed_free(CUdeviceptr p, CUresult *r)
{
	struct range g;

	if (!p || !take(p, &g))
		return false;
	*r = block_in_context(g.context, wait_and_free, g.address);
	if (*r)
		put(g); // there is room
	else
		end(g.bytes);
	return true;
}

bool managed_range(CUdeviceptr p, CUdeviceptr *base, size_t *bytes)
{
	lock(LOCK_MANAGED);
	const struct range *g = at(p);
	if (g && base)
		*base = g->address;
	if (g && bytes)
		*bytes = g->bytes;
	unlock(LOCK_MANAGED);
	return g != NULL;
}

bool managed_attribute(CUdeviceptr p, int attribute, void *data)
{
	const unsigned type = MEMORY_TYPE_DEVICE;
	bool known = true;

	lock(LOCK_MANAGED);
	const struct range *g = data ? at(p) : NULL;
	switch (g ? attribute : 0) {
	case POINTER_CONTEXT:
		memcpy(data, &g->context, sizeof g->context);
		break;
	case POINTER_TYPE:
		memcpy(data, &type, sizeof type);
		break;
	case POINTER_MANAGED: // the driver has written a zero, in as many bytes as it does
		*(unsigned char *)data = 1;
		break;
	case POINTER_DEVICE:
		memcpy(data, &g->device, sizeof g->device);
		break;
	case POINTER_START:
		memcpy(data, &g->address, sizeof g->address);
		break;
	case POINTER_SIZE:
		memcpy(data, &g->bytes, sizeof g->bytes);
		break;
	default:
		known = false;
	}
	unlock(LOCK_MANAGED);
	return known;
}

void managed_context_ended(CUcontext c)
{
	lock(LOCK_MANAGED);
	for (size_t i = count; i-- > 0;) {
		if (ranges[i].context != c)
			continue;
		in_use -= pages(ranges[i].bytes);
		remove_range(&ranges[i]);
	}
	unlock(LOCK_MANAGED);
}

void managed_forked(void)
{
	count = in_use = 0;
}

static CUmemLocation location_of(CUdevice device)
{
	return device == ID_HOST ? (CUmemLocation){ON_HOST, 0} : (CUmemLocation){ON_DEVICE, device};
}

// settle has a location as it is answered for. It is an error if there is none such.
static CUresult settle(CUmemLocation *l)
{
	unsigned node = 0;
	int n = 0;

	switch (l->type) {
	case ON_DEVICE:
		if (!driver.cuDeviceGetCount(&n) && l->id >= 0 && l->id < n && n <= MAX_DEVICES)
			return CUDA_SUCCESS;
		return CUDA_ERROR_INVALID_DEVICE;
	case ON_NEAREST_NODE:
		syscall(SYS_getcpu, NULL, &node, NULL);
		*l = (CUmemLocation){ON_NODE, (int)node};
		return CUDA_SUCCESS;
	case ON_HOST:
	case ON_NODE:
		return CUDA_SUCCESS;
	}
	return CUDA_ERROR_INVALID_VALUE;
}

static CUresult advise(struct range *g, int advice, CUmemLocation l)
{
	CUresult r = CUDA_SUCCESS;

	switch (advice) {
	case SET_READ_MOSTLY:
	case UNSET_READ_MOSTLY:
		g->read_mostly = advice == SET_READ_MOSTLY;
		return r;
	case UNSET_PREFERRED:
		g->preferred = (CUmemLocation){NOWHERE, 0};
		return r;
	case SET_PREFERRED:
		if (!(r = settle(&l)))
			g->preferred = l;
		return r;
	case SET_ACCESSED_BY:
	case UNSET_ACCESSED_BY:
		if (l.type != ON_DEVICE && l.type != ON_HOST)
			return CUDA_ERROR_INVALID_VALUE;
		if ((r = settle(&l)))
			return r;
		if (l.type == ON_HOST)
			g->host = advice == SET_ACCESSED_BY;
		else if (advice == SET_ACCESSED_BY)
			g->devices |= UINT64_C(1) << l.id;
		else
			g->devices &= ~(UINT64_C(1) << l.id);
		return r;
	}
	return CUDA_ERROR_INVALID_VALUE;
}

static CUresult prefetch(struct range *g, CUmemLocation l)
{
	CUresult r = settle(&l);

	if (!r)
		g->fetched = l;
	return r;
}

static int id_of(CUmemLocation l)
{
	return l.type == ON_DEVICE ? l.id : l.type == NOWHERE ? ID_NONE : ID_HOST;
}

static void list_accessors(const struct range *g, int *list, size_t n)
{
	size_t i = 0;

	for (int d = 0; d < MAX_DEVICES && i < n; d++)
		if (g->devices >> d & 1)
			list[i++] = d;
	if (g->host && i < n)
		list[i++] = ID_HOST;
	while (i < n)
		list[i++] = ID_NONE;
}

static CUresult answer(const struct range *g, void *data, size_t bytes, int attribute)
{
	int value;

	if (!data || !bytes || bytes % sizeof value || (attribute != ACCESSED_BY && bytes != sizeof value))
		return CUDA_ERROR_INVALID_VALUE;
	switch (attribute) {
	case READ_MOSTLY: value = g->read_mostly; break;
	case PREFERRED: value = id_of(g->preferred); break;
	case LAST_PREFETCH: value = id_of(g->fetched); break;
	case PREFERRED_TYPE: value = g->preferred.type; break;
	case PREFERRED_ID: value = g->preferred.id; break;
	case LAST_PREFETCH_TYPE: value = g->fetched.type; break;
	case LAST_PREFETCH_ID: value = g->fetched.id; break;
	case ACCESSED_BY:
		list_accessors(g, data, bytes / sizeof value);
		return CUDA_SUCCESS;
	default:
		return CUDA_ERROR_INVALID_VALUE;
	}
	memcpy(data, &value, sizeof value);
	return CUDA_SUCCESS;
}

static CUresult answers(const struct range *g, void **data, size_t *sizes, int *attributes, size_t n)
{
	CUresult r = data && sizes && attributes ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;

	for (size_t i = 0; !r && i < n; i++)
		r = answer(g, data[i], sizes[i], attributes[i]);
	return r;
}

static CUresult attach(unsigned flags)
{
	return flags == ATTACH_GLOBAL || flags == ATTACH_HOST || flags == ATTACH_SINGLE ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// OURS is the driver's function, but for bytes from p on that begin in a range g.
#define OURS(symbol, bytes, what, parameters, arguments)                               \
	static CUresult our_##symbol parameters                                        \
	{                                                                              \
		CUresult r = CUDA_ERROR_INVALID_VALUE;                                 \
		lock(LOCK_MANAGED);                                                    \
		struct range *g = at(p);                                               \
		if (g && within(g, p, bytes))                                          \
			r = what;                                                      \
		unlock(LOCK_MANAGED);                                                  \
		return g ? r : driver.symbol arguments;                                \
	}

OURS(cuMemAdvise, n, advise(g, advice, location_of(device)), (CUdeviceptr p, size_t n, int advice, CUdevice device), (p, n, advice, device))
OURS(cuMemAdvise_v2, n, advise(g, advice, location), (CUdeviceptr p, size_t n, int advice, CUmemLocation location), (p, n, advice, location))

#define PREFETCH(symbol) \
	OURS(symbol, n, prefetch(g, location_of(device)), (CUdeviceptr p, size_t n, CUdevice device, CUstream stream), (p, n, device, stream))
#define PREFETCH_V2(symbol) \
	OURS(symbol, n, flags ? CUDA_ERROR_INVALID_VALUE : prefetch(g, location), (CUdeviceptr p, size_t n, CUmemLocation location, unsigned flags, CUstream stream), (p, n, location, flags, stream))
#define ATTACH(symbol) \
	OURS(symbol, n ? n : 1, attach(flags), (CUstream stream, CUdeviceptr p, size_t n, unsigned flags), (stream, p, n, flags))
PREFETCH(cuMemPrefetchAsync)
PREFETCH(cuMemPrefetchAsync_ptsz)
PREFETCH_V2(cuMemPrefetchAsync_v2)
PREFETCH_V2(cuMemPrefetchAsync_v2_ptsz)
ATTACH(cuStreamAttachMemAsync)
ATTACH(cuStreamAttachMemAsync_ptsz)

OURS(cuMemRangeGetAttribute, n, answer(g, data, bytes, attribute), (void *data, size_t bytes, int attribute, CUdeviceptr p, size_t n), (data, bytes, attribute, p, n))
OURS(cuMemRangeGetAttributes, n, answers(g, data, sizes, attributes, attributes_count), (void **data, size_t *sizes, int *attributes, size_t attributes_count, CUdeviceptr p, size_t n), (data, sizes, attributes, attributes_count, p, n))

OURS(cuMemFreeHost, 1, CUDA_ERROR_INVALID_VALUE, (CUdeviceptr p), ((void *)p)) // cuMemFree frees it

// batch is what the batches have in common. Of a discard there are no locations.
struct batch {
	CUdeviceptr *p;
	size_t *bytes;
	size_t count;
	const CUmemLocation *locations;
	const size_t *from; // the operation that a location is for, and those after it
	size_t froms;
	bool prefetches;
	bool legal; // the flags and the stream
};

static bool any_ours(const struct batch *b)
{
	bool any = false;

	for (size_t i = 0; b->p && i < b->count && !any; i++)
		any = managed_has(b->p[i]);
	return any;
}

static bool is_legal(const struct batch *b)
{
	if (!b->legal || !b->bytes || (b->prefetches && (!b->locations || !b->from || !b->froms || b->from[0])))
		return false;
	for (size_t i = 1; b->prefetches && i < b->froms; i++)
		if (b->from[i] <= b->from[i - 1] || b->from[i] >= b->count)
			return false;
	return true;
}

static CUmemLocation location_in(const struct batch *b, size_t i)
{
	size_t k = 0;

	while (k + 1 < b->froms && b->from[k + 1] <= i)
		k++;
	return b->locations[k];
}

// do_ours does an operation of a batch on a range of ours. false: it is the driver's.
static bool do_ours(const struct batch *b, size_t i, CUresult *r)
{
	lock(LOCK_MANAGED);
	struct range *g = at(b->p[i]);
	if (g)
		*r = !within(g, b->p[i], b->bytes[i]) ? CUDA_ERROR_INVALID_VALUE : b->prefetches ? prefetch(g, location_in(b, i)) : CUDA_SUCCESS;
	unlock(LOCK_MANAGED);
	return g != NULL;
}

// The streams that have names of their own: 0 is the legacy stream, but where it is the thread's.
static bool is_legacy(CUstream s, bool per_thread)
{
	return s == LEGACY_STREAM || (!s && !per_thread);
}

// A batch with something of ours: the driver gets what is its own one by one.
typedef CUresult prefetch_batch(CUdeviceptr *, size_t *, size_t, CUmemLocation *, size_t *, size_t, uint64_t, CUstream);
static CUresult prefetch_all(prefetch_batch *real, struct batch b, uint64_t flags, CUstream s)
{
	CUresult r = CUDA_SUCCESS;

	if (!is_legal(&b))
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; !r && i < b.count; i++) {
		CUmemLocation l = location_in(&b, i);
		size_t first = 0;
		if (!do_ours(&b, i, &r))
			r = real(&b.p[i], &b.bytes[i], 1, &l, &first, 1, flags, s);
	}
	return r;
}

typedef CUresult discard_batch(CUdeviceptr *, size_t *, size_t, uint64_t, CUstream);
static CUresult discard_all(discard_batch *real, struct batch b, uint64_t flags, CUstream s)
{
	CUresult r = is_legal(&b) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;

	for (size_t i = 0; !r && i < b.count; i++)
		if (!do_ours(&b, i, &r))
			r = real(&b.p[i], &b.bytes[i], 1, flags, s);
	return r;
}

#define BATCH(symbol, per_thread)                                                                                   \
	static CUresult our_##symbol(CUdeviceptr *p, size_t *bytes, size_t n, CUmemLocation *locations,             \
	                             size_t *from, size_t froms, uint64_t flags, CUstream s)                        \
	{                                                                                                           \
		struct batch b = {p, bytes, n, locations, from, froms, true, !flags && !is_legacy(s, per_thread)};  \
		return any_ours(&b) ? prefetch_all(driver.symbol, b, flags, s) : driver.symbol(p, bytes, n, locations, from, froms, flags, s); \
	}
#define DISCARD(symbol, per_thread)                                                                                 \
	static CUresult our_##symbol(CUdeviceptr *p, size_t *bytes, size_t n, uint64_t flags, CUstream s)           \
	{                                                                                                           \
		struct batch b = {.p = p, .bytes = bytes, .count = n, .legal = !flags && !is_legacy(s, per_thread)}; \
		return any_ours(&b) ? discard_all(driver.symbol, b, flags, s) : driver.symbol(p, bytes, n, flags, s);                 \
	}
BATCH(cuMemPrefetchBatchAsync, false)
BATCH(cuMemPrefetchBatchAsync_ptsz, true)
BATCH(cuMemDiscardAndPrefetchBatchAsync, false)
BATCH(cuMemDiscardAndPrefetchBatchAsync_ptsz, true)
DISCARD(cuMemDiscardBatchAsync, false)
DISCARD(cuMemDiscardBatchAsync_ptsz, true)

#define OF(name) {#name, our_##name}
const struct override managed_overrides[] = {
	{"cuMemAllocManaged", alloc}, OF(cuMemFreeHost), OF(cuMemAdvise), OF(cuMemAdvise_v2),
	OF(cuMemPrefetchAsync), OF(cuMemPrefetchAsync_ptsz), OF(cuMemPrefetchAsync_v2), OF(cuMemPrefetchAsync_v2_ptsz),
	OF(cuStreamAttachMemAsync), OF(cuStreamAttachMemAsync_ptsz), OF(cuMemRangeGetAttribute), OF(cuMemRangeGetAttributes),
	OF(cuMemPrefetchBatchAsync), OF(cuMemPrefetchBatchAsync_ptsz), OF(cuMemDiscardAndPrefetchBatchAsync),
	OF(cuMemDiscardAndPrefetchBatchAsync_ptsz), OF(cuMemDiscardBatchAsync), OF(cuMemDiscardBatchAsync_ptsz),
	{NULL, NULL},
};
