// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Enters the mount and pid namespaces of the process whose pid is in the
// environment variable _GPUCKPT_JOIN, before the Go runtime starts: setns to a
// mount namespace is refused to a program with several threads, and only
// children of the caller of setns are in the new pid namespace.
//
// The order is the one that works with the real driver: load the host's
// libraries, join both namespaces, fork, and let the child call cuInit. The
// container's own driver files need not match, or be there at all. (Joining the
// mount namespace alone makes cuInit answer 304.)
//
// NVIDIA's libraries make the nodes of all GPUs in /dev if they may. The
// container is not to keep those that it did not have: the parent, which is in
// its mount namespace as well, removes them at the child's end.
//
// From then on every file name means a file of the container's, which may be
// hostile, while this program is the host's root. So nothing of it is run here:
// libraries that the driver asks for and that are not loaded yet are not found
// (dlopen below), no program is executed, and no file is mapped to be executed
// (stay_host).

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define JOIN_ENV "_GPUCKPT_JOIN"
#define DRIVER_ENV "_GPUCKPT_DRIVER_DIR"
#define SOCKET_FD 3

static void die(const char *what, const char *why)
{
	fprintf(stderr, "gpuckpt-cuda-helper: %s: %s\n", what, why);
	_exit(1);
}

static int open_ns(long pid, const char *kind)
{
	char path[64];
	snprintf(path, sizeof path, "/proc/%ld/ns/%s", pid, kind);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		die(path, strerror(errno));
	return fd;
}

// The names of NVIDIA's device nodes directly in /dev. There are fewer than 64
// on any machine with up to 16 GPUs; of more, the rest is left alone.
#define MAX_NODES 64
static char had[MAX_NODES][32];
static int had_count;

static int is_node(int dev, const char *name)
{
	struct stat st;
	return !strncmp(name, "nvidia", 6) && strlen(name) < sizeof had[0] &&
		!fstatat(dev, name, &st, AT_SYMLINK_NOFOLLOW) && S_ISCHR(st.st_mode);
}

static void each_node(void (*what)(int dev, const char *name))
{
	DIR *dir = opendir("/dev");
	if (dir == NULL)
		return;
	for (struct dirent *e; (e = readdir(dir)) != NULL;)
		if (is_node(dirfd(dir), e->d_name))
			what(dirfd(dir), e->d_name);
	closedir(dir);
}

static void note_node(int dev, const char *name)
{
	(void)dev;
	if (had_count < MAX_NODES)
		strcpy(had[had_count++], name);
}

static void drop_node(int dev, const char *name)
{
	if (had_count == MAX_NODES)
		return;
	for (int i = 0; i < had_count; i++)
		if (!strcmp(had[i], name))
			return;
	if (unlinkat(dev, name, 0) < 0)
		fprintf(stderr, "gpuckpt-cuda-helper: remove /dev/%s, which the driver made in the container: %s\n", name, strerror(errno));
}

// The parent's rest of life: wait for the child and end as it ended. When the
// parent is killed instead, the child's PDEATHSIG kills the child.
static void wait_for(pid_t child)
{
	int status;
	// Only the child may hold the socket: its end must be seen at the far end.
	close(SOCKET_FD);
	while (waitpid(child, &status, 0) < 0)
		if (errno != EINTR)
			die("wait for joined helper", strerror(errno));
	each_node(drop_node);
	if (WIFSIGNALED(status)) {
		signal(WTERMSIG(status), SIG_DFL);
		raise(WTERMSIG(status));
		_exit(128 + WTERMSIG(status));
	}
	_exit(WEXITSTATUS(status));
}

static int joined;

// Where the driver's libraries are; NULL where the loader finds them.
static const char *driver_dir;

// driver_file returns the path of a driver's library in driver_dir, or file itself.
static const char *driver_file(const char *file, char *path, size_t size)
{
	if (driver_dir == NULL || file == NULL || strchr(file, '/') != NULL ||
	    (strncmp(file, "libcuda", 7) && strncmp(file, "libnvidia", 9)))
		return file;
	int n = snprintf(path, size, "%s/%s", driver_dir, file);
	return n > 0 && (size_t)n < size && !access(path, F_OK) ? path : file;
}

// The driver's libraries call this one before the C library's. Only they are looked for in
// driver_dir: beside them may be a whole system's libraries, which must not mix with the host's.
// After the join a library is found by its name alone, because it is loaded already.
__attribute__((visibility("default"))) void *dlopen(const char *file, int mode)
{
	static void *(*next)(const char *, int);

	if (next == NULL) {
		void *found = dlsym(RTLD_NEXT, "dlopen");
		if (found == NULL)
			die("dlopen", "the C library has none");
		memcpy(&next, &found, sizeof next);
	}
	char path[4096];
	if (joined)
		return next(file, file != NULL ? mode | RTLD_NOLOAD : mode);
	return next(driver_file(file, path, sizeof path), mode);
}

