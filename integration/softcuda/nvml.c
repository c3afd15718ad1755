// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// libnvidia-ml.so.1: the few NVML calls that tell which GPUs and which driver a machine has, for
// github.com/NVIDIA/go-nvml. Names, numbers and layouts as in NVML's manual.

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "softcuda.h"

typedef int nvmlReturn_t;
enum {
	NVML_SUCCESS = 0,
	NVML_ERROR_UNINITIALIZED = 1,
	NVML_ERROR_INVALID_ARGUMENT = 2,
	NVML_ERROR_NOT_SUPPORTED = 3,
	NVML_ERROR_NOT_FOUND = 6,
	NVML_ERROR_INSUFFICIENT_SIZE = 7,
	NVML_ERROR_DRIVER_NOT_LOADED = 9,
	NVML_ERROR_UNKNOWN = 999,
};

typedef struct gpu *nvmlDevice_t;
typedef struct {
	unsigned long long total, free, used;
} nvmlMemory_t;
typedef struct {
	unsigned int version;
	unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;
typedef struct {
	char busIdLegacy[16];
	unsigned int domain, bus, device, pciDeviceId, pciSubSystemId;
	char busId[32];
} nvmlPciInfo_t;
typedef struct {
	unsigned int pid;
	unsigned long long usedGpuMemory;
	unsigned int gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;

static struct {
	int users, gpus;
	int control_fd; // nvidiactl, open while there are users; -1 if libcuda has it open
	struct config config;
	struct gpu gpu[MAX_GPUS];
} nvml;

// served_by_cuda has libcuda serve this process, as driver 580.159 does: then it has the restore thread
// and the files of a process after cuInit. It is so until the process ends. Where there is no libcuda,
// or it shows no GPU, NVML has its own file.
static bool served_by_cuda(void)
{
	void *library = nvml.config.nvml_alone ? NULL : dlopen("libcuda.so.1", RTLD_NOW);
	void *address = library ? dlsym(library, "softcuda_serve") : NULL;
	int (*serve)(void);

	memcpy(&serve, &address, sizeof serve);
	return serve && !serve();
}

CUDA_API nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
	(void)flags;
	config_load(&nvml.config);
	int n = gpus_visible(&nvml.config, nvml.gpu);
	if (n < 0)
		return NVML_ERROR_DRIVER_NOT_LOADED;
	if (!nvml.users) {
		nvml.control_fd = -1;
		if (!served_by_cuda() && (nvml.control_fd = gpu_open(-1)) < 0)
			return NVML_ERROR_DRIVER_NOT_LOADED;
	}
	nvml.gpus = n;
	nvml.users++;
	return NVML_SUCCESS;
}

CUDA_API nvmlReturn_t nvmlInit_v2(void)
{
	return nvmlInitWithFlags(0);
}

CUDA_API nvmlReturn_t nvmlShutdown(void)
{
	if (!nvml.users)
		return NVML_ERROR_UNINITIALIZED;
	if (!--nvml.users && nvml.control_fd >= 0)
		close(nvml.control_fd);
	return NVML_SUCCESS;
}

CUDA_API const char *nvmlErrorString(nvmlReturn_t result)
{
	switch (result) {
	case NVML_SUCCESS:
		return "Success";
	case NVML_ERROR_UNINITIALIZED:
		return "Uninitialized";
	case NVML_ERROR_INVALID_ARGUMENT:
		return "Invalid Argument";
	case NVML_ERROR_NOT_SUPPORTED:
		return "Not Supported";
	case NVML_ERROR_NOT_FOUND:
		return "Not Found";
	case NVML_ERROR_INSUFFICIENT_SIZE:
		return "Insufficient Size";
	case NVML_ERROR_DRIVER_NOT_LOADED:
		return "Driver Not Loaded";
	default:
		return "Unknown Error";
	}
}

static nvmlReturn_t give_text(const char *text, char *to, unsigned int len)
{
	if (!nvml.users)
		return NVML_ERROR_UNINITIALIZED;
	if (!to)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (strlen(text) >= len)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	strcpy(to, text);
	return NVML_SUCCESS;
}

static nvmlReturn_t check(nvmlDevice_t device, const void *out)
{
	if (!nvml.users)
		return NVML_ERROR_UNINITIALIZED;
	if (!out || device < nvml.gpu || device >= nvml.gpu + nvml.gpus)
		return NVML_ERROR_INVALID_ARGUMENT;
	return NVML_SUCCESS;
}

CUDA_API nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int len)
{
	return give_text(nvml.config.driver, version, len);
}

CUDA_API nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int len)
{
	char text[96];
	snprintf(text, sizeof text, "%d.%s", nvml.config.cuda_version / 1000, nvml.config.driver);
	return give_text(text, version, len);
}

CUDA_API nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
	if (!nvml.users || !version)
		return nvml.users ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_UNINITIALIZED;
	*version = nvml.config.cuda_version;
	return NVML_SUCCESS;
}

