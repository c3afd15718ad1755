// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// GPU memory of the interposer's own making. What a program has by cuMemAlloc, from MIN_BYTES on, is a
// handle of cuMemCreate, mapped at an address that was reserved for it. So the memory can be given back
// and had again, and the address stays.
//
//	cuMemAlloc --> mapped --memory_save--> reserved --memory_restore--> mapped --> cuMemFree
//
// Another process may have such memory mapped as well, by cuIpcOpenMemHandle: an import. It is not saved
// there, but given back before the exporter saves it, and had again from the exporter after that:
//
//	cuIpcOpenMemHandle --> mapped --memory_leave--> away --memory_join--> mapped --> cuIpcCloseMemHandle
//
// The functions here that stand in for the driver's run inside the gate, and the worker changes blocks
// only while nobody is inside. The mutex is for the program's threads among each other, and is never
// held across a call that waits for the GPU.

#include "block.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

// The driver gives memory by pieces of 2 MiB, and several small allocations share one. A handle has
// pieces of its own. What would waste a third of them or more is the driver's; PyTorch and NCCL ask for whole pieces.
#define MIN_BYTES ((size_t)2 << 20)

enum { MAX_CONTEXTS = 256 };

struct context {
	CUcontext it;
	int primary_of; // a device; -1
};

// peer is what a cuCtxEnablePeerAccess has allowed: from's kernels reach memory of to's.
struct peer {
	struct peer *next;
	CUcontext from, to;
	bool ended; // by peers_end
};

static struct peer *peers;
struct block *blocks;
static struct context contexts[MAX_CONTEXTS];
static int context_count;
static uint64_t may_access[MAX_DEVICES]; // devices whose kernels reach the memory of one
pthread_mutex_t blocks_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER; // one cuIpcOpenMemHandle or Close at a time
static pthread_mutex_t exporting = PTHREAD_MUTEX_INITIALIZER; // no handle ends while one is exported
static uint64_t last_number; // of a block
static uint32_t lost; // what the program has used that the interposer does not bring back

static struct {
	CUresult (*MemAlloc)(CUdeviceptr *, size_t);
	CUresult (*MemFree)(CUdeviceptr);
	CUresult (*DriverGetVersion)(int *);
	CUresult (*CtxGetCurrent)(CUcontext *);
	CUresult (*CtxSetCurrent)(CUcontext);
	CUresult (*CtxGetDevice)(CUdevice *);
	CUresult (*CtxSynchronize)(void);
	CUresult (*Granularity)(size_t *, const CUmemAllocationProp *, int);
	CUresult (*AddressReserve)(CUdeviceptr *, size_t, size_t, CUdeviceptr, uint64_t);
	CUresult (*AddressFree)(CUdeviceptr, size_t);
	CUresult (*Create)(CUhandle *, size_t, const CUmemAllocationProp *, uint64_t);
	CUresult (*Release)(CUhandle);
	CUresult (*Map)(CUdeviceptr, size_t, size_t, CUhandle, uint64_t);
	CUresult (*Unmap)(CUdeviceptr, size_t);
	CUresult (*SetAccess)(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);
	CUresult (*Export)(void *, CUhandle, int, uint64_t);
	CUresult (*Import)(CUhandle *, void *, int);
} cu;

static const struct {
	const char *name;
	void *function;
} functions[] = {
	{"cuMemAlloc_v2", &cu.MemAlloc},
	{"cuMemFree_v2", &cu.MemFree},
	{"cuDriverGetVersion", &cu.DriverGetVersion},
	{"cuCtxGetCurrent", &cu.CtxGetCurrent},
	{"cuCtxSetCurrent", &cu.CtxSetCurrent},
	{"cuCtxGetDevice", &cu.CtxGetDevice},
	{"cuCtxSynchronize", &cu.CtxSynchronize},
	{"cuMemGetAllocationGranularity", &cu.Granularity},
	{"cuMemAddressReserve", &cu.AddressReserve},
	{"cuMemAddressFree", &cu.AddressFree},
	{"cuMemCreate", &cu.Create},
	{"cuMemRelease", &cu.Release},
	{"cuMemMap", &cu.Map},
	{"cuMemUnmap", &cu.Unmap},
	{"cuMemSetAccess", &cu.SetAccess},
	{"cuMemExportToShareableHandle", &cu.Export},
	{"cuMemImportFromShareableHandle", &cu.Import},
};

