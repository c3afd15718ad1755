// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// What a program that comes into a container finds there: the GPUs by NVML, as nvidia-smi -L prints
// them, and by CUDA, each used once.

#include <dlfcn.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "gpu.h"
#include "workloads.h"

// NVML, as in its manual; 0 is success.
static struct {
	int (*init)(void);
	int (*count)(unsigned *);
	int (*handle)(unsigned, void **);
	int (*name)(void *, char *, unsigned);
	int (*uuid)(void *, char *, unsigned);
	const char *(*error)(int);
} nvml;

static void nvml_check(int result, const char *call)
{
	if (!result)
		return;
	fprintf(stderr, "gpuwork: %s: %s (%d)\n", call, nvml.error(result), result);
	exit(1);
}

#define NVML(name, ...) nvml_check(nvml.name(__VA_ARGS__), "nvml " #name)

static void *nvml_symbol(void *library, const char *name)
{
	void *address = library ? dlsym(library, name) : NULL;
	if (!address) {
		fprintf(stderr, "gpuwork: %s\n", dlerror());
		exit(1);
	}
	return address;
}

static void nvml_open(void)
{
	void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);

	nvml.init = (__typeof__(nvml.init))nvml_symbol(library, "nvmlInit_v2");
	nvml.count = (__typeof__(nvml.count))nvml_symbol(library, "nvmlDeviceGetCount_v2");
	nvml.handle = (__typeof__(nvml.handle))nvml_symbol(library, "nvmlDeviceGetHandleByIndex_v2");
	nvml.name = (__typeof__(nvml.name))nvml_symbol(library, "nvmlDeviceGetName");
	nvml.uuid = (__typeof__(nvml.uuid))nvml_symbol(library, "nvmlDeviceGetUUID");
	nvml.error = (__typeof__(nvml.error))nvml_symbol(library, "nvmlErrorString");
	NVML(init);
}

int list_gpus(void)
{
	char name[96], uuid[96];
	unsigned n;
	void *device;

	nvml_open();
	NVML(count, &n);
	for (unsigned i = 0; i < n; i++) {
		NVML(handle, i, &device);
		NVML(name, device, name, sizeof name);
		NVML(uuid, device, uuid, sizeof uuid);
		printf("GPU %u: %s (UUID: %s)\n", i, name, uuid);
	}
	return 0;
}

void run_monitor(const struct options *o)
{
	nvml_open();
	run_plain(o);
}

int try_gpus(void)
{
	int n = gpu_count();

	for (int i = 0; i < n; i++) {
		char uuid[41];
		struct gpu g = gpu_open(i);

		gpu_uuid(i, uuid);
		gpu_write(g.counter, 41);
		uint64_t value = gpu_increment(&g, g.counter);
		printf("%s %s\n", value == 42 ? "ok" : "wrong", uuid);
		if (value != 42)
			return 1;
	}
	return 0;
}
