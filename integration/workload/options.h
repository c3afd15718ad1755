// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Command line options of the form --name VALUE.

#ifndef GPUCKPT_OPTIONS_H
#define GPUCKPT_OPTIONS_H

struct options {
	int port, chunks, gpus, gpu, procs, seconds, ahead, work_us;
	int pinned; // of pattern: its host memory is page-locked, 1 by cuMemHostAlloc, 2 by cuMemHostRegister; 3 is shared
	unsigned long long bytes, seed, start, host_bytes;
	const char *file, *log, *interface, *peer;
	const char *state;   // of odd
	const char *share;   // of ipc: "ipc" or "handle"
	const char *apart;   // of plain: "chroot", "mounts" or "packet"
	const char *content; // of pattern: "pattern", "zero" or "weights"
};

// options_parse ends the program with status 2 on an unknown or malformed option.
struct options options_parse(char **args);

// keep_locks and keep_hidden_lock lock files for the rest of the process's life.
void keep_locks(const char *dir);
void keep_hidden_lock(const char *path);

#endif