static bool is_known;

static void look(void)
{
	const char *set = getenv("GPUCKPT_INTERPOSER");
	int version = 0;

	if (set && !strcmp(set, "off")) {
		interposer_say("GPUCKPT_INTERPOSER=off: it does nothing here");
		return;
	}
	for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
		void *f = interposer_real(functions[i].name);
		if (!f) {
			interposer_say("the driver lacks a function that the interposer needs: it does nothing here");
			return;
		}
		memcpy(functions[i].function, &f, sizeof f);
	}
	if (!copy_ready()) {
		interposer_say("the driver lacks a function that the interposer needs: it does nothing here");
		return;
	}
	if (cu.DriverGetVersion(&version) || version < 12000 || version >= 14000) {
		interposer_say("the driver is none of CUDA 12 or 13: it does nothing here");
		return;
	}
	if (!worker_start()) {
		interposer_say("there is no thread for it: it does nothing here");
		return;
	}
	is_known = true;
}

// known looks the driver over, once. false: a driver that is not known, and nothing is made here.
bool block_ready(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, look);
	return is_known;
}

static void note_context(CUcontext c, int primary_of)
{
	int i;

	pthread_mutex_lock(&blocks_mutex);
	for (i = 0; i < context_count && contexts[i].it != c; i++)
		;
	if (i < MAX_CONTEXTS) {
		contexts[i] = (struct context){c, primary_of >= 0 || i == context_count ? primary_of : contexts[i].primary_of};
		context_count += i == context_count;
	}
	pthread_mutex_unlock(&blocks_mutex);
}

struct block *block_at(CUdeviceptr p)
{
	struct block *b;

	pthread_mutex_lock(&blocks_mutex);
	for (b = blocks; b && (!b->visible || p < b->address || p - b->address >= b->asked); b = b->next)
		;
	pthread_mutex_unlock(&blocks_mutex);
	return b;
}

static CUmemAllocationProp on(CUdevice device)
{
	return (CUmemAllocationProp){.type = CU_PINNED, .requestedHandleTypes = CU_POSIX_FD, .location = {CU_DEVICE, device}};
}

// allow lets the kernels of all GPUs reach a block that would reach it if it were the driver's.
static CUresult allow(const struct block *b)
{
	CUmemAccessDesc desc[MAX_DEVICES];
	size_t n = 0;

	for (int d = 0; d < MAX_DEVICES; d++)
		if (d == b->device || may_access[b->device] >> d & 1)
			desc[n++] = (CUmemAccessDesc){{CU_DEVICE, d}, CU_READWRITE};
	return cu.SetAccess(b->address, b->bytes, desc, n);
}

bool block_is_import(const struct block *b)
{
	return b->from.number != 0;
}

static CUresult create(struct block *b)
{
	CUmemAllocationProp prop = b->prop.type ? b->prop : on(b->device);
	CUresult r = cu.Create(&b->handle, b->bytes, &prop, 0);

	b->exportable = !r;
	if (!r || r == CUDA_ERROR_OUT_OF_MEMORY || b->prop.type)
		return r;
	prop.requestedHandleTypes = 0; // a driver without that kind of handle
	return cu.Create(&b->handle, b->bytes, &prop, 0);
}

static CUresult import(struct block *b)
{
	int fd = -1;
	CUresult r = share_ask(&b->from, SHARE_OPEN, 0, &fd);

	if (r)
		return r;
	r = cu.Import(&b->handle, (void *)(intptr_t)fd, CU_POSIX_FD);
	close(fd);
	if (r)
		share_ask(&b->from, SHARE_CLOSE, 0, NULL);
	return r;
}

CUresult block_have(struct block *b)
{
	CUresult r = block_is_import(b) ? import(b) : create(b);

	if (r)
		return r;
	if (!b->address || !(r = cu.Map(b->address, b->bytes, 0, b->handle, 0))) {
		r = b->address ? allow(b) : r;
		if (!r && !(r = vmm_show(b))) {
			b->mapped = true;
			return CUDA_SUCCESS;
		}
		if (b->address)
			cu.Unmap(b->address, b->bytes);
	}
	cu.Release(b->handle);
	if (block_is_import(b))
		share_ask(&b->from, SHARE_CLOSE, 0, NULL);
	return r;
}

