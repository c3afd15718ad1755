// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// The thread that does what the shim asks for, and the control block by which it is asked.
//
// The shim finds the block by its magic in the library's writable mapping, writes a request into it, by
// /proc/PID/mem, and sends the thread SIGNAL, which the thread waits for. No descriptor is used, since
// programs close those that they do not know, and CRIU has nothing to restore. Nobody in the container
// can ask for more than root in it could do to the process anyway.
//
//	open --PARK--> parked --SAVE--> saved --BACK--> parked
//	               parked --OPEN--> open
//	                                saved --OPEN--> open
//
// A SAVE can keep the memory on the GPU instead, by descriptors that the shim holds (keep.c): KEEP as often as there are
// descriptors, then RELEASE. The way back, also of what was saved otherwise, is MEET, TAKE as often as there are messages,
// and RETURN.
//
//	parked --KEEP, RELEASE--> saved --MEET, TAKE, RETURN--> parked --OPEN--> open
//
// A PASS lets a parked program make a few calls more, one of each thread at a time. It ends, parked, when their
// work on the GPU does: which may wait for that of other processes.
//
// What processes share, memory and events, is taken down while they are parked, each step in all of them before the next:
// LEAVE (what it imports goes), REST (nobody has what it exports, and nobody can ask for it), and the
// other way round WAKE and JOIN, before OPEN.

#include "interposer.h"

#include <signal.h>
#include <string.h>

enum { OPEN = 0, PARKING = 1, PARKED = 2, SAVED = 3 };  // states
enum { ASK_PARK = 1, ASK_SAVE, ASK_OPEN, ASK_BACK, ASK_LEAVE, ASK_REST, ASK_WAKE, ASK_JOIN,
       ASK_KEEP, ASK_RELEASE, ASK_MEET, ASK_TAKE, ASK_RETURN, ASK_PASS, ASKS = 16 }; // requests
enum { TURNS = 1 << 12 };     // argument of a PASS: so many turns at most, and this times a timeout in milliseconds
enum { FROM_CHECKPOINT = 1 }; // argument of a BACK: the host memory has what was saved or kept
enum { BESIDE = 1 };          // argument of a TAKE: see keep_take
enum { IMPORTS = 1, EXPORTS = 2, APART = 4 }; // how it shares memory, beside enum lost: see describe
enum { SIGNAL = 60 };                                   // one of the real-time signals
enum { COPIERS = 7 };                                   // beside the thread itself; see copy.c
enum { THREADS = COPIERS + 1 };                         // and share.c's

// The shim reads the block, and writes request, cancelled, argument, cut and in_area.
static struct control {
	char magic[32];
	uint32_t version;
	int32_t pid, tid;   // in the process's pid namespace; 0 before there is a thread
	uint32_t state;
	uint32_t request;   // a number that counts up, times ASKS, and what is asked for
	uint32_t answered;  // the request that result belongs to
	int32_t result;     // a CUresult
	uint32_t argument;  // of a PARK: its timeout in milliseconds; of a PASS: see TURNS; of a BACK: FROM_CHECKPOINT or 0; of a TAKE: BESIDE or 0
	uint32_t cancelled; // a PARK or PASS that is to be given up, whatever it waits for; a SAVE that is to be undone
	uint32_t peers;     // parked or saved: how often a SAVE takes one GPU's access to another's memory
	uint64_t start, bytes; // the host memory with what is saved; parked, the bytes that it will take
	int32_t copiers[THREADS]; // their tids as tid's; 0 after the last
	uint64_t cut;     // a number of the shim's, the same in all processes that are parked together
	uint32_t sharing; // as of the last request
	uint32_t count;   // of a KEEP: descriptors; of a MEET and a TAKE: pieces taken so far; of a PASS: turns with a call
	int32_t descriptors[KEEP_BATCH]; // of a KEEP or a MEET, open until the next request
	uint64_t sizes[KEEP_BATCH];      // of a KEEP, in bytes
	uint32_t in_area; // the shim's, of what was kept: the host memory has it as well
} control __attribute__((aligned(64))) = {.magic = "gpuckpt interposer control page", .version = 6};

// What the shim knows of it, in internal/gpu/interposer/interposer.go.
#define AT(offset, field) _Static_assert(offsetof(struct control, field) == (offset), #field)
AT(0, magic);
AT(32, version);
AT(40, tid);
AT(44, state);
AT(48, request);
AT(52, answered);
AT(56, result);
AT(60, argument);
AT(64, cancelled);
AT(68, peers);
AT(72, start);
AT(80, bytes);
AT(88, copiers);
AT(120, cut);
AT(128, sharing);
AT(132, count);
AT(136, descriptors);
AT(264, sizes);
AT(520, in_area);
_Static_assert(THREADS == 8 && KEEP_BATCH == 32 && ASKS == 16 && TURNS == 4096, "what it counts by");
_Static_assert(PARKING == 1 && PARKED == 2 && SAVED == 3, "states");
_Static_assert(ASK_PARK == 1 && ASK_OPEN == 3 && ASK_JOIN == 8 && ASK_TAKE == 12 && ASK_PASS == 14, "requests");
_Static_assert(IMPORTS == 1 && EXPORTS == 2 && APART == 4 && LOST_UNKNOWN == 8 && LOST_HOST == 16, "how it shares");

