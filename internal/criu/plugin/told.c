// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0
//
// What CRIU is told otherwise, as leave_out.c does for memory: in a CRIU that the library was
// loaded into before any other (LD_PRELOAD).
//
// GPUCKPT_CLOSED names Unix sockets by their inodes. The kernel's list of sockets (sock_diag) says of
// them here that their other end has closed.
//
// With GPUCKPT_TIMERS a timer of a process's first thread, in the file timers of /proc/PID, is of thread 0.
// CRIU 4.2 takes that for no thread, and fails to find the first one. A timer of a thread that has ended
// signals nobody.
//
// GPUCKPT_HIDDEN names watches of epolls, as PID/FD/LINE: the file fdinfo/FD of /proc/PID lacks them where
// CRIU reads it, as that of a copy of its own.
//
// GPUCKPT_ENDED names, in a restore, processes that have ended and what they have ended with, as " PID:STATUS".
// CRIU 4.2 keeps the lower seven bits of a status.
//
// GPUCKPT_FREE names, in a restore, what sockets may be bound to where it is not there, as " ADDRESS:PORT". CRIU 4.2
// sets their option IP_FREEBIND when it has bound them.
//
// GPUCKPT_WAITS names threads in a call that waits for a time: as " TID:-CALL " those that the kernel can have go on,
// as " TID:CALL " others, such as the first one of a process. CRIU has the call fail with EINTR where the program is
// left running. Here the kernel goes on with it, until the same time, if no handler of a signal runs. Others call
// again: CRIU's code in a first thread has ended by sigreturn, and the kernel then knows of no call. If that might
// last for more than a minute longer, the call fails: it would never end where checkpoints follow each other sooner.
//
// A socket that is connected to a broadcast address is allowed to be: CRIU 4.2 sets SO_BROADCAST later.
//
// What waits to be read from a terminal CRIU reads, and writes back: as it is, without an echo, and only as much as
// fits there. CRIU 4.2 writes it as one would type or print it, and with a byte before it that a master in packet
// mode (TIOCPKT) reads.
//
// A tracer may write into memory that is shared and not writable, if it has no other name than in memory: PHP's
// compiled code is such, and where it lies lowest CRIU puts its own there for a moment. All who share it stand still.
// Of a tmpfs and of System V memory others may run the code, which the program may not even write to.
//
// The limits of another user's process, which the kernel does not tell a root without CAP_SYS_RESOURCE, are
// those of the file limits of /proc/PID.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <linux/sock_diag.h>
#include <linux/unix_diag.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <termios.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))

enum { ESTABLISHED = 1, CLOSED = 7, BOTH = 3 }; // states of a socket, and ways that are shut down

static bool is_closed(uint32_t inode)
{
	const char *list = getenv("GPUCKPT_CLOSED");
	char *end;

	for (; list && *list; list = end) {
		unsigned long one = strtoul(list, &end, 10);
		if (end == list)
			break;
		if (one == inode)
			return true;
	}
	return false;
}

// close_socket changes a message about a socket.
static void close_socket(struct nlmsghdr *h)
{
	struct unix_diag_msg *m = NLMSG_DATA(h);

	if (h->nlmsg_type != SOCK_DIAG_BY_FAMILY || h->nlmsg_len < NLMSG_LENGTH(sizeof(*m)) || m->udiag_family != AF_UNIX)
		return;
	bool datagrams = m->udiag_type == SOCK_DGRAM, closed = is_closed(m->udiag_ino);
	if (closed && datagrams)
		m->udiag_state = CLOSED;
	int left = (int)(h->nlmsg_len - NLMSG_LENGTH(sizeof(*m)));
	for (struct rtattr *a = (struct rtattr *)(m + 1); RTA_OK(a, left); a = RTA_NEXT(a, left)) {
		uint32_t *inodes = RTA_DATA(a);
		if (closed && a->rta_type == UNIX_DIAG_PEER)
			memset(inodes, 0, RTA_PAYLOAD(a));
		if (closed && a->rta_type == UNIX_DIAG_SHUTDOWN && !datagrams)
			*(uint8_t *)RTA_DATA(a) = BOTH;
		// Of one that listens, the connections that it has not accepted.
		for (size_t i = 0; a->rta_type == UNIX_DIAG_ICONS && i < RTA_PAYLOAD(a) / sizeof(*inodes); i++)
			if (is_closed(inodes[i]))
				inodes[i] = 0;
	}
}