CUresult block_give(struct block *b)
{
	CUresult r = CUDA_SUCCESS;

	if (!b->mapped) // an import whose exporter has ended
		return r;
	pthread_mutex_lock(&exporting);
	if (!(r = vmm_hide(b)) && b->address && (r = cu.Unmap(b->address, b->bytes)))
		vmm_show(b);
	if (!r) {
		b->mapped = false;
		r = cu.Release(b->handle);
	}
	pthread_mutex_unlock(&exporting);
	return r;
}

void block_add(struct block *b)
{
	if (b->context)
		note_context(b->context, -1);
	pthread_mutex_lock(&blocks_mutex);
	b->next = blocks;
	blocks = b;
	pthread_mutex_unlock(&blocks_mutex);
}

struct block *block_here(size_t bytes)
{
	struct block *b = calloc(1, sizeof *b);

	if (b && !cu.CtxGetCurrent(&b->context) && b->context && !cu.CtxGetDevice(&b->device) && b->device >= 0 && b->device < MAX_DEVICES) {
		b->asked = b->bytes = bytes;
		return b;
	}
	free(b);
	return NULL;
}

CUresult block_reserve(struct block *b)
{
	return cu.AddressReserve(&b->address, b->bytes, 0, 0, 0);
}

void block_lost(enum lost what)
{
	__atomic_or_fetch(&lost, what, __ATOMIC_SEQ_CST);
	block_ready();
}

static CUresult alloc(CUdeviceptr *address, size_t bytes)
{
	struct block *b = NULL;
	CUdevice device;
	size_t piece = 0;
	CUresult r;

	if (!block_ready() || !address || bytes < MIN_BYTES || cu.CtxGetDevice(&device) || device < 0 || device >= MAX_DEVICES)
		goto drivers;
	CUmemAllocationProp prop = on(device);
	if (cu.Granularity(&piece, &prop, 0) || !piece || bytes > SIZE_MAX - piece || !(b = calloc(1, sizeof *b)))
		goto drivers;
	b->asked = bytes;
	b->bytes = (bytes + piece - 1) / piece * piece;
	if (b->bytes - bytes >= b->bytes / 3)
		goto drivers;
	b->device = device;
	b->visible = true;
	if (cu.CtxGetCurrent(&b->context) || cu.AddressReserve(&b->address, b->bytes, 0, 0, 0))
		goto drivers;
	r = block_have(b);
	if (r == CUDA_ERROR_OUT_OF_MEMORY && keep_wait())
		r = block_have(b);
	if (r) {
		cu.AddressFree(b->address, b->bytes);
		goto drivers;
	}
	block_add(b);
	*address = b->address;
	return CUDA_SUCCESS;

drivers: // whose error, if there is one, is the program's
	free(b);
	CUresult (*real)(CUdeviceptr *, size_t) = interposer_real("cuMemAlloc_v2");
	r = real ? real(address, bytes) : CUDA_ERROR_NOT_FOUND;
	return r == CUDA_ERROR_OUT_OF_MEMORY && keep_wait() ? real(address, bytes) : r;
}

static void forget(struct block *gone)
{
	pthread_mutex_lock(&exporting);
	pthread_mutex_lock(&blocks_mutex);
	for (struct block **l = &blocks; *l; l = &(*l)->next) {
		if (*l == gone) {
			*l = gone->next;
			break;
		}
	}
	pthread_mutex_unlock(&blocks_mutex);
	pthread_mutex_unlock(&exporting);
	free(gone);
}

CUresult block_end(struct block *b)
{
	bool had = b->mapped;
	CUresult r = block_give(b);

	if (r)
		return r;
	if (block_is_import(b) && had)
		share_ask(&b->from, SHARE_CLOSE, 0, NULL); // who ends is missed
	if (b->address)
		r = cu.AddressFree(b->address, b->bytes);
	forget(b);
	return r;
}

CUresult block_in_context(CUcontext c, CUresult (*call)(CUdeviceptr), CUdeviceptr p)
{
	CUcontext before = NULL;
	CUresult r = cu.CtxGetCurrent(&before);

	if (r || (before != c && (r = cu.CtxSetCurrent(c))))
		return r;
	r = call(p);
	if (before != c)
		cu.CtxSetCurrent(before);
	return r;
}

