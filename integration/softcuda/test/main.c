// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// conform [--real] GPUWORK [TEST...]: runs every test, or those named, against the libcuda.so.1 that
// the loader finds; ends with status 1 if one failed. conform --call CALL PID makes one call as another process.

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"

struct cuda cu;
const char *gpuwork_path;

static void bind(void)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW);
	struct {
		void *to;
		const char *name;
	} calls[] = {
		{&cu.init, "cuInit"},
		{&cu.count, "cuDeviceGetCount"},
		{&cu.state, "cuCheckpointProcessGetState"},
		{&cu.tid, "cuCheckpointProcessGetRestoreThreadId"},
		{&cu.lock, "cuCheckpointProcessLock"},
		{&cu.checkpoint, "cuCheckpointProcessCheckpoint"},
		{&cu.restore, "cuCheckpointProcessRestore"},
		{&cu.unlock, "cuCheckpointProcessUnlock"},
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

// hammer locks and unlocks; each lock that succeeded must be undone by this caller or by the other
// one, and nothing but the state may refuse.
static int hammer(pid_t pid)
{
	for (int i = 0; i < 300; i++) {
		CUresult l = lock(pid, 10000), u = cu.unlock(pid, NULL);
		if ((l && l != CUDA_ERROR_ILLEGAL_STATE) || (u && u != CUDA_ERROR_ILLEGAL_STATE))
			return l ? l : u;
	}
	return 0;
}

static int call(const char *name, pid_t pid)
{
	int tid = 0;

	if (!strcmp(name, "init"))
		return cu.init(0);
	if (!strcmp(name, "state")) // 10 and more are states
		return state_of(pid) < 0 ? -state_of(pid) : 10 + state_of(pid);
	if (!strcmp(name, "lock"))
		return lock(pid, 0);
	if (!strcmp(name, "checkpoint"))
		return cu.checkpoint(pid, NULL);
	if (!strcmp(name, "restore"))
		return restore(pid, 0, NULL);
	if (!strcmp(name, "unlock"))
		return cu.unlock(pid, NULL);
	if (!strcmp(name, "hammer"))
		return hammer(pid);
	if (!strcmp(name, "tid"))
		return cu.tid(pid, &tid) || !is_thread_of(pid, tid) || tid == pid;
	if (!strcmp(name, "cycle")) {
		if (real_driver)
			cu.init(0);
		want_cycle(pid);
		return failures;
	}
	die("no call %s", name);
}

static void make_devices(void)
{
	snprintf(dev_folder, sizeof dev_folder, "/tmp/conform-XXXXXX");
	if (!mkdtemp(dev_folder))
		die("%s: %s", dev_folder, strerror(errno));
	setenv("SOFTCUDA_DEV", dev_folder, 1);
	setenv("SOFTCUDA_MACHINE", dev_folder, 1); // the memory that others use meanwhile is not of these GPUs
	setenv("SOFTCUDA_CONF", "/nonexistent", 1); // the machine's own, if any, is not for tests
	for (int i = -1; i < 2; i++)
		add_node(i);
}

static void remove_devices(void)
{
	for (int i = -1; i < 2; i++)
		remove_node(i);
	rmdir(dev_folder);
}

// is_named tells whether a test is among those asked for; with none asked for, all are.
static bool is_named(char **names, const char *name)
{
	char **n = names;
	while (*n && strcmp(*n, name))
		n++;
	return *n || !*names;
}

// run runs a test in a process of its own, whose end is also its targets', and reports whether it passed.
static bool run(void (*test)(void))
{
	int status = 0;
	pid_t pid = fork();

	if (pid < 0)
		die("fork: %s", strerror(errno));
	if (!pid) {
		alarm(180); // the longest took 4 s on an H200
		failures = 0; // the parent's are other tests'
		bind();
		// A restore needs it, or persistence mode.
		if (real_driver && cu.init(0))
			die("cuInit failed");
		test();
		exit(failures != 0);
	}
	while (waitpid(pid, &status, 0) != pid)
		;
	if (WIFSIGNALED(status))
		fprintf(stderr, "ended by signal %d (%s)\n", WTERMSIG(status), strsignal(WTERMSIG(status)));
	return WIFEXITED(status) && !WEXITSTATUS(status);
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*run)(void);
		bool soft_only;
	} tests[] = {
		{"states", test_states, false},         {"memory", test_memory, false},
		{"refusals", test_refusals, false},     {"threads", test_threads, false},
		{"frozen", test_frozen, false},         {"callers", test_callers, false},
		{"namespaces", test_namespaces, false}, {"devices", test_devices, true},
		{"faults", test_faults, true},          {"nvml", test_nvml, true},
		{"remap", test_remap, false},           {"habits", test_habits, false},
		{"ranks", test_ranks, false},           {"shared", test_shared, false},
		{"kept", test_kept, false},             {"moved", test_moved, false},
		{"interrupted", test_interrupted, false}, {"slices", test_slices, false},
		{"managed", test_managed, false},
		{"events", test_events, false},
	};

	setvbuf(stdout, NULL, _IOLBF, 0);
	real_driver = getenv("CONFORM_REAL") != NULL; // known to the processes it starts, too
	if (argc == 4 && !strcmp(argv[1], "--call")) {
		bind();
		return call(argv[2], atoi(argv[3]));
	}
	if (argc == 3 && !strcmp(argv[1], "--kept"))
		kept_program(atoi(argv[2]));
	if (argc == 3 && !strcmp(argv[1], "--mover"))
		kept_mover(atoi(argv[2]));
	if (argc == 3 && !strcmp(argv[1], "--events"))
		events_program(atoi(argv[2]));
	if (argc > 2 && !strcmp(argv[1], "--real")) {
		setenv("CONFORM_REAL", "1", 1);
		real_driver = true;
		argv++, argc--;
	}
	if (argc < 2)
		die("usage: conform [--real] GPUWORK [TEST...]");
	gpuwork_path = argv[1];
	if (!real_driver)
		make_devices();
	for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
		if ((real_driver && tests[i].soft_only) || !is_named(argv + 2, tests[i].name))
			continue;
		bool passed = run(tests[i].run);
		failures += !passed;
		printf("%s  %s\n", passed ? "ok  " : "FAIL", tests[i].name);
	}
	if (!real_driver)
		remove_devices();
	return failures != 0;
}
