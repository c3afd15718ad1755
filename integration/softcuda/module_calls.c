// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// The few calls of NVIDIA's kernel module that tell what memory of a GPU a process has, and which of it
// another process made. The nodes here are other devices, which cannot answer them. A program finds these functions
// where it looks up open and ioctl in libcuda.so.1, as the real driver's library would find the C
// library's. Numbers and layouts: NVIDIA/open-gpu-kernel-modules, release 580.

#include <asm/ioctl.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "softcuda.h"

enum { NV_OK = 0, NV_ERR_INVALID_ARGUMENT = 0x1f, NV_ERR_INVALID_PARAM_STRUCT = 0x3b, NV_ERR_NOT_SUPPORTED = 0x56 };
enum { ROOT = 0xc1d00800, DEVICE = 0x100, SUBDEVICE = 0x200 };
enum { NV_ERR_INVALID_CLIENT = 0x23, NV_ERR_OBJECT_NOT_FOUND = 0x57, P2P_API = 0x3982b7 };

// The client of a process whose descriptor pidfd_getfd has returned last, and its number.
static struct { int fd, pid; uint32_t client; } other = {.fd = -1};

CUDA_API int pidfd_getfd(int pidfd, int fd, unsigned flags)
{
	char path[64], line[64];

	other.fd = (int)syscall(SYS_pidfd_getfd, pidfd, fd, flags);
	snprintf(path, sizeof path, "/proc/self/fdinfo/%d", pidfd);
	FILE *f = fopen(path, "re");
	while (f && fgets(line, sizeof line, f))
		sscanf(line, "Pid: %d", &other.pid);
	if (f)
		fclose(f);
	other.client = 0xc1d00000u + (unsigned)other.pid % 0x800;
	return other.fd;
}

struct card {
	uint8_t valid;
	uint32_t pci[3], gpu_id;
	uint16_t interrupt;
	uint64_t place[4];
	uint32_t minor;
	uint8_t name[10];
};
struct alloc {
	uint32_t root, parent, object, class;
	uint64_t parameters;
	uint32_t size, status;
};
struct control {
	uint32_t client, object, command, flags;
	uint64_t parameters;
	uint32_t size, status;
};
struct pid_info {
	uint32_t count;
	struct {
		uint32_t pid, index, result;
		uint64_t exclusive, shared, imported, protected[3];
		uint32_t instance[2];
	} list[200];
};

CUDA_API int open(const char *path, int flags, ...)
{
	int minor = -1;

	if (!strcmp(path, "/dev/nvidiactl") || sscanf(path, "/dev/nvidia%d", &minor) == 1)
		return gpu_open(minor);
	va_list rest;
	va_start(rest, flags);
	unsigned mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, unsigned) : 0;
	va_end(rest);
	return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

static void cards(struct card *to)
{
	struct config config;
	struct gpu gpus[MAX_GPUS];

	config_load(&config);
	int n = gpus_visible(&config, gpus);
	for (int i = 0; i < n; i++)
		to[i] = (struct card){.valid = 1, .gpu_id = 0x100u + (unsigned)gpus[i].minor, .minor = (unsigned)gpus[i].minor};
}

// A device is made from the number that the GPU's information has, here the GPU's minor.
static uint32_t allocate(struct alloc *a)
{
	const uint32_t *parameters = (const uint32_t *)a->parameters;

	switch (a->class) {
	case 0x41:
		a->object = ROOT;
		return NV_OK;
	case 0x80:
		a->object = DEVICE + (a->size == 56 ? *parameters : 0);
		return a->root == ROOT && a->size == 56 ? NV_OK : NV_ERR_INVALID_PARAM_STRUCT;
	case 0x2080:
		a->object = SUBDEVICE + a->parent - DEVICE;
		return a->root == ROOT && a->size == 4 ? NV_OK : NV_ERR_INVALID_PARAM_STRUCT;
	}
	return NV_ERR_NOT_SUPPORTED;
}

static uint32_t memory_of(uint32_t object, struct pid_info *info)
{
	struct config config;
	unsigned minor = object - SUBDEVICE;

	config_load(&config);
	if (minor >= MAX_GPUS || info->count != 1)
		return NV_ERR_INVALID_ARGUMENT;
	info->list[0].shared = gpu_memory_of(&config.gpu[minor], (int)info->list[0].pid);
	info->list[0].imported = gpu_memory_imported(&config.gpu[minor], (int)info->list[0].pid);
	return NV_OK;
}

// child answers for the only class of objects that is asked for.
static uint32_t child(int fd, const struct control *c, const uint32_t *wanted)
{
	if (fd != other.fd || c->client != other.client || c->object != c->client || *wanted != c->client)
		return NV_ERR_INVALID_CLIENT;
	if (c->size != 12)
		return NV_ERR_INVALID_PARAM_STRUCT;
	return wanted[1] == P2P_API && remote_reaches(other.pid) ? NV_OK : NV_ERR_OBJECT_NOT_FOUND;
}

static uint32_t control(int fd, struct control *c)
{
	uint32_t *id = (uint32_t *)c->parameters;
	struct config config;

	if (c->command == 0xd05)
		return child(fd, c, id);
	config_load(&config);
	switch (c->command) {
	case 0x205:
		if (c->size != 32)
			return NV_ERR_INVALID_PARAM_STRUCT;
		id[2] = id[0] - 0x100; // the device
		return NV_OK;
	case 0x2080018e:
		if (c->size != sizeof(struct pid_info))
			return NV_ERR_INVALID_PARAM_STRUCT;
		if (config.mute)
			return NV_ERR_NOT_SUPPORTED;
		return memory_of(c->object, (struct pid_info *)c->parameters);
	}
	return NV_ERR_NOT_SUPPORTED;
}

CUDA_API int ioctl(int fd, unsigned long request, ...)
{
	va_list rest;
	va_start(rest, request);
	void *arg = va_arg(rest, void *);
	va_end(rest);
	switch (_IOC_TYPE(request) == 'F' ? _IOC_NR(request) : 0) {
	case 200:
		cards(arg);
		return 0;
	case 201: // a GPU's node is one of the client's from here on
		return 0;
	case 0x2b:
		((struct alloc *)arg)->status = allocate(arg);
		return 0;
	case 0x2a:
		((struct control *)arg)->status = control(fd, arg);
		return 0;
	}
	return (int)syscall(SYS_ioctl, fd, request, arg);
}
