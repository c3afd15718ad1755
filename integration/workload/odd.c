// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// States of a process that are legal and rare, one a run: what CRIU does not carry, or refuses. A request
// is answered "same", or with what differs from what the program has set.

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/futex.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/keyctl.h>
#include <linux/landlock.h>
#include <linux/mempolicy.h>
#include <linux/netlink.h>
#include <linux/perf_event.h>
#include <linux/rtnetlink.h>
#include <linux/userfaultfd.h>
#include <mqueue.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/ip.h>
#include <netinet/ip_icmp.h>
#include <netinet/tcp.h>
#include <netinet/udp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/msg.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <termios.h>
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

static int a, b, c; // descriptors of a state
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
	uint64_t n = 1ULL << 40;

	a = (int)must(eventfd(3, EFD_SEMAPHORE | EFD_NONBLOCK));
	b = (int)must(eventfd(0, EFD_NONBLOCK));
	must(write(b, &n, sizeof n));
}

static const char *semaphore_same(void)
{
	uint64_t n = 0;

	must(read(a, &n, sizeof n));
	if (n != 1)
		return "a read took all";
	must(read(b, &n, sizeof n));
	must(write(b, &n, sizeof n));
	return n == 1ULL << 40 ? "same" : "it has counted less far";
}

static void set_personality(void) { must(personality(ADDR_NO_RANDOMIZE)); }
static const char *personality_same(void) { return personality(0xffffffff) == ADDR_NO_RANDOMIZE ? "same" : "the default"; }

static void merging(void) { must(prctl(67 /* PR_SET_MEMORY_MERGE */, 1, 0, 0, 0)); }
static const char *merging_same(void) { return prctl(68, 0, 0, 0, 0) == 1 ? "same" : "off"; }

static int value_of(int fd, int level, int option)
{
	int value = -1;
	socklen_t n = sizeof value;
	must(getsockopt(fd, level, option, &value, &n));
	return value;
}

static void set_value(int fd, int level, int option, int value) { must(setsockopt(fd, level, option, &value, sizeof value)); }

// Whether a socket is in a group of IPv4, and one of IPv6: who is can leave it, and join it again.
static int in_groups(int fd4, int fd6, int join)
{
	struct ip_mreq four = {{inet_addr("239.1.2.3")}, {htonl(INADDR_LOOPBACK)}};
	struct ipv6_mreq six = {.ipv6mr_interface = 1};
	inet_pton(AF_INET6, "ff12::1234", &six.ipv6mr_multiaddr);
	return !setsockopt(fd4, IPPROTO_IP, join ? IP_ADD_MEMBERSHIP : IP_DROP_MEMBERSHIP, &four, sizeof four) &&
	       !setsockopt(fd6, IPPROTO_IPV6, join ? IPV6_JOIN_GROUP : IPV6_LEAVE_GROUP, &six, sizeof six);
}

static void multicast(void)
{
	a = (int)must(socket(AF_INET, SOCK_DGRAM, 0));
	b = (int)must(socket(AF_INET6, SOCK_DGRAM, 0));
	must(in_groups(a, b, 1) - 1);
	set_value(a, IPPROTO_IP, IP_MULTICAST_TTL, 7);
	set_value(a, IPPROTO_IP, IP_RECVTTL, 1);
	must(setsockopt(a, IPPROTO_IP, IP_OPTIONS, "\x94\x04\0", 4)); // a router alert
	set_value(b, IPPROTO_IPV6, IPV6_MULTICAST_HOPS, 9);
	set_value(b, IPPROTO_IPV6, IPV6_TCLASS, 16);
	set_value(b, IPPROTO_IPV6, IPV6_RECVPATHMTU, 1);
}

static const char *multicast_same(void)
{
	char options[40];
	socklen_t n = sizeof options;
	must(getsockopt(a, IPPROTO_IP, IP_OPTIONS, options, &n));
	if (n != 4)
		return "no IP_OPTIONS";
	if (value_of(a, IPPROTO_IP, IP_MULTICAST_TTL) != 7 || value_of(a, IPPROTO_IP, IP_RECVTTL) != 1 ||
	    value_of(b, IPPROTO_IPV6, IPV6_MULTICAST_HOPS) != 9 || value_of(b, IPPROTO_IPV6, IPV6_TCLASS) != 16 ||
	    value_of(b, IPPROTO_IPV6, IPV6_RECVPATHMTU) != 1)
		return "other options";
	return in_groups(a, b, 0) && in_groups(a, b, 1) ? "same" : "it is in no group";
}

// Options of a socket that listens, and of a connection.
static void tcp_options(void)
{
	struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t n = sizeof here;
	a = (int)must(socket(AF_INET, SOCK_STREAM, 0));
	must(bind(a, (void *)&here, sizeof here));
	must(listen(a, 4));
	set_value(a, IPPROTO_TCP, TCP_USER_TIMEOUT, 4321);
	set_value(a, IPPROTO_TCP, TCP_NODELAY, 1);
	set_value(a, IPPROTO_TCP, TCP_MAXSEG, 900);
	must(getsockname(a, (void *)&here, &n));
	b = (int)must(socket(AF_INET, SOCK_STREAM, 0));
	must(connect(b, (void *)&here, sizeof here));
	must(accept(a, NULL, NULL));
	must(setsockopt(b, IPPROTO_TCP, TCP_CONGESTION, "reno", 4));
	set_value(b, IPPROTO_TCP, TCP_NOTSENT_LOWAT, 12345);
	set_value(b, SOL_SOCKET, SO_OOBINLINE, 1);
}

static const char *tcp_options_same(void)
{
	char congestion[16] = "";
	socklen_t n = sizeof congestion;
	must(getsockopt(b, IPPROTO_TCP, TCP_CONGESTION, congestion, &n));
	return value_of(a, IPPROTO_TCP, TCP_USER_TIMEOUT) == 4321 && value_of(a, IPPROTO_TCP, TCP_NODELAY) == 1 && value_of(a, IPPROTO_TCP, TCP_MAXSEG) == 900 && !strcmp(congestion, "reno") &&
			value_of(b, IPPROTO_TCP, TCP_NOTSENT_LOWAT) == 12345 && value_of(b, SOL_SOCKET, SO_OOBINLINE) == 1
		? "same"
		: "other options";
}

// Another program listens at the path: one of the host's. After a restore the other end has closed.
static void connect_host(int type)
{
	struct sockaddr_un at = {.sun_family = AF_UNIX};
	on_path(at.sun_path, "");
	a = (int)must(socket(AF_UNIX, type, 0));
	must(connect(a, (void *)&at, sizeof at));
}

static void host_stream(void) { connect_host(SOCK_STREAM); }
static void host_packets(void) { connect_host(SOCK_SEQPACKET); }
static void host_datagrams(void) { connect_host(SOCK_DGRAM); }

// One of the host's programs connects to the path.
static void host_client(void)
{
	struct sockaddr_un at = {.sun_family = AF_UNIX};
	on_path(at.sun_path, "");
	b = (int)must(socket(AF_UNIX, SOCK_STREAM, 0));
	must(bind(b, (void *)&at, sizeof at));
	must(listen(b, 4));
}

static const char *host_same(void)
{
	char text[16];
	if (b && !a) // it has come by now
		a = (int)must(accept(b, NULL, NULL));
	ssize_t n = recv(a, text, sizeof text, MSG_DONTWAIT);
	if (n < 0 && errno == EAGAIN)
		return send(a, "x", 1, MSG_NOSIGNAL) == 1 ? "same" : "it cannot send";
	if (n > 0) {
		n = recv(a, text + n, sizeof text - (size_t)n, MSG_DONTWAIT);
		return n == 0 ? "closed behind what was sent" : "it is not closed";
	}
	return n == 0 && send(a, "x", 1, MSG_NOSIGNAL) < 0 && errno == EPIPE ? "closed" : "it is not closed";
}

static const char *datagrams_same(void)
{
	if (send(a, "x", 1, MSG_NOSIGNAL) == 1)
		return "same";
	return errno == ENOTCONN ? "closed" : strerror(errno);
}

static volatile sig_atomic_t fired, wrong;
static timer_t timer;

static void on_timer(int signal)
{
	(void)signal;
	fired = 1;
	wrong |= gettid() != getpid();
}

static void timer_of(pid_t thread)
{
	struct sigevent e = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGRTMIN};
	struct itimerspec often = {{0, 10000000}, {0, 10000000}};
	e._sigev_un._tid = thread;
	must(timer_create(CLOCK_MONOTONIC, &e, &timer));
	must(timer_settime(timer, 0, &often, NULL));
}

static void *wait_too(void *unused)
{
	for (;;)
		pause();
	return unused;
}

// A timer signals the first thread, and no other one.
static void first_thread_timer(void)
{
	struct sigaction act = {.sa_handler = on_timer, .sa_flags = SA_RESTART};
	pthread_t t;
	must(sigaction(SIGRTMIN, &act, NULL));
	timer_of(gettid());
	must(pthread_create(&t, NULL, wait_too, NULL));
}

static const char *first_thread_same(void)
{
	fired = 0;
	for (int i = 0; i < 100 && !fired; i++)
		usleep(10000);
	return fired && !wrong ? "same" : "another thread's, or none";
}

// A timer of the processor time of a thread, as profilers have it, and that thread.
static volatile sig_atomic_t work, counted;

static void on_time(int signal)
{
	(void)signal;
	counted = 1;
}

static void *work_and_rest(void *unused)
{
	struct sigevent e = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGRTMIN};
	struct itimerspec often = {{0, 10000000}, {0, 10000000}};
	struct timespec now;
	e._sigev_un._tid = gettid();
	must(timer_create(CLOCK_THREAD_CPUTIME_ID, &e, &timer));
	must(timer_settime(timer, 0, &often, NULL));
	for (a = 1;; work ? 0 : usleep(1000))
		if (work && !counted && !clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now) && now.tv_sec * 1000 + now.tv_nsec / 1000000 > c + 1000)
			work = 0;
		else if (!work && !clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now))
			c = (int)(now.tv_sec * 1000 + now.tv_nsec / 1000000);
	return unused;
}

static void threads_time(void)
{
	pthread_t t;
	signal(SIGRTMIN, on_time);
	must(pthread_create(&t, NULL, work_and_rest, NULL));
	while (!*(volatile int *)&a)
		usleep(1000);
}

static const char *threads_time_same(void)
{
	counted = 0;
	for (work = 1; work && !counted;)
		usleep(20000); // this thread takes next to nothing
	work = 0;
	return counted ? "same" : "it counts another thread's";
}

static void *make_timer(void *unused)
{
	timer_of(gettid());
	return unused;
}

static void ended_thread_timer(void)
{
	pthread_t t;
	signal(SIGRTMIN, SIG_IGN);
	must(pthread_create(&t, NULL, make_timer, NULL));
	must(pthread_join(t, NULL));
}

static const char *ended_thread_same(void)
{
	struct itimerspec now;
	return timer_gettime(timer, &now) || !now.it_interval.tv_nsec ? "there is none" : "same";
}

// Memory policies of threads (numactl), one each.
static volatile int other_policy;

static int policy_of(void *map)
{
	int policy = -1;
	must(syscall(SYS_get_mempolicy, &policy, 0, 0, map, map ? MPOL_F_ADDR : 0));
	return policy;
}

