// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Events that processes share (CU_EVENT_INTERPROCESS). The driver's own leave traces in a process until it ends. So the
// driver has none here, unless the program's environment has GPUCKPT_INTERPOSER_EVENTS=off. The program has a number of
// the interposer's for an event, which stands for
//
//	an ordinary event of the driver's  for what this process records, waits for and asks for
//	a slot of words                    that processes share, once the event has a handle
//
// Words are host memory that the exporter makes and that each process has mapped, and registered with the driver. A
// record takes the slot's next number. The GPU writes the number when it is there, and other processes' GPUs wait for
// it. So it is with the driver's events of CUDA IPC, in memory of its own.
//
//	cuEventCreate --> plain --cuIpcGetEventHandle--> shared --events_rest--> plain --events_wake--> shared
//	cuIpcOpenEventHandle --> shared --events_leave--> plain --events_join--> shared
//
// Parked, all records are complete, and that is what words say that are made anew: so none are saved.

#include "block.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/memfd.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { BLOCKING_SYNC = 1, DISABLE_TIMING = 2, INTERPROCESS = 4 }; // CU_EVENT_*
enum { RELAXED = 2 };             // CU_STREAM_CAPTURE_MODE_RELAXED
enum { EXTERNAL = 1 };            // CU_EVENT_RECORD_EXTERNAL, CU_EVENT_WAIT_EXTERNAL
enum { NON_BLOCKING = 1 };        // CU_STREAM_NON_BLOCKING
enum { PORTABLE_DEVICEMAP = 3 };  // CU_MEMHOSTREGISTER_PORTABLE and _DEVICEMAP
enum { WAIT_VALUE_GEQ = 0, WRITE_VALUE_DEFAULT = 0 };
enum { CAN_USE_64_BIT_STREAM_MEM_OPS = 122 }; // CU_DEVICE_ATTRIBUTE_*, from CUDA 12 on
enum { CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712 };

// A record's number is written to one of so many places: those of records in different streams that are under way at
// once would overtake each other in one.
enum { RING = 5 };

struct slot {
	uint64_t owner;      // of the event that has it; 0: none
	uint64_t given;      // the last number that was taken
	uint64_t recorded;   // the last number that a GPU has been told to write; 0: not recorded yet
	uint64_t done[RING]; // what GPUs have written
};
enum { SLOTS = 4095 };

struct words {
	uint64_t since; // when the exporter started, in the kernel's ticks
	uint64_t unused[7];
	struct slot slot[SLOTS];
};

struct page {
	struct page *next;
	struct ticket from; // its number is 0 for this process's own
	struct words *words; // NULL: taken down, or lost with the exporter
	CUdeviceptr device;  // of the words, if a context is set
	CUcontext context;   // in which they are registered; NULL: not now
	bool away;           // between events_leave and events_join
};

struct event {
	CUevent plain;
	CUcontext context;
	struct page *page; // NULL: not shared
	uint64_t owner;    // as in the slot
	uint64_t last;     // the number of this process's last record; 0 for none
	uint32_t slot;
	bool used;
	bool captured; // its last record is part of a graph that is captured
};

// A program's event is a number that is no address: TAG, and the place in a table.
#define TAG ((uintptr_t)0x67706b65)
#define MEANT(e) ((uintptr_t)(e) >> 32 == TAG)
enum { CHUNK = 1024, CHUNKS = 4096 };

// LOCK_EVENTS is of all that follows.
static struct event *chunks[CHUNKS];
static uint32_t count, *unused, unused_count, unused_room;
static struct page *imports, own;
static struct owned own_file = {.fd = -1}; // of own's words
static bool exports; // there is a handle, so own has words unless they are taken down
static uint64_t last_owner;
static struct event none; // what a number stands for that is no event: the driver's answer is the program's

// Those of a stream, by what a stream of 0 is: the legacy one, or the thread's.
struct calls {
	CUresult (*Record)(CUevent, CUstream);
	CUresult (*RecordWithFlags)(CUevent, CUstream, unsigned);
	CUresult (*Wait)(CUstream, CUevent, unsigned);
	CUresult (*IsCapturing)(CUstream, int *);
	CUresult (*WriteValue)(CUstream, CUdeviceptr, uint64_t, unsigned);
	CUresult (*WaitValue)(CUstream, CUdeviceptr, uint64_t, unsigned);
};
static struct calls legacy, per_thread;