EXPORTED ssize_t recvmsg(int fd, struct msghdr *msg, int flags)
{
	const struct sockaddr_nl *from = msg->msg_name;
	ssize_t n = syscall(SYS_recvmsg, fd, msg, flags);

	if (n <= 0 || !from || from->nl_family != AF_NETLINK || msg->msg_iovlen != 1 || !getenv("GPUCKPT_CLOSED"))
		return n;
	char *at = msg->msg_iov->iov_base, *end = at + n;
	while (end - at >= (ssize_t)sizeof(struct nlmsghdr)) {
		struct nlmsghdr *h = (struct nlmsghdr *)at;
		if (h->nlmsg_len < sizeof(*h) || h->nlmsg_len > (size_t)(end - at))
			break;
		close_socket(h);
		at += NLMSG_ALIGN(h->nlmsg_len);
	}
	return n;
}

// tell_timer changes a line of a file of timers.
static void tell_timer(char line[static 256], int process, int pid)
{
	char how[16], thread[64];
	int tid;

	if (sscanf(line, "notify: %15[a-z]/tid.%d", how, &tid) != 2)
		return;
	snprintf(thread, sizeof(thread), "task/%d", tid);
	if (tid == pid)
		snprintf(line, 256, "notify: %s/tid.0\n", how);
	else if (faccessat(process, thread, F_OK, 0))
		snprintf(line, 256, "notify: none/pid.%d\n", pid);
}

// is_hidden reports whether a watch of an epoll is hidden, by its line; with line 0 whether any is. CRIU
// has a copy of the epoll.
static bool is_hidden(int copy, int watch)
{
	const char *list = getenv("GPUCKPT_HIDDEN");
	int pid, epoll, line, n;

	for (; list && sscanf(list, "%d/%d/%d%n", &pid, &epoll, &line, &n) == 3; list += n)
		if ((!watch || line == watch) && !syscall(SYS_kcmp, getpid(), pid, 0 /* KCMP_FILE */, copy, epoll))
			return true;
	return false;
}

// retell copies a file of a process's directory in /proc, as CRIU is to read it: its timers, or what an
// epoll watches.
static int retell(int file, int process, const char *path)
{
	char line[256], link[64];
	int copy = memfd_create(path, MFD_CLOEXEC), pid = 0, epoll = -1, watch = 0;

	snprintf(link, sizeof(link), "/proc/self/fd/%d", process);
	ssize_t n = readlink(link, line, sizeof(line) - 1);
	line[n < 0 ? 0 : n] = 0;
	FILE *in = fdopen(file, "r");
	if (!in || copy < 0 || sscanf(line, "/proc/%d", &pid) != 1)
		return -1;
	sscanf(path, "fdinfo/%d", &epoll);
	while (fgets(line, sizeof(line), in)) {
		if (epoll < 0)
			tell_timer(line, process, pid);
		if (!strncmp(line, "tfd:", 4) && is_hidden(epoll, ++watch))
			continue;
		dprintf(copy, "%s", line);
	}
	fclose(in);
	lseek(copy, 0, SEEK_SET);
	return copy;
}

// is_told reports whether CRIU opens a file that it is told otherwise.
static bool is_told(int process, const char *path)
{
	char link[64], name[64];
	int epoll, pid = 0;

	if (!strcmp(path, "timers"))
		return getenv("GPUCKPT_TIMERS") != NULL;
	const char *list = getenv("GPUCKPT_HIDDEN");
	if (!list || !*list || sscanf(path, "fdinfo/%d", &epoll) != 1)
		return false;
	snprintf(link, sizeof(link), "/proc/self/fd/%d", process);
	ssize_t n = readlink(link, name, sizeof(name) - 1);
	name[n < 0 ? 0 : n] = 0;
	return sscanf(name, "/proc/%d", &pid) == 1 && pid == getpid() && is_hidden(epoll, 0);
}

EXPORTED int openat64(int dir, const char *path, int flags, ...)
{
	va_list list;
	va_start(list, flags);
	mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(list, mode_t) : 0;
	va_end(list);
	int fd = (int)syscall(SYS_openat, dir, path, flags | O_LARGEFILE, mode);
	if (fd < 0 || !is_told(dir, path))
		return fd;
	int told = retell(fd, dir, path);
	if (told < 0)
		errno = EIO;
	return told;
}

EXPORTED int openat(int dir, const char *path, int flags, ...) __attribute__((alias("openat64")));

