// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The hold: the shim starts runc for a restore before CRIU may begin. The file that GPUCKPT_HOLD names is
// locked (flock) until then. It has lines of variables of the environment, NAME=VALUE, and "go" as the last
// one. Without that the shim has ended or has given up, and CRIU ends too: it has not looked at anything.
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

// Before all others, which read the environment.
__attribute__((constructor(101))) static void wait_for_shim(void)
{
	const char *name = getenv("GPUCKPT_HOLD");
	char *line = NULL;
	size_t room = 0;
	int go = 0;

	if (!name)
		return;
	FILE *f = fopen(name, "re");
	while (f && flock(fileno(f), LOCK_SH)) {
		if (errno != EINTR)
			_exit(1);
	}
	while (f && !go && getline(&line, &room, f) > 0) {
		line[strcspn(line, "\n")] = 0;
		char *value = strchr(line, '=');
		if (value) {
			*value++ = 0;
			setenv(line, value, 1);
		}
		go = !value && !strcmp(line, "go");
	}
	if (!go)
		_exit(1);
	fclose(f);
	free(line);
	unsetenv("GPUCKPT_HOLD"); // what CRIU runs does not find the file
}
