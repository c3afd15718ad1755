// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// The driver's functions, which all of the interposer calls by one table: driver.cuMemAlloc_v2(...). They are looked up once,
// before anything of the interposer's stands in for one of them. One that the driver lacks answers CUDA_ERROR_NOT_FOUND.

#ifndef GPUCKPT_DRIVER_H
#define GPUCKPT_DRIVER_H

#include "interposer.h"

typedef struct CUevent_st *CUevent;

struct driver {
#define DRIVER(name, parameters, needed) CUresult (*name) parameters;
#include "driver.inc"
#undef DRIVER
};
extern struct driver driver;

// What cannot do without a function.
enum needed { NOTHING = 0, BLOCKS = 1, COPIES = 2, STREAMS = 4, ZEROS = 8, KEEPING = 16, EVENTS = 32 };

// driver_look looks the functions up, once. The driver must be there.
void driver_look(void);
// driver_serves reports whether the driver has all functions that something needs.
bool driver_serves(enum needed what);

#endif
