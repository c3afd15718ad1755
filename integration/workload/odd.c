// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// States of a process that are legal and rare, one a run: what CRIU does not carry, or refuses. A request
// is answered "same", or with what differs from what the program has set.

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/landlock.h>
#include <linux/mempolicy.h>
#include <linux/perf_event.h>
#include <linux/userfaultfd.h>
#include <mqueue.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "udp.h"
#include "workloads.h"

#define must(call) must_((long)(call), #call)

static long must_(long result, const char *call)
{
	if (result < 0) {
		fprintf(stderr, "gpuwork: %s: %s\n", call, strerror(errno));
		exit(1);
	}
	return result;
}

static int a, b; // descriptors of a state
static const char *path;

static int make_file(const char *name, int flags)
{
	int fd = (int)must(open(name, O_RDWR | O_CREAT | O_EXCL, 0640));

	must(write(fd, "0123456789", 10));
	close(fd);
	return (int)must(open(name, flags));
}

// on_path writes the path of the state's file and a suffix into an array.
#define on_path(to, suffix) must(snprintf(to, sizeof(to), "%s%s", path, suffix))

// A file of two names, open by the one that is gone; the other is in another directory.
static void other_name(void)
{
	char other[4096];

	on_path(other, ".d");
	must(mkdir(other, 0755));
	on_path(other, ".d/other");
	a = make_file(path, O_RDWR);
	must(lseek(a, 5, SEEK_SET));
	must(link(path, other));
	must(unlink(path));
}

static const char *other_name_same(void)
{
	char other[4096], text[11] = "";
	struct stat one, two;

	on_path(other, ".d/other");
	must(fstat(a, &one));
	if (stat(other, &two) || one.st_ino != two.st_ino || one.st_dev != two.st_dev)
		return "another file";
	if (lseek(a, 0, SEEK_CUR) != 5 || pread(a, text, 10, 0) != 10 || strcmp(text, "0123456789"))
		return "content or offset";
	return "same";
}

// A directory and a file in it are watched.
static void watch(void)
{
	char file[4096];

	on_path(file, "/file");
	must(mkdir(path, 0755));
	b = (int)must(open(file, O_CREAT | O_WRONLY | O_APPEND, 0644));
	a = (int)must(inotify_init1(IN_NONBLOCK));
	must(inotify_add_watch(a, file, IN_MODIFY));
	must(inotify_add_watch(a, path, IN_CREATE));
	must(inotify_add_watch(a, "/", IN_CREATE));
}

static const char *watch_same(void)
{
	char file[4096], events[4096];
	int seen = 0;

	while (read(a, events, sizeof events) > 0)
		;
	on_path(file, "/new");
	must(write(b, "x", 1));
	close((int)must(open(file, O_CREAT | O_WRONLY, 0644)));
	must(unlink(file));
	close((int)must(open("/new", O_CREAT | O_WRONLY, 0644)));
	must(unlink("/new"));
	ssize_t n = read(a, events, sizeof events);
	for (ssize_t at = 0; at < n;) {
		struct inotify_event *e = (void *)(events + at);
		seen |= 1 << e->wd;
		at += (ssize_t)(sizeof *e + e->len);
	}
	return seen == (1 << 1 | 1 << 2 | 1 << 3) ? "same" : "an event is missing";
}

// A log, open as loggers do.
static void append(void) { a = (int)must(open(path, O_WRONLY | O_CREAT | O_APPEND, 0640)); }

static const char *append_same(void)
{
	struct stat open, named;

	must(write(a, "line\n", 5));
	must(fstat(a, &open));
	if (stat(path, &named) || open.st_ino != named.st_ino)
		return "another file has the name";
	return "same";
}

// A processor of those that it may use, the last one.
static cpu_set_t one;

__attribute__((noreturn)) static void *wait_for_ever(void *unused)
{
	(void)unused;
	must(sched_setaffinity(0, sizeof one, &one));
	must(prctl(PR_SET_TIMERSLACK, 1000000));
	must(syscall(SYS_ioprio_set, 1, 0, 2 << 13 | 7));
	b = gettid();
	for (;;)
		pause();
}