// limit_of makes a limit of its text, "1024" or "unlimited".
static uint64_t limit_of(const char *text) { return *text == 'u' ? RLIM64_INFINITY : strtoull(text, NULL, 10); }

// read_limit answers for the kernel, with 0 or -1.
static int read_limit(int pid, int resource, struct rlimit64 *limit)
{
	enum { NAME = 25 }; // what a limit is called, and how wide that is
	char path[32], line[128], soft[24], hard[24];
	int at = -1; // the number of the limit in a line, behind that of titles

	snprintf(path, sizeof(path), "/proc/%d/limits", pid);
	FILE *f = fopen(path, "re");
	while (f && fgets(line, sizeof(line), f) && at < resource)
		at++;
	if (f)
		fclose(f);
	if (at != resource || strlen(line) < NAME || sscanf(line + NAME, "%23s %23s", soft, hard) != 2)
		return errno = EPERM, -1;
	limit->rlim_cur = limit_of(soft);
	limit->rlim_max = limit_of(hard);
	return 0;
}

// CRIU asks for limits by this function of libc's.
EXPORTED long syscall(long number, ...)
{
	static long (*libc)(long, ...);
	long a[6];
	va_list list;

	va_start(list, number);
	for (int i = 0; i < 6; i++)
		a[i] = va_arg(list, long);
	va_end(list);
	if (!libc)
		libc = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
	long result = libc(number, a[0], a[1], a[2], a[3], a[4], a[5]);
	if (result < 0 && errno == EPERM && number == SYS_prlimit64 && !a[2] && a[3])
		return read_limit((int)a[0], (int)a[1], (struct rlimit64 *)a[3]);
	return result;
}

// exit ends a process of CRIU's, such as one that is restored as a process that has ended.
EXPORTED void exit(int status)
{
	void (*libc)(int) = (void (*)(int))dlsym(RTLD_NEXT, "exit");
	const char *list = getenv("GPUCKPT_ENDED");
	char one[32];

	snprintf(one, sizeof(one), " %d:%d ", getpid(), status | 0x80);
	libc(list && strstr(list, one) ? status | 0x80 : status);
	__builtin_unreachable();
}

EXPORTED int bind(int fd, const struct sockaddr *at, socklen_t size)
{
	const struct sockaddr_in *in = (const struct sockaddr_in *)at;
	const char *list = getenv("GPUCKPT_FREE");
	char name[INET_ADDRSTRLEN], one[32];
	int yes = 1;

	if (list && size == sizeof(*in) && at->sa_family == AF_INET && inet_ntop(AF_INET, &in->sin_addr, name, sizeof(name))) {
		snprintf(one, sizeof(one), " %s:%d ", name, ntohs(in->sin_port));
		if (strstr(list, one))
			setsockopt(fd, IPPROTO_IP, IP_FREEBIND, &yes, sizeof(yes));
	}
	return (int)syscall(SYS_bind, fd, at, size);
}

EXPORTED int connect(int fd, const struct sockaddr *at, socklen_t size)
{
	int on = 1, off = 0;

	if (!syscall(SYS_connect, fd, at, size))
		return 0;
	if (errno != EACCES || at->sa_family != AF_INET || setsockopt(fd, SOL_SOCKET, SO_BROADCAST, &on, sizeof(on)))
		return -1;
	int result = (int)syscall(SYS_connect, fd, at, size);
	int err = errno;
	setsockopt(fd, SOL_SOCKET, SO_BROADCAST, &off, sizeof(off));
	errno = err;
	return result;
}

// plainly has a terminal take what is typed or printed as it is. Lines stay lines.
static void plainly(int fd, const struct termios *was, bool typed)
{
	static const int edits[] = { VERASE, VKILL, VEOF, VWERASE, VREPRINT, VLNEXT };
	struct termios t = *was;

	if (!typed) {
		t.c_oflag &= (tcflag_t)~OPOST;
		tcsetattr(fd, TCSANOW, &t);
		return;
	}
	t.c_iflag &= (tcflag_t) ~(ISTRIP | INLCR | IGNCR | ICRNL | IUCLC | IXON | PARMRK);
	t.c_lflag &= (tcflag_t) ~(ECHO | ECHONL | ISIG | IEXTEN);
	for (size_t i = 0; i < sizeof(edits) / sizeof(*edits); i++)
		t.c_cc[edits[i]] = _POSIX_VDISABLE;
	tcsetattr(fd, TCSANOW, &t);
}

