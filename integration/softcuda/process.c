// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// cuInit, NVML's begin and the driver's per-process state.

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "softcuda.h"

struct process process = {.control_fd = -1};

static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;

// make_node does as NVIDIA's libraries, which make the nodes of all GPUs where they may.
static void make_node(void)
{
	const char *name = getenv("SOFTCUDA_MAKE_NODE");
	char path[512];

	if (!name)
		return;
	snprintf(path, sizeof path, "/dev/%s", name);
	mknod(path, S_IFCHR | 0666, makedev(1, 3)); // there already, or not allowed
}

void process_close(void)
{
	for (int i = 0; i < process.gpus; i++) {
		if (process.fd[i] >= 0)
			close(process.fd[i]);
		process.fd[i] = -1;
	}
	if (process.control_fd >= 0)
		close(process.control_fd);
	process.control_fd = -1;
}

CUresult process_open(const struct gpu *gpus, int n)
{
	process.gpus = n;
	for (int i = 0; i < n; i++)
		process.fd[i] = -1;
	process.control_fd = gpu_open(-1);
	if (process.control_fd < 0)
		return CUDA_ERROR_NO_DEVICE;
	for (int i = 0; i < n; i++) {
		process.fd[i] = gpu_open(gpus[i].minor);
		if (process.fd[i] < 0) {
			process_close();
			return CUDA_ERROR_NO_DEVICE;
		}
	}
	memmove(process.gpu, gpus, (size_t)n * sizeof *gpus);
	return CUDA_SUCCESS;
}

// A forked child has inherited open nodes and pipes that are its parent's to use. The nodes stay
// open, as with the real driver, though the child can do nothing with them. A child of one that has
// not called cuInit may do so.
// As malloc's of the C library, which the driver's threads use too: whoever forks has it meanwhile, with all
// signals blocked.
static pthread_mutex_t forking = PTHREAD_MUTEX_INITIALIZER;
static sigset_t unblocked; // the mask of whoever forks

void process_wait_for_forks(void)
{
	pthread_mutex_lock(&forking);
	pthread_mutex_unlock(&forking);
}

static void before_fork(void)
{
	struct config config;
	sigset_t all;

	config_load(&config);
	sigfillset(&all);
	pthread_mutex_lock(&forking);
	pthread_sigmask(SIG_SETMASK, &all, &unblocked);
	pause_ms(config.fork_ms);
}

static void in_parent(void)
{
	pthread_sigmask(SIG_SETMASK, &unblocked, NULL);
	pthread_mutex_unlock(&forking);
}

static void in_child(void)
{
	pthread_sigmask(SIG_SETMASK, &unblocked, NULL);
	pthread_mutex_init(&forking, NULL);
	if (!process.served)
		return;
	for (int i = 0; i < process.gpus; i++)
		process.fd[i] = -1;
	process.control_fd = -1;
	control_forget_after_fork();
	process.served = false;
	process.forked = process.initialised;
	process.initialised = false;
	if (process.forked)
		return;
	gate_forget_after_fork();
	slice_forget_after_fork();
	checkpoint_forget_after_fork();
}

// listen_for_importers does as the real driver, by whose socket other processes ask for what they
// import. Nobody asks here. The socket stays open until the process ends, and in forked children.
// Another socket of the name in the network namespace is an error, as with the real one.
static CUresult listen_for_importers(int *to)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	struct stat namespace;

	if (stat("/proc/self/ns/pid", &namespace))
		return CUDA_ERROR_OPERATING_SYSTEM;
	int len = snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "cuda-uvmfd-%lu-%d", (unsigned long)namespace.st_ino, getpid());
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return CUDA_ERROR_OPERATING_SYSTEM;
	if (bind(fd, (struct sockaddr *)&address, offsetof(struct sockaddr_un, sun_path) + 1 + (socklen_t)len) || listen(fd, 16)) {
		close(fd);
		return CUDA_ERROR_OPERATING_SYSTEM;
	}
	*to = fd;
	return CUDA_SUCCESS;
}

