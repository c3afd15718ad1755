// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// A program that has one of every kind of file, timer, mapping and IPC object that a restore takes:
// what the tests of hostile checkpoints change. It needs no capability and a network of its own.

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
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
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "workloads.h"

// must ends the program if a call has failed.
static long must_(long result, const char *call)
{
	if (result < 0) {
		fprintf(stderr, "gpuwork: %s: %s\n", call, strerror(errno));
		exit(1);
	}
	return result;
}
#define must(call) must_((long)(call), #call)

static int keep(int fd)
{
	must(fd);
	return fd;
}

static void files(void)
{
	int fd = keep(open("/tmp/file", O_RDWR | O_CREAT | O_APPEND, 0644));
	must(write(fd, "content", 7));
	must(flock(fd, LOCK_EX));
	must(fcntl(fd, F_SETOWN, getpid()));
	must(fcntl(fd, F_SETSIG, SIGIO));

	char *map = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (map == MAP_FAILED)
		abort();
	// Removed: one that nothing names any more, one that another name is left of.
	int removed = keep(open("/tmp/removed", O_RDWR | O_CREAT, 0600));
	must(write(removed, "removed", 7));
	must(ftruncate(removed, 65536)); // of which the dump has the part that is no hole
	must(unlink("/tmp/removed"));
	keep(open("/dev/shm/name", O_RDWR | O_CREAT, 0600)); // elsewhere the dump opens it by the other name
	must(link("/dev/shm/name", "/dev/shm/other"));
	must(unlink("/dev/shm/name"));
	keep(open("/tmp", O_RDONLY | O_DIRECTORY));
	keep(open("/dev/null", O_RDWR));
	keep(open("/proc/meminfo", O_RDONLY));
	keep(open("/proc/1/status", O_RDONLY));
	keep(open("/proc/self/ns/net", O_RDONLY));
	for (const char *const *dir = (const char *const[]){"fd", "fdinfo", "map_files", "ns", "task", NULL}; *dir; dir++) {
		char name[32];
		snprintf(name, sizeof name, "/proc/self/%s", *dir);
		keep(open(name, O_RDONLY | O_DIRECTORY));
	}

	must(write(keep(memfd_create("zoo", MFD_ALLOW_SEALING)), "memory", 6));
	int i = keep(inotify_init());
	must(inotify_add_watch(i, "/dev/shm", IN_CREATE));
}

static void pipes(void)
{
	int p[2];
	must(pipe(p));
	must(write(p[1], "in a pipe", 9));
	must(mkfifo("/tmp/fifo", 0600));
	must(write(keep(open("/tmp/fifo", O_RDWR)), "in a fifo", 9));
	int event = keep(eventfd(7, 0)), poll = keep(epoll_create(1));
	struct epoll_event e = {.events = EPOLLIN, .data.u64 = 0x1234};
	must(epoll_ctl(poll, EPOLL_CTL_ADD, event, &e));
}

static void sockets(void)
{
	int pair[2];
	must(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
	must(write(pair[0], "queued", 6));
	int rights[2];
	must(socketpair(AF_UNIX, SOCK_DGRAM, 0, rights));
	char control[CMSG_SPACE(sizeof(int))] = {0}, byte = 'x';
	struct iovec data = {&byte, 1};
	struct msghdr m = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);
	c->cmsg_level = SOL_SOCKET;
	c->cmsg_type = SCM_RIGHTS;
	c->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(c), &pair[0], sizeof(int));
	must(sendmsg(rights[0], &m, 0));
	struct sockaddr_un name = {.sun_family = AF_UNIX, .sun_path = "/tmp/socket"};
	int bound = keep(socket(AF_UNIX, SOCK_STREAM, 0));
	must(bind(bound, (struct sockaddr *)&name, sizeof name));
	must(listen(bound, 4));

	struct sockaddr_in here = {.sin_family = AF_INET, .sin_port = htons(4242), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	int l = keep(socket(AF_INET, SOCK_STREAM, 0)), one = 1;
	must(setsockopt(l, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one));
	must(bind(l, (struct sockaddr *)&here, sizeof here));
	must(listen(l, 4));
	int to = keep(socket(AF_INET, SOCK_STREAM, 0));
	must(setsockopt(to, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one));
	must(connect(to, (struct sockaddr *)&here, sizeof here));
	int from = keep(accept(l, NULL, NULL));
	must(write(from, "on its way", 10));
	here.sin_port = htons(4243);
	must(bind(keep(socket(AF_INET, SOCK_DGRAM, 0)), (struct sockaddr *)&here, sizeof here));
	struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons(4244)};
	int s6 = socket(AF_INET6, SOCK_DGRAM, 0); // a machine may have none
	if (s6 >= 0)
		must(bind(s6, (struct sockaddr *)&six, sizeof six));
	// In a group of which nobody tells anything there: what waits in such a socket cannot be dumped.
	struct sockaddr_nl network = {.nl_family = AF_NETLINK, .nl_groups = 1 << (RTNLGRP_PHONET_IFADDR - 1)};
	int n = keep(socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE));
	must(bind(n, (struct sockaddr *)&network, sizeof network));
	must(setsockopt(n, SOL_NETLINK, NETLINK_EXT_ACK, &one, sizeof one));
	keep(socket(AF_NETLINK, SOCK_RAW, NETLINK_KOBJECT_UEVENT));
}

