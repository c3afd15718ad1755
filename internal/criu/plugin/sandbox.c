// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The sandbox: a mount namespace of CRIU's own for a restore, without the host's files.
//
// CRIU opens files, mounts and makes nodes as images say, as root. So before it looks at the images
// of files and mounts, and before it has made a process, it moves to a root that has only what the
// lines of gpuckpt.conf name, each at the path that it has on the host. Every process that CRIU
// makes begins there. CRIU's programs and libraries are loaded by then.
//
// Lines, the fields separated by a tab. No path of a bind is below another.
//   sandbox PATH           an empty directory, the new root
//   bind rw|ro PATH        a file or directory that is visible, with what is mounted in it
//   link PATH TARGET       a symbolic link
//   cgroup CONTROLLER DIR ROOT  the container's cgroup of version 1; DIR is where the controller is
//                          mounted, and ROOT what of the hierarchy is mounted there
//   work PATH              CRIU's working directory
//   proc                   /proc of the host's processes, with the host's settings read-only
//   users                  the container has a user namespace of its own
//   writable PATH          one of these settings that a namespace of the container's has too
//   caps HEX               the capabilities that CRIU keeps
//   mounts                 CRIU mounts no file system that the host has too, and changes none (mounts.c)
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/capability.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "sandbox.h"

extern void print_on_level(unsigned int level, const char *format, ...) __attribute__((weak, format(printf, 2, 3)));
// CRIU keeps descriptors of /proc, which lead to the host's. It opens them anew.
extern void close_proc(void) __attribute__((weak));