static CUresult wait_for_gpu(CUdeviceptr p)
{
	(void)p;
	return cu.CtxSynchronize();
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
	if (!b || b->address != address) {
		CUresult (*real)(CUdeviceptr) = interposer_real("cuMemFree_v2");
		return real ? real(address) : CUDA_ERROR_NOT_FOUND;
	}
	if ((r = block_in_context(b->context, wait_for_gpu, b->address)))
		return r;
	if (vmm_keeps(b))
		return CUDA_SUCCESS;
	return block_end(b);
}

static CUresult get_address_range(CUdeviceptr *base, size_t *bytes, CUdeviceptr p)
{
	CUresult (*real)(CUdeviceptr *, size_t *, CUdeviceptr) = interposer_real("cuMemGetAddressRange_v2");
	struct block *b = block_at(p);

	if (!b && managed_range(p, base, bytes))
		return CUDA_SUCCESS;
	if (!b)
		return real ? real(base, bytes, p) : CUDA_ERROR_NOT_FOUND;
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
	CUresult (*real)(void *, int, CUdeviceptr) = interposer_real("cuPointerGetAttribute");
	struct block *b = block_at(p);

	if (b && data && attribute_of(b, data, attribute))
		return CUDA_SUCCESS;
	CUresult r = real ? real(data, attribute, p) : CUDA_ERROR_NOT_FOUND;
	return managed_attribute(p, attribute, data) ? CUDA_SUCCESS : r;
}

static CUresult pointer_attributes(unsigned n, int *attributes, void **data, CUdeviceptr p)
{
	CUresult (*real)(unsigned, int *, void **, CUdeviceptr) = interposer_real("cuPointerGetAttributes");
	struct block *b = block_at(p);
	CUresult r = real ? real(n, attributes, data, p) : CUDA_ERROR_NOT_FOUND;

	for (unsigned i = 0; !r && i < n; i++)
		if (!b || !attribute_of(b, data[i], attributes[i]))
			managed_attribute(p, attributes[i], data[i]);
	return r;
}

bool block_ticket(struct block *b, struct ticket *t)
{
	pthread_mutex_lock(&blocks_mutex);
	if (!b->number)
		b->number = ++last_number;
	*t = (struct ticket){.number = b->number, .bytes = b->bytes, .asked = b->asked};
	pthread_mutex_unlock(&blocks_mutex);
	return b->exportable && share_ticket(t);
}

static CUresult ipc_get(void *handle, CUdeviceptr p)
{
	CUresult (*real)(void *, CUdeviceptr) = interposer_real("cuIpcGetMemHandle");

	struct block *b = block_at(p);
	struct ticket t;

	if (!b && managed_has(p))
		return CUDA_ERROR_INVALID_VALUE;
	if (!b)
		return real ? real(handle, p) : CUDA_ERROR_NOT_FOUND;
	if (!handle || block_is_import(b))
		return CUDA_ERROR_INVALID_VALUE;
	if (!block_ticket(b, &t)) {
		interposer_say("CUDA IPC (cuIpcGetMemHandle) cannot share memory of the interposer's here: start the program without dev.gpuckpt.interposer");
		return CUDA_ERROR_NOT_SUPPORTED;
	}
	memcpy(handle, &t, sizeof t);
	return CUDA_SUCCESS;
}

static struct block *import_of(const struct ticket *t, CUcontext c)
{
	struct block *b;

	pthread_mutex_lock(&blocks_mutex);
	for (b = blocks; b && !(block_is_import(b) && b->visible && b->context == c && b->from.number == t->number && !memcmp(b->from.exporter, t->exporter, sizeof t->exporter)); b = b->next)
		;
	pthread_mutex_unlock(&blocks_mutex);
	return b;
}

// map_import maps memory of another process for the first time.
static CUresult map_import(CUdeviceptr *address, const struct ticket *t, CUcontext c)
{
	struct block *b = calloc(1, sizeof *b);
	CUresult r;

	if (!b)
		return CUDA_ERROR_OUT_OF_MEMORY;
	b->from = *t;
	b->asked = t->asked;
	b->bytes = t->bytes;
	b->context = c;
	b->opened = 1;
	b->visible = true;
	if (!(r = cu.CtxGetDevice(&b->device)) && b->device >= 0 && b->device < MAX_DEVICES &&
	    !(r = cu.AddressReserve(&b->address, b->bytes, 0, 0, 0)) && (r = block_have(b)))
		cu.AddressFree(b->address, b->bytes);
	if (r || !b->mapped) {
		free(b);
		return r && r != CUDA_ERROR_NOT_FOUND ? r : CUDA_ERROR_INVALID_HANDLE;
	}
	block_add(b);
	*address = b->address;
	return CUDA_SUCCESS;
}