#if defined(__x86_64__)
#define THIS_ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define THIS_ARCH AUDIT_ARCH_AARCH64
#endif

// Refuses to execute a program, or to map a file so that it can be executed; see
// seccomp(2). Memory without a file stays as it was: the driver may compile.
static void stay_host(void)
{
	const unsigned refuse = SECCOMP_RET_ERRNO | EACCES;
	struct sock_filter rules[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, THIS_ARCH, 0, 6), // another's calls have other numbers
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_execve, 4, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_execveat, 3, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mmap, 0, 3),
		// The low halves, of a little-endian machine.
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2])),
		BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, PROT_EXEC, 2, 1),
		BPF_STMT(BPF_RET | BPF_K, refuse),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[3])),
		BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, MAP_ANONYMOUS, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
		BPF_STMT(BPF_RET | BPF_K, refuse),
	};
	struct sock_fprog program = { .len = sizeof rules / sizeof *rules, .filter = rules };
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) < 0)
		die("keep the container's programs out", strerror(errno));
}

// The capabilities that the child keeps: to make, own and open device nodes, to look at and to signal
// processes of any user, to lock memory, to administer the GPU. A process of the container that came
// to control the child would have no more than these.
static const int kept[] = {
	CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER, CAP_KILL, CAP_IPC_LOCK, CAP_IPC_OWNER,
	CAP_SYS_PTRACE, CAP_SYS_ADMIN, CAP_SYS_NICE, CAP_SYS_RESOURCE, CAP_MKNOD,
};

static void drop_capabilities(void)
{
	unsigned long long keep = 0;
	for (size_t i = 0; i < sizeof kept / sizeof *kept; i++)
		keep |= 1ull << kept[i];
	for (int cap = 0; prctl(PR_CAPBSET_READ, cap) >= 0; cap++)
		if (!(keep >> cap & 1) && prctl(PR_CAPBSET_DROP, cap) < 0)
			die("drop a capability", strerror(errno));
	struct __user_cap_header_struct head = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct have[2];
	if (syscall(SYS_capget, &head, have) < 0)
		die("read capabilities", strerror(errno));
	for (int i = 0; i < 2; i++) {
		have[i].permitted &= keep >> 32 * i;
		have[i].effective = have[i].permitted;
		have[i].inheritable = 0;
	}
	if (syscall(SYS_capset, &head, have) < 0)
		die("drop capabilities", strerror(errno));
}

__attribute__((constructor)) static void gpuckpt_join(void)
{
	const char *dir = getenv(DRIVER_ENV);
	if (dir != NULL && *dir == '/')
		driver_dir = dir;
	const char *env = getenv(JOIN_ENV);
	if (env == NULL || *env == '\0')
		return;
	char *end;
	errno = 0;
	long pid = strtol(env, &end, 10);
	if (errno != 0 || *end != '\0' || pid <= 0)
		die(JOIN_ENV, "not a pid");
	unsetenv(JOIN_ENV);

	// They stay loaded; a later dlopen by the same name finds them. A missing
	// one is reported when the driver is asked for.
	dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
	dlopen("libnvidia-ml.so.1", RTLD_LAZY | RTLD_GLOBAL);

	// From here on it is in the container's /proc: only who may trace processes of any user may look
	// at it, or attach to it.
	if (prctl(PR_SET_DUMPABLE, 0) < 0)
		die("hide from the container", strerror(errno));
	int mnt = open_ns(pid, "mnt"), pidns = open_ns(pid, "pid");
	int alive[2]; // its far end closes when the parent dies
	if (pipe2(alive, O_CLOEXEC) < 0)
		die("make pipe", strerror(errno));
	if (setns(mnt, CLONE_NEWNS) < 0)
		die("join mount namespace", strerror(errno));
	if (setns(pidns, CLONE_NEWPID) < 0)
		die("join pid namespace", strerror(errno));
	close(mnt);
	close(pidns);
	each_node(note_node);

	pid_t child = fork();
	if (child < 0)
		die("fork into pid namespace", strerror(errno));
	if (child > 0) {
		close(alive[0]);
		wait_for(child);
	}
	if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0)
		die("tie to parent", strerror(errno));
	// The parent may have died before the line above; getppid cannot tell,
	// since it is 0 for a parent outside the pid namespace.
	close(alive[1]);
	struct pollfd far = { .fd = alive[0], .events = POLLIN };
	if (poll(&far, 1, 0) != 0)
		_exit(1);
	close(alive[0]);
	joined = 1;
	drop_capabilities();
	stay_host();
}