static bool complete, wanted; // the driver has what they need; the program's environment, as it was at first, wants them

static void look(void)
{
	const char *set = getenv("GPUCKPT_INTERPOSER_EVENTS");

	wanted = !set || strcmp(set, "off");
	complete = wanted && driver_serves(EVENTS);
	legacy = (struct calls){driver.cuEventRecord, driver.cuEventRecordWithFlags, driver.cuStreamWaitEvent,
	                        driver.cuStreamIsCapturing, driver.cuStreamWriteValue64_v2, driver.cuStreamWaitValue64_v2};
	per_thread = (struct calls){driver.cuEventRecord_ptsz, driver.cuEventRecordWithFlags_ptsz, driver.cuStreamWaitEvent_ptsz,
	                            driver.cuStreamIsCapturing_ptsz, driver.cuStreamWriteValue64_v2_ptsz, driver.cuStreamWaitValue64_v2_ptsz};
}

bool events_wanted(void)
{
	static pthread_once_t state = PTHREAD_ONCE_INIT;

	once(&state, look);
	return wanted;
}

static uint64_t load64(const uint64_t *p)
{
	return __atomic_load_n(p, __ATOMIC_SEQ_CST);
}

// page_of_event returns the page that an event has a slot on, NULL for none. It gets one while other threads use it.
static struct page *page_of_event(const struct event *e)
{
	return __atomic_load_n(&e->page, __ATOMIC_ACQUIRE);
}

