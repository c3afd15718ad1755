// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// How the interposers of two processes hand descriptors of GPU memory, and of events' words, to each other. The exporter has a
// socket of an abstract name, from its first ticket on, and a thread that answers there. There is one
// request for each connection. The exporter counts who has its memory, by pids: a checkpoint must not
// begin while somebody has it who is not in the cut.
//
// Parked, the thread rests, and its socket is closed: there is nothing of it for CRIU to restore.

#include "interposer.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

static const char magic[4] = {'g', 'p', 'c', 'k'};

// How long an answer may take. The exporter's thread does nothing else; it may be stopped by a debugger.
enum { ANSWER_SECONDS = 10, REQUEST_SECONDS = 1, BACKLOG = 128 };

// How long a program waits for memory of a process that is parked: a pause of a container that both are in is over
// when this one runs, and its exporter is a moment later than it. In naps, since this one may be stopped for hours.
enum { NAP_MS = 10, NAPS = 60 * 1000 / NAP_MS };

struct request {
	struct ticket ticket;
	uint64_t cut;
	int32_t what;
};

// holder is a process that has a block of this one mapped, or its events' words.
struct holder {
	struct holder *next;
	uint64_t number;
	pid_t pid;
	uint64_t since; // when the process started, in the kernel's ticks
	unsigned times;
};

static struct holder *holders; // LOCK_HOLDERS is of these, and of the start
static unsigned char self[16], key[16];
static bool started;
static int listener = -1;
static uint32_t wanted;  // the thread is to answer
static uint32_t resting; // it does not touch the socket

static void store(uint32_t *p, uint32_t value)
{
	__atomic_store_n(p, value, __ATOMIC_SEQ_CST);
	futex(p, FUTEX_WAKE_PRIVATE, INT32_MAX);
}

static socklen_t name_of(const unsigned char id[16], struct sockaddr_un *a)
{
	static const char digits[] = "0123456789abcdef", prefix[] = "gpuckpt-interposer-";
	char *at = a->sun_path + 1;

	memset(a, 0, sizeof *a);
	a->sun_family = AF_UNIX;
	memcpy(at, prefix, sizeof prefix - 1);
	at += sizeof prefix - 1;
	for (int i = 0; i < 16; i++) {
		*at++ = digits[id[i] >> 4];
		*at++ = digits[id[i] & 15];
	}
	return (socklen_t)(at - (char *)a);
}

// is_ours reports whether a descriptor is the socket still: programs close what they do not know.
static bool is_ours(int fd)
{
	struct sockaddr_un want, has;
	socklen_t n = sizeof has;

	return fd >= 0 && !getsockname(fd, (struct sockaddr *)&has, &n) && n == name_of(self, &want) && !memcmp(&want, &has, n);
}

static bool listen_again(void)
{
	struct sockaddr_un a;
	socklen_t n = name_of(self, &a);
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	if (fd < 0)
		return false;
	if (bind(fd, (struct sockaddr *)&a, n) || listen(fd, BACKLOG)) {
		close(fd);
		return false;
	}
	listener = fd;
	store(&resting, 0);
	store(&wanted, 1);
	return true;
}

uint64_t share_began(int32_t pid)
{
	char path[32], text[1024], *at;
	uint64_t ticks = 0;
	ssize_t n;

	snprintf(path, sizeof path, "/proc/%d/stat", pid);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return kill(pid, 0) && errno == ESRCH ? 0 : 1;
	n = read(fd, text, sizeof text - 1);
	close(fd);
	if (n <= 0)
		return 0;
	text[n] = 0;
	if (!(at = strrchr(text, ')')) || at[1] != ' ' || at[2] == 'Z' || at[2] == 'X')
		return 0;
	at += 2;
	for (int field = 3; field < 22 && at; field++)
		at = strchr(at + 1, ' ');
	while (at && *++at >= '0' && *at <= '9')
		ticks = 10 * ticks + (uint64_t)(*at - '0');
	return ticks ? ticks : 1;
}

// count notes that a process has a block once more, or once less. false: it has not.
static bool count(uint64_t number, pid_t pid, bool more)
{
	uint64_t since = share_began(pid);
	struct holder **l;
	bool done = false;

	lock(LOCK_HOLDERS);
	for (l = &holders; *l && !((*l)->number == number && (*l)->pid == pid && (*l)->since == since); l = &(*l)->next)
		;
	struct holder *h = *l;
	if (!h && more && (h = calloc(1, sizeof *h))) {
		*h = (struct holder){holders, number, pid, since, 0};
		holders = h;
	}
	if (h) {
		done = true;
		h->times += more ? 1 : -1u;
		if (!h->times) {
			*l = h->next;
			free(h);
		}
	}
	unlock(LOCK_HOLDERS);
	return done;
}