// take waits until the kernel has taken what was typed, which it does a little later, and by how the terminal is set
// then. waited are the bytes that waited before, lines is ICANON.
static void take(int slave, const char *typed, size_t size, int waited, bool lines)
{
	enum { TRIES = 100, MOST = 4095 }; // of the line discipline
	int waits;
	size_t told = size;

	while (lines && told && typed[told - 1] != '\n')
		told--; // it tells of whole lines alone
	if (told + (size_t)waited > MOST)
		told = (size_t)(MOST > waited ? MOST - waited : 0);
	for (int i = 0; i < TRIES && !ioctl(slave, FIONREAD, &waits) && waits < waited + (int)told; i++)
		usleep(1000);
	if (told < size)
		usleep(TRIES * 1000);
}

// put writes to a terminal what fits there, in pieces as large as the kernel finds most room for.
static ssize_t put(int fd, const char *from, size_t size)
{
	enum { PIECE = 1000, TRIES = 100 };
	int flags = fcntl(fd, F_GETFL), slave = -1, waited = 0, packets = 0, off = 0;
	size_t done = 0;
	struct termios was;

	if (tcgetattr(fd, &was))
		return -1;
	bool typed = !ioctl(fd, TIOCGPKT, &packets); // at a master
	if (packets)
		ioctl(fd, TIOCPKT, &off); // it would be told of the settings
	if (typed && (slave = ioctl(fd, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_NONBLOCK)) >= 0)
		ioctl(slave, FIONREAD, &waited);
	plainly(fd, &was, typed);
	fcntl(fd, F_SETFL, flags | O_NONBLOCK);
	for (int tries = 0; done < size && tries < TRIES;) {
		ssize_t n = syscall(SYS_write, fd, from + done, size - done < PIECE ? size - done : PIECE);
		if (n > 0) {
			done += (size_t)n;
			tries = 0;
		} else {
			usleep(1000);
			tries++;
		}
	}
	fcntl(fd, F_SETFL, flags);
	if (slave >= 0) {
		take(slave, from, done, waited, was.c_lflag & ICANON);
		close(slave);
	}
	tcsetattr(fd, TCSANOW, &was);
	if (packets)
		ioctl(fd, TIOCPKT, &packets);
	return done || !size ? (ssize_t)done : (errno = EAGAIN, -1);
}

// other_end opens the other end of a terminal, whose master CRIU has as well.
static int other_end(int fd)
{
	enum { MOST = 4096 };
	struct stat one, other;
	int slave = ioctl(fd, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_NONBLOCK), packets;

	for (int master = 0; slave < 0 && !fstat(fd, &one) && master < MOST; master++) {
		if (ioctl(master, TIOCGPKT, &packets) || (slave = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_NONBLOCK)) < 0)
			continue;
		bool its = !fstat(slave, &other) && one.st_dev == other.st_dev && one.st_ino == other.st_ino;
		close(slave);
		slave = its ? fcntl(master, F_DUPFD_CLOEXEC, 0) : -1;
	}
	return slave;
}

// drain reads all that waits at an end of a terminal: half a line too, and of a master in packet mode without the byte
// that it reads before the rest.
static ssize_t drain(int fd, struct termios was, char *to, size_t size)
{
	static char all[1 << 16];
	struct termios t = was;
	size_t got = 0;
	int packets = 0, off = 0;
	bool master = !ioctl(fd, TIOCGPKT, &packets);
	ssize_t n;

	t.c_lflag &= (tcflag_t)~ICANON;
	t.c_cc[VMIN] = 1;
	t.c_cc[VTIME] = 0;
	if (!master)
		plainly(fd, &t, true); // what the kernel has no room for comes while it is read
	if (packets)
		ioctl(fd, TIOCPKT, &off);
	while (got < sizeof(all) && (n = syscall(SYS_read, fd, all + got, sizeof(all) - got)) > 0)
		got += (size_t)n;
	if (packets)
		ioctl(fd, TIOCPKT, &packets);
	if (!master)
		tcsetattr(fd, TCSANOW, &was);
	if (got >= size) { // CRIU takes no more than that
		int other = other_end(fd);
		if (other >= 0) {
			put(other, all, got);
			close(other);
		}
		got = 0;
	}
	memcpy(to, all, got);
	return got ? (ssize_t)got : (errno = EAGAIN, -1);
}

EXPORTED ssize_t read(int fd, void *to, size_t size)
{
	enum { CRIUS = 16384 }; // what CRIU asks a terminal for
	struct termios t;

	return size == CRIUS && !tcgetattr(fd, &t) ? drain(fd, t, to, size) : syscall(SYS_read, fd, to, size);
}