static void terminals(void)
{
	int pty = keep(posix_openpt(O_RDWR | O_NOCTTY));
	struct winsize size = {.ws_row = 24, .ws_col = 80};
	must(grantpt(pty));
	must(unlockpt(pty));
	int tty = keep(open(ptsname(pty), O_RDWR | O_NOCTTY));
	must(ioctl(tty, TIOCSWINSZ, &size));
	must(write(pty, "typed\n", 6));
}

static void ipc(void)
{
	int shm = keep(shmget(0x7a01, 4096, IPC_CREAT | 0600)), sem = keep(semget(0x7a02, 2, IPC_CREAT | 0600)), msg = keep(msgget(0x7a03, IPC_CREAT | 0600));
	struct {
		long type;
		char text[8];
	} m = {1, "message"};
	char *at = shmat(shm, NULL, 0);
	if (at == (void *)-1)
		abort();
	strcpy(at, "shared");
	must(semctl(sem, 1, SETVAL, 3));
	must(msgsnd(msg, &m, sizeof m.text, 0));
	char *anon = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (anon == MAP_FAILED)
		abort();
	strcpy(anon, "anonymous");
	aio_context_t aio = 0;
	must(syscall(SYS_io_setup, 8, &aio));
}

static void timers(void)
{
	struct itimerval later = {.it_interval.tv_sec = 1000, .it_value.tv_sec = 5000};
	must(setitimer(ITIMER_REAL, &later, NULL));
	struct sigevent none = {.sigev_notify = SIGEV_NONE};
	struct itimerspec then = {.it_value.tv_sec = 5000, .it_interval.tv_sec = 1000};
	timer_t timer;
	must(timer_create(CLOCK_MONOTONIC, &none, &timer));
	must(timer_settime(timer, 0, &then, NULL));
	must(timerfd_settime(keep(timerfd_create(CLOCK_MONOTONIC, 0)), 0, &then, NULL));

	sigset_t pending;
	sigemptyset(&pending);
	sigaddset(&pending, SIGUSR1);
	must(sigprocmask(SIG_BLOCK, &pending, NULL));
	union sigval value = {.sival_int = 42};
	must(sigqueue(getpid(), SIGUSR1, value));
	keep(signalfd(-1, &pending, 0));
	static char stack[65536];
	stack_t alternate = {.ss_sp = stack, .ss_size = sizeof stack};
	must(sigaltstack(&alternate, NULL));
}

static void *thread(void *unused)
{
	for (;;)
		pause();
	return unused;
}

void run_zoo(const struct options *o)
{
	(void)o;
	files();
	pipes();
	sockets();
	terminals();
	ipc();
	timers();
	pthread_t t;
	if (pthread_create(&t, NULL, thread, NULL))
		abort();
	pid_t child = fork(), dead;
	must(child);
	if (!child) {
		must(setsid());
		thread(NULL);
	}
	keep((int)syscall(SYS_pidfd_open, child, 0));
	must(dead = fork());
	if (!dead)
		_exit(3);
	siginfo_t ended;
	must(waitid(P_PID, (id_t)dead, &ended, WEXITED | WNOWAIT));
	puts("ready");
	fflush(stdout);
	for (;;)
		pause();
}
