// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Configuration: a text file ($SOFTCUDA_CONF, else /etc/softcuda.conf) and the environment.
// Read with plain system calls into a buffer on the stack, because the control thread reads it
// again at each step and must not allocate in between.

#include <ctype.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "softcuda.h"

static const char *const step_names[STEPS] = {"lock", "checkpoint", "restore", "unlock"};

static int step_named(const char *name, size_t len)
{
	for (int s = 0; s < STEPS; s++)
		if (strlen(step_names[s]) == len && !strncmp(step_names[s], name, len))
			return s;
	return -1;
}

void parse_uuid(const char *text, CUuuid *uuid)
{
	CUuuid u;
	int digits = 0;

	if (!strncmp(text, "GPU-", 4))
		text += 4;
	for (; *text && digits < 32; text++) {
		if (*text == '-')
			continue;
		if (!isxdigit((unsigned char)*text))
			return;
		int v = isdigit((unsigned char)*text) ? *text - '0' : tolower(*text) - 'a' + 10;
		unsigned char *b = &u.bytes[digits / 2];
		*b = digits % 2 ? (unsigned char)(*b << 4 | v) : (unsigned char)v;
		digits++;
	}
	if (digits == 32)
		*uuid = u;
}

// parse_fail reads STEP:CODE or STEP:CODE:TIMES.
static void parse_fail(struct fault *fail, const char *text)
{
	const char *colon = strchr(text, ':');
	if (!colon)
		return;
	int step = step_named(text, (size_t)(colon - text));
	if (step < 0)
		return;
	char *end;
	fail[step].code = (CUresult)strtol(colon + 1, &end, 10);
	fail[step].times = *end == ':' ? (unsigned)strtoul(end + 1, NULL, 10) : 0;
}

static void set(struct config *c, const char *key, const char *value)
{
	int index = -1, used = 0;

	if (!strcmp(key, "driver")) {
		snprintf(c->driver, sizeof c->driver, "%s", value);
	} else if (!strcmp(key, "machine")) {
		for (int i = 0; i < MAX_GPUS; i++)
			snprintf(c->gpu[i].machine, sizeof c->gpu[i].machine, "%s", value);
	} else if (!strcmp(key, "no_words")) {
		c->no_words = !strcmp(value, "1");
	} else if (!strcmp(key, "mute")) {
		c->mute = !strcmp(value, "1");
	} else if (!strcmp(key, "nvml_alone")) {
		c->nvml_alone = !strcmp(value, "1");
	} else if (!strcmp(key, "timer_ms")) {
		c->timer_ms = (unsigned)strtoul(value, NULL, 10);
	} else if (!strcmp(key, "fork_ms")) {
		c->fork_ms = (unsigned)strtoul(value, NULL, 10);
	} else if (!strcmp(key, "cuda")) {
		c->cuda_version = atoi(value);
	} else if (!strcmp(key, "piece_ms")) {
		c->piece_ms = (unsigned)strtoul(value, NULL, 10);
	} else if (!strcmp(key, "out_delay_ms")) {
		c->out_delay_ms = (unsigned)strtoul(value, NULL, 10);
	} else if (!strcmp(key, "taken_mib")) {
		c->taken = strtoull(value, NULL, 10) << 20;
	} else if (!strcmp(key, "unmap_code")) {
		c->unmap_code = (CUresult)strtol(value, NULL, 10);
	} else if (!strcmp(key, "hang")) {
		int step = step_named(value, strlen(value));
		if (step >= 0)
			c->hang[step] = true;
	} else if (!strcmp(key, "fail")) {
		parse_fail(c->fail, value);
	} else if (!strcmp(key, "init_delay_ms")) {
		c->init_delay_ms = (unsigned)strtoul(value, NULL, 10);
	} else if (!strcmp(key, "context_delay_ms")) {
		c->context_delay_ms = (unsigned)strtoul(value, NULL, 10);
	} else if (strlen(key) > 9 && !strcmp(key + strlen(key) - 9, "_delay_ms")) {
		int step = step_named(key, strlen(key) - 9);
		if (step >= 0)
			c->delay_ms[step] = (unsigned)strtoul(value, NULL, 10);
	} else if (sscanf(key, "gpu%d.%n", &index, &used) == 1 && used && index >= 0 && index < MAX_GPUS) {
		if (!strcmp(key + used, "uuid"))
			parse_uuid(value, &c->gpu[index].uuid);
		else if (!strcmp(key + used, "name"))
			snprintf(c->gpu[index].name, sizeof c->gpu[index].name, "%s", value);
		else if (!strcmp(key + used, "nvml_name"))
			snprintf(c->gpu[index].nvml_name, sizeof c->gpu[index].nvml_name, "%s", value);
		else if (!strcmp(key + used, "memory_mib"))
			c->gpu[index].total = strtoull(value, NULL, 10) << 20;
		else if (!strcmp(key + used, "fail"))
			parse_fail(c->gpu_fail[index], value);
		else if (!strcmp(key + used, "mig"))
			c->gpu[index].mig = atoi(value) != 0;
		else if (!strcmp(key + used, "vgpu"))
			c->gpu[index].vgpu = atoi(value) != 0;
	}
}

