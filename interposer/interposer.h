// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// The rooms of the interposer.
//
//	thunks.S   before each function of the driver: counts its calls, holds them at the gate
//	route.c    which function of the driver is behind which thunk; dlsym, cuGetProcAddress
//	driver.c   the driver's functions
//	lock.c     all locks, threads and descriptors of the interposer's own
//	gate.c     the calls that are under way, and those that wait
//	override.c which functions of the interposer's stand in for the driver's
//	block.c    GPU memory of the interposer's own making
//	alloc.c    the program's functions for it
//	ipc.c      what other processes have of it, and what of theirs is here
//	vmm.c      the same for memory that a program makes and imports by handles
//	managed.c  managed memory, a little of it
//	peers.c    which GPU's kernels reach which GPU's memory
//	contexts.c the program's contexts
//	save.c     all of the memory copied to host memory and given back, and brought back
//	events.c   events that processes share
//	foreign.c  what is used of the driver and not brought back
//	share.c    how the interposers of two processes hand descriptors of memory to each other, and of events' words
//	keep.c     the same memory, kept on the GPU by descriptors while the driver checkpoints
//	copy.c     copies of it, by several threads
//	worker.c   the thread that does what the shim asks for; the control block

#ifndef GPUCKPT_INTERPOSER_H
#define GPUCKPT_INTERPOSER_H

#include <linux/futex.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

// What is needed of cuda.h. Numbers and layouts are the driver's ABI.
typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUhandle;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
enum {
	CUDA_SUCCESS = 0,
	CUDA_ERROR_INVALID_VALUE = 1,
	CUDA_ERROR_OUT_OF_MEMORY = 2,
	CUDA_ERROR_INVALID_DEVICE = 101,
	CUDA_ERROR_OPERATING_SYSTEM = 304,
	CUDA_ERROR_INVALID_CONTEXT = 201,
	CUDA_ERROR_INVALID_HANDLE = 400,
	CUDA_ERROR_ILLEGAL_STATE = 401,
	CUDA_ERROR_NOT_FOUND = 500,
	CUDA_ERROR_NOT_READY = 600,
	CUDA_ERROR_NOT_PERMITTED = 800,
	CUDA_ERROR_NOT_SUPPORTED = 801,
};
typedef struct {
	int type, id;
} CUmemLocation;
typedef struct {
	int type, requestedHandleTypes;
	CUmemLocation location;
	void *win32HandleMetaData;
	unsigned char allocFlags[8];
} CUmemAllocationProp;
typedef struct {
	CUmemLocation location;
	int flags;
} CUmemAccessDesc;
enum { CU_PINNED = 1, CU_DEVICE = 1, CU_READWRITE = 3, CU_POSIX_FD = 1 };
typedef struct {
	char bytes[64];
} CUipcMemHandle;

// lock.c
// All locks of the interposer's are these, so that none is forgotten at a fork. Who has one may take one that comes later.
enum lock {
	LOCK_IMPORTING,   // one cuIpcOpenMemHandle or Close at a time
	LOCK_HANDLES,     // one call at a time for memory that the program has handles of
	LOCK_EXPORTING,   // no handle of the driver's ends while one is exported
	LOCK_BLOCKS,      // see block.h
	LOCK_MANAGED,     // of managed memory
	LOCK_ATTACHING,   // one cuIpcOpenEventHandle at a time
	LOCK_TELLING,     // one record of an event that is shared at a time
	LOCK_REGISTERING, // of words of events with the driver
	LOCK_EVENTS,      // of the lists of events and words
	LOCK_HOLDERS,     // of who has memory of this process
	LOCK_THUNKS,      // of thunks
	LOCK_MEETING,     // of the socket that the shim has the other end of
	LOCKS,
};
void lock(enum lock);
void unlock(enum lock);
// locks_forked is for a child: a thread of the parent's may have had any.
void locks_forked(void);
// once is pthread_once.
void once(pthread_once_t *state, void (*call)(void));
// thread_start starts a thread of the interposer's, which passes the gate and runs no handler of the program's, and writes
// its tid: the shim must find it. false: there is none.
bool thread_start(const char *name, void (*run)(void), int32_t *tid);

static inline uint32_t load(const uint32_t *p)
{
	return __atomic_load_n(p, __ATOMIC_SEQ_CST);
}

static inline void futex(uint32_t *word, int operation, uint32_t value)
{
	syscall(SYS_futex, word, operation, value, NULL, NULL, 0);
}

// owned is a descriptor of the interposer's that the program may have closed, and then have another file by the same
// number.
struct owned {
	int fd;
	dev_t dev;
	ino_t ino;
};
// owned notes a descriptor. owned_has reports whether it is the same still, and owned_end closes it then.
struct owned owned(int fd);
bool owned_has(const struct owned *o);
void owned_end(struct owned *o);