EXPORTED ssize_t write(int fd, const void *from, size_t size)
{
	struct termios t;
	int err = errno;

	if (!tcgetattr(fd, &t))
		return put(fd, from, size);
	errno = err;
	return syscall(SYS_write, fd, from, size);
}

#ifdef __x86_64__
// go_on changes the registers of a thread that waits, as CRIU gives them back.
static void go_on(int tid, struct user_regs_struct *r)
{
	enum { ERESTARTNOHAND = 514, ERESTART_RESTARTBLOCK = 516, MINUTE = 60 }; // the first two are the kernel's own
	const char *list = getenv("GPUCKPT_WAITS"), *at;
	char one[16];

	if (!list || (long long)r->rax != -EINTR)
		return;
	snprintf(one, sizeof(one), " %d:", tid);
	if (!(at = strstr(list, one)))
		return;
	long long number = strtoll(at + strlen(one), NULL, 10), call = llabs(number);
	if ((long long)r->orig_rax != call && r->orig_rax != SYS_restart_syscall)
		return; // it is in another call now, or in none
	if (number < 0) {
		r->rax = (unsigned long long)-ERESTART_RESTARTBLOCK;
		return;
	}
	// The kernel writes the rest of a sleep to where it is asked to. A program that has it written elsewhere
	// than to the time itself asks for less itself.
	bool plain = call == SYS_nanosleep, futex = call == SYS_futex && r->r10 && ((int)r->rsi & FUTEX_CMD_MASK) == FUTEX_WAIT;
	unsigned long long time = futex ? r->r10 : plain ? r->rdi : r->rdx, rest = futex ? 0 : plain ? r->rsi : r->r10;
	if ((plain || futex || call == SYS_clock_nanosleep) && (rest ? rest != time : ptrace(PTRACE_PEEKDATA, tid, (void *)time, NULL) >= MINUTE))
		return;
	if (call == SYS_poll && (int)r->rdx > MINUTE * 1000)
		return;
	r->orig_rax = (unsigned long long)call;
	r->rax = (unsigned long long)-ERESTARTNOHAND;
}

// poke_shared writes a word into such memory of a process, and reports whether it could.
static bool poke_shared(int pid, unsigned long at, const void *word)
{
	char path[64], line[512], how[5] = "";
	unsigned long from = 0, to = 0, offset = 0;
	struct stat its, nameless;

	snprintf(path, sizeof(path), "/proc/%d/maps", pid);
	FILE *maps = fopen(path, "re");
	while (maps && to <= at && fgets(line, sizeof(line), maps))
		sscanf(line, "%lx-%lx %4s %lx", &from, &to, how, &offset);
	if (maps)
		fclose(maps);
	if (at < from || at >= to || how[3] != 's' || strstr(line, " /SYSV"))
		return false;
	snprintf(path, sizeof(path), "/proc/%d/map_files/%lx-%lx", pid, from, to);
	int fd = open(path, O_WRONLY | O_CLOEXEC), memory = memfd_create("gpuckpt", MFD_CLOEXEC);
	bool written = !fstat(fd, &its) && !fstat(memory, &nameless) && its.st_dev == nameless.st_dev &&
		       pwrite(fd, &word, sizeof(word), (off_t)(at - from + offset)) == sizeof(word);
	close(fd);
	close(memory);
	return written;
}

EXPORTED long ptrace(enum __ptrace_request request, ...)
{
	long (*libc)(int, ...) = (long (*)(int, ...))dlsym(RTLD_NEXT, "ptrace");
	struct user_regs_struct changed;
	va_list list;

	va_start(list, request);
	int tid = va_arg(list, int);
	void *addr = va_arg(list, void *), *data = va_arg(list, void *);
	va_end(list);
	if (request == PTRACE_POKEDATA) {
		long result = libc((int)request, tid, addr, data);
		int err = errno;
		if (result && err == EIO && poke_shared(tid, (unsigned long)addr, data))
			return 0;
		errno = err;
		return result;
	}
	struct iovec *given = data, own = { &changed, sizeof(changed) };
	if (request != PTRACE_SETREGSET || addr != (void *)NT_PRSTATUS || given->iov_len != sizeof(changed))
		return libc((int)request, tid, addr, data);
	memcpy(&changed, given->iov_base, sizeof(changed));
	go_on(tid, &changed);
	return libc((int)request, tid, addr, &own);
}
#endif
