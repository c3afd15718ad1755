// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Content and addresses of device memory across a checkpoint, and where it is meanwhile.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#include "harness.h"

static char *info(struct target t)
{
	const char *reply = ask(t, "info", 60000);
	return strdup(reply ? reply : "no reply");
}

static void same_bits_and_addresses(void)
{
	enum { BYTES = 48 << 20 };
	struct target t = start("pattern --bytes 48M --chunks 3 --seed 7", "");
	unsigned long area;

	char *before = info(t);
	want_reply(t, "count", "101");
	want_reply(t, "write 250", "wrote 250");
	WANT(lock(t.pid, 0), CUDA_SUCCESS);
	WANT(cu.checkpoint(t.pid, NULL), CUDA_SUCCESS);
	size_t size = largest_anonymous(t.pid, &area);
	if (size < BYTES)
		FAIL("the largest anonymous area has %zu bytes, the GPU memory %d", size, BYTES);
	WANT(gpu_mappings(t.pid), 0);
	WANT(restore(t.pid, 0, NULL), CUDA_SUCCESS);
	WANT(cu.unlock(t.pid, NULL), CUDA_SUCCESS);
	want_reply(t, "info", before);
	want_reply(t, "verify", "bad=0");
	want_reply(t, "count", "102");
	free(before);
	stop(t);
}

// A changed word in the staging area must show: the data really went through it.
static void changed_word_is_seen(void)
{
	struct target t = start_with_memory("pattern --bytes 16M", "");
	unsigned long area;
	uint64_t word = 1;

	want_reply(t, "verify", "bad=0");
	WANT(lock(t.pid, 0), CUDA_SUCCESS);
	WANT(cu.checkpoint(t.pid, NULL), CUDA_SUCCESS);
	size_t size = largest_anonymous(t.pid, &area);
	// The newest allocation, the pattern, comes first; the context's own image comes last.
	struct iovec from = {&word, sizeof word}, to = {(void *)(area + (1 << 20)), sizeof word};
	WANT(size > 16 << 20, true);
	WANT(process_vm_writev(t.pid, &from, 1, &to, 1, 0), sizeof word);
	WANT(restore(t.pid, 0, NULL), CUDA_SUCCESS);
	WANT(cu.unlock(t.pid, NULL), CUDA_SUCCESS);
	want_reply(t, "verify", "bad=1");
	stop(t);

	t = start_with_memory("pattern --bytes 16M", "");
	WANT(lock(t.pid, 0), CUDA_SUCCESS);
	WANT(cu.checkpoint(t.pid, NULL), CUDA_SUCCESS);
	size = largest_anonymous(t.pid, &area);
	to.iov_base = (void *)(area + size - sizeof word);
	WANT(process_vm_writev(t.pid, &from, 1, &to, 1, 0), sizeof word);
	WANT(restore(t.pid, 0, NULL), CUDA_ERROR_UNKNOWN);
	WANT(state_of(t.pid), CU_PROCESS_STATE_FAILED);
	WANT(cu.unlock(t.pid, NULL), CUDA_ERROR_ILLEGAL_STATE);
	stop(t);
}

void test_memory(void)
{
	same_bits_and_addresses();
	if (!real_driver)
		changed_word_is_seen();
}
