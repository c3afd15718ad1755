// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0
#ifndef GPUCKPT_SANDBOX_H
#define GPUCKPT_SANDBOX_H

#include <stdbool.h>

// sandbox_line takes one line of gpuckpt.conf. It returns 1 if the line is of the sandbox, 0 if it
// is not, and -1 on an error.
int sandbox_line(char *line);

// sandbox_enter takes CRIU out of the host's mounts, and drops capabilities, as the lines say.
// Without lines it does nothing. An error leaves CRIU between the two: the restore must fail.
int sandbox_enter(void);

// sandbox_missing reports whether lines were read and sandbox_enter has not succeeded.
bool sandbox_missing(void);

// mounts_read reads what the host's cgroups are mounted with. Once mounts_watch was called, CRIU may change
// only what it has mounted since. An error, where this library's mount(2) is not CRIU's, leaves CRIU
// unwatched: see mounts.c.
int mounts_read(void);
void mounts_watch(void);

#endif
