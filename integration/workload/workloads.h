// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// The workloads; each runs until it is killed unless it says otherwise.

#ifndef GPUCKPT_WORKLOADS_H
#define GPUCKPT_WORKLOADS_H

#include "options.h"

__attribute__((noreturn)) void run_counter(const struct options *o);
// run_peer counts by a kernel of GPU 0 in the memory of GPU 1.
__attribute__((noreturn)) void run_peer(const struct options *o);
__attribute__((noreturn)) void run_loop(const struct options *o);
__attribute__((noreturn)) void run_managed(const struct options *o);
__attribute__((noreturn)) void run_plain(const struct options *o);
__attribute__((noreturn)) void run_pattern(const struct options *o);
__attribute__((noreturn)) void run_web(const struct options *o);
__attribute__((noreturn)) void run_writer(const struct options *o);
__attribute__((noreturn)) void run_spin(const struct options *o);
__attribute__((noreturn)) void run_forked(const struct options *o);
__attribute__((noreturn)) void run_beside(const struct options *o);
__attribute__((noreturn)) void run_plainbeside(const struct options *o);
__attribute__((noreturn)) void run_oddly(const struct options *o);
__attribute__((noreturn)) void run_twice(const struct options *o);
__attribute__((noreturn)) void run_forking(const struct options *o);
__attribute__((noreturn)) void run_vforking(const struct options *o);
__attribute__((noreturn)) void run_ipc(const struct options *o);
__attribute__((noreturn)) void run_memory(const struct options *o);
__attribute__((noreturn)) void run_gpumemory(const struct options *o);
__attribute__((noreturn)) void run_segments(const struct options *o);
// run_monitor uses NVML alone.
__attribute__((noreturn)) void run_monitor(const struct options *o);
__attribute__((noreturn)) void run_ring(const struct options *o);
// run_turns is one of two, in two processes, that count in turns in --file; --start is 0 or 1.
__attribute__((noreturn)) void run_turns(const struct options *o);
// run_zoo has one of everything that a restore takes.
__attribute__((noreturn)) void run_zoo(const struct options *o);
// run_odd has the state that --state names, with files at --file.
__attribute__((noreturn)) void run_odd(const struct options *o);

// run_multi and run_ranks return the exit status of the first child that ended; the others are killed.
int run_multi(const struct options *o);
int run_ranks(const struct options *o);

// run_each is what both do: it runs a function in each of the children, with its place among them.
int run_each(const struct options *o, void (*run)(const struct options *, int));

// list_gpus prints what NVML shows; try_gpus uses each GPU that CUDA shows. Both return an exit status.
int list_gpus(void);
int try_gpus(void);

// print_much writes that much and a line, and returns 3. fork_much has that much memory,
// and children that inherit it; map_much has mappings of a file with a long path, and children; open_much
// has open files and children, join_much sockets in multicast groups, run_much threads, and remove_much
// open files that were removed. They do not return, or return 1.
int print_much(int mib);
int fork_much(int mib, int children);
int map_much(int mappings, int children);
int open_much(int files, int children);
int join_much(int sockets, int groups);
int run_much(int threads);
int remove_much(int mib, int files);

#endif