static void *interleave(void *unused)
{
	unsigned long node = 1;
	must(syscall(SYS_set_mempolicy, MPOL_INTERLEAVE | MPOL_F_STATIC_NODES, &node, 64));
	for (;; usleep(10000))
		other_policy = policy_of(NULL);
	return unused;
}

static void memory_policy(void)
{
	unsigned long node = 1;
	pthread_t t;
	must(pthread_create(&t, NULL, interleave, NULL));
	must(syscall(SYS_set_mempolicy, MPOL_BIND, &node, 64));
}

static const char *memory_policy_same(void)
{
	usleep(50000);
	return policy_of(NULL) == MPOL_BIND && other_policy == (MPOL_INTERLEAVE | MPOL_F_STATIC_NODES) ? "same" : "the default";
}

// What of its memory a core dump has.
static void core_filter(void)
{
	FILE *f = fopen("/proc/self/coredump_filter", "we");
	must(f ? fprintf(f, "0x7f") : -1);
	fclose(f);
}

static const char *core_filter_same(void)
{
	FILE *f = fopen("/proc/self/coredump_filter", "re");
	unsigned filter = 0;
	must(f && fscanf(f, "%x", &filter) == 1 ? 0 : -1);
	fclose(f);
	return filter == 0x7f ? "same" : "the default";
}

// What comes back different: one state a line of the table in docs/limits.md.
static void *policed;

static void mapping_policy(void)
{
	unsigned long node = 1;
	policed = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	must(syscall(SYS_mbind, policed, 1 << 20, MPOL_BIND, &node, 64, 0));
	memset(policed, 1, 1 << 20);
}

static const char *mapping_policy_same(void) { return policy_of(policed) == MPOL_BIND ? "same" : "the default"; }

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

static void left_queue(void)
{
	struct mq_attr attr = {.mq_maxmsg = 4, .mq_msgsize = 64};
	close((int)must(mq_open("/odd", O_CREAT | O_RDWR, 0600, &attr)));
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

static void watch_removed(void)
{
	a = (int)must(inotify_init());
	b = make_file(path, O_RDONLY);
	must(inotify_add_watch(a, path, IN_MODIFY));
	must(unlink(path));
}

static void watch_async(void)
{
	a = (int)must(inotify_init());
	signal(SIGIO, SIG_IGN);
	must(fcntl(a, F_SETFL, O_ASYNC));
}

static void watch_proc(void)
{
	a = (int)must(inotify_init());
	must(inotify_add_watch(a, "/proc/self", IN_MODIFY));
}

// Memory that can be read and no longer written, as a program hands it to others.
static void sealed_memfd(void)
{
	a = (int)must(memfd_create("sealed", MFD_ALLOW_SEALING));
	must(ftruncate(a, 4096));
	must(fcntl(a, F_ADD_SEALS, F_SEAL_WRITE));
	if (mmap(NULL, 4096, PROT_READ, MAP_SHARED, a, 0) == MAP_FAILED)
		must_(-1, "mmap");
}

static void thread_pidfd(void) { must(syscall(SYS_pidfd_open, gettid(), O_EXCL)); }
static void huge_memfd(void) { must(ftruncate((int)must(memfd_create("odd", MFD_HUGETLB)), 2 << 20)); }

static void too_early(void)
{
	struct sockaddr_un at = {.sun_family = AF_UNIX};
	on_path(at.sun_path, "");
	a = (int)must(socket(AF_UNIX, SOCK_STREAM, 0));
	must(bind(a, (void *)&at, sizeof at));
	must(listen(a, 4));
	b = (int)must(socket(AF_UNIX, SOCK_STREAM, 0));
	must(connect(b, (void *)&at, sizeof at));
}

static void sent_too_early(void)
{
	too_early();
	must(write(b, "x", 1));
}

static void left_too_early(void)
{
	too_early();
	close(b);
}

static void pending_trap(void)
{
	sigset_t trap;
	sigemptyset(&trap);
	sigaddset(&trap, SIGTRAP);
	must(sigprocmask(SIG_BLOCK, &trap, NULL));
	must(raise(SIGTRAP));
}

// Its protocol has MPTCP's number, and it is not MPTCP. Nor is the other one a connection, and CRIU takes it for one.
static void raw_connection(void)
{
	struct sockaddr_in to = {AF_INET, htons(7), {htonl(INADDR_LOOPBACK)}, {0}};
	must(socket(AF_INET, SOCK_RAW, IPPROTO_MPTCP));
	must(connect((int)must(socket(AF_INET, SOCK_RAW, IPPROTO_TCP)), (void *)&to, sizeof to));
}

// What ping has open, which gets answers alone, and a raw socket with an option that CRIU does not note.
enum { ICMP_FILTER = 1 }; // of linux/icmp.h
static const uint32_t answers = ~(1U << ICMP_ECHOREPLY);

static void raw_sockets(void)
{
	a = (int)must(socket(AF_INET, SOCK_RAW, IPPROTO_ICMP));
	must(setsockopt(a, SOL_RAW, ICMP_FILTER, &answers, sizeof answers));
	b = (int)must(socket(AF_INET6, SOCK_RAW, IPPROTO_UDP));
	set_value(b, IPPROTO_IPV6, IPV6_CHECKSUM, 6);
}

static const char *raw_sockets_same(void)
{
	static uint16_t sequence;
	struct sockaddr_in to = {AF_INET, 0, {htonl(INADDR_LOOPBACK)}, {0}};
	struct icmphdr request = {.type = ICMP_ECHO, .un.echo = {htons(4711), htons(++sequence)}};
	struct {
		struct iphdr ip;
		struct icmphdr icmp;
	} got;
	struct pollfd comes = {a, POLLIN, 0};
	uint32_t filter;
	int place;
	socklen_t n = sizeof filter;

	must(getsockopt(a, SOL_RAW, ICMP_FILTER, &filter, &n));
	n = sizeof place;
	must(getsockopt(b, IPPROTO_IPV6, IPV6_CHECKSUM, &place, &n));
	if (filter != answers)
		return "another filter";
	if (place != 6)
		return "another place of the checksum";
	request.checksum = (uint16_t)~htons((uint16_t)((ICMP_ECHO << 8) + 4711 + sequence));
	must(sendto(a, &request, sizeof request, 0, (void *)&to, sizeof to));
	while (poll(&comes, 1, 5000) == 1 && recv(a, &got, sizeof got, 0) == sizeof got)
		if (got.icmp.type == ICMP_ECHOREPLY && got.icmp.un.echo.sequence == htons(sequence))
			return "same";
	return "no answer";
}

// A socket of ping, as who has no CAP_NET_RAW makes it.
static void ping(void) { a = (int)must(socket(AF_INET, SOCK_DGRAM, IPPROTO_ICMP)); }

static const char *ping_same(void)
{
	struct sockaddr_in to = {AF_INET, 0, {htonl(INADDR_LOOPBACK)}, {0}};
	struct icmphdr request = {.type = ICMP_ECHO}, got;
	struct pollfd comes = {a, POLLIN, 0};

	must(sendto(a, &request, sizeof request, 0, (void *)&to, sizeof to));
	return poll(&comes, 1, 5000) == 1 && recv(a, &got, sizeof got, 0) == sizeof got && got.type == ICMP_ECHOREPLY ? "same" : "no answer";
}

// What tcpdump has open: a packet socket with a filter and a ring, of the loopback interface and all that it sees, and
// one of SOCK_DGRAM with an option that CRIU does not note.
static char *ring;
static const struct tpacket_req3 ring_form = {.tp_block_size = 1 << 16, .tp_block_nr = 4, .tp_frame_size = 1 << 11, .tp_frame_nr = 128, .tp_retire_blk_tov = 50};

static void packet_sockets(void)
{
	// UDP alone: the protocol is the tenth byte of the IP header, behind Ethernet's 14 bytes.
	struct sock_filter udp[] = {{BPF_LD | BPF_B | BPF_ABS, 0, 0, 14 + 9}, {BPF_JMP | BPF_JEQ | BPF_K, 0, 1, IPPROTO_UDP}, {BPF_RET | BPF_K, 0, 0, 2048}, {BPF_RET | BPF_K, 0, 0, 0}};
	struct sock_fprog filter = {sizeof udp / sizeof *udp, udp};
	struct sockaddr_ll at = {.sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL), .sll_ifindex = 1};
	struct packet_mreq all = {.mr_ifindex = 1, .mr_type = PACKET_MR_PROMISC};

	a = (int)must(socket(AF_PACKET, SOCK_RAW, 0));
	must(setsockopt(a, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter));
	set_value(a, SOL_PACKET, PACKET_VERSION, TPACKET_V3);
	must(setsockopt(a, SOL_PACKET, PACKET_RX_RING, &ring_form, sizeof ring_form));
	must(setsockopt(a, SOL_PACKET, PACKET_ADD_MEMBERSHIP, &all, sizeof all));
	must(bind(a, (void *)&at, sizeof at));
	ring = mmap(NULL, (size_t)ring_form.tp_block_size * ring_form.tp_block_nr, PROT_READ | PROT_WRITE, MAP_SHARED, a, 0);
	must(ring == MAP_FAILED ? -1 : 0);
	b = (int)must(socket(AF_PACKET, SOCK_DGRAM, htons(ETH_P_IP)));
	set_value(b, SOL_PACKET, PACKET_IGNORE_OUTGOING, 1);
}

static const char *packet_sockets_same(void)
{
	struct sockaddr_in to = {AF_INET, htons(9), {htonl(INADDR_LOOPBACK)}, {0}};
	int s = (int)must(socket(AF_INET, SOCK_DGRAM, 0)), ignores = 0;
	socklen_t n = sizeof ignores;
	char text[2048];

	must(getsockopt(b, SOL_PACKET, PACKET_IGNORE_OUTGOING, &ignores, &n));
	if (!ignores)
		return "it sees what goes out";
	while (recv(b, text, sizeof text, MSG_DONTWAIT) > 0)
		;
	for (int tries = 0; tries < 100; tries++) {
		must(sendto(s, "packet", 6, 0, (void *)&to, sizeof to));
		usleep(100000); // longer than until a block is handed over
		for (uint32_t i = 0; i < ring_form.tp_block_nr; i++) {
			struct tpacket_block_desc *block = (void *)(ring + (size_t)i * ring_form.tp_block_size);
			int seen = block->hdr.bh1.block_status & TP_STATUS_USER &&
			           memmem(block, block->hdr.bh1.blk_len, "packet", 6);
			if (block->hdr.bh1.block_status & TP_STATUS_USER)
				__atomic_store_n(&block->hdr.bh1.block_status, TP_STATUS_KERNEL, __ATOMIC_RELEASE);
			if (seen) {
				close(s);
				return recv(b, text, sizeof text, MSG_DONTWAIT) > 0 ? "same" : "the second sees nothing";
			}
		}
	}
	close(s);
	return "the ring stays empty";
}

// A packet socket listens on an interface other than the first, whose name it knows (tcpdump -i).
static void interface(void)
{
	struct sockaddr_ll at = {.sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL), .sll_ifindex = (int)if_nametoindex("e0")};
	struct packet_mreq all = {.mr_ifindex = at.sll_ifindex, .mr_type = PACKET_MR_PROMISC};

	a = (int)must(socket(AF_PACKET, SOCK_RAW, 0));
	must(bind(a, (void *)&at, sizeof at));
	must(setsockopt(a, SOL_PACKET, PACKET_ADD_MEMBERSHIP, &all, sizeof all));
}