// A handle that is opened once more has the address that it has.
static CUresult ipc_open(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags)
{
	CUresult (*real)(CUdeviceptr *, CUipcMemHandle, unsigned) = interposer_real("cuIpcOpenMemHandle_v2");
	CUcontext c = NULL;
	struct ticket t;
	CUresult r;

	memcpy(&t, &handle, sizeof t);
	if (!share_known(&t))
		return real ? real(address, handle, flags) : CUDA_ERROR_NOT_FOUND;
	if (!block_ready())
		return CUDA_ERROR_INVALID_HANDLE;
	if (!address || flags != 1) // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
		return CUDA_ERROR_INVALID_VALUE;
	if ((r = cu.CtxGetCurrent(&c)) || !c || share_own(&t)) // as the driver, which has it already
		return r ? r : CUDA_ERROR_INVALID_CONTEXT;
	pthread_mutex_lock(&opening);
	struct block *b = import_of(&t, c);
	if (b) {
		b->opened++;
		*address = b->address;
	} else {
		r = map_import(address, &t, c);
	}
	pthread_mutex_unlock(&opening);
	return r;
}

static CUresult ipc_close(CUdeviceptr address)
{
	CUresult (*real)(CUdeviceptr) = interposer_real("cuIpcCloseMemHandle");
	struct block *b = address ? block_at(address) : NULL;
	CUresult r = CUDA_SUCCESS;

	if (!b)
		return real ? real(address) : CUDA_ERROR_NOT_FOUND;
	if (!block_is_import(b) || b->address != address)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&opening);
	if (b->opened > 1)
		b->opened--;
	else if (!(r = block_in_context(b->context, wait_for_gpu, b->address)) && !vmm_keeps(b))
		r = block_end(b);
	pthread_mutex_unlock(&opening);
	return r;
}

static CUresult range_handle(void *handle, CUdeviceptr p, size_t bytes, int type, unsigned long long flags)
{
	CUresult (*real)(void *, CUdeviceptr, size_t, int, unsigned long long) = interposer_real("cuMemGetHandleForAddressRange");
	struct block *b = block_at(p), *view = vmm_block(p);
	CUresult r = real ? real(handle, p, bytes, type, flags) : CUDA_ERROR_NOT_FOUND;

	if (!r && b)
		b->given = true;
	if (!r && view)
		view->given = true;
	return r;
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
	pthread_mutex_lock(&blocks_mutex);
	p->next = peers;
	peers = p;
	pthread_mutex_unlock(&blocks_mutex);
}

// forget_peers forgets what from's kernels reach of to's; NULL is any.
static void forget_peers(CUcontext from, CUcontext to)
{
	pthread_mutex_lock(&blocks_mutex);
	for (struct peer **l = &peers; *l;) {
		struct peer *p = *l;
		if ((from && p->from != from) || (to && p->to != to)) {
			l = &p->next;
			continue;
		}
		*l = p->next;
		free(p);
	}
	pthread_mutex_unlock(&blocks_mutex);
}

static CUresult disable_peer(CUcontext peer)
{
	CUresult (*real)(CUcontext) = interposer_real("cuCtxDisablePeerAccess");
	CUresult r = real ? real(peer) : CUDA_ERROR_NOT_FOUND;
	CUcontext c;

	if (!r && block_ready() && !cu.CtxGetCurrent(&c))
		forget_peers(c, peer);
	return r;
}

CUresult peers_allow(void)
{
	CUresult (*enable)(CUcontext, unsigned) = interposer_real("cuCtxEnablePeerAccess");
	CUresult first = CUDA_SUCCESS;

	for (struct peer *p = peers; p; p = p->next) {
		if (!p->ended)
			continue;
		CUresult r = enable ? cu.CtxSetCurrent(p->from) : CUDA_ERROR_NOT_FOUND;
		r = r ? r : enable(p->to, 0);
		p->ended = r != CUDA_SUCCESS;
		first = first ? first : r;
	}
	return first;
}