static void set_state(uint32_t state)
{
	__atomic_store_n(&control.state, state, __ATOMIC_SEQ_CST);
}

uint64_t worker_cut(void)
{
	return load(&control.state) == PARKED ? __atomic_load_n(&control.cut, __ATOMIC_SEQ_CST) : 0;
}

int32_t *worker_note_thread(void)
{
	for (int i = 0; i < THREADS; i++)
		if (!control.copiers[i])
			return &control.copiers[i];
	return NULL;
}

// is_apart reports whether something that is shared is taken down.
static bool is_apart(void)
{
	return share_rests() || memory_away() || events_away();
}

// describe notes whether there are imports that are mapped, tickets, either of both that is taken down,
// and what is not known.
static void describe(void)
{
	uint32_t sharing = memory_imports() || events_import() ? IMPORTS : 0;

	sharing |= share_listens() ? EXPORTS : 0;
	sharing |= is_apart() ? APART : 0;
	sharing |= memory_lost();
	__atomic_store_n(&control.sharing, sharing, __ATOMIC_SEQ_CST);
}

bool interposer_cancelled(uint32_t number) __attribute__((visibility("hidden")));
bool interposer_cancelled(uint32_t number)
{
	// In this order: park() looks whether it was cancelled after it has left PARKING.
	return load(&control.cancelled) == number && load(&control.request) == number && load(&control.state) == PARKING;
}

// drain waits for the calls that are under way, and for the work on the GPU.
static CUresult drain(uint32_t timeout_ms, uint32_t number)
{
	if (!gate_drain(timeout_ms, &control.cancelled, number))
		return CUDA_ERROR_NOT_READY;
	CUresult r = memory_synchronize();
	return !r && load(&control.cancelled) == number ? CUDA_ERROR_NOT_READY : r;
}

// parked ends a PARK or a PASS whose drain has ended.
static CUresult parked(CUresult r, uint32_t number)
{
	if (!r)
		control.bytes = memory_total();
	control.peers = memory_peers();
	// A thread that has opened the gate by itself has seen PARKING.
	set_state(r ? OPEN : PARKED);
	if (!r && load(&control.cancelled) == number) {
		r = CUDA_ERROR_NOT_READY;
		set_state(OPEN);
	}
	if (r)
		gate_open();
	return r;
}

static CUresult park(uint32_t number)
{
	if (load(&control.state) != OPEN)
		return CUDA_ERROR_ILLEGAL_STATE;
	if (interposer_bypassed()) {
		interposer_say("the program calls functions of the driver past the interposer: its memory is left to the driver");
		return CUDA_ERROR_NOT_SUPPORTED;
	}
	keep_drop(); // calls may wait, and CRIU would find the socket
	set_state(PARKING);
	gate_close(number);
	return parked(drain(load(&control.argument), number), number);
}

// The last turn of a PASS is one that has waited so long for other processes, or that has so much work: with the
// next one the program might be as far ahead of the others again as it has just waited for.
#define LONG_TURN_NS 5000000

static CUresult pass(uint32_t number)
{
	uint32_t argument = load(&control.argument), turns = argument % TURNS;
	CUresult r = CUDA_SUCCESS;
	bool long_one = false;

	if (is_apart())
		return CUDA_ERROR_ILLEGAL_STATE;
	control.count = 0;
	gate_close(number);
	set_state(PARKING);
	while (!r && !long_one && control.count < turns && gate_turn(control.count)) {
		struct timespec begun;
		clock_gettime(CLOCK_MONOTONIC, &begun);
		control.count++;
		r = drain(argument / TURNS, number);
		long_one = gate_since(&begun) > LONG_TURN_NS;
	}
	return parked(r, number);
}

// bring_back has a saved program parked; one that is parked stays so.
static CUresult bring_back(uint32_t from)
{
	if (keep_away() && from != FROM_CHECKPOINT && !load(&control.in_area))
		return CUDA_ERROR_ILLEGAL_STATE; // the host memory may have nothing of it
	keep_abandon();
	memory_no_area();
	if (load(&control.state) == SAVED) {
		CUresult r = memory_restore(control.start, control.bytes);
		if (r)
			return r;
		set_state(PARKED);
	}
	control.start = 0;
	control.bytes = memory_total();
	return load(&control.state) == PARKED ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_STATE;
}

