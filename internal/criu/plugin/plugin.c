// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0
//
// gpuckpt_criu.so: a CRIU plugin with three jobs. The shim puts it, or a link to it, into the
// directory that CRIU's option libdir names, beside a file gpuckpt.conf. Without that file the
// plugin does nothing.
//
// 1. Files of GPU devices in processes without CUDA state: children that were forked after CUDA or
//    NVML began. CRIU cannot dump such a character device by itself.
//    At a dump the plugin notes which device each file is (gpuckpt-files.txt among the images). At
//    a restore it opens the device of the same path anew, with the numbers that the new container
//    has for it. The driver knows nothing of a file that was opened anew: a call by it answers an
//    error until the library is initialised again.
//    A line of that file may also have "semaphore COUNT" in the place of a device: an eventfd whose
//    reads take one (EFD_SEMAPHORE), which CRIU would make one whose reads take all; or "counter COUNT": one
//    that counts further than 32 bits, which CRIU would cut off; or "timer FLAGS TIME INTERVAL TICKS": a timer
//    with a time of the day, which CRIU would have come later by as long as the container was down. Both times are
//    seconds and nanoseconds.
//
// 2. The gate. After CRIU has restored all processes it holds each of their threads by ptrace, at
//    the last system call before the program goes on, and calls the plugin for each process. The
//    plugin then tells the shim, and waits until the shim lets it go: meanwhile the shim has the
//    driver restore the GPU state. No thread of the program runs before that but those that the
//    shim asks for, one by one: the driver's restore threads.
//
// 3. The sandbox: for a restore it takes CRIU to a root without the host's files (sandbox.c).
//
// leave_out.c, told.c and mounts.c are no part of the plugin: they work in a CRIU that the library was
// loaded into before, the first two in a dump and the last one in a restore.
//
// gpuckpt.conf, one entry a line, fields separated by a tab; for those of the sandbox see there:
//   device PATH MAJOR MINOR     a device of the container; PATH as the container sees it
//   gate                        the shim listens at gpuckpt.sock in the same directory
//
// The protocol at the gate is lines of text, one request, one answer:
//   plugin: "restored PID"      once; PID is the container's first process
//   shim:   "free TID"          let the thread run, untraced        plugin: "ok" or "error ..."
//   shim:   "loose TID"         let it run as the program's         plugin: "ok" or "error ..."
//   shim:   "hold TID"          stop it again                       plugin: "ok" or "error ..."
//   shim:   "call TID NR A B C D E F"  have it make a system call   plugin: "result N" or "error ..."
//   shim:   "go"                CRIU lets all threads go            no answer
// If the connection ends before "go", the plugin kills every process: without its GPU state the
// program must not run.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "sandbox.h"

// CRIU's plugin interface, criu/include/criu-plugin.h of CRIU 4.2, interface version 0.2.0. A CRIU
// with more hooks accepts a plugin that names fewer.

enum {
	HOOK_DUMP_EXT_FILE = 2,
	HOOK_RESTORE_EXT_FILE = 3,
	HOOK_HANDLE_DEVICE_VMA = 7,
	HOOK_UPDATE_VMA_MAP = 8,
	HOOK_RESUME_DEVICES_LATE = 9,
	HOOK_MAX = 10,
};
enum { STAGE_DUMP, STAGE_PRE_DUMP, STAGE_RESTORE };

typedef struct {
	const char *name;
	int (*init)(int stage);
	void (*exit)(int stage, int ret);
	unsigned int version;
	unsigned int max_hooks;
	void *hooks[HOOK_MAX];
} cr_plugin_desc_t;

// Weak: leave_out.c has this library loaded into programs that CRIU runs, too.
extern int criu_get_image_dir(void) __attribute__((weak));
// Of compel, which CRIU is linked with (compel/include/uapi/infect.h): only a tracer has a thread
// make a call, and CRIU is that.
extern void *compel_prepare(int pid) __attribute__((weak));
extern int compel_mode_native(void *ctl) __attribute__((weak));
extern int compel_syscall(void *ctl, int nr, long *ret, unsigned long a, unsigned long b, unsigned long c, unsigned long d,
			  unsigned long e, unsigned long f) __attribute__((weak));
extern void print_on_level(unsigned int level, const char *format, ...) __attribute__((weak, format(printf, 2, 3)));

enum { LOG_ERROR = 1, LOG_WARN = 2, LOG_INFO = 3 }; // criu/include/log.h
#define say(level, format, ...) print_on_level(level, "gpuckpt: " format "\n", ##__VA_ARGS__)

