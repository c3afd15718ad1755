// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Which GPUs a process has, and on which it may go on. Software GPU only: needs GPUs to come and go.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"

static CUcheckpointGpuPair pair(int from, int to)
{
	return (CUcheckpointGpuPair){uuid_of(from), uuid_of(to)};
}

static void checkpoint(struct target t)
{
	WANT(lock(t.pid, 0), CUDA_SUCCESS);
	WANT(cu.checkpoint(t.pid, NULL), CUDA_SUCCESS);
}

// Refusals of maps that are no bijection over the process's two GPUs; then a swap.
static void pairs(void)
{
	struct target t = start("pattern --bytes 4M --gpus 2", "");
	struct {
		int n;
		CUcheckpointGpuPair pair[3];
		CUresult want;
	} cases[] = {
		{1, {pair(0, 0)}, CUDA_ERROR_INVALID_VALUE},
		{2, {pair(0, 0), pair(0, 1)}, CUDA_ERROR_INVALID_VALUE},
		{2, {pair(0, 1), pair(1, 1)}, CUDA_ERROR_INVALID_VALUE},
		{2, {pair(0, 0), pair(2, 1)}, CUDA_ERROR_INVALID_VALUE},
		{3, {pair(0, 0), pair(1, 1), pair(2, 2)}, CUDA_ERROR_INVALID_VALUE},
		{2, {pair(0, 0), pair(1, 7)}, CUDA_ERROR_NOT_SUPPORTED},
	};
	char swapped[200];

	checkpoint(t);
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		if (!WANT(restore(t.pid, cases[i].n, cases[i].pair), cases[i].want))
			FAIL("case %zu", i);
		WANT(state_of(t.pid), CU_PROCESS_STATE_CHECKPOINTED);
		WANT(gpu_fds(t.pid), 0);
	}
	CUcheckpointGpuPair swap[] = {pair(1, 0), pair(0, 1)};
	WANT(restore(t.pid, 2, swap), CUDA_SUCCESS);
	WANT(cu.unlock(t.pid, NULL), CUDA_SUCCESS);
	want_reply(t, "verify", "bad=0");
	snprintf(swapped, sizeof swapped, "gpus=2 GPU-5af7c0da-0000-4000-8000-%012d GPU-5af7c0da-0000-4000-8000-%012d", 1, 0);
	const char *info = ask(t, "info", 60000);
	if (!info || !strstr(info, swapped))
		FAIL("after a swap: %s", info ? info : "no reply");
	// From now on these are its GPUs.
	checkpoint(t);
	CUcheckpointGpuPair back[] = {pair(0, 1), pair(1, 0)};
	WANT(restore(t.pid, 2, back), CUDA_SUCCESS);
	WANT(cu.unlock(t.pid, NULL), CUDA_SUCCESS);
	want_reply(t, "verify", "bad=0");
	stop(t);
}

// A process that had only one GPU goes on where there is only another, or more.
static void another_gpu(void)
{
	remove_node(1);
	struct target t = start("pattern --bytes 4M", "");
	CUcheckpointGpuPair move = pair(0, 1), stay = pair(1, 1);

	checkpoint(t);
	remove_node(0);
	add_node(1);
	WANT(restore(t.pid, 0, NULL), CUDA_ERROR_NOT_SUPPORTED);
	WANT(state_of(t.pid), CU_PROCESS_STATE_CHECKPOINTED);
	WANT(restore(t.pid, 1, &move), CUDA_SUCCESS);
	WANT(cu.unlock(t.pid, NULL), CUDA_SUCCESS);
	want_reply(t, "verify", "bad=0");
	checkpoint(t);
	add_node(0);
	WANT(restore(t.pid, 1, &stay), CUDA_SUCCESS);
	WANT(cu.unlock(t.pid, NULL), CUDA_SUCCESS);
	want_reply(t, "verify", "bad=0");
	stop(t);
}