static bool has_holders(void)
{
	bool any = false;

	lock(LOCK_HOLDERS);
	for (struct holder **l = &holders; *l;) {
		struct holder *h = *l;
		if (share_began(h->pid) == h->since) {
			any = true;
			l = &h->next;
			continue;
		}
		*l = h->next;
		free(h);
	}
	unlock(LOCK_HOLDERS);
	return any;
}

union control {
	struct cmsghdr header;
	char room[CMSG_SPACE(sizeof(int))];
};

static bool reply(int to, CUresult r, int fd)
{
	struct iovec data = {&r, sizeof r};
	union control control = {.header = {.cmsg_len = CMSG_LEN(sizeof fd), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
	struct msghdr m = {.msg_iov = &data, .msg_iovlen = 1};

	if (fd >= 0) {
		m.msg_control = &control;
		m.msg_controllen = sizeof control;
		memcpy(CMSG_DATA(&control.header), &fd, sizeof fd);
	}
	return sendmsg(to, &m, MSG_NOSIGNAL | MSG_DONTWAIT) == sizeof r; // there is room for one
}

static void limit(int s, int seconds)
{
	struct timeval t = {.tv_sec = seconds};

	setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t);
	setsockopt(s, SOL_SOCKET, SO_SNDTIMEO, &t, sizeof t);
}

static CUresult export(uint64_t number, int *fd)
{
	return number == SHARE_EVENTS ? events_export(fd) : memory_export(number, fd);
}

static bool has(uint64_t number)
{
	return number == SHARE_EVENTS ? events_exports() : memory_exports(number);
}

static CUresult obey(const struct request *q, pid_t pid, int *fd)
{
	CUresult r;

	switch (q->what) {
	case SHARE_OPEN:
		if ((r = export(q->ticket.number, fd)))
			return r;
		return count(q->ticket.number, pid, true) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
	case SHARE_CLOSE:
		count(q->ticket.number, pid, false);
		return CUDA_SUCCESS;
	case SHARE_LEAVE:
		if (!q->cut || q->cut != worker_cut() || !has(q->ticket.number))
			return CUDA_ERROR_NOT_PERMITTED;
		return count(q->ticket.number, pid, false) ? CUDA_SUCCESS : CUDA_ERROR_NOT_PERMITTED;
	}
	return CUDA_ERROR_INVALID_VALUE;
}

static void answer(int s)
{
	struct ucred peer = {0};
	socklen_t n = sizeof peer;
	struct request q;
	ssize_t got;
	int fd = -1;

	limit(s, REQUEST_SECONDS);
	if (getsockopt(s, SOL_SOCKET, SO_PEERCRED, &peer, &n))
		return;
	do
		got = recv(s, &q, sizeof q, 0);
	while (got < 0 && errno == EINTR); // it was stopped
	if (got != sizeof q)
		return;
	// A process of another pid namespace has no pid here, and cannot be counted.
	CUresult r = peer.pid > 0 && !memcmp(q.ticket.key, key, sizeof key) ? obey(&q, peer.pid, &fd) : CUDA_ERROR_NOT_PERMITTED;
	if (!reply(s, r, r ? -1 : fd) && !r && q.what == SHARE_OPEN)
		count(q.ticket.number, peer.pid, false);
	if (fd >= 0)
		close(fd);
}

static void serve(void)
{
	struct timespec nap = {.tv_nsec = 10000000};

	for (;;) {
		if (!load(&wanted)) {
			store(&resting, 1);
			futex(&wanted, FUTEX_WAIT_PRIVATE, 0);
			continue;
		}
		int s = is_ours(listener) ? accept4(listener, NULL, NULL, SOCK_CLOEXEC) : -1;
		if (s >= 0) {
			answer(s);
			close(s);
		} else if (load(&wanted)) { // there are too many files, or the program has closed it
			nanosleep(&nap, NULL);
		}
	}
}

static bool start(void)
{
	int32_t *tid = worker_note_thread();

	if (!tid || syscall(SYS_getrandom, self, sizeof self, 0) != sizeof self ||
	    syscall(SYS_getrandom, key, sizeof key, 0) != sizeof key || !listen_again())
		return false;
	started = thread_start("gpuckpt-share", serve, tid);
	if (!started) {
		close(listener);
		listener = -1;
	}
	return started;
}

bool share_ticket(struct ticket *t)
{
	lock(LOCK_HOLDERS);
	bool can = started || start();
	unlock(LOCK_HOLDERS);
	memcpy(t->magic, magic, sizeof magic);
	t->pid = getpid();
	memcpy(t->exporter, self, sizeof self);
	memcpy(t->key, key, sizeof key);
	return can;
}

bool share_known(const struct ticket *t)
{
	return !memcmp(t->magic, magic, sizeof magic) && t->number && t->bytes && t->asked && t->asked <= t->bytes;
}

bool share_own(const struct ticket *t)
{
	return started && !memcmp(t->exporter, self, sizeof self);
}

// receive reads an answer, and the descriptor that comes with it. Its result is recvmsg's.
static ssize_t receive(int s, CUresult *r, int *fd)
{
	struct iovec data = {r, sizeof *r};
	union control control;
	struct msghdr m = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};

	ssize_t n = recvmsg(s, &m, MSG_CMSG_CLOEXEC);
	struct cmsghdr *h = n < 0 ? NULL : CMSG_FIRSTHDR(&m);
	if (h && h->cmsg_level == SOL_SOCKET && h->cmsg_type == SCM_RIGHTS && h->cmsg_len == CMSG_LEN(sizeof *fd))
		memcpy(fd, CMSG_DATA(h), sizeof *fd);
	return n;
}