static const char files_name[] = "gpuckpt-files.txt";

struct device {
	char path[256];
	dev_t rdev;
};

// More devices than a container can have: 256 minors of NVIDIA's and as many capabilities.
enum { MAX_DEVICES = 1024 };
static struct device devices[MAX_DEVICES];
static int device_count;
static char directory[PATH_MAX];
static bool has_gate;
static int stage_now;

static int read_settings(void)
{
	Dl_info self;
	if (!dladdr(&devices, &self) || !self.dli_fname)
		return -1;
	snprintf(directory, sizeof(directory), "%s", self.dli_fname);
	char *slash = strrchr(directory, '/');
	if (!slash)
		return -1;
	*slash = 0;

	char path[PATH_MAX + 32], line[2 * PATH_MAX];
	snprintf(path, sizeof(path), "%s/gpuckpt.conf", directory);
	FILE *f = fopen(path, "re");
	if (!f)
		return errno == ENOENT ? 0 : -1;
	int bad = 0;
	while (fgets(line, sizeof(line), f)) {
		struct device d;
		unsigned int major, minor;
		line[strcspn(line, "\n")] = 0;
		int taken = sandbox_line(line);
		if (!strcmp(line, "gate")) {
			has_gate = true;
		} else if (taken > 0) {
			continue;
		} else if (!taken && sscanf(line, "device\t%255[^\t]\t%u\t%u", d.path, &major, &minor) == 3 &&
			   device_count < MAX_DEVICES) {
			d.rdev = makedev(major, minor);
			devices[device_count++] = d;
		} else {
			say(LOG_ERROR, "%s: bad line \"%s\"", path, line);
			bad = -1;
		}
	}
	fclose(f);
	return bad;
}

static int start(int stage)
{
	stage_now = stage;
	if (read_settings())
		return -1;
	return stage == STAGE_RESTORE ? sandbox_enter() : 0;
}

static const struct device *device_by_path(const char *path)
{
	for (int i = 0; i < device_count; i++)
		if (!strcmp(devices[i].path, path))
			return &devices[i];
	return NULL;
}

// device_of returns the device of an open file: by its numbers, and by the name that it was opened
// by where several nodes have the same numbers.
static const struct device *device_of(int fd, dev_t rdev)
{
	char link[64], name[256];
	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	ssize_t n = readlink(link, name, sizeof(name) - 1);
	name[n < 0 ? 0 : n] = 0;
	const struct device *named = device_by_path(name);
	if (named && named->rdev == rdev)
		return named;
	for (int i = 0; i < device_count; i++)
		if (devices[i].rdev == rdev)
			return &devices[i];
	return NULL;
}

// is_gpu reports whether a path is a GPU's own node, /dev/nvidiaN.
static bool is_gpu(const char *path)
{
	static const char prefix[] = "/dev/nvidia";
	const char *digits = path + strlen(prefix);
	return !strncmp(path, prefix, strlen(prefix)) && *digits && strspn(digits, "0123456789") == strlen(digits);
}

// device_for returns the device that a restored file is opened on: the one of its path, or for a
// GPU that the new container does not have any GPU that it has. The process could use neither.
static const struct device *device_for(const char *path)
{
	const struct device *d = device_by_path(path);
	for (int i = 0; !d && is_gpu(path) && i < device_count; i++)
		if (is_gpu(devices[i].path))
			d = &devices[i];
	return d;
}