static void scheduling(void)
{
	pthread_t thread;
	cpu_set_t all;

	must(sched_getaffinity(0, sizeof all, &all));
	for (int i = 0; i < CPU_SETSIZE; i++)
		if (CPU_ISSET(i, &all)) {
			CPU_ZERO(&one);
			CPU_SET(i, &one);
		}
	must(pthread_create(&thread, NULL, wait_for_ever, NULL));
	while (!*(volatile int *)&b)
		usleep(1000);
	must(prctl(PR_SET_TIMERSLACK, 2000000));
}

static const char *scheduling_same(void)
{
	static char says[128];
	cpu_set_t now;

	must(sched_getaffinity(b, sizeof now, &now));
	snprintf(says, sizeof says, "affinity of %s, I/O priority %ld, timer slack %d", CPU_EQUAL(&now, &one) ? "one" : "all",
	         syscall(SYS_ioprio_get, 1, b) & 7, prctl(PR_GET_TIMERSLACK));
	return says;
}

static void semaphore(void)
{
	a = (int)must(eventfd(3, EFD_SEMAPHORE | EFD_NONBLOCK));
}

static const char *semaphore_same(void)
{
	uint64_t n = 0;

	must(read(a, &n, sizeof n));
	return n == 1 ? "same" : "a read took all";
}

// What comes back different: one state a line of the table in docs/limits.md.
static void memory_policy(void)
{
	unsigned long node = 1;
	must(syscall(SYS_set_mempolicy, MPOL_BIND, &node, 64));
}

static const char *memory_policy_same(void)
{
	int policy = -1;
	must(syscall(SYS_get_mempolicy, &policy, 0, 0, 0, 0));
	return policy == MPOL_BIND ? "same" : "the default";
}

static void lock_future(void) { must(mlockall(MCL_CURRENT | MCL_FUTURE)); }

static const char *lock_future_same(void)
{
	char line[256], *map = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	FILE *f = fopen("/proc/self/smaps", "re");
	unsigned long from, to, locked = 0;
	int ours = 0;

	while (f && fgets(line, sizeof line, f)) {
		if (sscanf(line, "%lx-%lx ", &from, &to) == 2)
			ours = from <= (unsigned long)map && (unsigned long)map < to;
		if (ours && sscanf(line, "Locked: %lu", &locked) == 1)
			break;
	}
	fclose(f);
	return locked >= 1024 ? "same" : "new memory is not locked";
}

static void set_personality(void) { must(personality(ADDR_NO_RANDOMIZE)); }
static const char *personality_same(void) { return personality(0xffffffff) == ADDR_NO_RANDOMIZE ? "same" : "the default"; }

static void merging(void) { must(prctl(67 /* PR_SET_MEMORY_MERGE */, 1, 0, 0, 0)); }
static const char *merging_same(void) { return prctl(68, 0, 0, 0, 0) == 1 ? "same" : "off"; }

static void multicast(void)
{
	struct ip_mreq group = {{inet_addr("239.1.2.3")}, {htonl(INADDR_LOOPBACK)}};
	int ttl = 7;
	a = (int)must(socket(AF_INET, SOCK_DGRAM, 0));
	must(setsockopt(a, IPPROTO_IP, IP_ADD_MEMBERSHIP, &group, sizeof group));
	must(setsockopt(a, IPPROTO_IP, IP_MULTICAST_TTL, &ttl, sizeof ttl));
}

static const char *multicast_same(void)
{
	int ttl = 0;
	socklen_t n = sizeof ttl;
	must(getsockopt(a, IPPROTO_IP, IP_MULTICAST_TTL, &ttl, &n));
	return ttl == 7 ? "same" : "the defaults";
}

static void tcp_options(void)
{
	int timeout = 4321;
	a = (int)must(socket(AF_INET, SOCK_STREAM, 0));
	must(listen(a, 4));
	must(setsockopt(a, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout, sizeof timeout));
}

static const char *tcp_options_same(void)
{
	int timeout = 0;
	socklen_t n = sizeof timeout;
	must(getsockopt(a, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout, &n));
	return timeout == 4321 ? "same" : "the defaults";
}

static void queued_udp(void)
{
	struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t n = sizeof here;
	a = (int)must(socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK, 0));
	must(bind(a, (void *)&here, sizeof here));
	must(getsockname(a, (void *)&here, &n));
	b = (int)must(socket(AF_INET, SOCK_DGRAM, 0));
	must(sendto(b, "x", 1, 0, (void *)&here, sizeof here));
}

