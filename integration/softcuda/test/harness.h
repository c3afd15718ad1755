// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// What the conformance tests share: targets (gpuwork processes), calls to the driver from outside
// them, device nodes, and looks into /proc. The same tests run against the real driver (--real),
// less those of the software GPU's own switches: so the double is known to be like the original.

#ifndef GPUCKPT_HARNESS_H
#define GPUCKPT_HARNESS_H

#include <stdbool.h>
#include <sys/types.h>

#include "../cuda_abi.h"

// cu holds the calls under test, loaded from libcuda.so.1.
extern struct cuda {
	CUresult (*init)(unsigned int);
	CUresult (*count)(int *);
	CUresult (*state)(int, CUprocessState *);
	CUresult (*tid)(int, int *);
	CUresult (*lock)(int, CUcheckpointLockArgs *);
	CUresult (*checkpoint)(int, CUcheckpointCheckpointArgs *);
	CUresult (*restore)(int, CUcheckpointRestoreArgs *);
	CUresult (*unlock)(int, CUcheckpointUnlockArgs *);
} cu;

extern bool real_driver;
extern char dev_folder[64]; // $SOFTCUDA_DEV of the targets
extern int failures;

// WANT evaluates to whether got equals want, and counts and prints where it does not.
#define WANT(got, want) want_equal(__FILE__, __LINE__, #got, (long long)(got), (long long)(want))
bool want_equal(const char *file, int line, const char *what, long long got, long long want);
#define FAIL(...) fail(__FILE__, __LINE__, __VA_ARGS__)
__attribute__((format(printf, 3, 4))) void fail(const char *file, int line, const char *form, ...);
__attribute__((noreturn, format(printf, 1, 2))) void die(const char *form, ...);

struct target {
	pid_t pid;
	int port;
	pid_t launched; // the process that was launched, of which pid may be a child
};

// start runs gpuwork with the arguments and a port, and with environment "NAME=VALUE ..." added,
// and waits until it has a context. in_namespaces: as pid 1 of its own pid and mount namespaces.
struct target start(const char *arguments, const char *environment);
// start_with_memory waits until the program has taken its memory, too.
struct target start_with_memory(const char *arguments, const char *environment);
struct target start_in_namespaces(const char *arguments);
// launch does the same but does not wait.
struct target launch(const char *arguments, const char *environment, bool in_namespaces);
void stop(struct target t);

// ask sends a request and gives the reply without its line end, or NULL when none came in time. It dies
// where the process that was launched has ended.
const char *ask(struct target t, const char *request, int timeout_ms);
// want_reply asks with a generous deadline.
void want_reply(struct target t, const char *request, const char *want);

// steps on a target, in the calls' shortest forms
int state_of(pid_t pid); // the state, or minus the error
CUresult lock(pid_t pid, unsigned timeout_ms);
CUresult restore(pid_t pid, int pairs, CUcheckpointGpuPair *pair);
void want_cycle(pid_t pid); // lock, checkpoint, restore, unlock

// call runs one call in a process of its own ("conform --call ..."); finish waits for its result.
pid_t call_elsewhere(const char *call, pid_t pid);
int finish(pid_t caller);

// look into a process
int gpu_fds(pid_t pid);      // open files named .../nvidia*
int gpu_mappings(pid_t pid); // mappings of device memory
// describe prints what a process has of the driver: libraries, device files, threads.
void describe(pid_t pid);
// largest_anonymous finds the largest private anonymous rw mapping; returns its size.
size_t largest_anonymous(pid_t pid, unsigned long *start);
bool is_thread_of(pid_t pid, int tid);

int gpu_count(void); // of the real driver

void add_node(int minor); // nvidiaN, or nvidiactl for -1
void remove_node(int minor);
CUuuid uuid_of(int minor); // the default one

// the tests
void test_states(void);
void test_memory(void);
void test_refusals(void);
void test_devices(void);
void test_threads(void);
void test_frozen(void);
void test_callers(void);
void test_namespaces(void);
void test_faults(void);
void test_nvml(void);
void test_remap(void);
void test_habits(void);
void test_ranks(void);
void test_shared(void);
void test_kept(void);
void test_moved(void);
void test_interrupted(void);
void test_slices(void);
void test_managed(void);
void test_events(void);

// kept_program is what test_kept and test_moved checkpoint, kept_mover what test_moved runs meanwhile; s is a socket
// to that.
__attribute__((noreturn)) void kept_program(int s);
__attribute__((noreturn)) void kept_mover(int s);
// events_program is each of the two that test_events tells what to do, by a socket.
__attribute__((noreturn)) void events_program(int s);

#endif