enum { LOG_ERROR = 1, LOG_INFO = 3 };
// In the form of CRIU's own errors, of which the shim quotes the first.
#define fail(format, ...) \
	(print_on_level(LOG_ERROR, "Error (gpuckpt/sandbox.c:%d): " format ": %s\n", __LINE__, ##__VA_ARGS__, strerror(errno)), -1)

#ifndef MOUNT_ATTR_RDONLY
struct mount_attr {
	uint64_t attr_set, attr_clr, propagation, userns_fd;
};
#define MOUNT_ATTR_RDONLY 1
#endif
#ifndef SYS_mount_setattr
#define SYS_mount_setattr 442
#endif
#define RECURSIVE 0x8000 // AT_RECURSIVE

struct line {
	char *words[4];
	struct line *next;
};

// Where CRIU's working directory is in the sandbox. CRIU does not name it.
static const char work_place[] = "/.gpuckpt/work";

static struct line *lines, **end = &lines;
static bool entered;

int sandbox_line(char *text)
{
	static const struct {
		const char *name;
		int words;
	} kinds[] = {
		{ "sandbox", 2 }, { "bind", 3 }, { "link", 3 }, { "cgroup", 4 }, { "work", 2 }, { "proc", 1 }, { "users", 1 }, { "writable", 2 }, { "caps", 2 }, { "mounts", 1 },
	};
	size_t name = strcspn(text, "\t");
	for (size_t i = 0; i < sizeof(kinds) / sizeof(*kinds); i++) {
		if (strlen(kinds[i].name) != name || strncmp(kinds[i].name, text, name))
			continue;
		struct line *l = calloc(1, sizeof(*l));
		char *rest = strdup(text);
		if (!l || !rest)
			return -1;
		int n = 0;
		for (char *word; n < 4 && (word = strsep(&rest, "\t")) != NULL; n++)
			l->words[n] = word;
		if (n != kinds[i].words || rest)
			return -1;
		*end = l;
		end = &l->next;
		return 1;
	}
	return 0;
}

static const struct line *find(const char *name)
{
	for (const struct line *l = lines; l; l = l->next)
		if (!strcmp(l->words[0], name))
			return l;
	return NULL;
}

static const char *value(const char *name)
{
	const struct line *l = find(name);
	return l ? l->words[1] : NULL;
}

bool sandbox_missing(void)
{
	return lines && !entered;
}

// under returns a path below the new root.
static char *under(char buf[static PATH_MAX], const char *root, const char *path)
{
	if (snprintf(buf, PATH_MAX, "%s%s", root, path) >= PATH_MAX) {
		errno = ENAMETOOLONG;
		return NULL;
	}
	return buf;
}

// make_place makes an empty directory or file, and the directories on the way. The shim names no
// path below one that is bound, so that all of these are the sandbox's own.
static int make_place(char *path, size_t skip, bool directory)
{
	for (char *slash = strchr(path + skip + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
		*slash = 0;
		int err = mkdir(path, 0755) && errno != EEXIST;
		*slash = '/';
		if (err)
			return -1;
	}
	if (directory)
		return mkdir(path, 0755) && errno != EEXIST ? -1 : 0;
	int fd = open(path, O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
	return fd < 0 ? -1 : close(fd);
}

static int set_read_only(const char *path)
{
	struct mount_attr attr = { .attr_set = MOUNT_ATTR_RDONLY };
	return syscall(SYS_mount_setattr, AT_FDCWD, path, RECURSIVE, &attr, sizeof(attr));
}

static int bind_to(const char *root, const char *path, const char *place, bool read_only)
{
	char buf[PATH_MAX], *at = under(buf, root, place);
	struct stat st;
	if (!at || stat(path, &st) || make_place(at, strlen(root), S_ISDIR(st.st_mode)) ||
	    mount(path, at, NULL, MS_BIND | MS_REC, NULL) || (read_only && set_read_only(at)))
		return fail("show %s", path);
	return 0;
}

// cgroup_path returns the cgroup of version 1 of a process, below the root of its controller's mount.
static int cgroup_path(char path[static PATH_MAX], pid_t pid, const char *controller, const char *mount_root)
{
	char line[PATH_MAX + 256];
	snprintf(line, sizeof(line), "/proc/%d/cgroup", pid);
	FILE *f = fopen(line, "re");
	if (!f)
		return fail("read the cgroups of process %d", pid);
	int found = 0;
	while (!found && fgets(line, sizeof(line), f)) {
		line[strcspn(line, "\n")] = 0;
		char *rest = line;
		strsep(&rest, ":");
		char *names = strsep(&rest, ":");
		if (!names || !rest)
			continue;
		if (!strncmp(names, "name=", 5))
			names += 5;
		for (char *name; !found && (name = strsep(&names, ",")) != NULL;)
			found = !strcmp(name, controller);
		size_t skip = strcmp(mount_root, "/") ? strlen(mount_root) : 0;
		if (found && !strncmp(rest, mount_root, skip))
			rest += skip;
		if (found)
			snprintf(path, PATH_MAX, "%s", strcmp(rest, "/") ? rest : "");
	}
	fclose(f);
	return found;
}

// bind_cgroup shows the container's cgroup of version 1, into which runc has put CRIU, where runc has
// CRIU look for it: at the cgroup of runc itself (libcontainer, getCgroupMounts in a restore).
static int bind_cgroup(const char *root, const char *controller, const char *dir, const char *mount_root)
{
	char own[PATH_MAX], runc[PATH_MAX], from[PATH_MAX], to[PATH_MAX];
	int found = cgroup_path(own, getpid(), controller, mount_root);
	if (found > 0)
		found = cgroup_path(runc, getppid(), controller, mount_root);
	if (found <= 0)
		return found;
	return under(from, dir, own) && under(to, dir, runc) ? bind_to(root, from, to, false) : -1;
}

// keep_settings makes the host's settings in /proc read-only.
static int keep_settings(const char *root)
{
	char buf[PATH_MAX], *at;
	static const char *const settings[] = { "/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs", "/proc/scsi", "/proc/acpi", "/proc/driver" };
	for (size_t i = 0; i < sizeof(settings) / sizeof(*settings); i++) {
		if (!(at = under(buf, root, settings[i])))
			return -1;
		if (access(at, F_OK))
			continue;
		if (mount(at, at, NULL, MS_BIND | MS_REC, NULL) || set_read_only(at))
			return fail("make %s read-only", settings[i]);
	}
	return 0;
}

// mount_proc mounts /proc. The host's settings in it are read-only but those of CRIU's processes and
// those named.
static int mount_proc(const char *root)
{
	char buf[PATH_MAX], *at = under(buf, root, "/proc");
	if (!at || make_place(at, strlen(root), true) || mount("proc", at, "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL))
		return fail("mount /proc");
	return keep_settings(root);
}

static int bind(const char *root, const char *path, bool read_only)
{
	// A node of the host that has gone since the shim saw it is as one that it never had.
	if (!strncmp(path, "/dev/", 5) && access(path, F_OK) && errno == ENOENT)
		return 0;
	if (bind_to(root, path, path, read_only))
		return -1;
	return strcmp(path, "/proc") ? 0 : keep_settings(root); // of the host's, which the container has
}

// mount_writable makes one setting writable again.
static int mount_writable(const char *root, const char *path)
{
	char from[PATH_MAX], to[PATH_MAX];
	// By the host's own mount: the one in the sandbox is read-only.
	if (!under(from, "", path) || !under(to, root, path))
		return -1;
	if (access(from, F_OK))
		return 0;
	return mount(from, to, NULL, MS_BIND, NULL) ? fail("make %s writable", path) : 0;
}

// mount_whole mounts /proc and /sys where nothing covers them. The kernel lets a user namespace mount
// only what its mount namespace has already as a whole ("VFS: Mount too revealing"). The processes
// of the user namespace do not get there: it is CRIU's root alone, which they leave.
static int mount_whole(const char *root)
{
	static const struct {
		const char *type, *place;
		unsigned long flags;
	} whole[] = { { "proc", "/.whole/proc", 0 }, { "sysfs", "/.whole/sys", MS_RDONLY } };
	for (size_t i = 0; i < sizeof(whole) / sizeof(*whole); i++) {
		char buf[PATH_MAX], *at = under(buf, root, whole[i].place);
		if (!at || make_place(at, strlen(root), true) || mount(whole[i].type, at, whole[i].type, MS_NOSUID | MS_NODEV | MS_NOEXEC | whole[i].flags, NULL))
			return fail("mount %s", whole[i].place);
	}
	char buf[PATH_MAX], *at = under(buf, root, "/.whole");
	return !at || chmod(at, 0700) ? fail("close /.whole") : 0;
}

static int make_root(const char *root)
{
	// Nothing that is mounted from here on is to be seen by the host.
	if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL))
		return fail("make a mount namespace");
	if (mount("gpuckpt", root, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=4m"))
		return fail("mount its root");
	for (struct line *l = lines; l; l = l->next) {
		const char *kind = l->words[0];
		int err = 0;
		if (!strcmp(kind, "bind"))
			err = bind(root, l->words[2], !strcmp(l->words[1], "ro"));
		else if (!strcmp(kind, "work"))
			err = bind_to(root, l->words[1], work_place, false);
		else if (!strcmp(kind, "cgroup"))
			err = bind_cgroup(root, l->words[1], l->words[2], l->words[3]);
		else if (!strcmp(kind, "proc"))
			err = mount_proc(root);
		else if (!strcmp(kind, "users"))
			err = mount_whole(root);
		else if (!strcmp(kind, "writable"))
			err = mount_writable(root, l->words[1]);
		else if (!strcmp(kind, "link")) {
			char buf[PATH_MAX], *at = under(buf, root, l->words[1]);
			if (!at || symlink(l->words[2], at))
				err = fail("make the link %s", l->words[1]);
		}
		if (err)
			return -1;
	}
	// For CRIU's mounts, and the lock of iptables.
	static const char *const own[] = { "/tmp", "/run" };
	for (size_t i = 0; i < sizeof(own) / sizeof(*own); i++) {
		char buf[PATH_MAX], *at = under(buf, root, own[i]);
		struct stat st, of_root;
		if (!at || (mkdir(at, 0755) && errno != EEXIST) || stat(at, &st) || stat(root, &of_root))
			return fail("make %s", own[i]);
		// A process in a user namespace is another user. The host's directory, which the container has, stays as it is.
		if (st.st_dev == of_root.st_dev && chmod(at, 01777))
			return fail("open %s to all", own[i]);
	}
	return 0;
}

// leave_host makes the new root the root of CRIU, and lets go of what leads to the old one.
static int leave_host(const char *root)
{
	if (chdir(root) || syscall(SYS_pivot_root, ".", ".") || umount2(".", MNT_DETACH) || chdir(work_place))
		return fail("leave the host's root");
	if (close_proc)
		close_proc();
	return 0;
}

static int drop_caps(uint64_t keep)
{
	for (int cap = 0; prctl(PR_CAPBSET_READ, cap) >= 0; cap++)
		if (!(keep >> cap & 1) && prctl(PR_CAPBSET_DROP, cap))
			return fail("drop capability %d", cap);
	struct __user_cap_header_struct head = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct caps[2];
	if (syscall(SYS_capget, &head, caps))
		return fail("read the capabilities");
	for (int i = 0; i < 2; i++) {
		caps[i].permitted &= keep >> 32 * i;
		caps[i].effective = caps[i].permitted;
		caps[i].inheritable = 0;
	}
	return syscall(SYS_capset, &head, caps) ? fail("drop capabilities") : 0;
}

int sandbox_enter(void)
{
	const char *root = value("sandbox"), *caps = value("caps");
	if (!lines)
		return 0;
	if (root && !value("work")) {
		errno = EINVAL;
		return fail("read its settings");
	}
	if (find("mounts") && mounts_read())
		return fail("watch what CRIU mounts");
	if (root && (make_root(root) || leave_host(root)))
		return -1;
	if (caps && drop_caps(strtoull(caps, NULL, 16)))
		return -1;
	if (find("mounts"))
		mounts_watch();
	entered = true;
	print_on_level(LOG_INFO, "gpuckpt: sandbox: entered\n");
	return 0;
}
