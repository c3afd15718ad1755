// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Targets, device nodes and looks into /proc.

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "harness.h"

extern const char *gpuwork_path;

int failures;
char dev_folder[64];
bool real_driver;

void fail(const char *file, int line, const char *form, ...)
{
	va_list args;
	va_start(args, form);
	fprintf(stderr, "%s:%d: ", file, line);
	vfprintf(stderr, form, args);
	fputc('\n', stderr);
	va_end(args);
	failures++;
}

void die(const char *form, ...)
{
	va_list args;
	va_start(args, form);
	vfprintf(stderr, form, args);
	fputc('\n', stderr);
	va_end(args);
	exit(2);
}

bool want_equal(const char *file, int line, const char *what, long long got, long long want)
{
	if (got != want)
		fail(file, line, "%s is %lld, want %lld", what, got, want);
	return got == want;
}

static int free_port(void)
{
	struct sockaddr_in any = {.sin_family = AF_INET};
	socklen_t len = sizeof any;
	int s = socket(AF_INET, SOCK_DGRAM, 0);

	if (s < 0 || bind(s, (struct sockaddr *)&any, len) ||
	    getsockname(s, (struct sockaddr *)&any, &len))
		die("no free port: %s", strerror(errno));
	close(s);
	return ntohs(any.sin_port);
}

// words splits at spaces into an argument vector of static storage.
static char **words(char *text)
{
	static char *list[32];
	int n = 0;
	for (char *w = strtok(text, " "); w && n < 31; w = strtok(NULL, " "))
		list[n++] = w;
	list[n] = NULL;
	return list;
}

struct target launch(const char *arguments, const char *environment, bool in_namespaces)
{
	struct target t = {.port = free_port()};
	char line[600], extra[600];

	snprintf(line, sizeof line, "gpuwork %s --port %d", arguments, t.port);
	snprintf(extra, sizeof extra, "%s", environment);
	unsigned long flags = SIGCHLD | (in_namespaces ? CLONE_NEWPID | CLONE_NEWNS : 0);
	t.pid = (pid_t)syscall(SYS_clone, flags, 0, 0, 0, 0);
	if (t.pid < 0)
		die("start gpuwork: %s", strerror(errno));
	t.launched = t.pid;
	if (t.pid)
		return t;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (in_namespaces && (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
	                      mount("proc", "/proc", "proc", 0, NULL)))
		die("mount /proc: %s", strerror(errno));
	for (char **w = words(extra); *w; w++)
		putenv(*w);
	execv(gpuwork_path, words(line));
	die("%s: %s", gpuwork_path, strerror(errno));
}

// must_live dies where a target's program has ended, which stop and others still wait for.
static void must_live(struct target t)
{
	siginfo_t end = {0};

	if (waitid(P_PID, (id_t)t.launched, &end, WEXITED | WNOHANG | WNOWAIT) || end.si_pid != t.launched)
		return;
	die("gpuwork ended with %s %d", end.si_code == CLD_EXITED ? "status" : "signal", end.si_status);
}

static void wait_for_context(struct target t)
{
	for (int i = 0; i < 6000; i++) { // 60 s
		if (state_of(t.pid) == CU_PROCESS_STATE_RUNNING)
			return;
		must_live(t);
		usleep(10000);
	}
	die("gpuwork has made no context");
}

struct target start(const char *arguments, const char *environment)
{
	struct target t = launch(arguments, environment, false);
	wait_for_context(t);
	return t;
}

struct target start_with_memory(const char *arguments, const char *environment)
{
	struct target t = start(arguments, environment);
	ask(t, "info", 60000); // it answers when its memory is there; a context comes before that
	return t;
}

struct target start_in_namespaces(const char *arguments)
{
	struct target t = launch(arguments, "", true);
	wait_for_context(t);
	return t;
}

void stop(struct target t)
{
	kill(t.pid, SIGKILL);
	waitpid(t.pid, NULL, 0);
}

