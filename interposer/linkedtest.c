// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// A library of a program's that is linked to the driver's: it stands before one of its functions, and calls another.

#define _GNU_SOURCE
#include <dlfcn.h>

extern int cuMemFree_v2(unsigned long long), cuNobodyHasIt(void) __attribute__((weak));

int cuCtxGetDevice(int *device)
{
	static int within;
	int (*next)(int *) = (int (*)(int *))dlsym(RTLD_NEXT, "cuCtxGetDevice");

	return within++ ? -1 : next(device); // -1: it is its own next
}

int linked_free(unsigned long long p)
{
	return cuNobodyHasIt ? cuNobodyHasIt() : cuMemFree_v2(p);
}