// ask_once asks over a connection of its own. false: the exporter does not listen, or has not answered. A call that
// ends early since this process was stopped is made again: the exporter would count an answer that nobody reads.
static bool ask_once(const struct request *q, CUresult *r, int *fd)
{
	struct sockaddr_un a;
	socklen_t n = name_of(q->ticket.exporter, &a);
	int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	ssize_t done;

	*r = CUDA_ERROR_OPERATING_SYSTEM;
	if (s < 0)
		return true;
	limit(s, ANSWER_SECONDS);
	do
		done = connect(s, (struct sockaddr *)&a, n);
	while (done && errno == EINTR);
	while (!done && (done = send(s, q, sizeof *q, MSG_NOSIGNAL) - (ssize_t)sizeof *q) && errno == EINTR)
		done = 0;
	while (!done && (done = receive(s, r, fd)) < 0 && errno == EINTR)
		done = 0;
	// Nothing at all is an end of the connection, as at a park.
	bool answered = done == sizeof *r || (done < 0 && errno != ECONNREFUSED && errno != ECONNRESET && errno != EPIPE);
	if (done != sizeof *r)
		*r = CUDA_ERROR_OPERATING_SYSTEM;
	close(s);
	return answered;
}

CUresult share_ask(const struct ticket *t, int what, uint64_t cut, int *fd)
{
	struct timespec nap = {.tv_nsec = NAP_MS * 1000000};
	struct request q = {*t, cut, what};
	CUresult r;
	int got = -1;

	// While this process is parked, its interposer asks: exporters answer then, or have ended.
	for (int naps = what == SHARE_OPEN && !worker_cut() ? NAPS : 0; !ask_once(&q, &r, &got); naps--) {
		if (!naps || !share_began(t->pid)) {
			r = CUDA_ERROR_NOT_FOUND;
			break;
		}
		nanosleep(&nap, NULL);
	}
	if (!r && what == SHARE_OPEN && got < 0) { // this process has too many files
		share_ask(t, SHARE_CLOSE, 0, NULL);
		r = CUDA_ERROR_OPERATING_SYSTEM;
	}
	if (!r && fd)
		*fd = got;
	else if (got >= 0)
		close(got);
	return r;
}

bool share_listens(void)
{
	return started && load(&wanted);
}

bool share_rests(void)
{
	return started && !load(&wanted);
}

CUresult share_rest(void)
{
	if (!share_listens())
		return CUDA_SUCCESS;
	if (has_holders())
		return CUDA_ERROR_NOT_PERMITTED;
	store(&wanted, 0);
	if (is_ours(listener)) {
		shutdown(listener, SHUT_RDWR); // the thread may wait in accept
		while (!load(&resting))
			futex(&resting, FUTEX_WAIT_PRIVATE, 0);
		close(listener);
	}
	listener = -1;
	if (!has_holders())
		return CUDA_SUCCESS;
	share_wake(); // one has come meanwhile
	return CUDA_ERROR_NOT_PERMITTED;
}

CUresult share_wake(void)
{
	return !share_rests() || listen_again() ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

void share_forked(void)
{
	if (is_ours(listener))
		close(listener);
	listener = -1;
	started = false;
	wanted = 0;
}
