// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// How much memory of each GPU a process has made, and how much another process made. Neither CUDA nor NVML reports this. The
// kernel module does, by the control call that NVML adds its per-process figures up from:
// NV2080_CTRL_CMD_GPU_GET_PID_INFO, which any program may make. Numbers and layouts are those of
// NVIDIA/open-gpu-kernel-modules, the same from 570 to 595 (nv_escape.h, nv-ioctl.h, nvos.h,
// cl0080.h, ctrl0000gpu.h, ctrl2080gpu.h). The module refuses a parameter block of another size.
//
// And whether a process reaches memory of one GPU from another. For that the driver makes an object
// NV50_P2P in the process's client of the module (measured, driver 580: by cuCtxEnablePeerAccess, and
// by memory of cuMemCreate or of a pool that two GPUs may access). The module tells of a client's
// objects to whoever has its descriptor of /dev/nvidiactl and knows its number. The descriptor is had by
// pidfd_getfd. Numbers count up, so those below a new client's are tried first, the newest first.

#include "libcuda.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
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
		uint64_t exclusive, shared, imported, protected[3]; // bytes; the first two are its own
		uint32_t compute_instance, gpu_instance;
	} list[200];
};
struct child { // NV0000_CTRL_CMD_CLIENT_GET_CHILD_HANDLE_PARAMS
	uint32_t parent, class, object;
};
_Static_assert(sizeof(struct card) == 72, "nv_ioctl_card_info_t");
_Static_assert(sizeof(struct device) == 56, "NV0080_ALLOC_PARAMETERS");
_Static_assert(sizeof(struct pid_info) == 14408, "NV2080_CTRL_GPU_GET_PID_INFO_PARAMS");

enum { CARDS = 32 }; // NV_MAX_DEVICES
enum { ESCAPE_CONTROL = 0x2a, ESCAPE_ALLOC = 0x2b, ESCAPE_CARDS = 200, ESCAPE_REGISTER = 201 };
enum { CLASS_ROOT = 0x41, CLASS_DEVICE = 0x80, CLASS_SUBDEVICE = 0x2080 };
enum { COMMAND_ID_INFO = 0x205, COMMAND_CHILD = 0xd05, COMMAND_PID_INFO = 0x2080018e };
enum { CLIENTS = 0xc1d00000, CLIENTS_MOST = 0x100000 }; // RS_CLIENT_HANDLE_BASE, RS_CLIENT_HANDLE_MAX
enum { CLASS_P2P = 0x3982b7 };                          // P2PApi, by the module's own number of the class
enum { NOT_FOUND = 0x57 };                              // NV_ERR_OBJECT_NOT_FOUND

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

// client_of_library has the calls as the driver's own library finds them: a driver in software has its own.
static struct client client_of_library(void)
{
	return (struct client){
		.open = (int (*)(const char *, int, ...))dlsym(gk_library, "open"),
		.ioctl = (int (*)(int, unsigned long, ...))dlsym(gk_library, "ioctl"),
		.fd = -1,
		.step = "be asked by a library without open and ioctl",
	};
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

// memory_on tells what the process has of one GPU's memory.
static int memory_on(struct client *c, uint32_t gpu_id, int pid, gk_memory_on *has)
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
	has->own = info.list[0].exclusive + info.list[0].shared;
	has->imported = info.list[0].imported;
	return 0;
}

// memory_of asks for the GPUs, whose nodes it keeps open in gpus.
static int memory_of(struct client *c, int pid, const int *minors, int *gpus, int count, gk_memory_on *has)
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
		    memory_on(c, cards[card].gpu_id, pid, &has[i]))
			return -1;
	}
	return 0;
}