const char *ask(struct target t, const char *request, int timeout_ms)
{
	static char reply[4096];
	struct sockaddr_in to = {.sin_family = AF_INET,
	                         .sin_port = htons((uint16_t)t.port),
	                         .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	struct timeval limit = {.tv_sec = timeout_ms / 1000, .tv_usec = timeout_ms % 1000 * 1000};
	int s = socket(AF_INET, SOCK_DGRAM, 0);
	ssize_t n = -1;

	setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
	if (s < 0 || connect(s, (struct sockaddr *)&to, sizeof to))
		die("UDP: %s", strerror(errno));
	for (int i = 0; i < 1000; i++) { // a target that has just been started may not listen yet
		send(s, request, strlen(request) + 1, 0);
		n = recv(s, reply, sizeof reply - 1, 0);
		if (n > 0 || errno != ECONNREFUSED)
			break;
		must_live(t);
		usleep(10000);
	}
	close(s);
	if (n < 1)
		return NULL;
	reply[n - 1] = 0;
	return reply;
}

void want_reply(struct target t, const char *request, const char *want)
{
	const char *got = ask(t, request, 60000);
	if (!got || strcmp(got, want))
		FAIL("%s: got %s, want %s", request, got ? got : "no reply", want);
}

int state_of(pid_t pid)
{
	CUprocessState state = -1000;
	CUresult r = cu.state(pid, &state);
	return r ? -r : state;
}

CUresult lock(pid_t pid, unsigned timeout_ms)
{
	CUcheckpointLockArgs args = {.timeoutMs = timeout_ms};
	return cu.lock(pid, &args);
}

CUresult restore(pid_t pid, int pairs, CUcheckpointGpuPair *pair)
{
	CUcheckpointRestoreArgs args = {.gpuPairs = pair, .gpuPairsCount = (unsigned)pairs};
	return cu.restore(pid, &args);
}

void want_cycle(pid_t pid)
{
	WANT(lock(pid, 0), CUDA_SUCCESS);
	WANT(cu.checkpoint(pid, NULL), CUDA_SUCCESS);
	WANT(state_of(pid), CU_PROCESS_STATE_CHECKPOINTED);
	WANT(restore(pid, 0, NULL), CUDA_SUCCESS);
	WANT(cu.unlock(pid, NULL), CUDA_SUCCESS);
	WANT(state_of(pid), CU_PROCESS_STATE_RUNNING);
}

pid_t call_elsewhere(const char *call, pid_t pid)
{
	char text[16];
	snprintf(text, sizeof text, "%d", pid);
	pid_t caller = fork();
	if (caller)
		return caller;
	execl("/proc/self/exe", "conform", "--call", call, text, NULL);
	die("run myself: %s", strerror(errno));
}

int finish(pid_t caller)
{
	int status = 0;
	if (waitpid(caller, &status, 0) != caller)
		die("wait for a caller: %s", strerror(errno));
	return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

int gpu_fds(pid_t pid)
{
	char path[300], to[300];
	int n = 0;

	snprintf(path, sizeof path, "/proc/%d/fd", pid);
	DIR *d = opendir(path);
	for (struct dirent *e; d && (e = readdir(d));) {
		snprintf(path, sizeof path, "/proc/%d/fd/%s", pid, e->d_name);
		ssize_t len = readlink(path, to, sizeof to - 1);
		to[len < 0 ? 0 : len] = 0;
		n += strstr(to, "/nvidia") != NULL;
	}
	if (d)
		closedir(d);
	return n;
}

int gpu_count(void)
{
	int n = 0;
	if (cu.count(&n))
		die("the GPUs cannot be counted");
	return n;
}

static FILE *open_maps(pid_t pid)
{
	char path[64];
	snprintf(path, sizeof path, "/proc/%d/maps", pid);
	FILE *maps = fopen(path, "re");
	if (!maps)
		die("%s: %s", path, strerror(errno));
	return maps;
}

int gpu_mappings(pid_t pid)
{
	char line[4352];
	int n = 0;
	FILE *maps = open_maps(pid);

	while (fgets(line, sizeof line, maps))
		n += strstr(line, "memfd:softcuda") || strstr(line, "/dev/nvidia");
	fclose(maps);
	return n;
}

// list prints the links of a directory of /proc, or of its threads the names.
static void list(pid_t pid, const char *folder, const char *file)
{
	char path[600], text[300];

	snprintf(path, sizeof path, "/proc/%d/%s", pid, folder);
	DIR *d = opendir(path);
	for (struct dirent *e; d && (e = readdir(d));) {
		ssize_t n;
		snprintf(path, sizeof path, "/proc/%d/%s/%s%s", pid, folder, e->d_name, file);
		int fd = *file ? open(path, O_RDONLY) : -1;
		n = fd < 0 ? readlink(path, text, sizeof text - 1) : read(fd, text, sizeof text - 1);
		close(fd);
		if (n < 1 || e->d_name[0] == '.')
			continue;
		text[n] = 0;
		text[strcspn(text, "\n")] = 0;
		fprintf(stderr, "  %s %s: %s\n", folder, e->d_name, text);
	}
	if (d)
		closedir(d);
}

void describe(pid_t pid)
{
	char line[4352];
	FILE *maps = open_maps(pid);

	fprintf(stderr, "process %d has\n", pid);
	while (fgets(line, sizeof line, maps))
		if (strstr(line, "libcuda") || strstr(line, "nvidia"))
			fprintf(stderr, "  %s", line);
	fclose(maps);
	list(pid, "fd", "");
	list(pid, "task", "/comm");
}

size_t largest_anonymous(pid_t pid, unsigned long *start)
{
	char line[4352], perms[8], path[300];
	unsigned long from, to;
	size_t largest = 0;
	FILE *maps = open_maps(pid);

	while (fgets(line, sizeof line, maps)) {
		int fields = sscanf(line, "%lx-%lx %7s %*s %*s %*s %299s", &from, &to, perms, path);
		if (fields != 3 || strcmp(perms, "rw-p") || to - from <= largest)
			continue;
		largest = to - from;
		*start = from;
	}
	fclose(maps);
	return largest;
}

bool is_thread_of(pid_t pid, int tid)
{
	char path[64];
	snprintf(path, sizeof path, "/proc/%d/task/%d", pid, tid);
	return !access(path, F_OK);
}

// The devices that can stand in for a GPU: opening one does nothing, and CRIU cannot dump it.
static dev_t harmless(void)
{
	static const char *const names[] = {"/dev/loop-control", "/dev/fuse", "/dev/cpu_dma_latency",
	                                    "/dev/vsock", "/dev/hpet"};
	static dev_t chosen;
	struct stat st;

	for (size_t i = 0; !chosen && i < sizeof names / sizeof *names; i++) {
		int fd = stat(names[i], &st) || !S_ISCHR(st.st_mode) ? -1 : open(names[i], O_RDONLY);
		if (fd < 0)
			continue;
		close(fd);
		chosen = st.st_rdev;
	}
	if (!chosen)
		die("no device can stand in for a GPU");
	return chosen;
}

static const char *node(int minor)
{
	static char path[128];
	if (minor < 0)
		snprintf(path, sizeof path, "%s/nvidiactl", dev_folder);
	else
		snprintf(path, sizeof path, "%s/nvidia%d", dev_folder, minor);
	return path;
}

void add_node(int minor)
{
	if (mknod(node(minor), S_IFCHR | 0666, harmless()))
		die("%s: %s", node(minor), strerror(errno));
}

void remove_node(int minor)
{
	unlink(node(minor));
}

CUuuid uuid_of(int minor)
{
	CUuuid u = {{0x5a, 0xf7, 0xc0, 0xda, 0, 0, 0x40, 0, 0x80, 0}};
	u.bytes[15] = (unsigned char)minor;
	return u;
}