static const char *interface_same(void)
{
	struct sockaddr_ll at;
	socklen_t n = sizeof at;

	must(getsockname(a, (void *)&at, &n));
	return at.sll_ifindex == (int)if_nametoindex("e0") ? "same" : "another interface";
}

// Where a raw socket is bound and connected to.
static void raw_address(void)
{
	struct sockaddr_in at = {AF_INET, 0, {htonl(INADDR_LOOPBACK)}, {0}};
	a = (int)must(socket(AF_INET, SOCK_RAW, IPPROTO_ICMP));
	must(bind(a, (void *)&at, sizeof at));
	must(connect(a, (void *)&at, sizeof at));
}

static const char *raw_address_same(void)
{
	struct sockaddr_in at;
	socklen_t n = sizeof at;
	must(getsockname(a, (void *)&at, &n));
	int bound = at.sin_addr.s_addr == htonl(INADDR_LOOPBACK), sent = send(a, "12345678", 8, 0) == 8;
	return bound && sent ? "same" : bound || sent ? "half of it is gone" : "gone";
}

static void child_in(int namespace)
{
	if (namespace == CLONE_NEWTIME)
		must(unshare(namespace)); // for children
	if (!must(fork())) {
		if (namespace != CLONE_NEWTIME)
			must(unshare(namespace));
		for (;;)
			pause();
	}
	usleep(100000);
}

static void own_network(void) { child_in(CLONE_NEWNET); }
static void own_time(void) { child_in(CLONE_NEWTIME); }
static void own_children(void) { child_in(CLONE_NEWPID); }

static void covered_directory(void)
{
	char file[4096];
	on_path(file, "/file");
	must(mkdir(path, 0755));
	a = make_file(file, O_RDONLY);
	must(mount("none", path, "tmpfs", 0, NULL));
}

static void covered_file(void)
{
	char other[4096];
	on_path(other, ".other");
	a = make_file(path, O_RDONLY);
	close(make_file(other, O_RDONLY));
	must(mount(other, path, NULL, MS_BIND, NULL));
}

// An overlay, in a mount namespace of a child's own, and a file system that CRIU does not know.
static void own_overlay(void)
{
	must(mkdir("/lower", 0755));
	must(mkdir("/memory", 0755));
	if (must(fork())) {
		usleep(200000);
		return;
	}
	must(unshare(CLONE_NEWNS));
	must(mount("none", "/memory", "tmpfs", 0, NULL));
	must(mkdir("/memory/u", 0755));
	must(mkdir("/memory/w", 0755));
	must(mount("none", "/lower", "overlay", 0, "lowerdir=/lower,upperdir=/memory/u,workdir=/memory/w"));
	for (;;)
		pause();
}

static void own_ramfs(void)
{
	must(mkdir("/memory", 0755));
	must(mount("none", "/memory", "ramfs", 0, NULL));
}

// An epoll watches a pipe that its process has closed, and a child has open. Its number is another file's.
static void others_epoll(void)
{
	int p[2];
	struct epoll_event e = {.events = EPOLLIN, .data.u64 = 0x123456789abcdef0};
	a = (int)must(epoll_create1(0));
	must(pipe(p));
	must(epoll_ctl(a, EPOLL_CTL_ADD, p[0], &e));
	if (!must(fork()))
		for (;;)
			pause();
	must(dup2(p[1], p[0]));
	b = p[1];
}

static const char *others_epoll_same(void)
{
	struct epoll_event e;
	must(write(b, "x", 1));
	return epoll_wait(a, &e, 1, 1000) == 1 && e.events == EPOLLIN && e.data.u64 == 0x123456789abcdef0 ? "same" : "no event";
}

// Memory of the host's IPC namespace, if the container has that.
static void system_v(void)
{
	int id = (int)must(shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0600));
	must(shmat(id, NULL, 0) == (void *)-1 ? -1 : 0);
	must(shmctl(id, IPC_RMID, NULL));
}

// A Unix socket was renamed after it was bound, as servers do that are to be found when they are ready.
static int unix_socket(const char *name, int type)
{
	struct sockaddr_un at = {.sun_family = AF_UNIX};
	int s = (int)must(socket(AF_UNIX, type, 0));
	must(snprintf(at.sun_path, sizeof at.sun_path, "%s", name));
	must(bind(s, (void *)&at, sizeof at));
	must(type == SOCK_STREAM ? listen(s, 4) : 0);
	return s;
}

static void renamed_socket(void)
{
	char soon[4096];
	on_path(soon, ".soon");
	a = unix_socket(soon, SOCK_STREAM);
	must(rename(soon, path));
	b = unix_socket(soon, SOCK_DGRAM);
	char is[4096];
	on_path(is, ".datagrams");
	must(link(soon, is)); // as supervisord does
	must(unlink(soon));
	on_path(is, ".run"); // as /var/run is
	must(symlink("/dev/shm", is));
	on_path(soon, ".run/soon");
	c = unix_socket(soon, SOCK_DGRAM);
	on_path(is, ".run/datagrams");
	must(link(soon, is));
	must(unlink(soon));
}

static const char *renamed_socket_same(void)
{
	struct sockaddr_un at = {.sun_family = AF_UNIX};
	int s = (int)must(socket(AF_UNIX, SOCK_STREAM, 0)), d = (int)must(socket(AF_UNIX, SOCK_DGRAM, 0));
	on_path(at.sun_path, "");
	int failed = connect(s, (void *)&at, sizeof at);
	if (!failed)
		close((int)must(accept(a, NULL, NULL)));
	on_path(at.sun_path, ".datagrams");
	failed |= connect(d, (void *)&at, sizeof at);
	on_path(at.sun_path, ".run/datagrams");
	failed |= connect(d, (void *)&at, sizeof at);
	close(s);
	close(d);
	on_path(at.sun_path, ".soon");
	return failed ? "nobody listens" : !access(at.sun_path, F_OK) ? "the old name is back" : "same";
}

// A process in a chroot has bound sockets there.
static void jailed_sockets(void)
{
	must(mkdir("/jail", 0755));
	must(mkdir("/jail/jailed", 0755));
	if (!must(fork())) {
		must(chroot("/jail"));
		must(chdir("/jailed"));
		unix_socket("/jailed/whole", SOCK_DGRAM);
		unix_socket("part", SOCK_DGRAM);
		for (;;)
			pause();
	}
	usleep(200000);
}

static const char *jailed_sockets_same(void)
{
	struct sockaddr_un whole = {AF_UNIX, "/jail/jailed/whole"}, part = {AF_UNIX, "/jail/jailed/part"};
	int s = (int)must(socket(AF_UNIX, SOCK_DGRAM, 0));
	int failed = connect(s, (void *)&whole, sizeof whole), half = connect(s, (void *)&part, sizeof part);
	close(s);
	return failed ? "nobody has the whole name" : half ? "nobody has the other name" : "same";
}

// in_replaced opens a file, removes it and its directory, and makes a file of the directory's name.
static int in_replaced(const char *dir)
{
	char name[4096];
	must(mkdir(dir, 0755));
	snprintf(name, sizeof name, "%s/file", dir);
	int fd = make_file(name, O_RDONLY);
	must(unlink(name));
	must(rmdir(dir));
	close(make_file(dir, O_RDONLY));
	return fd;
}

static const char in_memory[] = "/dev/shm/odd-dir";
static int in_tmpfs;

// The working directory was removed, with an open directory and an open file in it, and another one has its
// name. So has a file that of the directory in which an open file was, and another one in a tmpfs.
static void replaced_directory(void)
{
	char name[4096];
	must(mkdir(path, 0755));
	must(chdir(path));
	must(mkdir("below", 0711));
	b = (int)must(open("below", O_RDONLY | O_DIRECTORY));
	c = make_file("below/file", O_RDONLY);
	must(unlink("below/file"));
	must(rmdir("below"));
	must(rmdir(path));
	must(mkdir(path, 0700));
	on_path(name, ".dir");
	a = in_replaced(name);
	in_tmpfs = in_replaced(in_memory);
}

static const char *replaced_directory_same(void)
{
	struct stat own, st;
	char text[10], name[4096];
	on_path(name, ".dir");
	if (stat(path, &st) || (st.st_mode & 0777) != 0700)
		return "the other directory is gone, or changed";
	must(stat(".", &own));
	if (own.st_ino == st.st_ino || own.st_nlink)
		return "another working directory";
	if (fstat(b, &own) || (own.st_mode & 0777) != 0711 || own.st_nlink || fstat(c, &own) || own.st_nlink || pread(c, text, 10, 0) != 10)
		return "another file or directory in it";
	if (stat(name, &st) || !S_ISREG(st.st_mode) || pread(a, text, 10, 0) != 10)
		return "another file";
	return stat(in_memory, &st) || !S_ISREG(st.st_mode) || pread(in_tmpfs, text, 10, 0) != 10 ? "another file in the tmpfs" : "same";
}