// trim cuts white space off both ends, in place.
static char *trim(char *s)
{
	while (isspace((unsigned char)*s))
		s++;
	for (char *end = s + strlen(s); end > s && isspace((unsigned char)end[-1]);)
		*--end = 0;
	return s;
}

static void read_file(struct config *c)
{
	const char *named = getenv("SOFTCUDA_CONF");
	char text[8192];
	int fd = -1;

	if (named)
		fd = open(named, O_RDONLY | O_CLOEXEC);
	if (fd < 0) // a helper that has joined a container no longer sees its own file
		fd = open("/etc/softcuda.conf", O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return;
	size_t len = 0;
	for (ssize_t n; len < sizeof text - 1 && (n = read(fd, text + len, sizeof text - 1 - len)) > 0;)
		len += (size_t)n;
	close(fd);
	text[len] = 0;
	for (char *line = text, *next; line; line = next) {
		next = strchr(line, '\n');
		if (next)
			*next++ = 0;
		line[strcspn(line, "#")] = 0;
		char *equals = strchr(line, '=');
		if (!equals)
			continue;
		*equals = 0;
		set(c, trim(line), trim(equals + 1));
	}
}

void config_load(struct config *c)
{
	static const struct {
		const char *variable, *key;
	} environment[] = {
		{"SOFTCUDA_MACHINE", "machine"},
		{"SOFTCUDA_DRIVER", "driver"},
		{"SOFTCUDA_FAIL", "fail"},
		{"SOFTCUDA_HANG", "hang"},
		{"SOFTCUDA_PIECE_MS", "piece_ms"},
		{"SOFTCUDA_MUTE", "mute"},
		{"SOFTCUDA_NVML_ALONE", "nvml_alone"},
		{"SOFTCUDA_TIMER_MS", "timer_ms"},
		{"SOFTCUDA_INIT_DELAY_MS", "init_delay_ms"},
		{"SOFTCUDA_CONTEXT_DELAY_MS", "context_delay_ms"},
		{"SOFTCUDA_LOCK_DELAY_MS", "lock_delay_ms"},
		{"SOFTCUDA_CHECKPOINT_DELAY_MS", "checkpoint_delay_ms"},
		{"SOFTCUDA_RESTORE_DELAY_MS", "restore_delay_ms"},
		{"SOFTCUDA_UNLOCK_DELAY_MS", "unlock_delay_ms"},
	};

	memset(c, 0, sizeof *c);
	snprintf(c->driver, sizeof c->driver, "580.0-softcuda");
	c->cuda_version = 13000;
	for (int i = 0; i < MAX_GPUS; i++) {
		char uuid[48];
		snprintf(uuid, sizeof uuid, "5af7c0da-0000-4000-8000-%012x", i);
		parse_uuid(uuid, &c->gpu[i].uuid);
		snprintf(c->gpu[i].name, sizeof c->gpu[i].name, "Software GPU");
		c->gpu[i].total = (size_t)2 << 30;
		c->gpu[i].minor = i;
	}
	read_file(c);
	for (size_t i = 0; i < sizeof environment / sizeof *environment; i++) {
		const char *value = getenv(environment[i].variable);
		if (value)
			set(c, environment[i].key, value);
	}
}

bool config_has_checkpoint(const struct config *c)
{
	// driver >= 570: cuCheckpointProcess*, CUDA driver API, group CUDA_CHECKPOINT
	return atoi(c->driver) >= 570;
}
