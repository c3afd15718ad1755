// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Which of a process's GPU memory another process made. Neither CUDA nor NVML reports this. The
// kernel module does, by the control call that NVML adds its per-process figures up from:
// NV2080_CTRL_CMD_GPU_GET_PID_INFO, which any program may make. Numbers and layouts are those of
// NVIDIA/open-gpu-kernel-modules, the same from 570 to 595 (nv_escape.h, nv-ioctl.h, nvos.h,
// cl0080.h, ctrl0000gpu.h, ctrl2080gpu.h). The module refuses a parameter block of another size.

#include "libcuda.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

struct card { // nv_ioctl_card_info_t
	uint8_t valid;
	uint32_t pci[3], gpu_id;
	uint16_t interrupt;
	uint64_t registers[2], framebuffer[2];
	uint32_t minor;
	uint8_t name[10];
};
struct allocation { // NVOS21_PARAMETERS
	uint32_t root, parent, object, class;
	uint64_t parameters;
	uint32_t size, status;
};
struct control { // NVOS54_PARAMETERS
	uint32_t client, object, command, flags;
	uint64_t parameters;
	uint32_t size, status;
};
struct id_info { // NV0000_CTRL_GPU_GET_ID_INFO_V2_PARAMS
	uint32_t gpu_id, flags, device, subdevice, sli, board, instance, node;
};
struct device { // NV0080_ALLOC_PARAMETERS
	uint32_t device, share, target_client, target_device, flags;
	uint64_t space[3];
	uint32_t mode;
};
struct pid_info { // NV2080_CTRL_GPU_GET_PID_INFO_PARAMS
	uint32_t count;
	struct {
		uint32_t pid, index, result;
		uint64_t exclusive, shared, imported, protected[3]; // bytes
		uint32_t compute_instance, gpu_instance;
	} list[200];
};
_Static_assert(sizeof(struct card) == 72, "nv_ioctl_card_info_t");
_Static_assert(sizeof(struct device) == 56, "NV0080_ALLOC_PARAMETERS");
_Static_assert(sizeof(struct pid_info) == 14408, "NV2080_CTRL_GPU_GET_PID_INFO_PARAMS");

enum { CARDS = 32 }; // NV_MAX_DEVICES
enum { ESCAPE_CONTROL = 0x2a, ESCAPE_ALLOC = 0x2b, ESCAPE_CARDS = 200, ESCAPE_REGISTER = 201 };
enum { CLASS_ROOT = 0x41, CLASS_DEVICE = 0x80, CLASS_SUBDEVICE = 0x2080 };
enum { COMMAND_ID_INFO = 0x205, COMMAND_PID_INFO = 0x2080018e };

// The module's client: a descriptor of /dev/nvidiactl and the number of its root object.
struct client {
	int (*open)(const char *, int, ...);
	int (*ioctl)(int, unsigned long, ...);
	int fd;
	uint32_t root;
	const char *step; // what failed
	uint32_t status;  // NV_STATUS, or a negative errno
};

static int done(struct client *c, const char *step, int r, uint32_t status)
{
	c->step = step;
	c->status = r < 0 ? (uint32_t)-errno : status;
	return r < 0 || status ? -1 : 0;
}

static int allocate(struct client *c, uint32_t parent, uint32_t class, void *parameters, uint32_t size, uint32_t *object)
{
	struct allocation a = { c->root, parent, 0, class, (uint64_t)(uintptr_t)parameters, size, 0 };
	int r = c->ioctl(c->fd, _IOWR('F', ESCAPE_ALLOC, struct allocation), &a);

	*object = a.object;
	return done(c, "allocate an object", r, a.status);
}

static int control(struct client *c, uint32_t object, uint32_t command, void *parameters, uint32_t size)
{
	struct control call = { c->root, object, command, 0, (uint64_t)(uintptr_t)parameters, size, 0 };
	int r = c->ioctl(c->fd, _IOWR('F', ESCAPE_CONTROL, struct control), &call);

	return done(c, command == COMMAND_ID_INFO ? "get the GPU's number" : "get the process's memory", r, call.status);
}

// imported_on adds what the process has imported of one GPU's memory.
static int imported_on(struct client *c, uint32_t gpu_id, int pid, uint64_t *bytes)
{
	struct id_info id = { .gpu_id = gpu_id };
	struct pid_info info = { .count = 1, .list[0].pid = (uint32_t)pid };
	uint32_t device, subdevice;

	if (control(c, c->root, COMMAND_ID_INFO, &id, sizeof id))
		return -1;
	struct device d = { .device = id.device };
	if (allocate(c, c->root, CLASS_DEVICE, &d, sizeof d, &device) ||
	    allocate(c, device, CLASS_SUBDEVICE, &id.subdevice, sizeof id.subdevice, &subdevice) ||
	    control(c, subdevice, COMMAND_PID_INFO, &info, sizeof info) ||
	    done(c, "read the process's memory", 0, info.list[0].result))
		return -1;
	*bytes += info.list[0].imported;
	return 0;
}

// imported_of adds up the GPUs, whose nodes it keeps open in gpus.
static int imported_of(struct client *c, int pid, const int *minors, int *gpus, int count, uint64_t *bytes)
{
	struct card cards[CARDS] = { 0 };
	char path[32];

	if (done(c, "open /dev/nvidiactl", c->fd, 0) ||
	    done(c, "list the GPUs", c->ioctl(c->fd, _IOWR('F', ESCAPE_CARDS, cards), cards), 0) ||
	    allocate(c, 0, CLASS_ROOT, NULL, 0, &c->root))
		return -1;
	for (int i = 0; i < count; i++) {
		int card = 0;
		while (card < CARDS && !(cards[card].valid && cards[card].minor == (uint32_t)minors[i]))
			card++;
		snprintf(path, sizeof path, "/dev/nvidia%d", minors[i]);
		if (done(c, "find the GPU", 0, card == CARDS) ||
		    done(c, "open the GPU", gpus[i] = c->open(path, O_RDWR | O_CLOEXEC), 0) ||
		    done(c, "register the GPU", c->ioctl(gpus[i], _IOWR('F', ESCAPE_REGISTER, int), &c->fd), 0) ||
		    imported_on(c, cards[card].gpu_id, pid, bytes))
			return -1;
	}
	return 0;
}

int gk_imported(int pid, const int *minors, int count, uint64_t *bytes, char *why, size_t size)
{
	int gpus[CARDS];
	// As the driver's own library finds them: a driver in software has its own.
	struct client c = {
		.open = (int (*)(const char *, int, ...))dlsym(gk_library, "open"),
		.ioctl = (int (*)(int, unsigned long, ...))dlsym(gk_library, "ioctl"),
	};

	*bytes = 0;
	if (count > CARDS || !c.open || !c.ioctl) {
		snprintf(why, size, "there are more than %d GPUs, or libcuda.so.1 is without a C library", CARDS);
		return -1;
	}
	for (int i = 0; i < count; i++)
		gpus[i] = -1;
	c.fd = c.open("/dev/nvidiactl", O_RDWR | O_CLOEXEC);
	int r = imported_of(&c, pid, minors, gpus, count, bytes);
	if (r)
		snprintf(why, size, "the kernel module could not %s (status %#x)", c.step, c.status);
	for (int i = 0; i < count; i++)
		if (gpus[i] >= 0)
			close(gpus[i]);
	if (c.fd >= 0)
		close(c.fd);
	return r;
}