CUresult peers_end(void)
{
	CUresult (*disable)(CUcontext) = interposer_real("cuCtxDisablePeerAccess");
	CUresult r = CUDA_SUCCESS;

	for (struct peer *p = peers; p && !r; p = p->next) {
		r = disable ? cu.CtxSetCurrent(p->from) : CUDA_ERROR_NOT_FOUND;
		r = r ? r : disable(p->to);
		p->ended = !r;
	}
	if (r)
		peers_allow();
	return r;
}

uint32_t memory_peers(void)
{
	uint32_t n = 0;

	for (struct peer *p = peers; p; p = p->next)
		n++;
	return n;
}

static CUresult enable_peer(CUcontext peer, unsigned flags)
{
	CUresult (*real)(CUcontext, unsigned) = interposer_real("cuCtxEnablePeerAccess");
	CUresult r = real ? real(peer, flags) : CUDA_ERROR_NOT_FOUND;
	CUdevice here, there;
	CUcontext c;

	if (r || !block_ready() || cu.CtxGetCurrent(&c))
		return r;
	note_peer(c, peer);
	if (cu.CtxGetDevice(&here) || cu.CtxSetCurrent(peer))
		return r;
	bool failed = cu.CtxGetDevice(&there);
	cu.CtxSetCurrent(c);
	if (failed || here < 0 || here >= MAX_DEVICES || there < 0 || there >= MAX_DEVICES)
		return r;
	note_context(c, -1);
	may_access[there] |= 1ull << here;
	pthread_mutex_lock(&blocks_mutex);
	for (struct block *b = blocks; b && !r; b = b->next)
		if (b->device == there && b->mapped && b->address)
			r = allow(b);
	pthread_mutex_unlock(&blocks_mutex);
	return r;
}

// The driver frees the memory of a context with it.
static void context_ended(CUcontext c)
{
	forget_peers(c, NULL);
	forget_peers(NULL, c);
	managed_context_ended(c);
	events_context_ended(c);
	for (;;) {
		struct block *b;
		pthread_mutex_lock(&blocks_mutex);
		for (b = blocks; b && b->context != c; b = b->next)
			;
		pthread_mutex_unlock(&blocks_mutex);
		if (!b)
			break;
		if (!b->visible) { // memory with a handle stays, and there is no context to copy it in
			b->context = NULL;
			b->given = true;
		} else if (block_end(b)) {
			forget(b);
		}
	}
	pthread_mutex_lock(&blocks_mutex);
	for (int i = 0; i < context_count; i++)
		if (contexts[i].it == c)
			contexts[i] = contexts[--context_count];
	pthread_mutex_unlock(&blocks_mutex);
}

#define CREATED(name, symbol, parameters, arguments)                             \
	static CUresult name parameters                                          \
	{                                                                        \
		CUresult(*real) parameters = interposer_real(symbol);             \
		CUresult r = real ? real arguments : CUDA_ERROR_NOT_FOUND;       \
		if (!r && context)                                               \
			note_context(*context, -1);                              \
		return r;                                                        \
	}
CREATED(create_v2, "cuCtxCreate_v2", (CUcontext *context, unsigned f, CUdevice d), (context, f, d))
CREATED(create_v3, "cuCtxCreate_v3", (CUcontext *context, void *p, int n, unsigned f, CUdevice d), (context, p, n, f, d))
CREATED(create_v4, "cuCtxCreate_v4", (CUcontext *context, void *p, unsigned f, CUdevice d), (context, p, f, d))

static CUresult primary_retain(CUcontext *context, CUdevice d)
{
	CUresult (*real)(CUcontext *, CUdevice) = interposer_real("cuDevicePrimaryCtxRetain");
	CUresult r = real ? real(context, d) : CUDA_ERROR_NOT_FOUND;

	if (!r)
		note_context(*context, d);
	return r;
}

static CUresult destroy(CUcontext c)
{
	CUresult (*real)(CUcontext) = interposer_real("cuCtxDestroy_v2");
	CUresult r = real ? real(c) : CUDA_ERROR_NOT_FOUND;

	if (!r)
		context_ended(c);
	return r;
}