// reaches asks a client for an object NV50_P2P. 1: it has one; 0: none; -1: fd is not this client's.
static int reaches(struct client *c, int fd, uint32_t client)
{
	struct child child = { client, CLASS_P2P, 0 };
	struct control call = { client, client, COMMAND_CHILD, 0, (uint64_t)(uintptr_t)&child, sizeof child, 0 };
	int r = c->ioctl(fd, _IOWR('F', ESCAPE_CONTROL, struct control), &call);

	done(c, "look at the process's objects", r, call.status);
	if (r < 0 || (call.status && call.status != NOT_FOUND))
		return -1;
	return !call.status;
}

// reaches_by finds the client of a descriptor, and asks it. -1: it is no client's.
static int reaches_by(struct client *c, int fd)
{
	int r = -1;

	for (uint32_t n = 1; r < 0 && n < CLIENTS_MOST; n++)
		r = reaches(c, fd, CLIENTS + ((c->root - n) & (CLIENTS_MOST - 1)));
	return r;
}

// descriptor_of returns the number that a file in /proc/PID/fd has if it is nvidiactl; else -1.
static int descriptor_of(DIR *fds, const char *name)
{
	static const char wanted[] = "/nvidiactl";
	char to[4096];
	ssize_t n = readlinkat(dirfd(fds), name, to, sizeof to);
	ssize_t at = n - (ssize_t)strlen(wanted);

	return at >= 0 && !memcmp(to + at, wanted, strlen(wanted)) ? atoi(name) : -1;
}

int gk_reaches(int pid, int *peers, char *why, size_t size)
{
	struct client c = client_of_library();
	int (*getfd)(int, int, unsigned) = (int (*)(int, int, unsigned))dlsym(gk_library, "pidfd_getfd"); // glibc 2.36
	int process = (int)syscall(SYS_pidfd_open, pid, 0), found = -1;
	char path[32];

	snprintf(path, sizeof path, "/proc/%d/fd", pid);
	DIR *fds = opendir(path);
	int r = done(&c, "look at the process's files", process < 0 || !fds ? -1 : 0, 0) || !c.open ||
		done(&c, "open /dev/nvidiactl", c.fd = c.open("/dev/nvidiactl", O_RDWR | O_CLOEXEC), 0) ||
		allocate(&c, 0, CLASS_ROOT, NULL, 0, &c.root) || done(&c, "find the process's client", 0, 0);
	for (struct dirent *e; !r && found < 1 && (e = readdir(fds));) {
		int theirs = descriptor_of(fds, e->d_name);
		if (theirs < 0)
			continue;
		int fd = getfd ? getfd(process, theirs, 0) : (int)syscall(SYS_pidfd_getfd, process, theirs, 0);
		if (done(&c, "have the process's file", fd, 0))
			break;
		int now = reaches_by(&c, fd);
		found = now > found ? now : found;
		close(fd);
	}
	*peers = found;
	if (found < 0)
		snprintf(why, size, "the kernel module could not %s (status %#x)", c.step, c.status);
	if (fds)
		closedir(fds);
	if (process >= 0)
		close(process);
	if (c.fd >= 0)
		close(c.fd);
	return found < 0 ? -1 : 0;
}

int gk_memory_of(int pid, const int *minors, int count, gk_memory_on *has, char *why, size_t size)
{
	int gpus[CARDS];
	struct client c = client_of_library();

	if (count > CARDS || !c.open || !c.ioctl) {
		snprintf(why, size, "there are more than %d GPUs, or libcuda.so.1 is without a C library", CARDS);
		return -1;
	}
	for (int i = 0; i < count; i++)
		gpus[i] = -1;
	c.fd = c.open("/dev/nvidiactl", O_RDWR | O_CLOEXEC);
	int r = memory_of(&c, pid, minors, gpus, count, has);
	if (r)
		snprintf(why, size, "the kernel module could not %s (status %#x)", c.step, c.status);
	for (int i = 0; i < count; i++)
		if (gpus[i] >= 0)
			close(gpus[i]);
	if (c.fd >= 0)
		close(c.fd);
	return r;
}
