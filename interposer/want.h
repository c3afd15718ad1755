// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// What the C tests here check with: WANT ends the program where something is not so.

#ifndef WANT_H
#define WANT_H

#include <stdio.h>
#include <stdlib.h>

#define WANT(what)                                                              \
	do {                                                                    \
		if (!(what)) {                                                  \
			fprintf(stderr, "line %d: %s is not so\n", __LINE__, #what); \
			exit(1);                                                \
		}                                                               \
	} while (0)

#endif
