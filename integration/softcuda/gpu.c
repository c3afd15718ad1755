// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// The GPUs as nodes under /dev, and how much of their memory is held.

#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "softcuda.h"

// device_folder is $SOFTCUDA_DEV where that has a driver in it, else /dev: a helper that joins a
// container's mount namespace keeps its environment but not its files.
static const char *device_folder(void)
{
	const char *named = getenv("SOFTCUDA_DEV");
	char path[512];

	if (!named)
		return "/dev";
	snprintf(path, sizeof path, "%s/nvidiactl", named);
	return access(path, F_OK) ? "/dev" : named;
}

int gpu_open(int minor)
{
	char path[512];

	if (minor < 0)
		snprintf(path, sizeof path, "%s/nvidiactl", device_folder());
	else
		snprintf(path, sizeof path, "%s/nvidia%d", device_folder(), minor);
	int fd = open(path, O_RDWR | O_CLOEXEC);
	// Some of the devices that stand in for a GPU can only be read.
	return fd < 0 ? open(path, O_RDONLY | O_CLOEXEC) : fd;
}

// The kernel module maps host memory by nvidiactl. The node here is another device, which has none.
int gpu_host_file(size_t bytes)
{
	static int made;
	char path[600];

	snprintf(path, sizeof path, "%s/nvidiactl.%d.%d", device_folder(), getpid(), made++);
	int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (fd < 0)
		return -1;
	unlink(path);
	if (!ftruncate(fd, (off_t)bytes))
		return fd;
	close(fd);
	return -1;
}

int gpus_visible(const struct config *config, struct gpu *gpus)
{
	int n = 0, fd = gpu_open(-1);

	if (fd < 0)
		return -1;
	close(fd);
	for (int i = 0; i < MAX_GPUS; i++) {
		fd = gpu_open(i);
		if (fd < 0)
			continue;
		close(fd);
		gpus[n++] = config->gpu[i];
	}
	return n;
}

int gpus_usable(const struct config *config, struct gpu *gpus)
{
	int n = gpus_visible(config, gpus), usable = 0;

	if (n < 0)
		return n;
	for (int i = 0; i < n; i++)
		if (!gpus[i].mig)
			gpus[usable++] = gpus[i];
	return usable;
}

// named finds the GPU that one word of CUDA_VISIBLE_DEVICES names, by its place or UUID; -1 for none.
static int named(const char *word, const struct gpu *gpus, int n)
{
	char *end;
	long place = strtol(word, &end, 10);
	CUuuid uuid = {{0}};

	if (*word && !*end)
		return place >= 0 && place < n ? (int)place : -1;
	parse_uuid(word, &uuid);
	for (int i = 0; i < n; i++)
		if (!memcmp(&uuid, &gpus[i].uuid, sizeof uuid))
			return i;
	return -1;
}

int gpus_chosen(struct gpu *gpus, int n)
{
	const char *list = getenv("CUDA_VISIBLE_DEVICES");
	struct gpu chosen[MAX_GPUS];
	char words[1024];
	int kept = 0;

	if (!list)
		return n;
	snprintf(words, sizeof words, "%s", list);
	for (char *rest = words, *word; kept < n && (word = strsep(&rest, ","));) {
		int i = named(word, gpus, n);
		if (i < 0)
			break;
		chosen[kept++] = gpus[i];
	}
	memcpy(gpus, chosen, (size_t)kept * sizeof *gpus);
	return kept;
}

// held_by adds up a GPU's memory that one process has mapped; memory.c names its files, and maps
// imported memory executable. Of a file that is mapped twice (vmm.c) each mapping is all of it.
static size_t held_by(const char *pid, const char *name, bool imported)
{
	char path[300], line[512], perms[8];
	size_t bytes = 0, len = strlen(name), n = 0;
	unsigned long from, to, inode, seen[256];

	snprintf(path, sizeof path, "/proc/%s/maps", pid);
	FILE *maps = fopen(path, "re");
	if (!maps)
		return 0;
	while (fgets(line, sizeof line, maps)) {
		char *at = strstr(line, name);
		if (!at || isalnum((unsigned char)at[len]) || at[len] == '@' ||
		    sscanf(line, "%lx-%lx %7s %*s %*s %lu", &from, &to, perms, &inode) != 4 || (perms[2] == 'x') != imported)
			continue;
		size_t i = 0;
		while (i < n && seen[i] != inode)
			i++;
		if (i < n)
			continue;
		if (n < sizeof seen / sizeof *seen)
			seen[n++] = inode;
		bytes += to - from;
	}
	fclose(maps);
	return bytes;
}

void gpu_memory_name(const struct gpu *gpu, char *name, size_t len)
{
	snprintf(name, len, "softcuda-%d%s%s", gpu->minor, gpu->machine[0] ? "@" : "", gpu->machine);
}

size_t gpu_memory_used(const struct gpu *gpu, void (*each)(void *arg, int pid, size_t bytes), void *arg)
{
	char name[120] = "/memfd:";
	size_t sum = 0;
	DIR *proc = opendir("/proc");

	if (!proc)
		return 0;
	gpu_memory_name(gpu, name + strlen(name), sizeof name - strlen(name));
	for (struct dirent *e; (e = readdir(proc));) {
		if (!isdigit((unsigned char)e->d_name[0]))
			continue;
		size_t bytes = held_by(e->d_name, name, false);
		if (bytes && each)
			each(arg, atoi(e->d_name), bytes);
		sum += bytes;
	}
	closedir(proc);
	return sum;
}

static size_t memory_of(const struct gpu *gpu, int pid, bool imported)
{
	char name[120] = "/memfd:", number[16];

	gpu_memory_name(gpu, name + strlen(name), sizeof name - strlen(name));
	snprintf(number, sizeof number, "%d", pid);
	return held_by(number, name, imported);
}

size_t gpu_memory_of(const struct gpu *gpu, int pid)
{
	return memory_of(gpu, pid, false);
}

size_t gpu_memory_imported(const struct gpu *gpu, int pid)
{
	return memory_of(gpu, pid, true);
}