static CUresult primary_ended(const char *name, CUdevice d)
{
	CUresult (*real)(CUdevice) = interposer_real(name);
	CUresult (*state)(CUdevice, unsigned *, int *) = interposer_real("cuDevicePrimaryCtxGetState");
	CUresult r = real ? real(d) : CUDA_ERROR_NOT_FOUND;
	unsigned flags;
	int active = 1;

	if (r || !state || state(d, &flags, &active) || active)
		return r;
	for (int i = 0; i < context_count; i++) {
		if (contexts[i].primary_of == d) {
			context_ended(contexts[i].it);
			break;
		}
	}
	return r;
}

static CUresult primary_release(CUdevice d)
{
	return primary_ended("cuDevicePrimaryCtxRelease_v2", d);
}

static CUresult primary_reset(CUdevice d)
{
	return primary_ended("cuDevicePrimaryCtxReset_v2", d);
}

void *route_override(const char *name); // route.c

void *memory_override(const char *name)
{
	// With the suffix of the library, and without, as cuGetProcAddress is asked for them.
	static const struct {
		const char *name;
		void *function;
	} overrides[] = {
		{"cuMemAlloc_v2", alloc}, {"cuMemAlloc", alloc},
		{"cuMemFree_v2", free_memory}, {"cuMemFree", free_memory},
		{"cuMemGetAddressRange_v2", get_address_range}, {"cuMemGetAddressRange", get_address_range},
		{"cuPointerGetAttribute", pointer_attribute}, {"cuPointerGetAttributes", pointer_attributes},
		{"cuIpcGetMemHandle", ipc_get},
		{"cuIpcOpenMemHandle_v2", ipc_open}, {"cuIpcOpenMemHandle", ipc_open}, {"cuIpcCloseMemHandle", ipc_close},
		{"cuMemGetHandleForAddressRange", range_handle}, {"cuCtxEnablePeerAccess", enable_peer},
		{"cuCtxDisablePeerAccess", disable_peer},
		{"cuCtxCreate_v2", create_v2}, {"cuCtxCreate_v3", create_v3}, {"cuCtxCreate_v4", create_v4},
		{"cuCtxDestroy_v2", destroy}, {"cuCtxDestroy", destroy},
		{"cuDevicePrimaryCtxRetain", primary_retain},
		{"cuDevicePrimaryCtxRelease_v2", primary_release}, {"cuDevicePrimaryCtxRelease", primary_release},
		{"cuDevicePrimaryCtxReset_v2", primary_reset}, {"cuDevicePrimaryCtxReset", primary_reset},
	};

	for (size_t i = 0; i < sizeof overrides / sizeof *overrides; i++)
		if (!strcmp(name, overrides[i].name))
			return overrides[i].function;
	void *function = vmm_override(name);
	if (!function)
		function = events_override(name);
	if (!function)
		function = foreign_override(name);
	if (!function)
		function = managed_override(name);
	return function ? function : route_override(name);
}

CUresult memory_synchronize(void)
{
	for (int i = 0; i < context_count; i++) {
		CUresult r = cu.CtxSetCurrent(contexts[i].it);
		if (!r)
			r = cu.CtxSynchronize();
		if (r)
			return r;
	}
	return CUDA_SUCCESS;
}

// One whose handle the program has stays, and an import is saved by its exporter.
bool block_is_taken(const struct block *b)
{
	return !b->given && !block_is_import(b);
}

uint32_t memory_imports(void)
{
	uint32_t n = 0;

	pthread_mutex_lock(&blocks_mutex);
	for (struct block *b = blocks; b; b = b->next)
		n += block_is_import(b) && b->mapped;
	pthread_mutex_unlock(&blocks_mutex);
	return n;
}

uint32_t memory_lost(void)
{
	uint32_t all = __atomic_load_n(&lost, __ATOMIC_SEQ_CST);

	pthread_mutex_lock(&blocks_mutex);
	for (struct block *b = blocks; b; b = b->next)
		all |= b->host ? LOST_HOST : 0;
	pthread_mutex_unlock(&blocks_mutex);
	return all;
}

bool memory_away(void)
{
	bool away = false;

	for (struct block *b = blocks; b; b = b->next)
		away |= b->away;
	return away;
}

CUresult memory_join(void)
{
	CUresult first = CUDA_SUCCESS;

	for (struct block *b = blocks; b; b = b->next) {
		if (!b->away)
			continue;
		CUresult r = cu.CtxSetCurrent(b->context);
		r = r ? r : block_have(b);
		b->away = r && r != CUDA_ERROR_NOT_FOUND;
		if (r == CUDA_ERROR_NOT_FOUND)
			interposer_say("the process that shared GPU memory with this one has ended: that memory is lost");
		if (r && (!first || first == CUDA_ERROR_NOT_FOUND))
			first = r;
	}
	return first;
}

