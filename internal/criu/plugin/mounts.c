// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0
//
// What CRIU mounts in a restore. Most kinds of file systems have one instance, or a disk, for the whole
// machine: mounting one again changes the flags and options that it has on the host, and has the kernel
// load a module. So for a container without CAP_SYS_ADMIN CRIU mounts anew what the kernel lets a user
// namespace mount, whose instances belong to the container's namespaces. It changes no file system that
// the host has mounted.
//
// The kernel has nothing that bounds this for a process with CAP_SYS_ADMIN, and that the processes which
// CRIU makes would not keep. So this library is loaded into CRIU before any other (LD_PRELOAD), and its
// mount(2) is CRIU's. The new calls, fsopen(2) and those after it, CRIU makes for /proc, /sys and cgroups
// of its own alone, and an image has no say in that.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <linux/magic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "sandbox.h"

#define EXPORTED __attribute__((visibility("default")))

extern void print_on_level(unsigned int level, const char *format, ...) __attribute__((weak, format(printf, 2, 3)));

static bool watched;

// The file systems that CRIU has mounted, which its processes share: one of them mounts for those that are
// in a user namespace.
static struct mounted {
	_Atomic size_t count;
	_Atomic dev_t dev[4096];
} *own;

// The host's hierarchies of cgroups of version 1, and the options of version 2.
static char *hierarchies, *unified;

// read_options keeps those of version 2.
static int read_options(void)
{
	FILE *f = fopen("/proc/self/mountinfo", "re");
	char *line = NULL;
	size_t room = 0;
	int err = f ? 0 : -1;

	while (!err && !unified && getline(&line, &room, f) > 0) {
		char *type = strstr(line, " - cgroup2 "), *options = type ? strrchr(line, ' ') : NULL;
		if (!options)
			continue;
		options[strcspn(options, "\n")] = 0;
		options += !strncmp(options, " rw,", 4) || !strncmp(options, " ro,", 4) ? 4 : strlen(options);
		err = (unified = strdup(options)) ? 0 : -1;
	}
	if (f)
		fclose(f);
	free(line);
	return err;
}

// read_hierarchies keeps their names, each between commas: ",cpu,cpuacct,name=systemd,".
static int read_hierarchies(void)
{
	FILE *f = fopen("/proc/self/cgroup", "re");
	char *line = NULL;
	size_t room = 0, size = 2;
	int err = f && (hierarchies = strdup(",")) ? 0 : -1;

	while (!err && getline(&line, &room, f) > 0) {
		char *names = strchr(line, ':'), *end = names ? strchr(names + 1, ':') : NULL;
		if (!end || end == names + 1)
			continue;
		*end = 0;
		size += strlen(names);
		char *more = realloc(hierarchies, size);
		if (more)
			strcat(strcat(hierarchies = more, names + 1), ",");
		else
			err = -1;
	}
	if (f)
		fclose(f);
	free(line);
	return err;
}

// device gives the one of the tmpfs or devpts at target: of these kinds each mount is a new file system, and
// its files have its device. Of others it is 0.
static dev_t device(const char *target)
{
	struct statfs fs;
	struct stat st;
	return !statfs(target, &fs) && !stat(target, &st) && (fs.f_type == TMPFS_MAGIC || fs.f_type == DEVPTS_SUPER_MAGIC) ? st.st_dev : 0;
}

// keep keeps what CRIU has mounted at target, so that it may change it. A name may lead below the new mount
// yet: to the device that was there before.
static void keep(const char *target, dev_t before)
{
	dev_t dev = device(target);
	size_t i = dev && dev != before ? own->count++ : sizeof(own->dev);
	if (i < sizeof(own->dev) / sizeof(*own->dev))
		own->dev[i] = dev;
}

// may_change reports whether a file system that is mounted is one of CRIU's: it remounts what it has filled.
// What the host has mounted does not tell: what it unmounts meanwhile leaves its device to the next.
static bool may_change(const char *target)
{
	dev_t dev = device(target);
	for (size_t i = 0; dev && i < sizeof(own->dev) / sizeof(*own->dev); i++)
		if (own->dev[i] == dev)
			return true;
	return false;
}

// is_hierarchy reports whether options of cgroups of version 1 name a hierarchy that there is, and no
// more: a new one would be the host's too, with a program that the kernel runs there (release_agent).
static bool is_hierarchy(const char *options)
{
	char *list = strdup(options ? options : ""), *rest = list, *name, word[128];
	bool is = list && *list;

	while (is && (name = strsep(&rest, ",")) != NULL)
		is = !strcmp(name, "none") || (*name && snprintf(word, sizeof(word), ",%s,", name) < (int)sizeof(word) && strstr(hierarchies, word));
	free(list);
	return is;
}

static bool may_mount(const char *type, const void *options)
{
	static const char *const types[] = { "proc", "sysfs", "tmpfs", "devpts", "mqueue", "overlay", "cgroup2" };
	for (size_t i = 0; type && i < sizeof(types) / sizeof(*types); i++)
		if (!strcmp(type, types[i]))
			return true;
	return type && !strcmp(type, "cgroup") && is_hierarchy(options);
}

static int watched_mount(const char *source, const char *target, const char *type, unsigned long flags, const void *options)
{
	// As the kernel takes the flags, which here are an image's.
	unsigned long are = (flags & MS_MGC_MSK) == MS_MGC_VAL ? flags & ~MS_MGC_MSK : flags;
	bool fresh = !(are & (MS_REMOUNT | MS_BIND | MS_MOVE | MS_SHARED | MS_PRIVATE | MS_SLAVE | MS_UNBINDABLE));
	bool change = (are & (MS_REMOUNT | MS_BIND)) == MS_REMOUNT;

	if (watched && ((fresh && !may_mount(type, options)) || (change && !may_change(target)))) {
		print_on_level(1, "Error (gpuckpt/mounts.c:%d): %s%s at %s: it is not the container's alone\n", __LINE__, fresh ? "mount a file system of type " : "change what is mounted",
			       !fresh ? "" : type ? type : "none", target);
		return errno = EPERM, -1;
	}
	// In the host's cgroup namespace each mount sets these for the host.
	if (watched && fresh && !strcmp(type, "cgroup2"))
		options = unified;
	dev_t before = watched && fresh ? device(target) : 0;
	int err = (int)syscall(SYS_mount, source, target, type, flags, options);
	if (watched && fresh && !err)
		keep(target, before);
	return err;
}

EXPORTED int mount(const char *source, const char *target, const char *type, unsigned long flags, const void *options)
	__attribute__((alias("watched_mount")));

int mounts_read(void)
{
	if (dlsym(RTLD_DEFAULT, "mount") != (void *)watched_mount)
		return errno = ENOEXEC, -1;
	own = mmap(NULL, sizeof(*own), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	return own == MAP_FAILED || read_options() || read_hierarchies() ? -1 : 0;
}

void mounts_watch(void) { watched = true; }
