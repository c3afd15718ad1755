// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// The rooms of the software GPU and what each offers the others. A process's CUDA life:
// cuInit finds the GPUs and starts the control thread (process.c, control.c), the API calls run
// through the gate (gate.c), and another process, through remote.c, has the control thread walk the
// state machine RUNNING, LOCKED, CHECKPOINTED (checkpoint.c).

#ifndef GPUCKPT_SOFTCUDA_H
#define GPUCKPT_SOFTCUDA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuda_abi.h"

#define MAX_GPUS 16

// gpu.c, config.c: what the machine has. A GPU is its node's number, as with the real driver.
struct gpu {
	int minor;    // N of /dev/nvidiaN
	CUuuid uuid;
	char name[96];
	char nvml_name[96]; // empty: the same
	size_t total; // bytes of memory
	bool mig;     // partitioned: NVML lists it, CUDA does not
	bool vgpu;    // NVML calls it a virtual one
	char machine[64]; // whose GPU it is, where several stand in for one machine; may be empty
};

enum step { STEP_LOCK, STEP_CHECKPOINT, STEP_RESTORE, STEP_UNLOCK, STEPS, ASK_STATE = STEPS };

struct fault {
	CUresult code;  // CUDA_SUCCESS: no fault is injected
	unsigned times; // only the first so many calls; 0: all
};

struct config {
	char driver[80];
	int cuda_version; // 13000 is 13.0
	struct gpu gpu[MAX_GPUS];
	bool nvml_alone;   // NVML does not have libcuda serve its process
	bool mute;         // the kernel module does not tell whose memory a process has mapped
	bool no_words;     // the GPUs do not wait for words of memory, or write them
	unsigned fork_ms;  // that a fork has a lock which checkpoints and restores need
	unsigned timer_ms; // 0: no such thread (timer.c)
	unsigned delay_ms[STEPS];
	unsigned init_delay_ms, context_delay_ms; // that cuInit takes longer with its nodes open, and a new context
	bool hang[STEPS];  // in the middle of its copy
	unsigned piece_ms; // that each piece of a copy takes a processor longer
	unsigned out_delay_ms; // before a cuMemcpyDtoHAsync
	size_t taken; // bytes of each GPU's memory that others have
	CUresult unmap_code; // the answer of each cuMemUnmap, which does nothing; 0: none
	struct fault fail[STEPS];
	struct fault gpu_fail[MAX_GPUS][STEPS]; // of processes with memory on it
};

// config_load reads the configuration file and the environment, which wins; never fails: what is
// missing or malformed keeps its default.
void config_load(struct config *config);

// parse_uuid reads 32 hex digits with any dashes, after an optional "GPU-"; what is none is ignored.
void parse_uuid(const char *text, CUuuid *uuid);

// config_has_checkpoint tells whether the configured driver is 570 or newer.
bool config_has_checkpoint(const struct config *config);

// pause_ms sleeps, also past signals. now_ms is a clock that nobody sets.
void pause_ms(unsigned ms);
long long now_ms(void);

// gpus_visible lists the GPUs whose nodes this process can open, by number. -1: no driver, that is
// no nvidiactl.
int gpus_visible(const struct config *config, struct gpu *gpus);

// gpus_usable are those of them that CUDA can use.
int gpus_usable(const struct config *config, struct gpu *gpus);

// gpus_chosen keeps of n GPUs those that CUDA_VISIBLE_DEVICES names, in its order, up to the first
// name that is none; all if it is not set.
int gpus_chosen(struct gpu *gpus, int n);

// profiled reports whether a profiler is at work in this process.
bool profiled(void);

// gpu_host_file makes a file for host memory, with a name in /proc as the real one has. -1 on error.
int gpu_host_file(size_t bytes);
// gpu_open opens a GPU's node, or nvidiactl for minor -1. -1 on error.
int gpu_open(int minor);

// gpu_memory_name is the name of the memory files of a GPU.
void gpu_memory_name(const struct gpu *gpu, char *name, size_t len);

// gpu_memory_used adds up, over all processes that /proc shows, what they hold of a GPU's memory.
// each, if not NULL, is told every process that holds some.
size_t gpu_memory_used(const struct gpu *gpu, void (*each)(void *arg, int pid, size_t bytes), void *arg);