static CUresult leave(struct block *b, uint64_t cut)
{
	if (b->given)
		return CUDA_ERROR_NOT_PERMITTED;
	CUresult r = cu.CtxSetCurrent(b->context);
	r = r ? r : share_ask(&b->from, SHARE_LEAVE, cut, NULL);
	if (r)
		return r == CUDA_ERROR_NOT_FOUND ? CUDA_ERROR_NOT_PERMITTED : r;
	r = block_give(b);
	b->away = !b->mapped;
	if (b->mapped) { // the exporter is to count it again
		int fd = -1;
		if (!share_ask(&b->from, SHARE_OPEN, 0, &fd))
			close(fd);
	}
	return r;
}

CUresult memory_leave(uint64_t cut)
{
	CUresult r = CUDA_SUCCESS;

	for (struct block *b = blocks; b && !r; b = b->next)
		if (block_is_import(b) && b->mapped)
			r = leave(b, cut);
	if (r)
		memory_join();
	return r;
}

static struct block *exported(uint64_t number)
{
	struct block *b;

	pthread_mutex_lock(&blocks_mutex);
	for (b = blocks; b && (!number || b->number != number); b = b->next)
		;
	pthread_mutex_unlock(&blocks_mutex);
	return b;
}

bool memory_exports(uint64_t number)
{
	pthread_mutex_lock(&exporting);
	struct block *b = exported(number);
	bool has = b && b->mapped && !b->given;
	pthread_mutex_unlock(&exporting);
	return has;
}

CUresult memory_export(uint64_t number, int *fd)
{
	CUresult r = CUDA_ERROR_INVALID_HANDLE;

	pthread_mutex_lock(&exporting);
	struct block *b = exported(number);
	if (b && b->mapped && !(r = cu.CtxSetCurrent(b->context)))
		r = cu.Export(fd, b->handle, CU_POSIX_FD, 0);
	pthread_mutex_unlock(&exporting);
	return r;
}

uint64_t memory_total(void)
{
	uint64_t bytes = 0;

	for (struct block *b = blocks; b; b = b->next)
		bytes += block_is_taken(b) ? b->bytes : 0;
	return bytes;
}

// pieces_of returns what is to be copied from or to host memory: of the blocks that are taken, those
// that wanted names. NULL: there is no memory for the list. The caller frees it.
static struct piece *pieces_of(char *host, bool (*wanted)(const struct block *), size_t *count)
{
	size_t n = 0;

	*count = 0;
	for (struct block *b = blocks; b; b = b->next)
		n++;
	struct piece *pieces = calloc(n + 1, sizeof *pieces);
	for (struct block *b = blocks; b && pieces; b = b->next) {
		if (!block_is_taken(b))
			continue;
		if (wanted(b))
			pieces[(*count)++] = (struct piece){b->context, b->address, host, b->bytes};
		host += b->bytes;
	}
	return pieces;
}

static bool any(const struct block *b)
{
	(void)b;
	return true;
}

static bool is_new(const struct block *b)
{
	return b->is_new;
}

CUresult blocks_have(void)
{
	CUresult r = CUDA_SUCCESS;

	for (struct block *b = blocks; b && !r; b = b->next) {
		if (!block_is_taken(b) || b->mapped)
			continue;
		if (!(r = cu.CtxSetCurrent(b->context)) && !(r = block_have(b)))
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

	struct piece *pieces = r ? NULL : pieces_of(host, is_new, &count);
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
	for (struct block *b = blocks; b && !r; b = b->next) {
		if (!block_is_taken(b))
			continue;
		r = cu.CtxSetCurrent(b->context);
		r = r ? r : block_give(b);
	}
	return r;
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
	struct piece *pieces = pieces_of(host, any, &count);
	r = pieces ? copy_all(pieces, count, host, bytes, true) : CUDA_ERROR_OUT_OF_MEMORY;
	free(pieces);
	for (struct block *b = blocks; b && !r; b = b->next) {
		if (!block_is_taken(b))
			continue;
		r = cu.CtxSetCurrent(b->context);
		r = r ? r : block_give(b);
	}
	if (!r) {
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