static const char *queued_udp_same(void)
{
	char byte;
	return recv(a, &byte, 1, MSG_PEEK) == 1 ? "same" : "lost";
}

static void queued_sender(void)
{
	struct sockaddr_un to = {.sun_family = AF_UNIX}, from = to;
	on_path(to.sun_path, ".to");
	on_path(from.sun_path, ".from");
	a = (int)must(socket(AF_UNIX, SOCK_DGRAM, 0));
	must(bind(a, (void *)&to, sizeof to));
	b = (int)must(socket(AF_UNIX, SOCK_DGRAM, 0));
	must(bind(b, (void *)&from, sizeof from));
	must(sendto(b, "x", 1, 0, (void *)&to, sizeof to));
}

static const char *queued_sender_same(void)
{
	struct sockaddr_un from = {0};
	socklen_t n = sizeof from;
	char byte;
	must(recvfrom(a, &byte, 1, MSG_PEEK, (void *)&from, &n));
	return strlen(from.sun_path) > strlen(path) ? "same" : "without a sender";
}

// The program may make no file below /, unless there is no Landlock.
static void landlock(void)
{
	struct landlock_ruleset_attr attr = {.handled_access_fs = LANDLOCK_ACCESS_FS_MAKE_REG};
	a = (int)syscall(SYS_landlock_create_ruleset, &attr, sizeof attr, 0);
	if (a < 0)
		return;
	must(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	must(syscall(SYS_landlock_restrict_self, a, 0));
	close(a);
}

static const char *landlock_same(void)
{
	if (a < 0)
		return "there is none";
	int fd = open(path, O_CREAT | O_WRONLY, 0600);
	if (fd < 0)
		return "same";
	close(fd);
	return "the domain is gone";
}

static unsigned long long started;

static unsigned long long start_time(void)
{
	unsigned long long at = 0;
	FILE *f = fopen("/proc/self/stat", "re");
	if (f && fscanf(f, "%*d (%*[^)]) %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &at) == 1)
		fclose(f);
	return at;
}

static void note_start(void) { started = start_time(); }
static const char *start_same(void) { return start_time() == started ? "same" : "that of the restore"; }

// What CRIU refuses.
static void seqpacket_pipe(void)
{
	int p[2];
	must(pipe2(p, O_DIRECT));
	must(write(p[1], "ab", 2));
}

static void credentials(void)
{
	int s[2], on = 1;
	must(socketpair(AF_UNIX, SOCK_DGRAM, 0, s));
	must(setsockopt(s[1], SOL_SOCKET, SO_PASSCRED, &on, sizeof on));
	must(write(s[0], "x", 1));
}

static void queue(void)
{
	struct mq_attr attr = {.mq_maxmsg = 4, .mq_msgsize = 64};
	must(mq_open("/odd", O_CREAT | O_RDWR, 0600, &attr));
}

static void secret(void)
{
	a = (int)must(syscall(SYS_memfd_secret, 0));
	must(ftruncate(a, 4096));
	must(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, a, 0) == MAP_FAILED ? -1 : 0);
}

static void perf(void)
{
	struct perf_event_attr attr = {.type = PERF_TYPE_SOFTWARE, .size = sizeof attr, .config = PERF_COUNT_SW_TASK_CLOCK, .exclude_kernel = 1};
	must(syscall(SYS_perf_event_open, &attr, 0, -1, -1, 0));
}

static void faults(void)
{
	struct uffdio_api api = {.api = UFFD_API};
	must(ioctl((int)must(syscall(SYS_userfaultfd, O_CLOEXEC | 1)), UFFDIO_API, &api));
}

static void vm_socket(void) { must(socket(AF_VSOCK, SOCK_STREAM, 0)); }

static void path_of_socket(void)
{
	struct sockaddr_un at = {.sun_family = AF_UNIX};
	on_path(at.sun_path, "");
	must(bind((int)must(socket(AF_UNIX, SOCK_STREAM, 0)), (void *)&at, sizeof at));
	must(open(path, O_PATH));
}

// Another program listens at the path: one of the host's.
static void host_stream(void)
{
	struct sockaddr_un at = {.sun_family = AF_UNIX};
	on_path(at.sun_path, "");
	must(connect((int)must(socket(AF_UNIX, SOCK_STREAM, 0)), (void *)&at, sizeof at));
}

static void host_datagrams(void)
{
	struct sockaddr_un at = {.sun_family = AF_UNIX};
	on_path(at.sun_path, "");
	must(connect((int)must(socket(AF_UNIX, SOCK_DGRAM, 0)), (void *)&at, sizeof at));
}

static void watch_removed(void)
{
	a = (int)must(inotify_init());
	b = make_file(path, O_RDONLY);
	must(inotify_add_watch(a, path, IN_MODIFY));
	must(unlink(path));
}

static void timer_of(pid_t thread)
{
	struct sigevent e = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGWINCH};
	timer_t t;
	e._sigev_un._tid = thread;
	must(timer_create(CLOCK_MONOTONIC, &e, &t));
}

static void first_thread_timer(void) { timer_of(gettid()); }

static void *make_timer(void *unused)
{
	timer_of(gettid());
	return unused;
}

static void ended_thread_timer(void)
{
	pthread_t t;
	must(pthread_create(&t, NULL, make_timer, NULL));
	must(pthread_join(t, NULL));
}

static void others_epoll(void)
{
	int p[2], poll = (int)must(epoll_create1(0));
	struct epoll_event e = {.events = EPOLLIN};
	must(pipe(p));
	must(epoll_ctl(poll, EPOLL_CTL_ADD, p[0], &e));
	if (!must(fork()))
		for (;;)
			pause();
	close(p[0]); // the child has it
}

// Memory of the host's IPC namespace, if the container has that.
static void system_v(void)
{
	int id = (int)must(shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0600));
	must(shmat(id, NULL, 0) == (void *)-1 ? -1 : 0);
	must(shmctl(id, IPC_RMID, NULL));
}