// gpu_memory_of adds up what a process has of a GPU's memory that it made.
size_t gpu_memory_of(const struct gpu *gpu, int pid);

// gpu_memory_imported adds up what a process has mapped of a GPU's memory that another process made.
size_t gpu_memory_imported(const struct gpu *gpu, int pid);

// process.c: this process's driver state. After a fork the child has none, as on the real driver.
struct process {
	bool served;      // it has the files, the socket and the restore thread: from cuInit or NVML's begin on
	bool initialised; // by cuInit
	bool forked;      // from a process that was
	int gpus;
	struct gpu gpu[MAX_GPUS]; // by CUDA ordinal; replaced by a restore onto others
	int fd[MAX_GPUS];         // open nodes; -1 while checkpointed
	int seen;                 // while checkpointed: the GPUs it could open then, used or not
	CUuuid seen_uuid[MAX_GPUS];
	int control_fd;           // nvidiactl; likewise
};
extern struct process process;

// process_open opens the nodes of gpus[0..n) and nvidiactl into the process. On error nothing is
// open.
CUresult process_open(const struct gpu *gpus, int n);
void process_close(void);
// process_wait_for_forks returns when no fork of the program is under way.
void process_wait_for_forks(void);

// gate.c: every API call is inside the gate while it runs; a lock closes it.
CUresult gate_enter(void);
CUresult gate_enter_served(void); // for cuInit of a process that NVML has the driver serve
void gate_forget_after_fork(void);
CUresult gate_leave(CUresult result); // returns its argument
bool gate_close(unsigned timeout_ms); // false: timed out and open again; 0 waits for ever
void gate_open(void);

// context.c
struct CUctx_st {
	int ordinal;
	int retained; // primary contexts only
	bool alive;
	CUdeviceptr image;
};
CUcontext context_current(void);
// remote_reaches tells whether another process's GPUs reach each other's memory.
bool remote_reaches(int pid);

// peers_lose is for a checkpoint: kernels do not reach other GPUs' memory any more that they could.
void peers_lose(void);
// peer_reaches tells whether kernels of one GPU reach memory of another; -1 is any.
bool peer_reaches(int from, int to);

// memory.c: device memory, one mapping per allocation, at addresses of its own
enum kind { KIND_DEVICE, KIND_MANAGED, KIND_CONTEXT, KIND_IMPORTED, KIND_HANDLE, KIND_HOST };
// advice is what a program has said of managed memory; a location of type 0 is none.
struct advice {
	bool read_mostly;
	CUmemLocation preferred, fetched;
	bool accessed[MAX_GPUS + 1]; // the last is the host
};
struct allocation {
	struct allocation *next;
	CUdeviceptr address;
	size_t bytes; // whole pages
	enum kind kind;
	CUcontext context;
	int export; // its memory file, once another process may map it or it has a handle; else -1
	int views;     // of a handle: where vmm.c has it mapped
	unsigned held; // of a handle: how often the program has it
	CUmemAllocationProp prop; // of a handle; of an imported one only where it is
	struct advice advice;     // of managed memory
};
CUresult memory_allocate(CUcontext context, enum kind kind, size_t bytes, CUdeviceptr *address);
// memory_host makes a handle of host memory, which is a file: an exporter's, or a new one if fd is -1.
CUresult memory_host(CUcontext context, int fd, size_t bytes, CUmemGenericAllocationHandle *handle);
void memory_release_context(CUcontext context);
// memory_at is the host's view of device or pinned memory, NULL unless all of it is allocated.
void *memory_at(CUdeviceptr address, size_t bytes);
size_t memory_in_use(int ordinal);
// memory_managed has an allocation of managed memory with these bytes written or read by use, which no other
// call uses meanwhile. CUDA_ERROR_INVALID_VALUE: there is none.
CUresult memory_managed(CUdeviceptr address, size_t bytes, CUresult (*use)(struct advice *, void *), void *arg);
// memory_about tells about an allocation or pinned memory; false: there is none at that address.
struct about {
	CUdeviceptr base;
	size_t bytes;
	CUcontext context;
	bool managed, host;
};
bool memory_about(CUdeviceptr address, struct about *about);
// memory_ordinal is the GPU that an address is of; -1 for one that cuMemMap or the host has.
int memory_ordinal(CUdeviceptr address);
bool memory_has_managed(void);
// memory_export makes an allocation's memory file one that another process can open: fd is it.
CUresult memory_export(CUdeviceptr address, int *fd, size_t *bytes);
// memory_import maps another process's memory file at an address of its own.
CUresult memory_import(CUcontext context, int fd, size_t bytes, CUdeviceptr *address);
// memory_imported_from tells whether another process has imported an allocation, then or now.
bool memory_imported_from(const struct allocation *a);
// memory_import_handle is memory_import for a handle, which is its address.
CUresult memory_import_handle(CUcontext context, int fd, size_t bytes, CUmemGenericAllocationHandle *handle);
// memory_handle returns the allocation of a handle; NULL for none. memory_drop ends it.
struct allocation *memory_handle(CUmemGenericAllocationHandle handle);
void memory_drop(struct allocation *a);
CUresult memory_release_imported(CUdeviceptr address);
struct allocation *memory_first(void);
CUresult memory_map(struct allocation *a);
void memory_unmap(struct allocation *a);

