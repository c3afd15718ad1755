// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Command line options.

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "gpu.h"
#include "options.h"

// number reads a decimal number with an optional K, M or G (powers of 1024).
static unsigned long long number(const char *name, const char *text)
{
	static const char units[] = "KMG";
	char *end;

	errno = 0;
	unsigned long long n = strtoull(text, &end, 0);
	const char *unit = *end ? strchr(units, *end) : NULL;
	if (unit) {
		n <<= 10 * (unit - units + 1);
		end++;
	}
	if (end == text || *end || errno) {
		fprintf(stderr, "gpuwork: %s: %s is not a number\n", name, text);
		exit(2);
	}
	return n;
}

// keep_open opens a file for the rest of the process's life: something that CRIU may not be able to
// dump.
static void keep_open(const char *path)
{
	if (open(path, O_RDONLY | O_CLOEXEC) < 0) {
		fprintf(stderr, "gpuwork: --open %s: %s\n", path, strerror(errno));
		exit(2);
	}
}

// keep_mapped makes a file of 8 MiB with a pattern and maps it, as programs share memory, PyTorch its
// tensors. File and mapping stay for the rest of the process's life; the name goes with unnamed.
static void keep_mapped(const char *option, const char *path, int unnamed)
{
	const size_t bytes = 8 << 20;
	int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	unsigned *words = MAP_FAILED;

	if (fd >= 0 && !ftruncate(fd, (off_t)bytes))
		words = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (words == MAP_FAILED || (unnamed && unlink(path))) {
		fprintf(stderr, "gpuwork: %s %s: %s\n", option, path, strerror(errno));
		exit(2);
	}
	for (size_t i = 0; i < bytes / sizeof *words; i++)
		words[i] = (unsigned)i * 2654435761u;
}

// keep_unnamed makes a file in a directory that never has a name.
static void keep_unnamed(const char *dir)
{
	int fd = open(dir, O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);

	if (fd < 0 || write(fd, "unnamed", 7) != 7) {
		fprintf(stderr, "gpuwork: --unnamed %s: %s\n", dir, strerror(errno));
		exit(2);
	}
}

struct options options_parse(char **args)
{
	struct options o = {.port = 10000, .chunks = 1, .gpus = 1, .procs = 2, .ahead = 1, .bytes = 64 << 20, .start = 100, .share = "ipc", .state = "", .content = "pattern"};

	for (; *args; args += 2) {
		const char *name = args[0], *value = args[1];
		if (!value) {
			fprintf(stderr, "gpuwork: %s has no value\n", name);
			exit(2);
		}
		if (!strcmp(name, "--port"))
			o.port = (int)number(name, value);
		else if (!strcmp(name, "--chunks"))
			o.chunks = (int)number(name, value);
		else if (!strcmp(name, "--gpus"))
			o.gpus = (int)number(name, value);
		else if (!strcmp(name, "--gpu"))
			o.gpu = (int)number(name, value);
		else if (!strcmp(name, "--procs"))
			o.procs = (int)number(name, value);
		else if (!strcmp(name, "--seconds"))
			o.seconds = (int)number(name, value);
		else if (!strcmp(name, "--ahead"))
			o.ahead = (int)number(name, value);
		else if (!strcmp(name, "--work"))
			o.work_us = (int)number(name, value);
		else if (!strcmp(name, "--bytes"))
			o.bytes = number(name, value);
		else if (!strcmp(name, "--host-bytes"))
			o.host_bytes = number(name, value);
		else if (!strcmp(name, "--pinned"))
			o.pinned = (int)number(name, value);
		else if (!strcmp(name, "--seed"))
			o.seed = number(name, value);
		else if (!strcmp(name, "--start"))
			o.start = number(name, value);
		else if (!strcmp(name, "--file"))
			o.file = value;
		else if (!strcmp(name, "--log"))
			o.log = value;
		else if (!strcmp(name, "--interface"))
			o.interface = value;
		else if (!strcmp(name, "--peer"))
			o.peer = value;
		else if (!strcmp(name, "--state"))
			o.state = value;
		else if (!strcmp(name, "--share"))
			o.share = value;
		else if (!strcmp(name, "--apart"))
			o.apart = value;
		else if (!strcmp(name, "--content"))
			o.content = value;
		else if (!strcmp(name, "--open"))
			keep_open(value);
		else if (!strcmp(name, "--unlinked"))
			keep_mapped(name, value, 1);
		else if (!strcmp(name, "--shared"))
			keep_mapped(name, value, 0);
		else if (!strcmp(name, "--unnamed"))
			keep_unnamed(value);
		else if (!strcmp(name, "--locks"))
			keep_locks(value);
		else if (!strcmp(name, "--with"))
			gpu_with(value);
		else if (!strcmp(name, "--hidden-lock"))
			keep_hidden_lock(value);
		else {
			fprintf(stderr, "gpuwork: unknown option %s\n", name);
			exit(2);
		}
	}
	if (o.chunks < 1 || o.gpus < 1 || o.procs < 1 || o.ahead < 1 || o.work_us < 0) {
		fprintf(stderr, "gpuwork: --chunks, --gpus, --procs and --ahead are at least 1, --work 0\n");
		exit(2);
	}
	return o;
}