static void raise_to(uint64_t *p, uint64_t n)
{
	uint64_t now = load64(p);

	while (now < n && !__atomic_compare_exchange_n(p, &now, n, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
		;
}

static struct event *at(uint32_t i)
{
	struct event *chunk = i / CHUNK < CHUNKS ? __atomic_load_n(&chunks[i / CHUNK], __ATOMIC_ACQUIRE) : NULL;
	return chunk ? &chunk[i % CHUNK] : &none;
}

static struct event *event_of(CUevent number)
{
	struct event *e = at((uint32_t)(uintptr_t)number);
	return e->used ? e : &none;
}

// drivers returns the driver's event.
static CUevent drivers(CUevent e)
{
	return MEANT(e) ? event_of(e)->plain : e;
}

// take finds a place for an event. The lock is held. -1: there is none.
static int64_t take(void)
{
	if (unused_count)
		return unused[--unused_count];
	if (count == (uint32_t)CHUNK * CHUNKS)
		return -1;
	if (unused_room < count + 1) { // so that each can be given back
		uint32_t room = unused_room + CHUNK;
		uint32_t *more = realloc(unused, room * sizeof *more);
		if (!more)
			return -1;
		unused = more;
		unused_room = room;
	}
	if (!chunks[count / CHUNK]) {
		struct event *chunk = calloc(CHUNK, sizeof *chunk);
		if (!chunk)
			return -1;
		__atomic_store_n(&chunks[count / CHUNK], chunk, __ATOMIC_RELEASE);
	}
	return count++;
}

// hand_out has a number for an event. Where there is no room, its plain one is gone.
static CUresult hand_out(const struct event *e, CUevent *number)
{
	lock(LOCK_EVENTS);
	int64_t i = take();
	if (i >= 0) {
		struct event *to = at((uint32_t)i);
		*to = *e;
		__atomic_store_n(&to->used, true, __ATOMIC_RELEASE);
		*number = (CUevent)(TAG << 32 | (uint64_t)i);
	}
	unlock(LOCK_EVENTS);
	if (i >= 0)
		return CUDA_SUCCESS;
	driver.cuEventDestroy_v2(e->plain);
	return CUDA_ERROR_OUT_OF_MEMORY;
}

// leave_slot has an event not shared any more. The lock is held.
static void leave_slot(struct event *e)
{
	if (e->page == &own && own.words && own.words->slot[e->slot].owner == e->owner)
		__atomic_store_n(&own.words->slot[e->slot].owner, 0, __ATOMIC_SEQ_CST);
	__atomic_store_n(&e->page, NULL, __ATOMIC_RELEASE);
}

// forget ends an event whose plain one is gone. The lock is held.
static void forget(struct event *e, uint32_t i)
{
	leave_slot(e);
	*e = (struct event){.used = false};
	unused[unused_count++] = i;
}

// plain_event makes the driver's part of an event in the current context.
static CUresult plain_event(struct event *e, unsigned flags)
{
	CUresult r = driver.cuCtxGetCurrent(&e->context);
	return r ? r : driver.cuEventCreate(&e->plain, flags);
}

// can reports whether the current context's GPU waits for words and writes them.
static bool can(void)
{
	CUdevice device;
	int has = 0;

	return complete && !driver.cuCtxGetDevice(&device) && !driver.cuDeviceGetAttribute(&has, CAN_USE_64_BIT_STREAM_MEM_OPS, device) && has && block_ready();
}

static CUresult create(CUevent *number, unsigned flags)
{
	struct event e = {.plain = NULL};

	if (!number || (flags & (INTERPROCESS | DISABLE_TIMING)) != (INTERPROCESS | DISABLE_TIMING) || !can())
		return driver.cuEventCreate(number, flags);
	CUresult r = plain_event(&e, flags & ~INTERPROCESS);
	return r ? r : hand_out(&e, number);
}

static CUresult destroy(CUevent number)
{
	if (!MEANT(number))
		return driver.cuEventDestroy_v2(number);
	struct event *e = event_of(number);
	CUresult r = driver.cuEventDestroy_v2(e->plain);
	if (r)
		return r;
	lock(LOCK_EVENTS);
	if (e->used)
		forget(e, (uint32_t)(uintptr_t)number);
	unlock(LOCK_EVENTS);
	return r;
}

// slot_of returns the slot of an event that is shared; NULL for none: its exporter has destroyed it, or has ended.
static struct slot *slot_of(const struct event *e)
{
	struct page *p = page_of_event(e);
	struct slot *s = p && p->words ? &p->words->slot[e->slot] : NULL;
	return s && load64(&s->owner) == e->owner ? s : NULL;
}

// change_mode returns how this thread's calls bear with captures before, in any thread: RELAXED is for calls that no
// program makes, and that would end a capture.
static int change_mode(int mode)
{
	driver.cuThreadExchangeStreamCaptureMode(&mode);
	return mode;
}

// device_of returns where the GPUs have the words.
static CUresult device_of(struct page *p, CUdeviceptr *device)
{
	CUcontext c = NULL;
	CUresult r = CUDA_SUCCESS;

	lock(LOCK_REGISTERING); // others may be asked for the words meanwhile
	if (!p->context && !(r = driver.cuCtxGetCurrent(&c))) {
		int mode = change_mode(RELAXED);
		r = driver.cuMemHostRegister_v2(p->words, sizeof *p->words, PORTABLE_DEVICEMAP);
		if (!r || r == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED) // as of a context that has ended
			r = driver.cuMemHostGetDevicePointer_v2(&p->device, p->words, 0);
		p->context = r ? NULL : c;
		change_mode(mode);
	}
	*device = p->device;
	unlock(LOCK_REGISTERING);
	return r;
}

static CUresult place_of(const struct event *e, const struct slot *s, uint64_t n, CUdeviceptr *place)
{
	CUresult r = device_of(e->page, place);

	*place += (CUdeviceptr)((const char *)&s->done[n % RING] - (const char *)e->page->words);
	return r;
}

// next_number has the GPU write the next number when the work is done that a stream has now. LOCK_TELLING is held.
static CUresult next_number(struct event *e, struct slot *s, CUstream stream, const struct calls *calls)
{
	uint64_t n = __atomic_add_fetch(&s->given, 1, __ATOMIC_SEQ_CST);
	CUdeviceptr place;
	CUresult r = place_of(e, s, n, &place);

	if (!r && n > RING && load64(&s->done[n % RING]) < n - RING)
		r = calls->WaitValue(stream, place, n - RING, WAIT_VALUE_GEQ);
	r = r ? r : calls->WriteValue(stream, place, n, WRITE_VALUE_DEFAULT);
	if (r) {
		raise_to(&s->done[n % RING], n);
		return r;
	}
	__atomic_store_n(&e->last, n, __ATOMIC_SEQ_CST);
	raise_to(&s->recorded, n);
	return CUDA_SUCCESS;
}

// tell has streams get numbers in the order in which threads take them: a stream would wait for ever for a number that
// comes behind in it.
static CUresult tell(struct event *e, struct slot *s, CUstream stream, const struct calls *calls)
{
	lock(LOCK_TELLING);
	CUresult r = next_number(e, s, stream, calls);
	unlock(LOCK_TELLING);
	return r;
}

static bool is_capturing(CUstream stream, const struct calls *calls)
{
	int status = 0;

	return !calls->IsCapturing(stream, &status) && status;
}

// A graph would have one number for all its launches.
static CUresult in_graph(void)
{
	interposer_say("an event that processes can share cannot be part of a graph, or of another context's work, here: start the program without dev.gpuckpt.interposer");
	return CUDA_ERROR_NOT_SUPPORTED;
}

static CUresult record_with(CUevent number, CUstream stream, unsigned flags, bool has_flags, const struct calls *calls)
{
	struct event *e = event_of(number);
	bool captures = is_capturing(stream, calls);

	if (captures && flags & EXTERNAL)
		return in_graph();
	CUresult r = has_flags ? calls->RecordWithFlags(e->plain, stream, flags) : calls->Record(e->plain, stream);
	if (r)
		return r;
	__atomic_store_n(&e->captured, captures, __ATOMIC_RELAXED);
	struct slot *s = captures ? NULL : slot_of(e);
	return s ? tell(e, s, stream, calls) : CUDA_SUCCESS;
}

// others returns the number of another process's record that is the event's last one; 0 if there is none.
static uint64_t others(const struct event *e, struct slot **s)
{
	*s = __atomic_load_n(&e->captured, __ATOMIC_RELAXED) ? NULL : slot_of(e);
	uint64_t n = *s ? load64(&(*s)->recorded) : 0;
	return n == load64(&e->last) ? 0 : n;
}

static bool is_done(struct slot *s, uint64_t n)
{
	return load64(&s->done[n % RING]) >= n;
}

static CUresult wait_with(CUstream stream, CUevent number, unsigned flags, const struct calls *calls)
{
	struct event *e = event_of(number);
	struct slot *s;
	CUdeviceptr place;
	uint64_t n = others(e, &s);
	bool captures = is_capturing(stream, calls);

	if (captures && flags & EXTERNAL)
		return in_graph();
	if (!n || captures)
		return calls->Wait(stream, e->plain, flags);
	if (is_done(s, n))
		return CUDA_SUCCESS;
	CUresult r = place_of(e, s, n, &place);
	return r ? r : calls->WaitValue(stream, place, n, WAIT_VALUE_GEQ);
}

#define IN_STREAMS(suffix, calls)                                                              \
	static CUresult record##suffix(CUevent e, CUstream s)                                  \
	{                                                                                      \
		return MEANT(e) ? record_with(e, s, 0, false, calls) : (calls)->Record(e, s); \
	}                                                                                      \
	static CUresult record_flags##suffix(CUevent e, CUstream s, unsigned flags)            \
	{                                                                                      \
		return MEANT(e) ? record_with(e, s, flags, true, calls) : (calls)->RecordWithFlags(e, s, flags); \
	}                                                                                      \
	static CUresult wait##suffix(CUstream s, CUevent e, unsigned flags)                    \
	{                                                                                      \
		return MEANT(e) ? wait_with(s, e, flags, calls) : (calls)->Wait(s, e, flags); \
	}
IN_STREAMS(, &legacy)
IN_STREAMS(_ptsz, &per_thread)

// The plain event has what the driver knows: after an error of the context it answers with that.
static CUresult look_at(struct event *e, struct slot *s, uint64_t n)
{
	if (is_done(s, n))
		return CUDA_SUCCESS;
	CUresult r = driver.cuEventQuery(e->plain);
	return r ? r : CUDA_ERROR_NOT_READY;
}

static CUresult query(CUevent number)
{
	struct slot *s;

	if (!MEANT(number))
		return driver.cuEventQuery(number);
	struct event *e = event_of(number);
	uint64_t n = others(e, &s);
	return n ? look_at(e, s, n) : driver.cuEventQuery(e->plain);
}

// How a processor waits for another process's GPU: it looks often at first, and then now and then.
enum { SPINS = 1000, NAP_NS = 50000 };

static CUresult synchronize(CUevent number)
{
	struct timespec nap = {.tv_nsec = NAP_NS};
	struct slot *s;
	CUresult r;

	if (!MEANT(number))
		return driver.cuEventSynchronize(number);
	struct event *e = event_of(number);
	uint64_t n = others(e, &s);
	if (!n)
		return driver.cuEventSynchronize(e->plain);
	for (int i = 0; i < SPINS && !is_done(s, n); i++)
		sched_yield();
	while ((r = look_at(e, s, n)) == CUDA_ERROR_NOT_READY)
		nanosleep(&nap, NULL);
	return r;
}

static CUresult elapsed(float *ms, CUevent from, CUevent to)
{
	return driver.cuEventElapsedTime(ms, drivers(from), drivers(to));
}

static CUresult elapsed_v2(float *ms, CUevent from, CUevent to)
{
	return driver.cuEventElapsedTime_v2(ms, drivers(from), drivers(to));
}

// make_words makes this process's own. The lock is held.
static bool make_words(void)
{
	int fd = (int)syscall(SYS_memfd_create, "gpuckpt-events", MFD_CLOEXEC);
	void *p = MAP_FAILED;

	if (fd >= 0 && !ftruncate(fd, sizeof(struct words)))
		p = mmap(NULL, sizeof(struct words), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (p == MAP_FAILED) {
		if (fd >= 0)
			close(fd);
		return false;
	}
	madvise(p, sizeof(struct words), MADV_DONTFORK);
	own.words = p;
	own.words->since = share_began(getpid());
	own_file = owned(fd);
	for (uint32_t i = 0; i < count; i++)
		if (at(i)->used && at(i)->page == &own)
			own.words->slot[at(i)->slot].owner = at(i)->owner;
	return true;
}

// slot_for finds a slot for an event. The lock is held. false: all have one.
static bool slot_for(struct event *e)
{
	static uint32_t next;

	for (uint32_t i = 0; i < SLOTS; i++) {
		uint32_t at = (next + i) % SLOTS;
		struct slot *s = &own.words->slot[at];
		if (s->owner)
			continue;
		// Numbers go on: the last event's may be under way still.
		s->recorded = 0;
		e->slot = at;
		e->owner = ++last_owner;
		__atomic_store_n(&s->owner, e->owner, __ATOMIC_SEQ_CST);
		__atomic_store_n(&e->page, &own, __ATOMIC_RELEASE);
		next = at + 1;
		return true;
	}
	return false;
}

// tell_what_was has the words say what was recorded before the event had a slot.
static CUresult tell_what_was(struct event *e)
{
	CUcontext before = NULL;
	CUstream stream;
	CUresult r = driver.cuEventQuery(e->plain);

	if (r != CUDA_ERROR_NOT_READY)
		return r;
	if ((r = driver.cuCtxGetCurrent(&before)) || (before != e->context && (r = driver.cuCtxSetCurrent(e->context))))
		return r;
	if (!(r = driver.cuStreamCreate(&stream, NON_BLOCKING))) {
		if (!(r = legacy.Wait(stream, e->plain, 0)))
			r = tell(e, slot_of(e), stream, &legacy);
		driver.cuStreamDestroy_v2(stream); // when its work is done
	}
	if (before != e->context)
		driver.cuCtxSetCurrent(before);
	return r;
}

static CUresult share_event(struct event *e)
{
	lock(LOCK_EVENTS);
	bool shared = e->page, can = shared || ((own.words || make_words()) && slot_for(e));
	exports |= can;
	unlock(LOCK_EVENTS);
	if (!can || shared)
		return can ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
	int mode = change_mode(RELAXED);
	CUresult r = tell_what_was(e);
	change_mode(mode);
	if (r) {
		lock(LOCK_EVENTS);
		leave_slot(e);
		unlock(LOCK_EVENTS);
	}
	return r;
}

// An event's ticket has its slot and its owner where a block's has its sizes.
static const char magic[4] = {'g', 'p', 'c', 'e'};

static CUresult get_handle(void *handle, CUevent number)
{
	struct ticket t = {.number = SHARE_EVENTS};
	CUresult r;

	if (!MEANT(number)) {
		r = driver.cuIpcGetEventHandle(handle, number);
		if (!r)
			block_lost(LOST_UNKNOWN);
		return r;
	}
	struct event *e = event_of(number);
	if (!handle || !e->used || (page_of_event(e) && page_of_event(e) != &own))
		return handle ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
	if (!share_ticket(&t)) {
		interposer_say("CUDA IPC (cuIpcGetEventHandle) cannot share an event here: start the program without dev.gpuckpt.interposer");
		return CUDA_ERROR_NOT_SUPPORTED;
	}
	if ((r = share_event(e)))
		return r;
	t.bytes = e->owner;
	t.asked = e->slot;
	memcpy(t.magic, magic, sizeof magic);
	memcpy(handle, &t, sizeof t);
	return CUDA_SUCCESS;
}

// attach maps the words of an exporter.
static CUresult attach(struct page *p)
{
	int fd = -1;
	CUresult r = share_ask(&p->from, SHARE_OPEN, 0, &fd);

	if (r)
		return r;
	void *words = mmap(NULL, sizeof *p->words, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (words == MAP_FAILED) {
		share_ask(&p->from, SHARE_CLOSE, 0, NULL);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	madvise(words, sizeof *p->words, MADV_DONTFORK);
	p->words = words;
	return CUDA_SUCCESS;
}

// detach unmaps words. On an error they are there as before.
static CUresult detach(struct page *p)
{
	CUresult r = CUDA_SUCCESS;

	if (!p->words)
		return r;
	if (p->context && !(r = driver.cuCtxSetCurrent(p->context)))
		r = driver.cuMemHostUnregister(p->words);
	if (r)
		return r;
	p->context = NULL;
	munmap(p->words, sizeof *p->words);
	p->words = NULL;
	return r;
}

// page_of has the words mapped that a ticket is of.
static CUresult page_of(const struct ticket *t, struct page **page)
{
	CUresult r = CUDA_SUCCESS;
	struct page *p;

	lock(LOCK_ATTACHING); // an exporter may take its time
	for (p = imports; p; p = p->next)
		if (p->words && !memcmp(p->from.exporter, t->exporter, sizeof t->exporter) && !memcmp(p->from.key, t->key, sizeof t->key))
			break;
	if (!p && !(p = calloc(1, sizeof *p)))
		r = CUDA_ERROR_OUT_OF_MEMORY;
	if (!r && !p->words) {
		p->from = *t;
		r = attach(p);
		if (r) {
			free(p);
		} else {
			lock(LOCK_EVENTS);
			p->next = imports;
			imports = p;
			unlock(LOCK_EVENTS);
		}
	}
	unlock(LOCK_ATTACHING);
	*page = r ? NULL : p;
	return r;
}

static CUresult open_handle(CUevent *number, CUipcMemHandle handle)
{
	struct event e = {.plain = NULL};
	struct ticket t;
	CUresult r;

	memcpy(&t, &handle, sizeof t);
	if (memcmp(t.magic, magic, sizeof magic)) {
		r = driver.cuIpcOpenEventHandle(number, handle);
		if (!r)
			block_lost(LOST_UNKNOWN);
		return r;
	}
	if (!number || !can())
		return number ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_INVALID_VALUE;
	if (share_own(&t) || t.asked >= SLOTS)
		return share_own(&t) ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_INVALID_HANDLE;
	if ((r = page_of(&t, &e.page)))
		return r == CUDA_ERROR_NOT_FOUND ? CUDA_ERROR_INVALID_HANDLE : r;
	e.slot = (uint32_t)t.asked;
	e.owner = t.bytes;
	if (!e.owner || !slot_of(&e))
		return CUDA_ERROR_INVALID_HANDLE;
	r = plain_event(&e, DISABLE_TIMING);
	return r ? r : hand_out(&e, number);
}

// IN_GRAPH is a function of the driver's that makes an event part of a graph, or of another context's work.
#define IN_GRAPH(name, parameters, arguments, event)                              \
	static CUresult graph_##name parameters                                   \
	{                                                                         \
		return MEANT(event) ? in_graph() : driver.name arguments;         \
	}

// What CUgraphNodeParams has of nodes of events.
struct node {
	int type, reserved[3];
	CUevent event;
};
enum { NODE_WAIT_EVENT = 6, NODE_EVENT_RECORD = 7 }; // CU_GRAPH_NODE_TYPE_*

static CUevent event_in(const struct node *n)
{
	return n && (n->type == NODE_WAIT_EVENT || n->type == NODE_EVENT_RECORD) ? n->event : NULL;
}

IN_GRAPH(cuGraphAddEventRecordNode, (void **n, void *g, const void *d, size_t c, CUevent e), (n, g, d, c, e), e)
IN_GRAPH(cuGraphAddEventWaitNode, (void **n, void *g, const void *d, size_t c, CUevent e), (n, g, d, c, e), e)
IN_GRAPH(cuGraphEventRecordNodeSetEvent, (void *n, CUevent e), (n, e), e)
IN_GRAPH(cuGraphEventWaitNodeSetEvent, (void *n, CUevent e), (n, e), e)
IN_GRAPH(cuGraphExecEventRecordNodeSetEvent, (void *x, void *n, CUevent e), (x, n, e), e)
IN_GRAPH(cuGraphExecEventWaitNodeSetEvent, (void *x, void *n, CUevent e), (x, n, e), e)
IN_GRAPH(cuGraphAddNode, (void **n, void *g, const void *d, size_t c, struct node *p), (n, g, d, c, p), event_in(p))
IN_GRAPH(cuGraphAddNode_v2, (void **n, void *g, const void *d, const void *w, size_t c, struct node *p), (n, g, d, w, c, p), event_in(p))
IN_GRAPH(cuGraphNodeSetParams, (void *n, struct node *p), (n, p), event_in(p))
IN_GRAPH(cuGraphExecNodeSetParams, (void *x, void *n, struct node *p), (x, n, p), event_in(p))
IN_GRAPH(cuCtxRecordEvent, (CUcontext c, CUevent e), (c, e), e)
IN_GRAPH(cuCtxWaitEvent, (CUcontext c, CUevent e), (c, e), e)
IN_GRAPH(cuGreenCtxRecordEvent, (void *c, CUevent e), (c, e), e)
IN_GRAPH(cuGreenCtxWaitEvent, (void *c, CUevent e), (c, e), e)

// That the driver shares an event is noted in any case.
const struct override shared_events_overrides[] = {
	{"cuIpcGetEventHandle", get_handle}, {"cuIpcOpenEventHandle", open_handle},
	{NULL, NULL},
};

#define OF(name) {#name, graph_##name}
const struct override events_overrides[] = {
	{"cuEventCreate", create}, {"cuEventDestroy_v2", destroy}, {"cuEventDestroy", destroy},
	{"cuEventRecord", record}, {"cuEventRecord_ptsz", record_ptsz},
	{"cuEventRecordWithFlags", record_flags}, {"cuEventRecordWithFlags_ptsz", record_flags_ptsz},
	{"cuStreamWaitEvent", wait}, {"cuStreamWaitEvent_ptsz", wait_ptsz},
	{"cuEventQuery", query}, {"cuEventSynchronize", synchronize},
	{"cuEventElapsedTime", elapsed}, {"cuEventElapsedTime_v2", elapsed_v2},
	OF(cuGraphAddEventRecordNode), OF(cuGraphAddEventWaitNode), OF(cuGraphEventRecordNodeSetEvent),
	OF(cuGraphEventWaitNodeSetEvent), OF(cuGraphExecEventRecordNodeSetEvent), OF(cuGraphExecEventWaitNodeSetEvent),
	OF(cuGraphAddNode), OF(cuGraphAddNode_v2), OF(cuGraphNodeSetParams), OF(cuGraphExecNodeSetParams),
	OF(cuCtxRecordEvent), OF(cuCtxWaitEvent), OF(cuGreenCtxRecordEvent), OF(cuGreenCtxWaitEvent),
	{NULL, NULL},
};

CUresult events_export(int *fd)
{
	lock(LOCK_EVENTS);
	*fd = own.words && owned_has(&own_file) ? fcntl(own_file.fd, F_DUPFD_CLOEXEC, 0) : -1;
	unlock(LOCK_EVENTS);
	return *fd < 0 ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

bool events_exports(void)
{
	lock(LOCK_EVENTS);
	bool has = own.words;
	unlock(LOCK_EVENTS);
	return has;
}

bool events_import(void)
{
	struct page *p;

	lock(LOCK_EVENTS);
	for (p = imports; p && !p->words; p = p->next)
		;
	unlock(LOCK_EVENTS);
	return p;
}

bool events_away(void)
{
	struct page *p;

	lock(LOCK_EVENTS);
	for (p = imports; p && !p->away; p = p->next)
		;
	unlock(LOCK_EVENTS);
	return p;
}

// complete_all notes that the events of a page are: who is parked has no work.
static void complete_all(const struct page *p)
{
	lock(LOCK_EVENTS);
	for (uint32_t i = 0; i < count; i++)
		if (at(i)->page == p)
			at(i)->last = 0;
	unlock(LOCK_EVENTS);
}

CUresult events_join(void)
{
	CUresult first = CUDA_SUCCESS;

	for (struct page *p = imports; p; p = p->next) {
		if (!p->away)
			continue;
		CUresult r = attach(p);
		if (r == CUDA_ERROR_NOT_FOUND) {
			interposer_say("the process that shared events with this one has ended: they are complete from now on");
			r = CUDA_SUCCESS;
		}
		p->away = r;
		first = first ? first : r;
	}
	return first;
}

static CUresult leave(struct page *p, uint64_t cut)
{
	bool ended = share_began(p->from.pid) != p->words->since;
	CUresult r = share_ask(&p->from, SHARE_LEAVE, cut, NULL);

	if (r == CUDA_ERROR_NOT_FOUND)
		r = ended ? CUDA_SUCCESS : CUDA_ERROR_NOT_PERMITTED;
	if (r)
		return r;
	if ((r = detach(p))) { // the exporter is to count it again
		int fd = -1;
		if (!share_ask(&p->from, SHARE_OPEN, 0, &fd))
			close(fd);
		return r;
	}
	complete_all(p);
	p->away = true;
	return r;
}

CUresult events_leave(uint64_t cut)
{
	CUresult r = CUDA_SUCCESS;

	for (struct page *p = imports; p && !r; p = p->next)
		if (p->words)
			r = leave(p, cut);
	if (r)
		events_join();
	return r;
}

CUresult events_rest(void)
{
	CUresult r = detach(&own);

	if (r)
		return r;
	owned_end(&own_file);
	complete_all(&own);
	return r;
}

CUresult events_wake(void)
{
	lock(LOCK_EVENTS);
	bool has = !exports || own.words || make_words();
	unlock(LOCK_EVENTS);
	return has ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

void events_context_ended(CUcontext c)
{
	lock(LOCK_REGISTERING); // others may register words in another context
	lock(LOCK_EVENTS);
	for (struct page *p = imports; p; p = p->next)
		p->context = p->context == c ? NULL : p->context;
	own.context = own.context == c ? NULL : own.context;
	for (uint32_t i = 0; i < count; i++)
		if (at(i)->used && at(i)->context == c)
			forget(at(i), i);
	unlock(LOCK_EVENTS);
	unlock(LOCK_REGISTERING);
}

void events_forked(void)
{
	owned_end(&own_file);
	own = (struct page){.words = NULL}; // which were not mapped here
	imports = NULL;
	count = unused_count = 0;
	memset(chunks, 0, sizeof chunks);
}