// managed.c: what a program says and asks of managed memory, and asks of any address

// vmm.c: where handles are mapped. vmm_hide unmaps all of them, and vmm_show maps them again.
// vmm_reaches_exportable tells whether memory that could be exported is mapped for another GPU.
bool vmm_reaches_exportable(void);
bool vmm_has(CUdeviceptr address, size_t bytes);
// vmm_reaches tells whether kernels of a GPU reach an address, as far as it is such memory's.
bool vmm_reaches(int ordinal, CUdeviceptr address);
void vmm_hide(void);
CUresult vmm_show(void);

// kernels.c: what the software GPU can run, by the name of the PTX entry
struct kernel {
	const char *name;
	CUresult (*run)(void **params, unsigned blocks); // does the work of the whole grid
};
const struct kernel *kernel_named(const char *name, size_t len);

// slice.c: a kernel runs between slice_begin and slice_end, on a GPU by its number. slice_lost tells one that runs
// whether the driver ends it. slice_restored: from here on the process's kernels are not interrupted.
void slice_begin(int minor);
void slice_end(int minor);
bool slice_lost(int minor);
void slice_restored(void);
void slice_forget_after_fork(void);

// pattern of context images and of the fill kernel (splitmix64)
uint64_t mix(uint64_t x);

// control.c, remote.c: the channel between a CUDA process and whoever checkpoints it
#define ENDPOINT_MAGIC "gpuckpt softcuda"
struct endpoint {
	char magic[16];
	int32_t ready;
	int32_t pid, tid; // as in the process's own pid namespace
	int32_t request[2], reply[2]; // pipes, both ends of each open in the process
	int32_t reach[2]; // how often GPUs reach others' memory, by cuCtxEnablePeerAccess and by mappings
};
extern struct endpoint endpoint;

struct request {
	uint64_t sequence;
	int32_t step; // enum step
	uint32_t timeout_ms;
	uint32_t pairs, visible; // counts
	CUcheckpointGpuPair pair[MAX_GPUS];
	CUuuid seen[MAX_GPUS]; // the GPUs in the caller's view
};
struct reply {
	uint64_t sequence;
	int32_t result;
	int32_t state; // after the step
};

// control_start makes the channel and its thread, once, for cuInit.
CUresult control_start(void);
// thread_start starts a detached thread of the driver's own, with a name and all signals blocked.
CUresult thread_start(const char *name, void *(*run)(void *));
void control_forget_after_fork(void);

// checkpoint.c: runs on the control thread only
CUresult checkpoint_step(const struct request *request);
CUprocessState checkpoint_state(void);
void checkpoint_forget_after_fork(void);

// timer.c: a thread that reads an address now and then, if the configuration asks for it. It must
// be forgotten before it is unmapped, but by a checkpoint.
CUresult timer_watch(CUdeviceptr address);
void timer_forget(CUdeviceptr address);

// foreign.c
// foreign_share notes that the process shares something otherwise than by ipc.c and vmm.c.
CUresult foreign_share(void);
bool foreign_shared(void);

// streams.c
// streams_settle waits until no work is pending: what a stream waits for is there. false: not in time; 0 waits for ever.
bool streams_settle(unsigned timeout_ms);

// events.c: a thread that every lock needs, from the first context on
CUresult events_start(void);
void events_settle(void); // returns once the thread has run

#endif
