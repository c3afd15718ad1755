// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// What the driver leaves in processes and keeps from them: files in forked children, users of NVML, a thread that reads what is mapped by a timer, memory that two processes share, a socket's name.

#include <errno.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"

static struct target second_of(struct target t)
{
	return (struct target){.port = t.port + 1, .launched = t.launched};
}

// child_of finds the only child of a process.
static pid_t child_of(pid_t pid)
{
	char path[64];
	int child = 0;

	snprintf(path, sizeof path, "/proc/%d/task/%d/children", pid, pid);
	FILE *f = fopen(path, "re");
	if (!f || fscanf(f, "%d", &child) != 1)
		FAIL("process %d has no child", pid);
	if (f)
		fclose(f);
	return child;
}

// A child forked after cuInit keeps the parent's files of the GPU open, has no mappings of it, and
// is no CUDA process. It keeps them when the parent has closed its own.
static void forked_child(void)
{
	struct target t = launch("forked", "", false), second = second_of(t);

	want_reply(t, "", "101");
	want_reply(second, "", "101");
	pid_t child = child_of(t.pid);
	int files = gpu_fds(child);
	WANT(files > 0, true);
	if (!real_driver) {
		WANT(gpu_fds(t.pid), files);
		WANT(gpu_mappings(child), 0);
	}
	WANT(state_of(child), -CUDA_ERROR_NOT_INITIALIZED);
	WANT(lock(t.pid, 0), CUDA_SUCCESS);
	WANT(cu.checkpoint(t.pid, NULL), CUDA_SUCCESS);
	WANT(gpu_fds(t.pid), 0);
	WANT(gpu_fds(child), files);
	WANT(restore(t.pid, 0, NULL), CUDA_SUCCESS);
	WANT(cu.unlock(t.pid, NULL), CUDA_SUCCESS);
	want_reply(t, "", "102");
	want_reply(second, "", "102");
	stop(t); // the child dies with it
}

// Who uses NVML alone is a CUDA process to the driver, which serves it all the way: NVML loads libcuda,
// opens files of all GPUs and starts the restore thread.
static void monitor(void)
{
	struct target t = launch("monitor", "", false);
	int tid = 0, before = failures;

	want_reply(t, "", "101");
	WANT(gpu_fds(t.pid) > 1, true);
	WANT(state_of(t.pid), CU_PROCESS_STATE_RUNNING);
	WANT(finish(call_elsewhere("state", t.pid)), 10 + CU_PROCESS_STATE_RUNNING);
	WANT(cu.tid(t.pid, &tid), CUDA_SUCCESS);
	WANT(is_thread_of(t.pid, tid), true);
	WANT(lock(t.pid, 1000), CUDA_SUCCESS);
	WANT(state_of(t.pid), CU_PROCESS_STATE_LOCKED);
	WANT(cu.checkpoint(t.pid, NULL), CUDA_SUCCESS);
	WANT(gpu_fds(t.pid), 0);
	WANT(gpu_mappings(t.pid), 0);
	WANT(state_of(t.pid), CU_PROCESS_STATE_CHECKPOINTED);
	WANT(restore(t.pid, 0, NULL), CUDA_SUCCESS);
	WANT(state_of(t.pid), CU_PROCESS_STATE_LOCKED);
	WANT(cu.unlock(t.pid, NULL), CUDA_SUCCESS);
	want_cycle(t.pid);
	if (failures > before)
		describe(t.pid);
	want_reply(t, "", "102");
	stop(t);
}

// NVML without libcuda (here by a switch): nvidiactl is open and the state RUNNING, but there is no
// restore thread, and no lock. So a state alone does not make a CUDA process.
static void monitor_without_cuda(void)
{
	struct target t = launch("monitor", "SOFTCUDA_NVML_ALONE=1", false);
	int tid = 0;

	want_reply(t, "", "101");
	WANT(gpu_fds(t.pid), 1);
	WANT(state_of(t.pid), CU_PROCESS_STATE_RUNNING);
	WANT(finish(call_elsewhere("state", t.pid)), 10 + CU_PROCESS_STATE_RUNNING);
	WANT(cu.tid(t.pid, &tid), CUDA_ERROR_NOT_INITIALIZED);
	WANT(lock(t.pid, 1000), CUDA_ERROR_NOT_INITIALIZED);
	want_reply(t, "", "102");
	stop(t);
}

// ended waits for the end of a target and returns the signal that killed it.
static int ended(struct target t)
{
	int status = 0;

	for (int i = 0; i < 500; i++) {
		if (waitpid(t.pid, &status, WNOHANG) == t.pid)
			return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
		usleep(10000);
	}
	stop(t);
	return 0;
}

// The timer's thread reads all the time; a process that it may run in while checkpointed dies. (In
// threads.c and frozen.c it may not: only the restore thread runs.)
static void timer(void)
{
	struct target t = start("counter", "SOFTCUDA_TIMER_MS=1");

	want_reply(t, "", "101");
	usleep(50000);
	want_reply(t, "", "102");
	WANT(lock(t.pid, 0), CUDA_SUCCESS);
	cu.checkpoint(t.pid, NULL); // it may be dead before the answer
	WANT(ended(t), SIGSEGV);
}

// Two processes that share memory are checkpointed, and neither is ever restored.
static void shared_memory(void)
{
	struct target t = launch("ipc", "", false), second = second_of(t);

	want_reply(t, "", "101");
	want_reply(second, "", "102");
	want_reply(t, "", "103");
	second.pid = child_of(t.pid);
	struct {
		pid_t pid;
		CUresult want;
	} both[] = {{t.pid, CUDA_ERROR_NOT_SUPPORTED}, {second.pid, CUDA_ERROR_INVALID_VALUE}};
	for (int i = 0; i < 2; i++)
		WANT(lock(both[i].pid, 0), CUDA_SUCCESS);
	for (int i = 0; i < 2; i++) {
		WANT(cu.checkpoint(both[i].pid, NULL), CUDA_SUCCESS);
		WANT(gpu_fds(both[i].pid), 0);
		WANT(gpu_mappings(both[i].pid), 0);
	}
	for (int i = 0; i < 4; i++) {
		WANT(restore(both[i % 2].pid, 0, NULL), both[i % 2].want);
		WANT(state_of(both[i % 2].pid), CU_PROCESS_STATE_CHECKPOINTED);
	}
	stop(t);
}

// The driver's name of a process is taken, by the process itself before it loads the driver.
static void name_taken(void)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	struct stat namespace;

	pid_t caller = fork();
	if (caller) {
		WANT(finish(caller), CUDA_ERROR_OPERATING_SYSTEM & 0xff);
		return;
	}
	if (stat("/proc/self/ns/pid", &namespace))
		die("stat: %s", strerror(errno));
	int len = sprintf(address.sun_path + 1, "cuda-uvmfd-%lu-%d", (unsigned long)namespace.st_ino, getpid());
	if (bind(socket(AF_UNIX, SOCK_SEQPACKET, 0), (struct sockaddr *)&address, offsetof(struct sockaddr_un, sun_path) + 1 + (socklen_t)len))
		die("bind: %s", strerror(errno));
	execl("/proc/self/exe", "conform", "--call", "init", "0", (char *)NULL);
	die("run myself: %s", strerror(errno));
}

void test_habits(void)
{
	forked_child();
	monitor();
	if (real_driver)
		return;
	monitor_without_cuda();
	timer();
	shared_memory();
	name_taken();
}