// route.c
// interposer_real looks the driver's function of that name up; NULL if it has none. What is called is in driver.h.
void *interposer_real(const char *name);
// interposer_passive says that the interposer does nothing in this process.
extern bool interposer_passive;
// interposer_say writes a line to stderr, once for each place that calls it.
#define interposer_say(text)                                                     \
	do {                                                                    \
		static bool said;                                               \
		if (!__atomic_exchange_n(&said, true, __ATOMIC_RELAXED))        \
			interposer_write("gpuckpt interposer: " text "\n");       \
	} while (0)
void interposer_write(const char *text);
// interposer_bypassed reports whether an object in this process has calls of the driver that would not wait at the gate.
bool interposer_bypassed(void);

// gate.c
// gate_close closes the gate, also one that is closed. Who waits opens it if interposer_cancelled(number).
void gate_close(uint32_t number);
void gate_open(void);
// gate_turn lets in the calls that wait at the gate, which stays closed and must be drained. With wait it waits a
// moment for one. false: there was none.
bool gate_turn(bool wait);
// gate_drain waits until no call is under way. false: not in time, or *cancelled was set to the number.
bool gate_drain(unsigned timeout_ms, const uint32_t *cancelled, uint32_t number);
// gate_since returns the nanoseconds since a time of CLOCK_MONOTONIC.
int64_t gate_since(const struct timespec *begun);
// gate_exempt lets the calls of this thread by for ever.
void gate_exempt(void);
// gate_forked is for a child: nobody waits, nothing is under way.
void gate_forked(void);

// override.c
// override_of returns the function that stands in for the driver's of a name, NULL for none. It runs inside the gate.
void *override_of(const char *name);

// What the worker asks for of memory.
// contexts.c
// memory_synchronize waits for the GPU work of all contexts.
CUresult memory_synchronize(void);
// save.c
// memory_total returns how many bytes memory_save would copy.
uint64_t memory_total(void);
// peers.c
// memory_peers returns how many contexts' access to others' memory memory_save would end.
uint32_t memory_peers(void);
// save.c
// memory_save copies the GPU memory to new host memory and gives it back to the driver; the addresses
// stay reserved. The driver loses what cuCtxEnablePeerAccess has allowed (580, measured), so that is
// ended as well. On an error all of it is there as before.
CUresult memory_save(uint64_t *start, uint64_t *bytes);
// memory_restore brings the GPU memory and the access back. On an error none of it is there, and the host memory
// still is.
CUresult memory_restore(uint64_t start, uint64_t bytes);

// memory_no_area gives back the host memory of a memory_save that has failed, if there is some.
void memory_no_area(void);
// memory_keep gives all blocks back to the driver as memory_save does, and copies nothing. The host memory, by which the
// shim finds what is saved, is not to be written. *bytes is 0 if there are no blocks. On an error with bytes some of them
// may be given back.
CUresult memory_keep(uint64_t *start, uint64_t *bytes);

// ipc.c
// memory_imports returns how much memory of other processes' interposers is mapped, in pieces.
uint32_t memory_imports(void);
// memory_leave gives that memory back, and keeps its addresses. Its exporters must be in the cut of that
// number and parked. On an error all of it is there as before.
CUresult memory_leave(uint64_t cut);
// block.c
// lost is what the program has used that is not brought back: ways to share, and host memory of cuMemCreate that it has
// now or that others may have.
enum lost { LOST_UNKNOWN = 8, LOST_HOST = 16 };
// memory_lost returns all of it.
uint32_t memory_lost(void);
// ipc.c
// memory_away reports whether some of it is still to come back.
bool memory_away(void);
// memory_join has that memory again from those who made it. Memory of a process that has ended is lost,
// and that is CUDA_ERROR_NOT_FOUND. On another error some of it is not there, and memory_join can be
// called again.
CUresult memory_join(void);
// memory_export makes a descriptor of a block that others may have, by its number.
CUresult memory_export(uint64_t number, int *fd);
// memory_exports reports whether there is a block of that number, which a checkpoint would save.
bool memory_exports(uint64_t number);

// events.c: as memory's, of the words of events that processes share. All of this process's are complete when it is
// parked, and are so again after that.
// events_import reports whether words of other processes are mapped. events_leave unmaps them; events_away reports
// whether some are still to come back. events_join has them again. Those of a process that has ended are complete from
// then on, which is no error.
bool events_import(void);
CUresult events_leave(uint64_t cut);
bool events_away(void);
CUresult events_join(void);
// events_export makes a descriptor of this process's words. events_exports reports whether it has some.
CUresult events_export(int *fd);
bool events_exports(void);
// events_rest gives this process's words up, which nobody else has then. On an error they are there as before.
// events_wake makes them anew.
CUresult events_rest(void);
CUresult events_wake(void);
// events_forked is for a child: it has no events.
void events_forked(void);

// managed_forked is for a child: it has no such memory.
void managed_forked(void); // managed.c

