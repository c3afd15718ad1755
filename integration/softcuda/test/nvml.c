// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// libnvidia-ml.so.1: what it says of the GPUs, and that their memory is free after a checkpoint.

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "harness.h"

static struct {
	int (*init)(void);
	int (*shutdown)(void);
	int (*driver)(char *, unsigned);
	int (*count)(unsigned *);
	int (*handle)(unsigned, void **);
	int (*uuid)(void *, char *, unsigned);
	int (*memory)(void *, unsigned long long[3]); // total, free, used
	int (*processes)(void *, unsigned *, void *);
} nvml;

static void bind(void)
{
	void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
	struct {
		void *to;
		const char *name;
	} calls[] = {
		{&nvml.init, "nvmlInit_v2"},
		{&nvml.shutdown, "nvmlShutdown"},
		{&nvml.driver, "nvmlSystemGetDriverVersion"},
		{&nvml.count, "nvmlDeviceGetCount_v2"},
		{&nvml.handle, "nvmlDeviceGetHandleByIndex_v2"},
		{&nvml.uuid, "nvmlDeviceGetUUID"},
		{&nvml.memory, "nvmlDeviceGetMemoryInfo"},
		{&nvml.processes, "nvmlDeviceGetComputeRunningProcesses_v3"},
	};

	if (!library)
		die("%s", dlerror());
	for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
		void *address = dlsym(library, calls[i].name);
		if (!address)
			die("%s", dlerror());
		memcpy(calls[i].to, &address, sizeof address);
	}
}

static unsigned long long used(void *device)
{
	unsigned long long memory[3] = {0};
	WANT(nvml.memory(device, memory), 0);
	return memory[2];
}

// NVML in use is no cuInit: CUDA's calls want one, and a forked child may make it. After it, CUDA has
// the GPUs of the program's choice, of which the process has files.
static void cuda_after(void)
{
	int n = 0;

	WANT(cu.count(&n), CUDA_ERROR_NOT_INITIALIZED);
	WANT(gpu_fds(getpid()), 3);
	WANT(lock(getpid(), 0), CUDA_SUCCESS); // the child is not locked
	pid_t child = fork();
	if (!child) {
		setenv("CUDA_VISIBLE_DEVICES", "1", 1);
		int inherited = gpu_fds(getpid());
		alarm(20);
		_exit(cu.init(0) || cu.count(&n) || n != 1 || gpu_fds(getpid()) != inherited + 2 || state_of(getpid()) != CU_PROCESS_STATE_RUNNING);
	}
	WANT(finish(child), 0);
	WANT(cu.unlock(getpid(), NULL), CUDA_SUCCESS);
	setenv("CUDA_VISIBLE_DEVICES", "1", 1);
	WANT(cu.init(0), CUDA_SUCCESS);
	WANT(cu.count(&n), CUDA_SUCCESS);
	WANT(n, 1);
	WANT(gpu_fds(getpid()), 2);
	want_cycle(getpid());
}

void test_nvml(void)
{
	enum { BYTES = 8 << 20 };
	char text[96];
	unsigned n = 0;
	void *first, *second;

	bind();
	WANT(nvml.count(&n), 1); // uninitialized
	WANT(nvml.init(), 0);
	WANT(nvml.driver(text, sizeof text), 0);
	WANT(strcmp(text, "580.0-softcuda"), 0);
	WANT(nvml.count(&n), 0);
	WANT(n, 2);
	WANT(nvml.handle(0, &first), 0);
	WANT(nvml.handle(1, &second), 0);
	WANT(nvml.uuid(second, text, sizeof text), 0);
	WANT(strcmp(text, "GPU-5af7c0da-0000-4000-8000-000000000001"), 0);

	struct target t = start("pattern --bytes 8M --gpu 1", "");
	want_reply(t, "verify", "bad=0");
	unsigned long long others = used(first), busy = used(second);
	WANT(busy >= BYTES, true);
	WANT(others + BYTES <= busy, true);
	WANT(nvml.processes(second, &n, NULL), 7); // too little room: says how much
	WANT(n >= 1, true);
	WANT(lock(t.pid, 0), CUDA_SUCCESS);
	WANT(cu.checkpoint(t.pid, NULL), CUDA_SUCCESS);
	WANT(used(second) + BYTES <= busy, true);
	stop(t);
	WANT(nvml.shutdown(), 0);
	cuda_after();
}