// A connection that no program has accepted yet.
static void not_accepted(void)
{
	struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
	socklen_t n = sizeof here;
	a = (int)must(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
	must(bind(a, (void *)&here, sizeof here));
	must(listen(a, 4));
	must(getsockname(a, (void *)&here, &n));
	b = (int)must(socket(AF_INET, SOCK_STREAM, 0));
	must(connect(b, (void *)&here, sizeof here));
}

static const char *not_accepted_same(void)
{
	struct sockaddr_in to;
	struct pollfd come = {.fd = a, .events = POLLIN};
	socklen_t n = sizeof to;
	int there = poll(&come, 1, 0) == 1;
	if (!getpeername(b, (void *)&to, &n))
		return there ? "same" : "its client waits";
	if (there)
		return "closed, and can be accepted";
	must(getsockname(a, (void *)&to, &n));
	b = (int)must(socket(AF_INET, SOCK_STREAM, 0));
	return connect(b, (void *)&to, sizeof to) ? "the server is gone" : "closed";
}

// Events of a watch that no program has read.
static void queued_events(void)
{
	must(mkdir(path, 0755));
	a = (int)must(inotify_init1(IN_NONBLOCK));
	must(inotify_add_watch(a, path, IN_ATTRIB));
	must(chmod(path, 0700));
}

static const char *queued_events_same(void)
{
	int n = 0;
	must(ioctl(a, FIONREAD, &n));
	return n ? "same" : "lost";
}

// A watch ends with its first event.
static void watch_flags(void)
{
	c = make_file(path, O_WRONLY);
	a = (int)must(inotify_init1(IN_NONBLOCK));
	b = (int)must(inotify_add_watch(a, path, IN_MODIFY | IN_ONESHOT));
}

static const char *watch_flags_same(void)
{
	struct inotify_event e[4];
	static int asked;
	if (!asked++) // before the checkpoint
		return "same";
	must(write(c, "x", 1));
	return read(a, e, sizeof e) == 2 * sizeof *e ? "same" : "off";
}

// What the kernel undoes when a process ends (SEM_UNDO).
static void undo(void)
{
	struct sembuf take = {0, -1, SEM_UNDO};
	a = (int)must(semget(IPC_PRIVATE, 1, 0600 | IPC_CREAT));
	must(semctl(a, 0, SETVAL, 1));
	b = (int)must(fork());
	for (must(b ? 0 : semop(a, &take, 1)); !b;)
		pause();
	while (must(semctl(a, 0, GETVAL)))
		usleep(1000);
}

static const char *undo_same(void)
{
	static int asked;
	if (!asked++) // before the checkpoint
		return "same";
	must(kill(b, SIGKILL));
	must(waitpid(b, NULL, 0));
	return semctl(a, 0, GETVAL) == 1 ? "same" : "not given back when the process ends";
}

static double used;

static double processor_time(void)
{
	struct timespec t;
	must(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t));
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void use_time(void)
{
	while (processor_time() < 0.5)
		;
	used = processor_time();
}

static const char *used_same(void) { return processor_time() < used ? "that since the restore" : "same"; }

// What a process can set for itself, and nobody else can see.
static void own_settings(void)
{
	must(prctl(PR_SET_TSC, PR_TSC_SIGSEGV));
	must(prctl(PR_MCE_KILL, PR_MCE_KILL_SET, PR_MCE_KILL_EARLY, 0, 0));
	must(prctl(65 /* PR_SET_MDWE */, 1, 0, 0, 0));
}

// A client of another user has connected.
static void peers_user(void)
{
	struct sockaddr_un here = {AF_UNIX, "/peers-user"};
	a = (int)must(socket(AF_UNIX, SOCK_STREAM, 0));
	must(bind(a, (void *)&here, sizeof here));
	must(chmod("/peers-user", 0777));
	must(listen(a, 1));
	if (!must(fork())) {
		must(setresuid(1000, 1000, 1000));
		must(connect(socket(AF_UNIX, SOCK_STREAM, 0), (void *)&here, sizeof here));
		for (;;)
			pause();
	}
	b = (int)must(accept(a, NULL, NULL));
}

static const char *peers_user_same(void)
{
	struct ucred peer;
	socklen_t n = sizeof peer;
	struct sockaddr_un own;
	socklen_t size = sizeof own;
	must(getsockopt(b, SOL_SOCKET, SO_PEERCRED, &peer, &n));
	must(getsockname(b, (void *)&own, &size));
	int named = size > sizeof own.sun_family;
	return peer.uid == 1000 && named ? "same" : peer.uid == 0 && !named ? "root, without an address" : "another";
}

// Messages behind an empty one.
static void behind_empty(void)
{
	int pair[2];
	must(socketpair(AF_UNIX, SOCK_DGRAM, 0, pair));
	a = pair[1];
	must(send(pair[0], "", 0, 0));
	must(send(pair[0], "x", 1, 0));
}

static const char *behind_empty_same(void)
{
	char text;
	return recv(a, &text, 1, MSG_DONTWAIT | MSG_PEEK) == 0 ? "same" : "lost";
}

// A file without a name, which could get one.
static void nameless(void) { a = (int)must(open("/", O_TMPFILE | O_RDWR, 0600)); }

static const char *nameless_same(void)
{
	char name[64];
	must(snprintf(name, sizeof name, "/proc/self/fd/%d", a));
	int err = linkat(AT_FDCWD, name, AT_FDCWD, "/named", AT_SYMLINK_FOLLOW);
	return err || unlink("/named") ? "it gets no name" : "same";
}

static const char *own_settings_same(void)
{
	int tsc = 0;
	must(prctl(PR_GET_TSC, &tsc));
	return tsc == PR_TSC_SIGSEGV && prctl(PR_MCE_KILL_GET, 0, 0, 0, 0) == PR_MCE_KILL_EARLY && prctl(66, 0, 0, 0, 0) == 1 ? "same" : "the default";
}

static void keys(void) { must(syscall(SYS_add_key, "user", "odd", "secret", 6, KEY_SPEC_PROCESS_KEYRING)); }

static const char *keys_same(void)
{
	return syscall(SYS_request_key, "user", "odd", NULL, 0) < 0 ? "gone" : "same";
}

static void removed_attributes(void)
{
	a = make_file(path, O_RDONLY);
	must(fsetxattr(a, "user.odd", "1", 1, 0));
	must(unlink(path));
}

static const char *removed_attributes_same(void) { return fgetxattr(a, "user.odd", NULL, 0) < 0 ? "gone" : "same"; }

// A datagram was for a port at which nobody listens: the next call says so.
static void refused_datagram(void)
{
	struct sockaddr_in at = {AF_INET, htons(9), {htonl(INADDR_LOOPBACK)}, {0}};
	a = (int)must(socket(AF_INET, SOCK_DGRAM, 0));
	must(connect(a, (void *)&at, sizeof at));
	must(send(a, "x", 1, 0));
}

static const char *refused_datagram_same(void)
{
	struct pollfd error = {.fd = a};
	return poll(&error, 1, 100) == 1 && error.revents & POLLERR ? "same" : "none";
}

static void netlink_type(void) { a = (int)must(socket(AF_NETLINK, SOCK_DGRAM, NETLINK_ROUTE)); }

static const char *netlink_type_same(void)
{
	int type = 0;
	socklen_t n = sizeof type;
	must(getsockopt(a, SOL_SOCKET, SO_TYPE, &type, &n));
	return type == SOCK_RAW ? "SOCK_RAW" : type == SOCK_DGRAM ? "same" : "another";
}

// Two sockets of one port, and a program that gives all to the second one.
static int shares_port(const struct sockaddr_in *at)
{
	int s = (int)must(socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK, 0));
	set_value(s, SOL_SOCKET, SO_REUSEPORT, 1);
	must(bind(s, (const void *)at, sizeof *at));
	return s;
}

static void shared_port(void)
{
	struct sock_filter second = {BPF_RET | BPF_K, 0, 0, 1};
	struct sock_fprog program = {1, &second};
	struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
	socklen_t n = sizeof at;
	a = shares_port(&at);
	must(getsockname(a, (void *)&at, &n));
	b = shares_port(&at);
	must(setsockopt(a, SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, &program, sizeof program));
}

static const char *shared_port_same(void)
{
	struct sockaddr_in at;
	socklen_t n = sizeof at;
	char c;
	int first = 0;
	must(getsockname(a, (void *)&at, &n));
	for (int i = 0; i < 64; i++) { // from a port each
		int s = (int)must(socket(AF_INET, SOCK_DGRAM, 0));
		must(sendto(s, "x", 1, 0, (void *)&at, sizeof at));
		close(s);
	}
	while (recv(a, &c, 1, 0) == 1)
		first++;
	while (recv(b, &c, 1, 0) == 1)
		;
	return first ? "the kernel shares it out" : "same";
}

static void urgent(void)
{
	int s[2];
	must(socketpair(AF_UNIX, SOCK_STREAM, 0, s));
	a = s[0];
	must(send(s[1], "!", 1, MSG_OOB));
}

static const char *urgent_same(void)
{
	char c;
	return recv(a, &c, 1, MSG_OOB | MSG_PEEK) == 1 ? "same" : "without its mark";
}

static void locked_segment(void)
{
	a = (int)must(shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0600));
	must(shmctl(a, SHM_LOCK, NULL));
}

static const char *locked_segment_same(void)
{
	struct shmid_ds now;
	must(shmctl(a, IPC_STAT, &now));
	return now.shm_perm.mode & SHM_LOCKED ? "same" : "not locked";
}

// A program that was started from memory.
static void from_memory(void)
{
	char bytes[65536];
	ssize_t n;
	int from = (int)must(open("/proc/self/exe", O_RDONLY | O_CLOEXEC)), to = (int)must(memfd_create("program", MFD_CLOEXEC));
	while ((n = must(read(from, bytes, sizeof bytes))) > 0)
		must(write(to, bytes, (size_t)n));
	if (!must(fork())) {
		char *args[] = {"gpuwork", "plain", "--port", "0", NULL}, *none[] = {NULL};
		must(fexecve(to, args, none));
	}
	usleep(200000);
}

// The inode of a new memfd in a.
static int numbered(void)
{
	struct stat st;
	close(a);
	a = (int)must(memfd_create("number", 0));
	must(fstat(a, &st));
	return (int)st.st_ino;
}

// A System V segment whose id is the inode of a memfd. Inodes rise by one, and by a thousand where
// another processor takes some; ids rise by 32,768 as long as no other segment is there.
static void same_number(void)
{
	enum { MANY = 3000, AHEAD = 2 * MANY };
	int ids[MANY], found = 0;
	a = -1;
	for (int tries = 0; !found && tries < 100; tries++) {
		while ((ids[0] = (int)must(shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0600))) < numbered() + AHEAD)
			must(shmctl(ids[0], IPC_RMID, NULL));
		for (int i = 1; i < MANY; i++)
			ids[i] = (int)must(shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0600));
		for (int inode = 0; !found && inode < ids[MANY - 1];) {
			inode = numbered();
			for (int i = 0; i < MANY && !found; i++)
				found = ids[i] == inode ? inode : 0;
		}
		for (int i = 0; i < MANY; i++)
			must(ids[i] == found ? 0 : shmctl(ids[i], IPC_RMID, NULL));
	}
	must(found ? ftruncate(a, 4096) : -1);
	must(shmat(found, NULL, 0) == (void *)-1 ? -1 : 0);
}

// Threads of one process whose directories or files are not the same.
static void *leave(void *flags)
{
	must(unshare((int)(long)flags));
	a = gettid();
	return wait_too(flags);
}

static void thread_apart(long flags)
{
	pthread_t t;
	must(pthread_create(&t, NULL, leave, (void *)flags));
	while (!*(volatile int *)&a)
		usleep(1000);
}

static void thread_directory(void) { thread_apart(CLONE_FS); }
static void thread_files(void) { thread_apart(CLONE_FILES); }

// Two processes with one working directory.
static void shared_directory(void)
{
	if (!must(syscall(SYS_clone, CLONE_FS | SIGCHLD, 0, 0, 0, 0)))
		for (;;)
			pause();
}

static void renamed_below(void)
{
	char soon[4096];
	must(chdir("/tmp"));
	unlink("soon");
	a = unix_socket("soon", SOCK_STREAM);
	on_path(soon, "");
	must(rename("soon", soon));
}

// A socket that is told of what happens in the network, of a kind that nobody makes there: what waits in
// it cannot be dumped. Nobody else has its number.
static struct sockaddr_nl netlink_name(void)
{
	struct sockaddr_nl name;
	socklen_t n = sizeof name;
	must(getsockname(a, (void *)&name, &n));
	return name;
}

static struct sockaddr_nl netlink_was;

static void netlink_socket(void)
{
	struct sockaddr_nl name = {.nl_family = AF_NETLINK, .nl_groups = 1 << (RTNLGRP_PHONET_IFADDR - 1)};
	int one = 1;
	must(getrandom(&name.nl_pid, sizeof name.nl_pid, 0));
	a = (int)must(socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC | SOCK_NONBLOCK, NETLINK_ROUTE));
	must(bind(a, (void *)&name, sizeof name));
	must(setsockopt(a, SOL_NETLINK, NETLINK_EXT_ACK, &one, sizeof one));
	b = (int)must(socket(AF_NETLINK, SOCK_RAW, NETLINK_KOBJECT_UEVENT));
	(void)socket(AF_NETLINK, SOCK_RAW, NETLINK_XFRM); // which a kernel may lack
	netlink_was = netlink_name();
}