// share.c
// A ticket is what a program has of cuIpcGetMemHandle for memory of the interposer's, in the place of the
// driver's handle. Who has it may map the memory, as with the driver's.
struct ticket {
	char magic[4];
	int32_t pid;                // the exporter's, in its pid namespace
	unsigned char exporter[16]; // at random; the exporter's socket has it in its name
	unsigned char key[16];      // at random; nobody else knows it
	uint64_t number;            // of the block, from 1 on
	uint64_t bytes, asked;      // as in the block
};
_Static_assert(sizeof(struct ticket) == sizeof(CUipcMemHandle), "a ticket is in its place");
#define SHARE_EVENTS UINT64_MAX // in the place of a block's number: the words of events
enum { SHARE_OPEN = 1, SHARE_CLOSE = 2, SHARE_LEAVE = 3 };
// share_ticket completes a ticket that has the number and the sizes, and has a thread answer for it.
// false: it cannot.
bool share_ticket(struct ticket *t);
// share_known reports whether bytes are an interposer's ticket, share_own whether it is this process's.
bool share_known(const struct ticket *t);
bool share_own(const struct ticket *t);
// share_ask asks a ticket's exporter. OPEN: for a descriptor, which is the caller's then. CLOSE: nothing,
// this process has the memory no more. LEAVE: whether this process may give it back for the cut. It is
// CUDA_ERROR_NOT_FOUND if the exporter has ended or does not answer. An OPEN of the program's waits for an exporter
// that is parked.
CUresult share_ask(const struct ticket *t, int what, uint64_t cut, int *fd);
// share_began returns when a process started, in the kernel's ticks, and 0 for one that has ended.
uint64_t share_began(int32_t pid);
// share_listens reports whether this process has tickets out.
bool share_listens(void);
// share_rest has nobody answer any more, and no descriptor open for it. It is CUDA_ERROR_NOT_PERMITTED, and nothing
// has changed, if a process has memory of this one.
CUresult share_rest(void);
// share_rests reports whether that is so.
bool share_rests(void);
// share_wake undoes share_rest.
CUresult share_wake(void);
// share_forked is for a child: it answers for nobody.
void share_forked(void);

// keep.c: memory is kept by descriptors that the shim holds while the process has none of it.
enum { KEEP_BATCH = 32 }; // descriptors at a time: programs may have room for few
// keep_export exports the next blocks, and writes their sizes and how many descriptors there are; 0 after the last. It is
// CUDA_ERROR_OUT_OF_MEMORY if a GPU has no room for another process's context, and CUDA_ERROR_NOT_SUPPORTED if a block
// cannot be exported. keep_offered closes what was written last: the shim has it.
CUresult keep_export(int32_t fds[KEEP_BATCH], uint64_t sizes[KEEP_BATCH], uint32_t *count);
void keep_offered(void);
// keep_forget forgets what was exported, and what was kept and is not taken.
void keep_forget(void);
// keep_release gives the blocks to the driver, once all are exported; see memory_keep.
CUresult keep_release(uint64_t *start, uint64_t *bytes);
// keep_away reports whether the memory is nowhere but with the shim.
bool keep_away(void);
// keep_meet makes a pair of sockets, one of which is for the shim, by which it sends descriptors. *count is how many
// pieces were taken before.
CUresult keep_meet(int32_t *fd, uint32_t *count);
// keep_take fills the next blocks, which it makes, with what one message of the shim's has: sizes of pieces (uint64_t),
// each with its descriptor. Nothing of the pieces is mapped or open afterwards. beside says that the GPU will have the
// memory of the pieces for longer: it is CUDA_ERROR_OUT_OF_MEMORY then if a GPU has no room for all blocks and 1 GiB more,
// and otherwise if it has none for the blocks of a piece. *count is how many pieces were taken so far. On an error none of
// the message is; it can be sent again.
CUresult keep_take(bool beside, uint32_t *count);
// keep_return ends that, when all is taken. The host memory, that of keep_release or memory_save, is unmapped.
CUresult keep_return(uint64_t start, uint64_t bytes);
// keep_abandon gives the blocks back that were taken, if keep_return has not ended that, and forgets what was kept.
void keep_abandon(void);
// keep_look reports whether the GPU may still have the memory a second time, and closes the socket if not.
bool keep_look(void);
// keep_drop closes the socket.
void keep_drop(void);
// keep_wait waits while the GPU may have the memory a second time, and reports whether it had. It is for the program's
// threads.
bool keep_wait(void);
// keep_forked is for a child.
void keep_forked(void);

// copy.c
struct piece {
	CUcontext context;
	CUdeviceptr device;
	char *host;
	size_t bytes;
};
// copy_start starts at most so many copiers, and writes their tids.
void copy_start(int32_t *tids, int most);
// copy_all copies all pieces out of the GPU's memory or into it, and returns the first error. Pieces are
// not empty and do not overlap, and are all within the host memory of bytes from host on. What comes back
// must be what went out to that memory last. One call at a time.
CUresult copy_all(const struct piece *pieces, size_t count, const char *host, size_t bytes, bool out);
// copy_forget forgets what went out last.
void copy_forget(void);

// worker.c
// worker_start has the thread at work, or returns false.
bool worker_start(void);
// worker_cut returns the number of the cut that this process is parked for; 0 for none.
uint64_t worker_cut(void);
// worker_note_thread returns where the shim looks for the tid of one more thread of the interposer's; NULL: there
// is no room.
int32_t *worker_note_thread(void);

#endif