// A caller that sees other GPUs than the target cannot move it, only put it back where it was.
static void another_view(void)
{
	char everything[64], environment[100];
	struct target t = start("pattern --bytes 4M", "");
	CUcheckpointGpuPair swap[] = {pair(0, 1), pair(1, 0)};

	checkpoint(t);
	snprintf(everything, sizeof everything, "%s", dev_folder);
	snprintf(dev_folder, sizeof dev_folder, "%.50s/more", everything);
	if (mkdir(dev_folder, 0700))
		die("mkdir %s", dev_folder);
	for (int i = -1; i < 3; i++)
		add_node(i);
	snprintf(environment, sizeof environment, "%s", dev_folder);
	setenv("SOFTCUDA_DEV", environment, 1);
	WANT(restore(t.pid, 2, swap), CUDA_ERROR_NOT_SUPPORTED);
	WANT(restore(t.pid, 0, NULL), CUDA_SUCCESS);
	WANT(cu.unlock(t.pid, NULL), CUDA_SUCCESS);
	want_reply(t, "verify", "bad=0");
	for (int i = -1; i < 3; i++)
		remove_node(i);
	rmdir(dev_folder);
	snprintf(dev_folder, sizeof dev_folder, "%s", everything);
	setenv("SOFTCUDA_DEV", dev_folder, 1);
	stop(t);
}

// write_conf makes a configuration file in the device folder.
static char *write_conf(const char *text)
{
	static char path[128];
	snprintf(path, sizeof path, "%s/conf", dev_folder);
	FILE *f = fopen(path, "we");
	if (!f || fputs(text, f) < 0 || fclose(f))
		die("write %s", path);
	return path;
}

// Memory and model come from the configuration; a GPU that is too small or another model is refused.
static void unlike_gpus(void)
{
	char environment[200];
	CUcheckpointGpuPair swap[] = {pair(0, 1), pair(1, 0)};
	const char *conf = write_conf("gpu0.memory_mib = 64 # small\ngpu1.memory_mib=16\n");

	snprintf(environment, sizeof environment, "SOFTCUDA_CONF=%s", conf);
	struct target t = launch("pattern --bytes 64M", environment, false);
	WANT(finish(t.pid), 1); // out of memory: its context takes some

	t = start_with_memory("pattern --bytes 32M", environment);
	checkpoint(t);
	WANT(restore(t.pid, 2, swap), CUDA_ERROR_OUT_OF_MEMORY);
	WANT(state_of(t.pid), CU_PROCESS_STATE_CHECKPOINTED);
	write_conf("gpu0.memory_mib=64\ngpu1.name=Another GPU\n");
	WANT(restore(t.pid, 2, swap), CUDA_ERROR_NOT_SUPPORTED);
	write_conf("gpu0.memory_mib=64\n");
	WANT(restore(t.pid, 2, swap), CUDA_SUCCESS);
	WANT(cu.unlock(t.pid, NULL), CUDA_SUCCESS);
	want_reply(t, "verify", "bad=0");
	stop(t);

	conf = write_conf("gpu0.uuid = GPU-01234567-89ab-cdef-0123-456789ABCDEF\n");
	t = start("pattern --bytes 1M", environment);
	const char *info = ask(t, "info", 60000);
	if (!info || !strstr(info, "GPU-01234567-89ab-cdef-0123-456789abcdef"))
		FAIL("configured UUID: %s", info ? info : "no reply");
	stop(t);
	unlink(conf);
}

// Without a driver or without a GPU there is no device.
static void none(void)
{
	struct target t;

	remove_node(-1);
	t = launch("counter", "", false);
	WANT(finish(t.pid), 1);
	add_node(-1);
	remove_node(0);
	remove_node(1);
	t = launch("counter", "", false);
	WANT(finish(t.pid), 1);
	add_node(0);
	add_node(1);
}

void test_devices(void)
{
	pairs();
	another_gpu();
	another_view();
	unlike_gpus();
	none();
}
