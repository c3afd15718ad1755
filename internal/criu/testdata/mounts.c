// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// mounts LIBRARY HOST OWN [TARGET TYPE FLAGS OPTIONS]...: enters the sandbox by the settings beside the
// library, as CRIU does, and has a file system mounted at OWN there. Then it mounts the rest as CRIU does, and
// says of each whether the kernel would have been asked, and with which options. It mounts none of them: for
// these the system call is this program's. HOST is where it has a file system mounted before. Another one,
// at /mnt, goes with the host's root: what is mounted at OWN has its device then.
// It ends with 1 if it cannot enter the sandbox.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sched.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

// Volatile: the C library's header says that mount(2) calls nothing of this program's.
static volatile bool pretends;
static const char *volatile asked;

__attribute__((format(printf, 2, 3))) void print_on_level(unsigned int level, const char *format, ...)
{
	va_list list;

	va_start(list, format);
	if (level == 1)
		vfprintf(stderr, format, list);
	va_end(list);
}

// In the place of the C library's for the library that is tested.
long syscall(long nr, ...)
{
	static long (*real)(long, ...);
	unsigned long arg[6];
	va_list list;

	va_start(list, nr);
	for (int i = 0; i < 6; i++)
		arg[i] = va_arg(list, unsigned long);
	va_end(list);
	if (!real)
		real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
	if (nr == SYS_mount && pretends) {
		asked = arg[4] ? (const char *)arg[4] : "";
		return 0;
	}
	return real(nr, arg[0], arg[1], arg[2], arg[3], arg[4], arg[5]);
}

int main(int argc, char **argv)
{
	struct {
		const char *name;
		int (*init)(int stage);
	} *plugin;

	if (argc < 4 || unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) || mount("host", argv[2], "tmpfs", 0, NULL) ||
	    mount("gone", "/mnt", "tmpfs", 0, NULL))
		return 3;
	void *library = dlopen(argv[1], RTLD_NOW);
	plugin = library ? dlsym(library, "CR_PLUGIN_DESC") : NULL;
	if (!plugin)
		return fprintf(stderr, "%s\n", dlerror()), 3;
	if (plugin->init(2 /* STAGE_RESTORE */))
		return 1;
	if (mkdir(argv[3], 0700) || mount("own", argv[3], "tmpfs", 0, NULL))
		return perror("its own"), 3;
	pretends = true;
	for (char **a = argv + 4; a + 3 < argv + argc; a += 4) {
		asked = NULL;
		int err = mount("source", a[0], a[1], strtoul(a[2], NULL, 16), *a[3] ? a[3] : NULL);
		if (err != (asked ? 0 : -1) || (!asked && errno != EPERM))
			return 3;
		printf("%s\n", asked ? asked : "refused");
	}
	return 0;
}