CUDA_API nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
	return nvmlSystemGetCudaDriverVersion_v2(version);
}

CUDA_API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
	if (!nvml.users || !count)
		return nvml.users ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_UNINITIALIZED;
	*count = (unsigned)nvml.gpus;
	return NVML_SUCCESS;
}

CUDA_API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
	if (!nvml.users)
		return NVML_ERROR_UNINITIALIZED;
	if (!device || index >= (unsigned)nvml.gpus)
		return NVML_ERROR_INVALID_ARGUMENT;
	*device = &nvml.gpu[index];
	return NVML_SUCCESS;
}

CUDA_API nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int len)
{
	char text[41] = "GPU-";
	nvmlReturn_t r = check(device, uuid);

	if (r)
		return r;
	for (int i = 0, at = 4; i < 16; i++) {
		if (i == 4 || i == 6 || i == 8 || i == 10)
			text[at++] = '-';
		at += snprintf(text + at, sizeof text - (size_t)at, "%02x", device->uuid.bytes[i]);
	}
	return give_text(text, uuid, len);
}

CUDA_API nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
	char text[48];

	if (!nvml.users)
		return NVML_ERROR_UNINITIALIZED;
	if (!uuid || !device)
		return NVML_ERROR_INVALID_ARGUMENT;
	for (int i = 0; i < nvml.gpus; i++) {
		nvmlDeviceGetUUID(&nvml.gpu[i], text, sizeof text);
		if (strcmp(uuid, text))
			continue;
		*device = &nvml.gpu[i];
		return NVML_SUCCESS;
	}
	return NVML_ERROR_NOT_FOUND;
}

CUDA_API nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int len)
{
	nvmlReturn_t r = check(device, name);
	return r ? r : give_text(*device->nvml_name ? device->nvml_name : device->name, name, len);
}

CUDA_API nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
	nvmlReturn_t r = check(device, index);
	if (!r)
		*index = (unsigned)(device - nvml.gpu);
	return r;
}

CUDA_API nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor)
{
	nvmlReturn_t r = check(device, minor);
	if (!r)
		*minor = (unsigned)device->minor;
	return r;
}

CUDA_API nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
	nvmlReturn_t r = check(device, pci);
	if (r)
		return r;
	memset(pci, 0, sizeof *pci);
	pci->bus = (unsigned)device->minor + 1;
	pci->pciDeviceId = 0x10de; // vendor NVIDIA
	snprintf(pci->busId, sizeof pci->busId, "00000000:%02X:00.0", pci->bus);
	snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "0000:%02X:00.0", pci->bus & 0xff);
	return NVML_SUCCESS;
}

CUDA_API nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
	nvmlReturn_t r = check(device, major && minor ? major : NULL);
	if (r)
		return r;
	*major = 9;
	*minor = 0;
	return NVML_SUCCESS;
}

CUDA_API nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
	nvmlReturn_t r = check(device, memory);
	if (r)
		return r;
	memory->total = device->total;
	memory->used = gpu_memory_used(device, NULL, NULL);
	memory->free = memory->used < memory->total ? memory->total - memory->used : 0;
	return NVML_SUCCESS;
}

CUDA_API nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
	nvmlMemory_t m;
	nvmlReturn_t r = check(device, memory);
	if (r || (r = nvmlDeviceGetMemoryInfo(device, &m)))
		return r;
	memory->total = m.total;
	memory->reserved = 0;
	memory->free = m.free;
	memory->used = m.used;
	return NVML_SUCCESS;
}

CUDA_API nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current,
                                           unsigned int *pending)
{
	nvmlReturn_t r = check(device, current && pending ? current : NULL);
	if (r)
		return r;
	*current = *pending = device->mig;
	return NVML_SUCCESS;
}

// 0 none, 1 passed through to a virtual machine, 2 virtual
CUDA_API nvmlReturn_t nvmlDeviceGetVirtualizationMode(nvmlDevice_t device, unsigned int *mode)
{
	nvmlReturn_t r = check(device, mode);
	if (!r)
		*mode = device->vgpu ? 2 : 0;
	return r;
}

struct list {
	nvmlProcessInfo_t *info;
	unsigned int room, found;
};

static void add_process(void *arg, int pid, size_t bytes)
{
	struct list *l = arg;

	if (l->found < l->room)
		l->info[l->found] = (nvmlProcessInfo_t){
			.pid = (unsigned)pid,
			.usedGpuMemory = bytes,
			.gpuInstanceId = ~0u, // no MIG
			.computeInstanceId = ~0u,
		};
	l->found++;
}

CUDA_API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device,
                                                              unsigned int *count,
                                                              nvmlProcessInfo_t *info)
{
	nvmlReturn_t r = check(device, count);
	if (r)
		return r;
	struct list l = {.info = info, .room = info ? *count : 0};
	gpu_memory_used(device, add_process, &l);
	*count = l.found;
	return l.found > l.room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}