// dump_file notes the device of a file that CRIU cannot dump.
static int dump_file(int fd, int id)
{
	struct stat st;
	if (fstat(fd, &st) || !S_ISCHR(st.st_mode))
		return -ENOTSUP;
	const struct device *d = device_of(fd, st.st_rdev);
	if (!d)
		return -ENOTSUP;
	int flags = fcntl(fd, F_GETFL);
	if (flags < 0)
		return -errno;
	int out = openat(criu_get_image_dir(), files_name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	if (out < 0) {
		say(LOG_ERROR, "open %s: %s", files_name, strerror(errno));
		return -1;
	}
	char line[512];
	int n = snprintf(line, sizeof(line), "%d\t%d\t%s\n", id, flags & (O_ACCMODE | O_NONBLOCK), d->path);
	int err = write(out, line, n) != n;
	if (close(out) || err) {
		say(LOG_ERROR, "write %s: %s", files_name, strerror(errno));
		return -1;
	}
	say(LOG_INFO, "file %#x is %s", id, d->path);
	return 0;
}

// open_device opens a device by its numbers in this container. The node in the restored /dev may
// still have the numbers of another GPU, node or boot: then a node is made, opened and removed.
static int open_device(const struct device *d, int flags)
{
	struct stat st;
	if (!stat(d->path, &st) && S_ISCHR(st.st_mode) && st.st_rdev == d->rdev)
		return open(d->path, flags | O_CLOEXEC);
	char name[64];
	snprintf(name, sizeof(name), "/dev/.gpuckpt-%d", getpid());
	if (mknod(name, S_IFCHR | 0600, d->rdev))
		return -1;
	int fd = open(name, flags | O_CLOEXEC);
	int err = errno;
	unlink(name);
	errno = err;
	return fd;
}

// make_counter makes an eventfd.
static int make_counter(uint64_t count, int kind, int flags)
{
	int fd = eventfd(0, kind | EFD_CLOEXEC | (flags & O_NONBLOCK ? EFD_NONBLOCK : 0));
	if (fd >= 0 && count && write(fd, &count, sizeof(count)) != sizeof(count)) {
		close(fd);
		return -1;
	}
	return fd;
}

#ifndef TFD_IOC_SET_TICKS // linux/timerfd.h, which libc's headers do not go with
#define TFD_IOC_SET_TICKS _IOW('T', 0, uint64_t)
#endif

// make_timer makes a timer with a time of the day.
static int make_timer(int how, const struct itimerspec *when, uint64_t ticks, int flags)
{
	int fd = timerfd_create(CLOCK_REALTIME, TFD_CLOEXEC | (flags & O_NONBLOCK ? TFD_NONBLOCK : 0));
	if (fd >= 0 && (timerfd_settime(fd, how, when, NULL) || (ticks && ioctl(fd, TFD_IOC_SET_TICKS, &ticks)))) {
		close(fd);
		return -1;
	}
	return fd;
}

// restore_file opens a dumped file's device anew.
static int restore_file(int id, bool *retry)
{
	*retry = false;
	int in = openat(criu_get_image_dir(), files_name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
	if (in < 0)
		return -ENOTSUP;
	FILE *f = fdopen(in, "r");
	if (!f) {
		close(in);
		return -1;
	}
	char line[512], path[256];
	int n, flags, how, fd = -ENOTSUP;
	uint64_t count;
	struct itimerspec when;
	while (fgets(line, sizeof(line), f)) {
		if (sscanf(line, "%d\t%d\t%255[^\n]", &n, &flags, path) != 3 || n != id)
			continue;
		if (sscanf(path, "semaphore %" SCNu64, &count) == 1) {
			fd = make_counter(count, EFD_SEMAPHORE, flags);
			break;
		}
		if (sscanf(path, "counter %" SCNu64, &count) == 1) {
			fd = make_counter(count, 0, flags);
			break;
		}
		if (sscanf(path, "timer %d %ld %ld %ld %ld %" SCNu64, &how, &when.it_value.tv_sec, &when.it_value.tv_nsec, &when.it_interval.tv_sec, &when.it_interval.tv_nsec, &count) == 6) {
			fd = make_timer(how, &when, count, flags);
			break;
		}
		const struct device *d = device_for(path);
		if (!d) {
			say(LOG_ERROR, "file %#x is %s, which this container does not have", id, path);
			fd = -1;
			break;
		}
		fd = open_device(d, flags & (O_ACCMODE | O_NONBLOCK));
		if (fd < 0)
			say(LOG_ERROR, "open %s for file %#x: %s", path, id, strerror(errno));
		break;
	}
	fclose(f);
	return fd;
}

// handle_map accepts a mapping of a GPU device. Its content is the device's: a process without
// CUDA state cannot use it, see update_map.
static int handle_map(int fd, const struct stat *st)
{
	return S_ISCHR(st->st_mode) && device_of(fd, st->st_rdev) ? 0 : -ENOTSUP;
}

// update_map puts zeros where a mapping of a device was.
static int update_map(const char *path, const uint64_t addr, const uint64_t old_offset, uint64_t *new_offset, int *fd)
{
	if (!device_for(path))
		return -ENOTSUP;
	*fd = open("/dev/zero", O_RDWR | O_CLOEXEC);
	if (*fd < 0)
		return -1;
	*new_offset = old_offset;
	say(LOG_INFO, "mapping of %s at %#lx is zeros now", path, (unsigned long)addr);
	return 1;
}

enum { GATE_CLOSED, GATE_OPEN, GATE_BROKEN };
static int gate_state = GATE_CLOSED;

static int connect_gate(void)
{
	// By a descriptor of the directory: the path of a bundle is longer than an address may be.
	int dir = open(directory, O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (dir < 0)
		return -1;
	struct sockaddr_un at = { .sun_family = AF_UNIX };
	snprintf(at.sun_path, sizeof(at.sun_path), "/proc/self/fd/%d/gpuckpt.sock", dir);
	int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (s >= 0 && connect(s, (struct sockaddr *)&at, sizeof(at))) {
		close(s);
		s = -1;
	}
	close(dir);
	return s;
}

// A thread that runs for the driver while the gate is closed: its signal mask, to be given back.
enum { MAX_FREE = 256 };
static struct {
	int tid;
	uint64_t mask;
} freed[MAX_FREE];

// Threads and children that loose threads have made. They stand still until the gate opens.
enum { MAX_MADE = 256 };
static int made[MAX_MADE];
static int made_count;

// The last thread that made a call, see call_in.
static struct {
	int tid;
	void *ctl;
} last;

// free_thread lets go of a thread that CRIU holds. It blocks all signals meanwhile: a handler of
// the program's must not run in it.
static int free_thread(int tid)
{
	uint64_t all = ~0ull;
	for (int i = 0; i < MAX_FREE; i++) {
		if (freed[i].tid)
			continue;
		if (ptrace(PTRACE_GETSIGMASK, tid, sizeof(freed[i].mask), &freed[i].mask) ||
		    ptrace(PTRACE_SETSIGMASK, tid, sizeof(all), &all) || ptrace(PTRACE_DETACH, tid, NULL, NULL))
			return -errno;
		freed[i].tid = tid;
		return 0;
	}
	return -ENOSPC;
}

// loosen_thread has a thread that CRIU holds run as the program's. It stops where it makes another one, or ends.
static int loosen_thread(int tid)
{
	long stops = PTRACE_O_TRACECLONE | PTRACE_O_TRACEFORK | PTRACE_O_TRACEVFORK | PTRACE_O_TRACEEXIT;
	if (last.tid == tid) // its registers will be others
		last.tid = 0;
	return ptrace(PTRACE_SETOPTIONS, tid, NULL, stops) || ptrace(PTRACE_CONT, tid, NULL, NULL) ? -errno : 0;
}

// await_stop waits until a traced thread stands still, for five seconds at most: one that waits in the kernel
// for a child of vfork, or for a disk, may take longer.
static int await_stop(int tid, int *status)
{
	for (int looks = 0; looks < 25000; looks++) {
		int got = waitpid(tid, status, __WALL | WNOHANG);
		if (got == tid)
			return WIFSTOPPED(*status) ? 0 : -ESRCH;
		if (got < 0 && errno != EINTR)
			return -errno;
		usleep(200);
	}
	return -ETIMEDOUT;
}

// tighten_thread stops a loose thread again, and takes what it has made.
static int tighten_thread(int tid)
{
	int status, err;
	if (ptrace(PTRACE_INTERRUPT, tid, NULL, NULL))
		return -errno;
	for (;;) {
		unsigned long new;
		if ((err = await_stop(tid, &status)))
			return err;
		int event = status >> 16;
		switch (event) {
		case 0: // a signal was first: the thread has it, and stops then
			if (ptrace(PTRACE_CONT, tid, NULL, (void *)(long)WSTOPSIG(status)))
				return -errno;
			continue;
		case PTRACE_EVENT_CLONE:
		case PTRACE_EVENT_FORK:
		case PTRACE_EVENT_VFORK:
			if (ptrace(PTRACE_GETEVENTMSG, tid, NULL, &new))
				return -errno;
			if ((err = await_stop((int)new, &status)) && err != -ESRCH)
				return err;
			if (!err && made_count == MAX_MADE)
				return -ENOSPC;
			if (!err)
				made[made_count++] = (int)new;
			if (event == PTRACE_EVENT_VFORK)
				return 0; // it would wait for the child, which stands still
			if (ptrace(PTRACE_CONT, tid, NULL, NULL)) // it stops as it was asked to, and may be loosened again
				return -errno;
			continue;
		}
		return 0;
	}
}

// hold_thread stops a thread that runs: one for the driver as CRIU left it.
static int hold_thread(int tid)
{
	for (int i = 0; i < MAX_FREE; i++) {
		int status, err;
		if (freed[i].tid != tid)
			continue;
		if (ptrace(PTRACE_SEIZE, tid, NULL, NULL) || ptrace(PTRACE_INTERRUPT, tid, NULL, NULL))
			return -errno;
		if ((err = await_stop(tid, &status)))
			return err;
		if (ptrace(PTRACE_SETSIGMASK, tid, sizeof(freed[i].mask), &freed[i].mask))
			return -errno;
		freed[i].tid = 0;
		return 0;
	}
	return tighten_thread(tid);
}

// call_in has a thread that CRIU holds make a system call. The thread is as it was before. What it takes is
// kept for the next call of the same thread: compel has no call that lets go of it.
static int call_in(int tid, int nr, const unsigned long arg[6], long *result)
{
	if (!compel_prepare || !compel_mode_native || !compel_syscall)
		return -ENOSYS;
	if (last.tid != tid) {
		last.tid = 0;
		last.ctl = compel_prepare(tid);
		if (!last.ctl)
			return -EIO;
		last.tid = tid;
	}
	if (!compel_mode_native(last.ctl))
		return -ENOEXEC; // a 32-bit program has other numbers
	// A SIGSTOP that waits, which nothing can block, comes in between and is gone then.
	for (int again = 0; again < 2; again++) {
		siginfo_t stop;
		if (!compel_syscall(last.ctl, nr, result, arg[0], arg[1], arg[2], arg[3], arg[4], arg[5]))
			return again && kill(tid, SIGSTOP) ? -errno : 0;
		if (ptrace(PTRACE_GETSIGINFO, tid, NULL, &stop) || stop.si_signo != SIGSTOP)
			break;
	}
	return -EIO;
}

static int wait_at_gate(int pid)
{
	int s = sandbox_missing() ? -1 : connect_gate();
	if (s < 0) {
		say(LOG_ERROR, "no shim at the gate: %s", strerror(errno));
		return GATE_BROKEN;
	}
	char text[128];
	int n = snprintf(text, sizeof(text), "restored %d", pid);
	int state = GATE_BROKEN;
	if (send(s, text, n, MSG_NOSIGNAL) == n) {
		for (;;) {
			int tid, nr, err;
			unsigned long arg[6];
			long result = 0;
			n = recv(s, text, sizeof(text) - 1, 0);
			if (n < 0 && errno == EINTR)
				continue;
			if (n <= 0)
				break;
			text[n] = 0;
			if (!strcmp(text, "go")) {
				state = GATE_OPEN;
				break;
			}
			if (sscanf(text, "free %d", &tid) == 1)
				err = free_thread(tid);
			else if (sscanf(text, "loose %d", &tid) == 1)
				err = loosen_thread(tid);
			else if (sscanf(text, "hold %d", &tid) == 1)
				err = hold_thread(tid);
			else if (sscanf(text, "call %d %d %lx %lx %lx %lx %lx %lx", &tid, &nr, &arg[0], &arg[1], &arg[2], &arg[3], &arg[4], &arg[5]) == 8)
				err = call_in(tid, nr, arg, &result);
			else
				err = -EINVAL;
			if (!err && !strncmp(text, "call ", 5))
				n = snprintf(text, sizeof(text), "result %ld", result);
			else if (err)
				n = snprintf(text, sizeof(text), "error %s", strerror(-err));
			else
				n = snprintf(text, sizeof(text), "ok");
			if (send(s, text, n, MSG_NOSIGNAL) != n)
				break;
		}
	}
	if (state == GATE_BROKEN)
		say(LOG_ERROR, "the shim left the gate: the processes are killed");
	while (made_count) { // CRIU knows nothing of these
		int tid = made[--made_count];
		if (state == GATE_BROKEN)
			kill(tid, SIGKILL); // its process
		ptrace(PTRACE_DETACH, tid, NULL, NULL);
	}
	close(s);
	return state;
}

// resume_late is called for each process, the first one of the container first. CRIU ignores what
// it returns.
static int resume_late(int pid)
{
	if (!has_gate)
		return -ENOTSUP;
	if (gate_state == GATE_CLOSED)
		gate_state = wait_at_gate(pid);
	if (gate_state == GATE_BROKEN)
		kill(pid, SIGKILL);
	return 0;
}

__attribute__((visibility("default"))) cr_plugin_desc_t CR_PLUGIN_DESC = {
	.name = "gpuckpt",
	.init = start,
	.version = 2 << 8, // 0.2.0
	.max_hooks = HOOK_MAX,
	.hooks = {
		[HOOK_DUMP_EXT_FILE] = dump_file,
		[HOOK_RESTORE_EXT_FILE] = restore_file,
		[HOOK_HANDLE_DEVICE_VMA] = handle_map,
		[HOOK_UPDATE_VMA_MAP] = update_map,
		[HOOK_RESUME_DEVICES_LATE] = resume_late,
	},
};