static CUresult open_again(void)
{
	if (load(&control.state) == SAVED) {
		CUresult r = bring_back(0);
		if (r)
			return r;
	}
	keep_forget();
	memory_no_area();
	if (is_apart())
		return CUDA_ERROR_ILLEGAL_STATE;
	control.start = control.bytes = 0;
	control.cut = 0;
	set_state(OPEN);
	gate_open();
	return CUDA_SUCCESS;
}

// returned has a program parked whose memory was kept.
static CUresult returned(void)
{
	CUresult r = keep_return(control.start, control.bytes);

	if (r)
		return r;
	set_state(PARKED);
	return bring_back(0);
}

static CUresult leave(void)
{
	CUresult r = events_leave(control.cut);

	if (!r && (r = memory_leave(control.cut)))
		events_join();
	return r;
}

static CUresult join(void)
{
	CUresult r = events_join(), m = memory_join();

	return r ? r : m;
}

static CUresult rest(void)
{
	CUresult r = share_rest();

	if (!r && (r = events_rest()))
		share_wake();
	return r;
}

static CUresult obey(uint32_t request)
{
	CUresult r;

	keep_offered();
	switch (request % ASKS) {
	case ASK_MEET:
		return load(&control.state) == SAVED ? keep_meet(control.descriptors, &control.count) : CUDA_ERROR_ILLEGAL_STATE;
	case ASK_TAKE:
		return load(&control.state) == SAVED ? keep_take(load(&control.argument) == BESIDE, &control.count) : CUDA_ERROR_ILLEGAL_STATE;
	case ASK_RETURN:
		return load(&control.state) == SAVED ? returned() : CUDA_ERROR_ILLEGAL_STATE;
	case ASK_PARK:
		return park(request);
	case ASK_SAVE:
		if (load(&control.state) != PARKED)
			return CUDA_ERROR_ILLEGAL_STATE;
		keep_forget();
		control.start = control.bytes = 0;
		r = memory_save(&control.start, &control.bytes);
		if (!r || control.bytes)
			set_state(SAVED);
		if (!r && load(&control.cancelled) == request) { // nobody waits for it any more
			r = bring_back(0);
			return r ? r : CUDA_ERROR_NOT_READY;
		}
		return r;
	case ASK_BACK:
		return bring_back(load(&control.argument));
	case ASK_OPEN:
		return open_again();
	}
	if (load(&control.state) != PARKED)
		return CUDA_ERROR_ILLEGAL_STATE;
	switch (request % ASKS) {
	case ASK_PASS:
		return pass(request);
	case ASK_KEEP:
		return keep_export(control.descriptors, control.sizes, &control.count);
	case ASK_RELEASE:
		control.start = control.bytes = 0;
		__atomic_store_n(&control.in_area, 0, __ATOMIC_SEQ_CST);
		r = keep_release(&control.start, &control.bytes);
		if (!r || control.bytes)
			set_state(SAVED);
		return r;
	case ASK_LEAVE:
		return leave();
	case ASK_REST:
		return rest();
	case ASK_WAKE:
		r = events_wake();
		return r ? r : share_wake();
	case ASK_JOIN:
		return join();
	}
	return CUDA_ERROR_INVALID_VALUE;
}

static void work(void)
{
	struct timespec look = {.tv_sec = 1}; // while the shim has its end of a socket
	sigset_t wanted;

	sigemptyset(&wanted);
	sigaddset(&wanted, SIGNAL);
	for (;;) {
		// By a system call: the C library's may be another one after a restore. A tracer ends it
		// early, and a signal may have come for a request that was seen already.
		syscall(SYS_rt_sigtimedwait, &wanted, NULL, keep_look() ? &look : NULL, 8);
		uint32_t request = load(&control.request);
		if (request == load(&control.answered))
			continue;
		control.result = obey(request);
		describe();
		__atomic_store_n(&control.answered, request, __ATOMIC_SEQ_CST);
	}
}

// A child of fork has no worker, and no CUDA.
static void forked(void)
{
	locks_forked();
	control.pid = control.tid = 0;
	memset(control.copiers, 0, sizeof control.copiers);
	set_state(OPEN);
	share_forked();
	keep_forked();
	managed_forked();
	events_forked();
	interposer_passive = true;
	gate_forked();
}

extern int __register_atfork(void (*)(void), void (*)(void), void (*)(void), void *) __attribute__((weak));

bool worker_start(void)
{
	if (!__register_atfork || __register_atfork(NULL, NULL, forked, NULL))
		return false;
	copy_start(control.copiers, COPIERS);
	control.pid = getpid();
	return thread_start("gpuckpt-interp", work, &control.tid);
}