static const char *netlink_same(void)
{
	struct {
		struct nlmsghdr head;
		struct rtgenmsg all;
	} request = {{sizeof request, RTM_GETLINK, NLM_F_REQUEST | NLM_F_DUMP, 1, 0}, {AF_UNSPEC}};
	struct sockaddr_nl name = netlink_name();
	char answer[16384];
	socklen_t n = sizeof(int);
	int option = 0;

	if (name.nl_pid != netlink_was.nl_pid || name.nl_groups != netlink_was.nl_groups)
		return "another address";
	must(getsockopt(a, SOL_NETLINK, NETLINK_EXT_ACK, &option, &n));
	if (!option || fcntl(a, F_GETFD) != FD_CLOEXEC || !(fcntl(a, F_GETFL) & O_NONBLOCK))
		return "an option or a flag";
	must(send(a, &request, sizeof request, 0)); // the kernel answers before this returns
	do {
		ssize_t got = recv(a, answer, sizeof answer, 0);
		if (got < (ssize_t)sizeof(struct nlmsghdr))
			return "no answer";
	} while (((struct nlmsghdr *)answer)->nlmsg_type != RTM_NEWLINK);
	while (recv(a, answer, sizeof answer, 0) > 0) // all of the answer
		;
	return "same";
}

// What a program has open that closes all its descriptors, or lists another's.
static void links_of_processes(void)
{
	char name[64];
	pid_t child = (pid_t)must(fork());
	if (!child)
		for (;;)
			pause();
	must(snprintf(name, sizeof name, "/proc/%d/fd", child));
	a = (int)must(open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
	b = (int)must(open(name, O_PATH | O_DIRECTORY));
	must(open("/proc/self/task", O_RDONLY | O_DIRECTORY));
	must(open("/proc/self/ns", O_RDONLY | O_DIRECTORY));
}

static const char *links_of_processes_same(void)
{
	char own[16];
	struct stat st, net;
	must(snprintf(own, sizeof own, "%d", a));
	if (fstatat(a, own, &st, 0) || !S_ISDIR(st.st_mode) || fstatat(b, own, &st, 0) == 0)
		return "the directory of another process"; // the child was made before it was opened
	return stat("/proc/self/ns/net", &net) || fstatat(a + 3, "net", &st, 0) || st.st_ino != net.st_ino ? "another namespace" : "same";
}

static void connected_netlink(void)
{
	struct sockaddr_nl kernel = {.nl_family = AF_NETLINK};
	a = (int)must(socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE));
	must(connect(a, (void *)&kernel, sizeof kernel));
}

static void waiting_netlink(void)
{
	struct {
		struct nlmsghdr head;
		struct rtgenmsg all;
	} request = {{sizeof request, RTM_GETLINK, NLM_F_REQUEST | NLM_F_DUMP, 1, 0}, {AF_UNSPEC}};
	a = (int)must(socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE));
	must(send(a, &request, sizeof request, 0));
}

static void high_netlink(void)
{
	struct sockaddr_nl name = {.nl_family = AF_NETLINK};
	int group = 33;
	a = (int)must(socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE));
	must(bind(a, (void *)&name, sizeof name));
	must(setsockopt(a, SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, &group, sizeof group));
}

static void process_directory(void) { a = (int)must(open("/proc/self", O_RDONLY | O_DIRECTORY)); }

static void user_namespace(void) { child_in(CLONE_NEWUSER); }

static void no_descriptors(void)
{
	struct rlimit few = {64, 64};
	must(setrlimit(RLIMIT_NOFILE, &few));
	while (dup(0) >= 0)
		;
}

// What leads to a pipe is opened again, for appending, as servers do it that write their logs to /dev/stdout.
static void appended_pipe(void)
{
	char name[64];
	int p[2];
	must(pipe(p));
	must(snprintf(name, sizeof name, "/proc/self/fd/%d", p[1]));
	a = (int)must(open(name, O_WRONLY | O_APPEND));
	b = p[0];
	c = p[1];
}

static const char *appended_pipe_same(void)
{
	char text[2];
	if (!(fcntl(a, F_GETFL) & O_APPEND) || fcntl(c, F_GETFL) & O_APPEND)
		return "flags";
	return write(a, "a", 1) == 1 && write(c, "b", 1) == 1 && read(b, text, 2) == 2 && text[0] == 'a' ? "same" : "another pipe";
}

// Timers that repeat, of which no program has read that their time has come, and one of a clock that counts
// also while the machine sleeps.
static void repeating_timers(void)
{
	struct itimerspec seldom = {{0, 100000000}, {0, 100000000}};
	c = (int)must(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK));
	must(timerfd_settime(c, 0, &seldom, NULL));
	struct itimerspec often = {{0, 10000000}, {0, 10000000}}, late = {{0, 0}, {100000, 0}};
	a = (int)must(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK));
	must(timerfd_settime(a, 0, &often, NULL));
	b = (int)must(timerfd_create(CLOCK_BOOTTIME, TFD_NONBLOCK));
	must(timerfd_settime(b, 0, &late, NULL));
	usleep(1050000);
}

static const char *repeating_timers_same(void)
{
	struct itimerspec left;
	struct pollfd comes = {a, POLLIN, 0};
	uint64_t times;
	must(timerfd_gettime(b, &left));
	if (left.it_value.tv_sec < 90000)
		return "the time that is left";
	for (int i = 0; i < 2; i++)
		if (poll(&comes, 1, 5000) != 1 || read(a, &times, sizeof times) != sizeof times)
			return "it stands still";
	if (read(c, &times, sizeof times) != sizeof times || times < 10)
		return "it came less often";
	usleep(1050000); // its time comes again before the next checkpoint
	return "same";
}

// Timers with an absolute time, of each clock.
static struct {
	clockid_t clock;
	int timer;
	struct itimerspec ends;
} absolute[] = {{.clock = CLOCK_MONOTONIC}, {.clock = CLOCK_BOOTTIME}, {.clock = CLOCK_REALTIME}};

static void absolute_timers(void)
{
	for (size_t i = 0; i < sizeof absolute / sizeof *absolute; i++) {
		must(clock_gettime(absolute[i].clock, &absolute[i].ends.it_value));
		absolute[i].ends.it_value.tv_sec += 1000;
		absolute[i].timer = (int)must(timerfd_create(absolute[i].clock, 0));
		must(timerfd_settime(absolute[i].timer, TFD_TIMER_ABSTIME, &absolute[i].ends, NULL));
	}
}

static const char *absolute_timers_same(void)
{
	for (size_t i = 0; i < sizeof absolute / sizeof *absolute; i++) {
		struct timespec now, end = absolute[i].ends.it_value;
		struct itimerspec left;
		must(clock_gettime(absolute[i].clock, &now));
		must(timerfd_gettime(absolute[i].timer, &left));
		double early = difftime(end.tv_sec, now.tv_sec) - difftime(left.it_value.tv_sec, 0) + (double)(end.tv_nsec - now.tv_nsec - left.it_value.tv_nsec) / 1e9;
		if (early > 0.01)
			return "it ends too early";
		if (absolute[i].clock == CLOCK_REALTIME && early < -0.01) // by as long as the program was down
			return "it ends too late";
	}
	return "same";
}

// Such a timer that is none of timerfd's.
static struct timespec day_ends;

static void day_timer(void)
{
	struct sigevent e = {.sigev_notify = SIGEV_NONE};
	struct itimerspec at = {0};
	must(timer_create(CLOCK_REALTIME, &e, &timer));
	must(clock_gettime(CLOCK_REALTIME, &at.it_value));
	at.it_value.tv_sec += 1000;
	day_ends = at.it_value;
	must(timer_settime(timer, TIMER_ABSTIME, &at, NULL));
}

static const char *day_timer_same(void)
{
	struct timespec now;
	struct itimerspec left;
	must(clock_gettime(CLOCK_REALTIME, &now));
	must(timer_gettime(timer, &left));
	double late = difftime(now.tv_sec, day_ends.tv_sec) + difftime(left.it_value.tv_sec, 0) + (double)(now.tv_nsec - day_ends.tv_nsec + left.it_value.tv_nsec) / 1e9;
	return late > 0.01 ? "it ends too late" : "same";
}

// Code that processes share, below all other: PHP has it compiled there.
static void *code_at;