static void user_namespace(void)
{
	if (!must(fork())) {
		must(unshare(CLONE_NEWUSER));
		for (;;)
			pause();
	}
	usleep(100000);
}

static void no_descriptors(void)
{
	struct rlimit few = {64, 64};
	must(setrlimit(RLIMIT_NOFILE, &few));
	while (dup(0) >= 0)
		;
}

static const struct state {
	const char *name;
	void (*make)(void);
	const char *(*same)(void);
} states[] = {
	{"other-name", other_name, other_name_same},
	{"watch", watch, watch_same},
	{"append", append, append_same},
	{"scheduling", scheduling, scheduling_same},
	{"semaphore", semaphore, semaphore_same},
	{"memory-policy", memory_policy, memory_policy_same},
	{"lock-future", lock_future, lock_future_same},
	{"personality", set_personality, personality_same},
	{"merging", merging, merging_same},
	{"multicast", multicast, multicast_same},
	{"tcp-options", tcp_options, tcp_options_same},
	{"queued-udp", queued_udp, queued_udp_same},
	{"queued-sender", queued_sender, queued_sender_same},
	{"landlock", landlock, landlock_same},
	{"start-time", note_start, start_same},
	{"packet-pipe", seqpacket_pipe, NULL},
	{"credentials", credentials, NULL},
	{"message-queue", queue, NULL},
	{"secret-memory", secret, NULL},
	{"perf", perf, NULL},
	{"userfaultfd", faults, NULL},
	{"vsock", vm_socket, NULL},
	{"path-of-socket", path_of_socket, NULL},
	{"host-stream", host_stream, NULL},
	{"host-datagrams", host_datagrams, NULL},
	{"watch-removed", watch_removed, NULL},
	{"first-thread-timer", first_thread_timer, NULL},
	{"ended-thread-timer", ended_thread_timer, NULL},
	{"others-epoll", others_epoll, NULL},
	{"system-v", system_v, NULL},
	{"user-namespace", user_namespace, NULL},
	{"no-descriptors", no_descriptors, NULL},
};

static void check(void *arg, const char *request, char *reply)
{
	const struct state *s = arg;
	(void)request;
	strcpy(reply, s->same ? s->same() : "same");
}

void run_odd(const struct options *o)
{
	int s = udp_listen(o->port);
	path = o->file ? o->file : "/odd";
	for (size_t i = 0; i < sizeof states / sizeof *states; i++)
		if (!strcmp(states[i].name, o->state)) {
			states[i].make();
			udp_serve(s, check, (void *)&states[i]);
		}
	fprintf(stderr, "gpuwork: there is no state %s\n", o->state);
	exit(2);
}