// serve has the driver serve this process: with files of these GPUs, the socket and the restore
// thread, which is there delay_ms after the files.
static CUresult serve(const struct gpu *gpus, int n, unsigned delay_ms)
{
	static bool follows_forks;
	int named = -1;
	CUresult r;

	if ((r = process_open(gpus, n)))
		return r;
	pause_ms(delay_ms);
	if (!follows_forks && pthread_atfork(before_fork, in_parent, in_child)) {
		process_close();
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	follows_forks = true;
	if ((r = listen_for_importers(&named)) || (r = control_start())) {
		if (named >= 0)
			close(named);
		process_close();
		return r;
	}
	process.served = true;
	return CUDA_SUCCESS;
}

static CUresult initialise(void)
{
	struct config config;
	struct gpu gpus[MAX_GPUS];
	CUresult r;

	if (process.forked)
		return CUDA_ERROR_NOT_INITIALIZED;
	if (process.initialised)
		return CUDA_SUCCESS;
	// With another pid namespace's /proc mounted there is no /proc/self; the real driver then
	// fails like this too.
	if (access("/proc/self/maps", R_OK))
		return CUDA_ERROR_OPERATING_SYSTEM;
	config_load(&config);
	make_node();
	int n = gpus_usable(&config, gpus);
	if (n > 0)
		n = gpus_chosen(gpus, n);
	if (n < 1)
		return CUDA_ERROR_NO_DEVICE;
	if (process.served) { // NVML was first: the files are those of all GPUs
		gate_enter_served();
		process_close();
		r = gate_leave(process_open(gpus, n));
	} else {
		r = serve(gpus, n, config.init_delay_ms);
	}
	if (!r)
		__atomic_store_n(&process.initialised, true, __ATOMIC_RELEASE);
	return r;
}

// reach_out does what the real driver may do in a program: it loads further libraries of its own,
// and has a program of NVIDIA's make the nodes that it misses.
static void reach_out(void)
{
	const char *program = getenv("SOFTCUDA_MODPROBE");

	dlopen("libnvidia-ptxjitcompiler.so.1", RTLD_NOW); // stays
	if (!program)
		return;
	pid_t child = fork();
	if (child == 0) {
		execl(program, program, (char *)NULL);
		_exit(127);
	}
	if (child > 0)
		waitpid(child, NULL, 0);
}

CUresult cuInit(unsigned int flags)
{
	if (flags)
		return CUDA_ERROR_INVALID_VALUE;
	if (process.forked) // the lock may have been held by another thread at the fork
		return CUDA_ERROR_NOT_INITIALIZED;
	pthread_mutex_lock(&once);
	if (!process.initialised)
		reach_out();
	CUresult r = initialise();
	pthread_mutex_unlock(&once);
	return r;
}

// softcuda_serve is for NVML's begin, which has libcuda serve the process, though CUDA's calls still
// want a cuInit.
CUDA_API CUresult softcuda_serve(void)
{
	struct config config;
	struct gpu gpus[MAX_GPUS];
	CUresult r = CUDA_SUCCESS;

	if (process.forked)
		return CUDA_ERROR_NOT_INITIALIZED;
	pthread_mutex_lock(&once);
	if (!process.served) {
		config_load(&config);
		int n = gpus_usable(&config, gpus);
		if (access("/proc/self/maps", R_OK))
			r = CUDA_ERROR_OPERATING_SYSTEM;
		else
			r = n < 1 ? CUDA_ERROR_NO_DEVICE : serve(gpus, n, 0);
	}
	pthread_mutex_unlock(&once);
	return r;
}

CUresult cuDriverGetVersion(int *version)
{
	struct config config;

	if (!version)
		return CUDA_ERROR_INVALID_VALUE;
	config_load(&config);
	*version = config.cuda_version;
	return CUDA_SUCCESS;
}
