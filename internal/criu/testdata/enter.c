// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// enter PATH... LINE...: enters the sandbox by the lines, which have a tab in them, as CRIU does by
// gpuckpt.conf. It ends with 0 if it has entered and sees none of the paths, and none of those with "-" before
// them is writable, else with 2.

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "../plugin/sandbox.h"

__attribute__((format(printf, 2, 3))) void print_on_level(unsigned int level, const char *format, ...)
{
	va_list list;

	va_start(list, format);
	if (level == 1)
		vfprintf(stderr, format, list);
	va_end(list);
}

int main(int argc, char **argv)
{
	int lines = 1;

	while (lines < argc && !strchr(argv[lines], '\t'))
		lines++;
	for (int i = lines; i < argc; i++)
		if (sandbox_line(argv[i]) != 1)
			return 3;
	if (sandbox_enter())
		return 1;
	for (int i = 1; i < lines; i++)
		if (!(argv[i][0] == '-' ? access(argv[i] + 1, W_OK) : access(argv[i], F_OK)))
			return 2;
	return 0;
}
