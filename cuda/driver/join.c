// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Enters the mount and pid namespaces of the process whose pid is in the
// environment variable _GPUCKPT_JOIN, before the Go runtime starts: setns to a
// mount namespace is refused to a program with several threads, and only
// children of the caller of setns are in the new pid namespace.
//
// The order is the one that works with the real driver: load the host's
// libraries, join both namespaces, fork, and let the child call cuInit. The
// container's own driver files need not match, or be there at all. (Joining the
// mount namespace alone makes cuInit answer 304.)
//
// NVIDIA's libraries make the nodes of all GPUs in /dev if they may. The
// container is not to keep those that it did not have: the parent, which is in
// its mount namespace as well, removes them at the child's end.

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define JOIN_ENV "_GPUCKPT_JOIN"
#define SOCKET_FD 3

static void die(const char *what, const char *why)
{
	fprintf(stderr, "gpuckpt-cuda-helper: %s: %s\n", what, why);
	_exit(1);
}

static int open_ns(long pid, const char *kind)
{
	char path[64];
	snprintf(path, sizeof path, "/proc/%ld/ns/%s", pid, kind);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		die(path, strerror(errno));
	return fd;
}

// The names of NVIDIA's device nodes directly in /dev. There are fewer than 64
// on any machine with up to 16 GPUs; of more, the rest is left alone.
#define MAX_NODES 64
static char had[MAX_NODES][32];
static int had_count;

static int is_node(int dev, const char *name)
{
	struct stat st;
	return !strncmp(name, "nvidia", 6) && strlen(name) < sizeof had[0] &&
		!fstatat(dev, name, &st, AT_SYMLINK_NOFOLLOW) && S_ISCHR(st.st_mode);
}

static void each_node(void (*what)(int dev, const char *name))
{
	DIR *dir = opendir("/dev");
	if (dir == NULL)
		return;
	for (struct dirent *e; (e = readdir(dir)) != NULL;)
		if (is_node(dirfd(dir), e->d_name))
			what(dirfd(dir), e->d_name);
	closedir(dir);
}

static void note_node(int dev, const char *name)
{
	(void)dev;
	if (had_count < MAX_NODES)
		strcpy(had[had_count++], name);
}

static void drop_node(int dev, const char *name)
{
	if (had_count == MAX_NODES)
		return;
	for (int i = 0; i < had_count; i++)
		if (!strcmp(had[i], name))
			return;
	if (unlinkat(dev, name, 0) < 0)
		fprintf(stderr, "gpuckpt-cuda-helper: remove /dev/%s, which the driver made in the container: %s\n", name, strerror(errno));
}

// The parent's rest of life: wait for the child and end as it ended. When the
// parent is killed instead, the child's PDEATHSIG kills the child.
static void wait_for(pid_t child)
{
	int status;
	// Only the child may hold the socket: its end must be seen at the far end.
	close(SOCKET_FD);
	while (waitpid(child, &status, 0) < 0)
		if (errno != EINTR)
			die("wait for joined helper", strerror(errno));
	each_node(drop_node);
	if (WIFSIGNALED(status)) {
		prctl(PR_SET_DUMPABLE, 0); // the child has dumped its core, if any
		signal(WTERMSIG(status), SIG_DFL);
		raise(WTERMSIG(status));
		_exit(128 + WTERMSIG(status));
	}
	_exit(WEXITSTATUS(status));
}

__attribute__((constructor)) static void gpuckpt_join(void)
{
	const char *env = getenv(JOIN_ENV);
	if (env == NULL || *env == '\0')
		return;
	char *end;
	errno = 0;
	long pid = strtol(env, &end, 10);
	if (errno != 0 || *end != '\0' || pid <= 0)
		die(JOIN_ENV, "not a pid");
	unsetenv(JOIN_ENV);

	// They stay loaded; a later dlopen by the same name finds them. A missing
	// one is reported when the driver is asked for.
	dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
	dlopen("libnvidia-ml.so.1", RTLD_LAZY | RTLD_GLOBAL);

	int mnt = open_ns(pid, "mnt"), pidns = open_ns(pid, "pid");
	int alive[2]; // its far end closes when the parent dies
	if (pipe2(alive, O_CLOEXEC) < 0)
		die("make pipe", strerror(errno));
	if (setns(mnt, CLONE_NEWNS) < 0)
		die("join mount namespace", strerror(errno));
	if (setns(pidns, CLONE_NEWPID) < 0)
		die("join pid namespace", strerror(errno));
	close(mnt);
	close(pidns);
	each_node(note_node);

	pid_t child = fork();
	if (child < 0)
		die("fork into pid namespace", strerror(errno));
	if (child > 0) {
		close(alive[0]);
		wait_for(child);
	}
	if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0)
		die("tie to parent", strerror(errno));
	// The parent may have died before the line above; getppid cannot tell,
	// since it is 0 for a parent outside the pid namespace.
	close(alive[1]);
	struct pollfd far = { .fd = alive[0], .events = POLLIN };
	if (poll(&far, 1, 0) != 0)
		_exit(1);
	close(alive[0]);
}
