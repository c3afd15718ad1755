// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// File locks, as ordinary programs hold them for their life: of each kind that the kernel has, and as
// SQLite holds one on a file that it has mapped. None of the descriptors is closed.

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include "options.h"

static void must(int failed, const char *path)
{
	if (!failed)
		return;
	fprintf(stderr, "gpuwork: lock %s: %s\n", path, strerror(errno));
	exit(2);
}

static int make(const char *dir, const char *name, int flags, char *path)
{
	snprintf(path, 4096, "%s/%s", dir, name);
	int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
	must(fd < 0 || ftruncate(fd, 8192), path);
	if (flags == O_RDWR)
		return fd;
	close(fd);
	must((fd = open(path, flags | O_CLOEXEC)) < 0, path);
	return fd;
}

static void range(int fd, int command, int type, off_t start, off_t bytes, const char *path)
{
	struct flock l = {.l_type = (short)type, .l_whence = SEEK_SET, .l_start = start, .l_len = bytes};
	must(fcntl(fd, command, &l), path);
}

// keep_locks locks files in a directory. Two children have what the parent has open.
void keep_locks(const char *dir)
{
	char path[4096];
	int fd = make(dir, "flock", O_RDWR, path);
	must(flock(fd, LOCK_EX), path);
	must(flock(make(dir, "flock-shared", O_RDONLY, path), LOCK_SH), path);
	range(make(dir, "ofd", O_RDWR, path), F_OFD_SETLK, F_WRLCK, 5, 5, path);

	// By two descriptors, one of which maps the file.
	fd = make(dir, "mapped", O_RDWR, path);
	must(mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED, path);
	range(make(dir, "mapped", O_RDWR, path), F_SETLK, F_WRLCK, 120, 1, path);
	range(fd, F_SETLK, F_RDLCK, 128, 1, path);

	fd = make(dir, "posix", O_RDWR, path);
	range(fd, F_SETLK, F_WRLCK, 10, 10, path);
	range(fd, F_SETLK, F_RDLCK, 100, 0, path);
	pid_t child = fork();
	must(child < 0, path);
	if (!child) { // a lock of its own
		range(fd, F_SETLK, F_WRLCK, 30, 1, path);
		for (;;)
			pause();
	}
	must((child = fork()) < 0, path);
	if (!child) { // waits for the parent's
		range(fd, F_SETLKW, F_WRLCK, 15, 1, path);
		fprintf(stderr, "gpuwork: lock %s: it is another process's\n", path);
		exit(2);
	}

	signal(SIGIO, SIG_IGN);
	must(fcntl(make(dir, "lease", O_RDONLY, path), F_SETLEASE, F_RDLCK), path);
	must(fcntl(make(dir, "lease-write", O_RDWR, path), F_SETLEASE, F_WRLCK), path);
}

// keep_hidden_lock holds a lock on a file that it has mapped, and not open.
void keep_hidden_lock(const char *path)
{
	int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
	must(fd < 0 || ftruncate(fd, 4096) || flock(fd, LOCK_EX), path);
	must(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED, path);
	close(fd);
}
