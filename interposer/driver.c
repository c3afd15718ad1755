// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

#include "driver.h"

#include <string.h>

static CUresult missing(void)
{
	return CUDA_ERROR_NOT_FOUND;
}

struct driver driver;

static const struct {
	const char *name;
	void *function;
	enum needed needed;
} functions[] = {
#define DRIVER(name, parameters, needed) {#name, &driver.name, needed},
#include "driver.inc"
#undef DRIVER
};

static enum needed lacking; // what has a function missing

static void look(void)
{
	for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
		void *f = interposer_real(functions[i].name);
		if (!f) {
			f = missing;
			lacking |= functions[i].needed;
		}
		memcpy(functions[i].function, &f, sizeof f);
	}
}

void driver_look(void)
{
	static pthread_once_t state = PTHREAD_ONCE_INIT;

	once(&state, look);
}

bool driver_serves(enum needed what)
{
	return !(lacking & what);
}