static void shared_code(void)
{
	static const unsigned char returns_42[] = {0xb8, 42, 0, 0, 0, 0xc3};
	code_at = mmap((void *)0x200000, 8192, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
	must(code_at == MAP_FAILED ? -1 : 0);
	memcpy(code_at, returns_42, sizeof returns_42);
	must(mprotect(code_at, 8192, PROT_READ | PROT_EXEC));
}

static const char *shared_code_same(void)
{
	int (*code)(void) = (int (*)(void))code_at;
	return code() == 42 ? "same" : "other code";
}

// A program has its own memory open as a file, as Julia has it, and its own score for the kernel that ends programs,
// and more of its own that it may write to.
static void own_memory(void)
{
	must(open("/proc/self/sched", O_RDWR));
	must(open("/proc/self/attr/current", O_RDWR));
	a = (int)must(open("/proc/self/mem", O_RDWR));
	b = (int)must(open("/proc/self/oom_score_adj", O_WRONLY));
}

static const char *own_memory_same(void)
{
	static int word;
	int one = 1;
	word = 0;
	if (pwrite(b, "1000", 4, 0) != 4)
		return "not its score";
	return pwrite(a, &one, sizeof one, (off_t)(uintptr_t)&word) == sizeof one && word == 1 ? "same" : "not its memory";
}

// What closed clients have sent is still to be read; one of the servers has closed its side as well.
static void closed_clients(void)
{
	struct sockaddr_in at = {AF_INET, 0, {htonl(INADDR_LOOPBACK)}, {0}};
	socklen_t size = sizeof at;
	int *servers[] = {&a, &b};

	c = (int)must(socket(AF_INET, SOCK_STREAM, 0));
	must(listen(c, 2));
	must(getsockname(c, (void *)&at, &size));
	for (int i = 0; i < 2; i++) {
		int client = (int)must(socket(AF_INET, SOCK_STREAM, 0));
		must(connect(client, (void *)&at, sizeof at));
		*servers[i] = (int)must(accept(c, NULL, NULL));
		must(write(client, "bye", 3));
		close(client);
	}
	must(shutdown(b, SHUT_WR));
}

static const char *closed_clients_same(void)
{
	char text[8];
	if (recv(a, text, sizeof text, MSG_PEEK | MSG_DONTWAIT) != 3 || recv(b, text, sizeof text, MSG_PEEK | MSG_DONTWAIT) != 3)
		return "what they have sent is lost";
	return "same";
}

// A client that is made before its server waits to be accepted.
static void early_client(void)
{
	static int listens; // for the calls of early_client_same
	struct sockaddr_un at = {.sun_family = AF_UNIX, .sun_path = "@early"};
	at.sun_path[0] = 0;
	a = (int)must(socket(AF_UNIX, SOCK_STREAM, 0));
	if (!listens) {
		listens = 1;
		b = (int)must(socket(AF_UNIX, SOCK_STREAM, 0));
		must(bind(b, (void *)&at, sizeof at));
		must(listen(b, 4));
	}
	must(connect(a, (void *)&at, sizeof at));
}

static const char *early_client_same(void)
{
	char text[8];
	int s = fcntl(b, F_SETFL, O_NONBLOCK) ? -1 : accept(b, NULL, NULL);
	if (s < 0)
		return "nobody waits";
	must(write(s, "hi", 2));
	if (read(a, text, sizeof text) != 2)
		return "it is another one";
	close(s);
	close(a);
	early_client();
	return "same";
}

// A child has ended with a status that is no letter, and nobody has waited for it.
static void ended_child(void)
{
	a = (int)must(fork());
	if (!a)
		_exit(200);
	siginfo_t info;
	must(waitid(P_PID, (id_t)a, &info, WEXITED | WNOWAIT));
}

static const char *ended_child_same(void)
{
	siginfo_t info = {0};
	if (waitid(P_PID, (id_t)a, &info, WEXITED | WNOWAIT | WNOHANG) < 0 || info.si_code != CLD_EXITED)
		return "it has not ended";
	return info.si_status == 200 ? "same" : "it has ended with another status";
}

static struct sockaddr_un named(const char *name, size_t bytes)
{
	struct sockaddr_un at = {AF_UNIX, {0}};
	memcpy(at.sun_path, name, bytes);
	return at;
}

// A Unix socket is bound by a path that leads up.
static void dotted_socket(void)
{
	must(mkdir("/dotted", 0755));
	struct sockaddr_un at = named("/dotted/../dotted-socket", sizeof "/dotted/../dotted-socket");
	a = (int)must(socket(AF_UNIX, SOCK_DGRAM, 0));
	must(bind(a, (void *)&at, sizeof at));
}

static const char *dotted_socket_same(void)
{
	struct sockaddr_un at = named("/dotted-socket", sizeof "/dotted-socket");
	char one;
	int client = (int)must(socket(AF_UNIX, SOCK_DGRAM, 0));
	ssize_t n = sendto(client, "!", 1, 0, (void *)&at, sizeof at);
	close(client);
	return n == 1 && recv(a, &one, 1, MSG_DONTWAIT) == 1 ? "same" : "nobody has the name";
}

// CRIU restores no name that fills an address.
static void long_socket(void)
{
	struct sockaddr_un at = {AF_UNIX, {0}};
	memset(at.sun_path, 's', sizeof at.sun_path);
	at.sun_path[0] = '/';
	a = (int)must(socket(AF_UNIX, SOCK_DGRAM, 0));
	must(bind(a, (void *)&at, sizeof at));
}

static void part_of_segment(void)
{
	a = (int)must(shmget(IPC_PRIVATE, 16384, 0600));
	char *at = shmat(a, NULL, 0);
	must(at == (void *)-1 ? -1 : 0);
	at[0] = at[12288] = 1;
	must(munmap(at + 4096, 4096));
}

static void watch_link(void)
{
	must(symlink("/proc", path));
	a = (int)must(inotify_init());
	must(inotify_add_watch(a, path, IN_ATTRIB | IN_DONT_FOLLOW));
}

static void corked(void)
{
	struct sockaddr_in at = {AF_INET, htons(9), {htonl(INADDR_LOOPBACK)}, {0}};
	int on = 1;
	a = (int)must(socket(AF_INET, SOCK_DGRAM, 0));
	must(setsockopt(a, IPPROTO_UDP, UDP_CORK, &on, sizeof on));
	must(sendto(a, "!", 1, 0, (void *)&at, sizeof at));
}

// A file with a long name was removed, and one whose directory is a link now.
static void long_removed(void)
{
	char name[250] = "/";
	memset(name + 1, 'r', sizeof name - 2);
	a = make_file(name, O_RDONLY);
	must(unlink(name));
	must(mkdir("/linked", 0755));
	b = make_file("/linked/file", O_RDONLY);
	must(unlink("/linked/file"));
	must(rmdir("/linked"));
	must(symlink("/proc", "/linked"));
}

static const char *long_removed_same(void)
{
	char text[11] = "";
	if (pread(a, text, 10, 0) != 10 || strcmp(text, "0123456789"))
		return "the long one is lost";
	return pread(b, text, 10, 0) == 10 && readlink("/linked", text, sizeof text) == 5 ? "same" : "the other one is lost";
}

static void long_linked(void)
{
	char name[250] = "/";
	memset(name + 1, 'r', sizeof name - 2);
	a = make_file(name, O_RDONLY);
	must(link(name, "/short"));
	must(unlink(name));
}

// Children of a process that has ended share an epoll, and each watches a pipe of its own.
static void orphans_epoll(void)
{
	int said[2];
	char one;
	pid_t parent = (pid_t)must(fork());

	if (parent) {
		must(waitpid(parent, NULL, 0));
		return;
	}
	a = (int)must(epoll_create1(0));
	must(pipe(said));
	for (int i = 0; i < 2; i++) {
		int own[2];
		if (must(fork()))
			continue;
		must(pipe(own));
		struct epoll_event event = {EPOLLIN, {.fd = i}};
		must(epoll_ctl(a, EPOLL_CTL_ADD, own[0], &event));
		must(write(said[1], "!", 1));
		for (;;)
			pause();
	}
	must(read(said[0], &one, 1));
	must(read(said[0], &one, 1));
	_exit(0);
}

// A segment of System V memory goes with the last process that has it, as it was removed.
static int *segment;

static void removed_segment(void)
{
	a = (int)must(shmget(IPC_PRIVATE, 4096, 0600));
	segment = shmat(a, NULL, 0);
	must(segment == (void *)-1 ? -1 : 0);
	must(shmctl(a, IPC_RMID, NULL));
	*segment = 7;
}

static const char *removed_segment_same(void)
{
	struct shmid_ds st;
	if (*segment != 7)
		return "content";
	return shmctl(a, IPC_STAT, &st) || st.shm_perm.mode & SHM_DEST ? "same" : "it stays";
}

// A socket was bound below a directory that is gone, like the socket's name, and has a client.
static void name_in_gone(void)
{
	struct sockaddr_un here = {AF_UNIX, "./s"};
	must(mkdir(path, 0755));
	must(chdir(path));
	a = (int)must(socket(AF_UNIX, SOCK_STREAM, 0));
	must(bind(a, (void *)&here, sizeof here));
	must(listen(a, 1));
	b = (int)must(socket(AF_UNIX, SOCK_STREAM, 0));
	must(connect(b, (void *)&here, sizeof here));
	c = (int)must(accept(a, NULL, NULL));
	must(unlink("s"));
	must(chdir("/"));
	must(rmdir(path));
}

static const char *name_in_gone_same(void)
{
	char text;
	return write(b, "x", 1) == 1 && read(c, &text, 1) == 1 ? "same" : "no connection";
}

// A descriptor is on its way to another program.
static void sent(int fd)
{
	char room[CMSG_SPACE(sizeof fd)] = {0}, text = 'x';
	struct iovec data = {&text, 1};
	struct msghdr m = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
	struct cmsghdr *h = CMSG_FIRSTHDR(&m);
	int pair[2];
	h->cmsg_level = SOL_SOCKET;
	h->cmsg_type = SCM_RIGHTS;
	h->cmsg_len = CMSG_LEN(sizeof fd);
	memcpy(CMSG_DATA(h), &fd, sizeof fd);
	must(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
	must(sendmsg(pair[0], &m, 0));
	close(fd);
}

static void sent_timer(void) { sent((int)must(timerfd_create(CLOCK_MONOTONIC, 0))); }
// Of many terminals the last one is left.
static void high_terminal(void)
{
	int all[40];
	for (int i = 0; i < 40; i++)
		all[i] = (int)must(open("/dev/ptmx", O_RDWR | O_NOCTTY));
	for (int i = 0; i < 39; i++)
		close(all[i]);
}

static void sent_socket(void) { sent((int)must(socket(AF_UNIX, SOCK_DGRAM, 0))); }
static void waking_timer(void) { must(timerfd_create(CLOCK_BOOTTIME_ALARM, 0)); }
static void own_program(void) { must(open("/proc/self/exe", O_PATH)); }
static void terminal_by_name(void) { must(open("/dev/ptmx", O_PATH)); }
static void sent_terminal(void) { sent((int)must(open("/dev/ptmx", O_RDWR | O_NOCTTY))); }

static void fifo_by_name(void)
{
	must(mkfifo("/fifo", 0600));
	must(open("/fifo", O_PATH));
}

// A directory of the image was removed while the program is in it, and another one has its name.
static void renewed_directory(void)
{
	must(chdir("/root"));
	must(rmdir("/root"));
	must(mkdir("/root", 0700));
}

// Threads that wait in poll(2) and for a semaphore, and children in poll(2) and at a futex, and no signal comes.
static void *wait_an_hour(void *unused)
{
	(void)unused;
	a = poll(NULL, 0, 3600 * 1000) < 0 ? errno : ETIME;
	return NULL;
}

static void *wait_for_post(void *never)
{
	struct timespec at;
	clock_gettime(CLOCK_REALTIME, &at);
	at.tv_sec += 3600;
	b = sem_timedwait(never, &at) ? errno : 0;
	return NULL;
}

static void waiting_poll(void)
{
	static sem_t never;
	static uint32_t word;
	struct timespec some = {50, 0};
	pthread_t t;
	c = (int)must(fork());
	if (!c)
		_exit(poll(NULL, 0, -1));
	if (!must(fork()))
		_exit((int)syscall(SYS_futex, &word, FUTEX_WAIT, 0, &some, NULL, 0));
	must(sem_init(&never, 0, 0));
	must(pthread_create(&t, NULL, wait_an_hour, NULL));
	must(pthread_create(&t, NULL, wait_for_post, &never));
}

static const char *waiting_poll_same(void)
{
	usleep(50000);
	if (waitpid(-1, NULL, WNOHANG))
		return "a child waits no longer";
	return a || b ? strerror(a ? a : b) : "same";
}

// Threads in calls that the kernel ends with EINTR when it stops the process.
static volatile sig_atomic_t ended;

static void *wait_for_signal(void *unused)
{
	sigset_t all;
	sigfillset(&all);
	ended |= sigwaitinfo(&all, NULL) < 0;
	return unused;
}

static void *wait_for_event(void *unused)
{
	struct epoll_event event;
	ended |= epoll_wait((int)must(epoll_create1(0)), &event, 1, -1) < 0 ? 2 : 0;
	return unused;
}

static void *wait_at_socket(void *unused)
{
	struct timeval limit = {50, 0};
	int pair[2], got;
	char text;
	must(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
	must(setsockopt(pair[0], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit));
	while ((got = (int)recv(pair[0], &text, 1, 0)) < 0 && errno == EAGAIN)
		;
	ended |= got < 0 ? 4 : 0;
	return unused;
}

static void failing_waits(void)
{
	pthread_t t;
	struct sembuf down = {.sem_op = -1};
	must(pthread_create(&t, NULL, wait_for_signal, NULL));
	must(pthread_create(&t, NULL, wait_for_event, NULL));
	must(pthread_create(&t, NULL, wait_at_socket, NULL));
	a = (int)must(semget(IPC_PRIVATE, 1, 0600));
	c = (int)must(fork());
	if (!c)
		_exit(semop(a, &down, 1) < 0);
}

static const char *failing_waits_same(void)
{
	static char says[32];
	usleep(50000);
	snprintf(says, sizeof says, "these have ended: %d", ended | (waitpid(c, NULL, WNOHANG) ? 8 : 0));
	return says[18] == '0' ? "same" : says;
}

// A child whose first thread sleeps for an hour, which nobody writes the rest of.
static void long_sleep(void)
{
	struct timespec hour = {3600, 0};
	c = (int)must(fork());
	if (!c)
		_exit(clock_nanosleep(CLOCK_MONOTONIC, 0, &hour, NULL));
}

static const char *long_sleep_same(void)
{
	usleep(50000);
	return waitpid(c, NULL, WNOHANG) ? "awake" : "same";
}

// A child whose end the kernel tells by no signal.
static void exit_signal(void)
{
	b = (int)must(syscall(SYS_clone, 0, 0, 0, 0, 0));
	for (; !b;)
		pause();
}

static const char *exit_signal_same(void) { return waitpid(b, NULL, WNOHANG) < 0 ? "same" : "SIGCHLD"; }

// Half a line is typed at a terminal.
static void open_terminal(void)
{
	int unlock = 0;
	a = (int)must(open("/dev/ptmx", O_RDWR | O_NOCTTY));
	must(ioctl(a, TIOCSPTLCK, &unlock));
	b = (int)must(ioctl(a, TIOCGPTPEER, O_RDWR | O_NOCTTY));
}

// On a terminal whose master reads in packets a line was typed, and half of another, and more was printed than the
// terminal's own buffer takes.
static char typed_text[6000];

static void type(void)
{
	for (size_t i = 0; i < sizeof typed_text; i++)
		typed_text[i] = (char)('a' + i % 26);
	must(write(a, "a line\nhalf", 11));
	must(write(b, typed_text, sizeof typed_text) - (ssize_t)sizeof typed_text);
	usleep(50000);
}

static void typed(void)
{
	struct termios t;
	int on = 1;
	open_terminal();
	must(tcgetattr(b, &t));
	t.c_lflag &= (tcflag_t)~ECHO;
	must(tcsetattr(b, TCSANOW, &t));
	must(ioctl(a, TIOCPKT, &on));
	type();
}

static const char *typed_same(void)
{
	char packet[4096];
	ssize_t n;
	size_t got = 0;
	struct pollfd typed = {b, POLLIN, 0}, more = {a, POLLIN, 0};
	if (poll(&typed, 1, 2000) != 1 || (n = read(b, packet, sizeof packet)) != 7 || memcmp(packet, "a line\n", 7))
		return "another line";
	must(write(a, " of it\n", 7));
	if (poll(&typed, 1, 2000) != 1 || (n = read(b, packet, sizeof packet)) != 11 || memcmp(packet, "half of it\n", 11))
		return "another half";
	for (; poll(&more, 1, 200) == 1 && (n = read(a, packet, sizeof packet)) > 0; got += (size_t)n - 1)
		if (packet[0] || got + (size_t)n - 1 > sizeof typed_text || memcmp(packet + 1, typed_text + got, (size_t)n - 1))
			return "another packet";
	if (got != sizeof typed_text)
		return "less was printed";
	type(); // before the next checkpoint
	return "same";
}

// How much can be read from a terminal, when the kernel has taken what was written.
static int waits(int terminal, int expected)
{
	int n = 0;
	for (int i = 0; i < 100 && !ioctl(terminal, FIONREAD, &n) && n < expected; i++)
		usleep(1000);
	usleep(20000);
	must(ioctl(terminal, FIONREAD, &n));
	return n;
}

// A line was typed and echoed, and one was printed.
static void line_typed(void)
{
	char echo[16];
	open_terminal();
	must(write(a, "typed\n", 6));
	must(read(a, echo, sizeof echo));
	must(waits(b, 6) - 6);
	c = b;
	int typed_at = a;
	open_terminal();
	must(write(b, "said\n", 5));
	b = a;
	a = typed_at;
}

static const char *line_typed_same(void)
{
	if (waits(a, 0))
		return "it is echoed again";
	return waits(c, 6) == 6 && waits(b, 6) == 6 ? "same" : "another line";
}

// More was printed than the kernel takes back.
static size_t printed;

static void full_terminal(void)
{
	char text[26];
	open_terminal();
	for (int i = 0; i < 26; i++)
		text[i] = (char)('a' + i);
	must(fcntl(b, F_SETFL, O_NONBLOCK));
	for (int tries = 0; tries < 100; usleep(1000), tries++) // the kernel makes room a little later
		for (ssize_t n; (n = write(b, text + printed % sizeof text, sizeof text - printed % sizeof text)) > 0; tries = 0)
			printed += (size_t)n;
	must((long)printed - 16384); // more than CRIU reads
}

static const char *full_terminal_same(void)
{
	static int asked;
	char text[4096];
	size_t got = 0;
	ssize_t n;
	struct pollfd more = {a, POLLIN, 0};
	if (!asked++) // before the checkpoint
		return "same";
	for (; poll(&more, 1, 200) == 1 && (n = read(a, text, sizeof text)) > 0; got += (size_t)n)
		for (ssize_t i = 0; i < n; i++)
			if (text[i] != (char)('a' + (got + (size_t)i) % 26))
				return "another text";
	return got >= printed ? "same" : "less";
}

// A child opens its terminal by its name for all, which its parent has.
static void childs_terminal(void)
{
	int ask[2], say[2];
	char one = 0;
	open_terminal();
	must(pipe(ask));
	must(pipe(say));
	if (!must(fork())) {
		must(setsid());
		must(ioctl(b, TIOCSCTTY, 0));
		int child = (int)must(fork());
		while (child)
			pause();
		for (;; close(c), must(write(say[1], &one, 1))) {
			must(read(ask[0], &one, 1));
			c = open("/dev/tty", O_RDWR);
			one = c >= 0;
		}
	}
	a = ask[1];
	b = say[0];
}

static const char *childs_terminal_same(void)
{
	char one = 0;
	must(write(a, &one, 1));
	must(read(b, &one, 1));
	return one ? "same" : "none";
}

static void exclusive(void)
{
	open_terminal();
	must(ioctl(b, TIOCEXCL));
}

static const char *exclusive_same(void)
{
	int is = 0;
	must(ioctl(b, TIOCGEXCL, &is));
	return is ? "same" : "off";
}

static void lock_when_used(void)
{
	policed = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	must(mlock2(policed, 1 << 20, MLOCK_ONFAULT));
}

static const char *lock_when_used_same(void)
{
	unsigned char there[256];
	must(mincore(policed, 1 << 20, there));
	return there[7] & 1 ? "all of it" : "same";
}

// So much memory that it goes past CRIU, and some that is locked beside.
enum { MUCH = 80 << 20, LOCKED = 2 << 20 };
static unsigned char *much, *locked_part;

static void locked_beside(void)
{
	much = mmap(NULL, MUCH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	memset(much, 7, MUCH);
	// Between others it stays a mapping of its own.
	locked_part = mmap(NULL, 3 * LOCKED, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	locked_part = mmap(locked_part + LOCKED, LOCKED, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	memset(locked_part, 3, LOCKED);
	must(mlock(locked_part, LOCKED));
}

static const char *locked_beside_same(void)
{
	for (size_t i = 0; i < MUCH; i++)
		if (much[i] != 7)
			return "other memory";
	for (size_t i = 0; i < LOCKED; i++)
		if (locked_part[i] != 3)
			return "other locked memory";
	return "same";
}

// A queue that takes less than others.
static void small_queue(void)
{
	struct msqid_ds q;
	a = (int)must(msgget(IPC_PRIVATE, IPC_CREAT | 0600));
	must(msgctl(a, IPC_STAT, &q));
	q.msg_qbytes = 4096;
	must(msgctl(a, IPC_SET, &q));
}

static const char *small_queue_same(void)
{
	struct msqid_ds q;
	must(msgctl(a, IPC_STAT, &q));
	return q.msg_qbytes == 4096 ? "same" : "as much as others";
}

static void md5(void)
{
	struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
	socklen_t n = sizeof here;
	struct tcp_md5sig key = {.tcpm_keylen = 3, .tcpm_key = "odd"};
	a = (int)must(socket(AF_INET, SOCK_STREAM, 0));
	must(bind(a, (void *)&here, sizeof here));
	must(getsockname(a, (void *)&here, &n));
	memcpy(&key.tcpm_addr, &here, sizeof here);
	must(setsockopt(a, IPPROTO_TCP, TCP_MD5SIG, &key, sizeof key));
	must(listen(a, 4));
}

static const char *md5_same(void)
{
	struct sockaddr_in at;
	socklen_t n = sizeof at;
	struct timeval soon = {0, 300000};
	int s = (int)must(socket(AF_INET, SOCK_STREAM, 0));
	must(setsockopt(s, SOL_SOCKET, SO_SNDTIMEO, &soon, sizeof soon));
	must(getsockname(a, (void *)&at, &n));
	n = (socklen_t)connect(s, (void *)&at, sizeof at);
	close(s);
	return n ? "same" : "anybody can connect";
}

// A socket is bound to an address that is not there yet (haproxy, keepalived).
static void free_bind(void)
{
	struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {inet_addr("192.0.2.7")}};
	a = (int)must(socket(AF_INET, SOCK_STREAM, 0));
	set_value(a, IPPROTO_IP, IP_FREEBIND, 1);
	must(bind(a, (void *)&at, sizeof at));
	must(listen(a, 4));
}

static const char *free_bind_same(void)
{
	struct sockaddr_in at;
	socklen_t n = sizeof at;
	must(getsockname(a, (void *)&at, &n));
	return at.sin_addr.s_addr == inet_addr("192.0.2.7") && value_of(a, IPPROTO_IP, IP_FREEBIND) == 1 ? "same" : "another address";
}

// A proxy's, which has its clients' addresses (TPROXY).
static void transparent(void)
{
	struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {inet_addr("192.0.2.7")}};
	a = (int)must(socket(AF_INET, SOCK_STREAM, 0));
	set_value(a, IPPROTO_IP, IP_TRANSPARENT, 1);
	must(bind(a, (void *)&at, sizeof at));
	must(listen(a, 4));
}

static const char *transparent_same(void)
{
	int is = value_of(a, IPPROTO_IP, IP_TRANSPARENT), free = value_of(a, IPPROTO_IP, IP_FREEBIND);
	return is && !free ? "same" : free ? "IP_FREEBIND" : "no IP_TRANSPARENT";
}

// A socket is bound to a group on one interface (mDNS).
static void bound_group(void)
{
	struct sockaddr_in6 at = {.sin6_family = AF_INET6, .sin6_scope_id = 1};
	inet_pton(AF_INET6, "ff02::fb", &at.sin6_addr);
	a = (int)must(socket(AF_INET6, SOCK_DGRAM, 0));
	must(bind(a, (void *)&at, sizeof at));
}

static const char *bound_group_same(void)
{
	struct sockaddr_in6 at;
	socklen_t n = sizeof at;
	must(getsockname(a, (void *)&at, &n));
	return at.sin6_scope_id == 1 && at.sin6_addr.s6_addr[15] == 0xfb ? "same" : "another address";
}

// A child is scheduled by its deadlines.
static void deadline(void)
{
	// sched_attr of linux/sched/types.h, which libc's headers do not go with
	struct {
		uint32_t size, policy;
		uint64_t flags;
		int32_t nice;
		uint32_t priority;
		uint64_t runtime, deadline, period;
	} a = {.size = 48, .policy = 6, .runtime = 1000000, .deadline = 100000000, .period = 100000000};
	b = (int)must(fork());
	for (; !b;)
		pause();
	must(syscall(SYS_sched_setattr, b, &a, 0));
}

// A capability that programs may inherit, and that is beyond the bounding set.
static void left_capability(void)
{
	struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
	struct __user_cap_data_struct sets[2];
	must(syscall(SYS_capget, &head, sets));
	sets[0].inheritable |= 1 << CAP_KILL;
	must(syscall(SYS_capset, &head, sets));
	must(prctl(PR_CAPBSET_DROP, CAP_KILL));
}

// A process has as many mappings as it may.
static void full_maps(void)
{
	enum { MOST = 1 << 17 };
	char *at = mmap(NULL, MOST * 8192l, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	for (long i = 0; i < MOST && !mprotect(at + i * 8192, 4096, PROT_READ); i++)
		;
}

// A socket that sends to all.
static void broadcast(void)
{
	struct sockaddr_in at = {AF_INET, htons(9), {htonl(0x7fffffff)}, {0}};
	a = (int)must(socket(AF_INET, SOCK_DGRAM, 0));
	set_value(a, SOL_SOCKET, SO_BROADCAST, 1);
	must(connect(a, (void *)&at, sizeof at));
}

static const char *broadcast_same(void)
{
	return value_of(a, SOL_SOCKET, SO_BROADCAST) == 1 && send(a, "x", 1, 0) == 1 ? "same" : "it cannot send";
}

// A shell's descriptor that is open for both: exec 3<> <(:).
static void both_ways(void)
{
	char name[64];
	int p[2];
	must(pipe(p));
	must(snprintf(name, sizeof name, "/proc/self/fd/%d", p[0]));
	a = (int)must(open(name, O_RDWR));
	close(p[0]);
	close(p[1]);
}

static const char *both_ways_same(void) { return (fcntl(a, F_GETFL) & O_ACCMODE) == O_RDWR ? "same" : "for reading"; }

// More signals wait than may.
static void many_signals(void)
{
	struct rlimit few = {4, 4};
	sigset_t all;
	sigfillset(&all);
	must(sigprocmask(SIG_BLOCK, &all, NULL));
	for (int i = 0; i < 8; i++)
		must(sigqueue(getpid(), SIGRTMIN, (union sigval){i}));
	must(setrlimit(RLIMIT_SIGPENDING, &few));
}

// A limit that came after the timer that exceeds it.
static void timer_above_limit(void)
{
	struct rlimit none = {0, 0};
	signal(SIGRTMIN, SIG_IGN);
	timer_of(gettid());
	must(setrlimit(RLIMIT_SIGPENDING, &none));
}

// A thread, which is not the first one, is signalled when something comes.
static void threads_file(void)
{
	struct f_owner_ex owner = {.type = F_OWNER_TID};
	int p[2];
	thread_apart(0);
	owner.pid = a;
	must(pipe(p));
	must(fcntl(p[0], F_SETOWN_EX, &owner));
}

static void threads_name(void)
{
	char name[64];
	thread_apart(0);
	must(snprintf(name, sizeof name, "/proc/self/task/%d/comm", a));
	must(open(name, O_RDWR));
}

static void without_vdso(void)
{
	char line[256];
	unsigned long from, to;
	FILE *f = fopen("/proc/self/maps", "re");
	b = (int)must(fork());
	if (b) {
		usleep(200000);
		return;
	}
	while (fgets(line, sizeof line, f))
		if (strstr(line, "[vdso]") && sscanf(line, "%lx-%lx ", &from, &to) == 2)
			must(munmap((void *)from, to - from));
	for (;;)
		syscall(SYS_pause);
}

static const char *without_vdso_same(void) { return waitpid(b, NULL, WNOHANG) ? "it has ended" : "same"; }

// What is called like what CRIU makes in a restore.
static void ghosts_name(void)
{
	char name[4096];
	for (int i = 0; i < 20; i++) {
		must(snprintf(name, sizeof name, "%s.cr.%x.ghost", path, i));
		close(make_file(name, O_RDONLY));
	}
	a = make_file(path, O_RDONLY);
	must(unlink(path));
}

static const char *ghosts_name_same(void)
{
	char text[10];
	return pread(a, text, 10, 0) == 10 && access(path, F_OK) ? "same" : "the file is lost, or has its name again";
}

// A volume is shared with the host's mount: which group it is in.
static int group_of(void)
{
	char line[4096];
	int group = 0;
	FILE *f = fopen("/proc/self/mountinfo", "re");
	while (f && fgets(line, sizeof line, f))
		if (strstr(line, " /volume ") && strstr(line, " shared:"))
			group = atoi(strstr(line, " shared:") + 8);
	fclose(f);
	return group;
}

static void shared_mount(void) { a = group_of(); }
static const char *shared_mount_same(void) { return !a ? "it is not shared" : group_of() == a ? "same" : "a group of its own"; }

static void copied_output(void) { must(dup(1)); }

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
	{"core-filter", core_filter, core_filter_same},
	{"mapping-policy", mapping_policy, mapping_policy_same},
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
	{"host-stream", host_stream, host_same},
	{"host-packets", host_packets, host_same},
	{"host-client", host_client, host_same},
	{"host-datagrams", host_datagrams, datagrams_same},
	{"watch-removed", watch_removed, NULL},
	{"watch-proc", watch_proc, NULL},
	{"watch-async", watch_async, NULL},
	{"thread-pidfd", thread_pidfd, NULL},
	{"sealed-memfd", sealed_memfd, NULL},
	{"huge-memfd", huge_memfd, NULL},
	{"sent-too-early", sent_too_early, NULL},
	{"left-too-early", left_too_early, NULL},
	{"pending-trap", pending_trap, NULL},
	{"raw-connection", raw_connection, NULL},
	{"raw-sockets", raw_sockets, raw_sockets_same},
	{"ping", ping, ping_same},
	{"interface", interface, interface_same},
	{"raw-address", raw_address, raw_address_same},
	{"packet-sockets", packet_sockets, packet_sockets_same},
	{"own-network", own_network, NULL},
	{"own-time", own_time, NULL},
	{"own-children", own_children, NULL},
	{"covered-directory", covered_directory, NULL},
	{"covered-file", covered_file, NULL},
	{"own-overlay", own_overlay, NULL},
	{"own-ramfs", own_ramfs, NULL},
	{"first-thread-timer", first_thread_timer, first_thread_same},
	{"threads-time", threads_time, threads_time_same},
	{"ended-thread-timer", ended_thread_timer, ended_thread_same},
	{"others-epoll", others_epoll, others_epoll_same},
	{"system-v", system_v, NULL},
	{"user-namespace", user_namespace, NULL},
	{"no-descriptors", no_descriptors, NULL},
	{"waiting-poll", waiting_poll, waiting_poll_same},
	{"failing-waits", failing_waits, failing_waits_same},
	{"long-sleep", long_sleep, long_sleep_same},
	{"copied-output", copied_output, NULL},
	{"renamed-socket", renamed_socket, renamed_socket_same},
	{"jailed-sockets", jailed_sockets, jailed_sockets_same},
	{"replaced-directory", replaced_directory, replaced_directory_same},
	{"not-accepted", not_accepted, not_accepted_same},
	{"queued-events", queued_events, queued_events_same},
	{"watch-flags", watch_flags, watch_flags_same},
	{"undo", undo, undo_same},
	{"processor-time", use_time, used_same},
	{"own-settings", own_settings, own_settings_same},
	{"peers-user", peers_user, peers_user_same},
	{"behind-empty", behind_empty, behind_empty_same},
	{"nameless", nameless, nameless_same},
	{"thread-directory", thread_directory, NULL},
	{"thread-files", thread_files, NULL},
	{"keys", keys, keys_same},
	{"removed-attributes", removed_attributes, removed_attributes_same},
	{"refused-datagram", refused_datagram, refused_datagram_same},
	{"netlink-type", netlink_type, netlink_type_same},
	{"shared-port", shared_port, shared_port_same},
	{"urgent", urgent, urgent_same},
	{"locked-segment", locked_segment, locked_segment_same},
	{"from-memory", from_memory, NULL},
	{"same-number", same_number, NULL},
	{"shared-directory", shared_directory, NULL},
	{"renamed-below", renamed_below, NULL},
	{"netlink", netlink_socket, netlink_same},
	{"links-of-processes", links_of_processes, links_of_processes_same},
	{"connected-netlink", connected_netlink, NULL},
	{"waiting-netlink", waiting_netlink, NULL},
	{"high-netlink", high_netlink, NULL},
	{"process-directory", process_directory, NULL},
	{"appended-pipe", appended_pipe, appended_pipe_same},
	{"repeating-timers", repeating_timers, repeating_timers_same},
	{"absolute-timers", absolute_timers, absolute_timers_same},
	{"day-timer", day_timer, day_timer_same},
	{"shared-code", shared_code, shared_code_same},
	{"own-memory", own_memory, own_memory_same},
	{"closed-clients", closed_clients, closed_clients_same},
	{"early-client", early_client, early_client_same},
	{"ended-child", ended_child, ended_child_same},
	{"dotted-socket", dotted_socket, dotted_socket_same},
	{"long-socket", long_socket, NULL},
	{"part-of-segment", part_of_segment, NULL},
	{"orphans-epoll", orphans_epoll, NULL},
	{"watch-link", watch_link, NULL},
	{"corked", corked, NULL},
	{"long-removed", long_removed, long_removed_same},
	{"long-linked", long_linked, NULL},
	{"removed-segment", removed_segment, removed_segment_same},
	{"name-in-gone", name_in_gone, name_in_gone_same},
	{"sent-timer", sent_timer, NULL},
	{"high-terminal", high_terminal, NULL},
	{"sent-socket", sent_socket, NULL},
	{"waking-timer", waking_timer, NULL},
	{"own-program", own_program, NULL},
	{"terminal-by-name", terminal_by_name, NULL},
	{"sent-terminal", sent_terminal, NULL},
	{"fifo-by-name", fifo_by_name, NULL},
	{"renewed-directory", renewed_directory, NULL},
	{"line-typed", line_typed, line_typed_same},
	{"full-terminal", full_terminal, full_terminal_same},
	{"exit-signal", exit_signal, exit_signal_same},
	{"typed", typed, typed_same},
	{"childs-terminal", childs_terminal, childs_terminal_same},
	{"left-queue", left_queue, NULL},
	{"exclusive", exclusive, exclusive_same},
	{"lock-when-used", lock_when_used, lock_when_used_same},
	{"locked-beside", locked_beside, locked_beside_same},
	{"small-queue", small_queue, small_queue_same},
	{"md5", md5, md5_same},
	{"free-bind", free_bind, free_bind_same},
	{"transparent", transparent, transparent_same},
	{"broadcast", broadcast, broadcast_same},
	{"both-ways", both_ways, both_ways_same},
	{"bound-group", bound_group, bound_group_same},
	{"shared-mount", shared_mount, shared_mount_same},
	{"deadline", deadline, NULL},
	{"left-capability", left_capability, NULL},
	{"full-maps", full_maps, NULL},
	{"many-signals", many_signals, NULL},
	{"timer-above-limit", timer_above_limit, NULL},
	{"threads-file", threads_file, NULL},
	{"threads-name", threads_name, NULL},
	{"without-vdso", without_vdso, without_vdso_same},
	{"ghosts-name", ghosts_name, ghosts_name_same},
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
