// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Which GPUs the pairs of a restore must name: all that the process could see, used or not, and those
// that CUDA_VISIBLE_DEVICES hid from it as well. Needs two GPUs, no more.

#include <stdio.h>
#include <string.h>

#include "harness.h"

// read_uuid reads "GPU-" and a UUID.
static CUuuid read_uuid(const char *text)
{
	CUuuid u = {{0}};
	const char *at = text + 4;

	for (int i = 0; i < 16; i++, at += 2) {
		unsigned byte = 0;
		at += *at == '-';
		if (sscanf(at, "%2x", &byte) != 1)
			die("no UUID: %s", text);
		u.bytes[i] = (unsigned char)byte;
	}
	return u;
}

static void checkpoint(struct target t)
{
	WANT(lock(t.pid, 10000), CUDA_SUCCESS);
	WANT(cu.checkpoint(t.pid, NULL), CUDA_SUCCESS);
}

static void go_on(struct target t)
{
	WANT(cu.unlock(t.pid, NULL), CUDA_SUCCESS);
	want_reply(t, "verify", "bad=0");
	stop(t);
}

// lone moves a process that uses one of two GPUs: pairs[0] is that one's, pairs[1] the other's.
static void lone(const char *arguments, const char *environment, CUcheckpointGpuPair pairs[2])
{
	struct target t = start(arguments, environment);

	want_reply(t, "verify", "bad=0");
	checkpoint(t);
	WANT(restore(t.pid, 1, pairs), CUDA_ERROR_INVALID_VALUE);
	WANT(state_of(t.pid), CU_PROCESS_STATE_CHECKPOINTED);
	if (WANT(restore(t.pid, 2, pairs), CUDA_SUCCESS))
		go_on(t);
	else
		stop(t);
}

void test_remap(void)
{
	if (real_driver && gpu_count() != 2) {
		puts("remap needs a machine with two GPUs: skipped");
		return;
	}
	struct target t = start("pattern --bytes 4M --gpus 2", "");
	const char *info = ask(t, "info", 60000), *first = info ? strstr(info, "GPU-") : NULL;
	if (!first || strlen(first) < 81)
		die("no UUIDs: %s", info ? info : "no reply");
	char second[41], environment[80];
	snprintf(second, sizeof second, "%s", first + 41);
	CUuuid a = read_uuid(first), b = read_uuid(second);
	CUcheckpointGpuPair from_a[] = {{a, b}, {b, a}}, from_b[] = {{b, a}, {a, b}};

	checkpoint(t);
	WANT(restore(t.pid, 1, from_a), CUDA_ERROR_INVALID_VALUE);
	WANT(restore(t.pid, 1, from_b), CUDA_ERROR_INVALID_VALUE);
	WANT(state_of(t.pid), CU_PROCESS_STATE_CHECKPOINTED);
	WANT(restore(t.pid, 2, from_a), CUDA_SUCCESS);
	go_on(t);

	lone("pattern --bytes 4M", "", from_a);
	snprintf(environment, sizeof environment, "CUDA_VISIBLE_DEVICES=%s", second);
	lone("pattern --bytes 4M", environment, from_b);
}
