// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Programs that cost whoever works on them more than they cost themselves. Those that wait write
// "ready" first.

#include <arpa/inet.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "workloads.h"

// wait_with forks children that wait, and waits.
static void wait_with(int children)
{
	for (int i = 0; i < children; i++) {
		pid_t pid = fork();
		if (pid < 0)
			exit(1);
		if (pid == 0) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			for (;;)
				pause();
		}
	}
	puts("ready");
	for (;;)
		pause();
}

int print_much(int mib)
{
	static char part[1 << 20];

	memset(part, 'x', sizeof part);
	for (; mib > 0; mib--)
		for (size_t done = 0; done < sizeof part;) {
			ssize_t n = write(STDOUT_FILENO, part + done, sizeof part - done);
			if (n <= 0)
				return 1;
			done += (size_t)n;
		}
	puts("and the end of it");
	return 3;
}

int fork_much(int mib, int children)
{
	size_t words = ((size_t)mib << 20) / sizeof(unsigned);
	unsigned *p = mmap(NULL, words * sizeof *p, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), x = 1;

	if (p == MAP_FAILED)
		return 1;
	for (size_t i = 0; i < words; i++)
		p[i] = x = x * 1103515245 + 12345;
	wait_with(children);
	return 0;
}

int map_much(int mappings, int children)
{
	char name[251] = "";
	int file;

	memset(name, 'a', sizeof name - 1);
	if (chdir("/tmp"))
		return 1;
	for (int i = 0; i < 15; i++) // /proc shows paths of 4096 bytes at most
		if (mkdir(name, 0755) || chdir(name))
			return 1;
	file = open("f", O_RDWR | O_CREAT, 0644);
	if (file < 0 || ftruncate(file, 16384))
		return 1;
	for (int i = 0; i < mappings; i++) // two neighbours that are alike would be one
		if (mmap(NULL, 4096, i % 2 ? PROT_READ : PROT_READ | PROT_EXEC, MAP_SHARED, file, i % 2 * 4096) == MAP_FAILED)
			return 1;
	wait_with(children);
	return 0;
}

// open_much has a locked file open very often, and children that inherit it.
int open_much(int files, int children)
{
	int file = open("/tmp/f", O_RDWR | O_CREAT, 0644), other = open("/dev/null", O_RDONLY);

	if (file < 0 || other < 0 || flock(file, LOCK_EX))
		return 1;
	for (int i = 0; i < files; i++)
		if (dup(other) < 0)
			return 1;
	wait_with(children);
	return 0;
}

// join_much has sockets that are each in so many multicast groups of their own.
int join_much(int sockets, int groups)
{
	for (int i = 0; i < sockets; i++) {
		int s = socket(AF_INET, SOCK_DGRAM, 0);

		if (s < 0)
			return 1;
		for (int g = 0; g < groups; g++) {
			struct ip_mreqn request = {.imr_multiaddr.s_addr = htonl(0xef000000u + (unsigned)(i * groups + g)), .imr_ifindex = 1};
			if (setsockopt(s, IPPROTO_IP, IP_ADD_MEMBERSHIP, &request, sizeof request))
				return 1;
		}
	}
	wait_with(0);
	return 0;
}

static void *wait_in(void *unused)
{
	for (;;)
		pause();
	return unused;
}

int run_much(int threads)
{
	pthread_attr_t small;

	if (pthread_attr_init(&small) || pthread_attr_setstacksize(&small, 64 << 10))
		return 1;
	for (int i = 0; i < threads; i++) {
		pthread_t thread;
		if (pthread_create(&thread, &small, wait_in, NULL))
			return 1;
	}
	wait_with(0);
	return 0;
}

// remove_much has files of so much each open, which have no name any more.
int remove_much(int mib, int files)
{
	static char part[1 << 20];

	memset(part, 'x', sizeof part);
	for (int i = 0; i < files; i++) {
		int file = open("/tmp/f", O_RDWR | O_CREAT, 0644);
		if (file < 0 || unlink("/tmp/f"))
			return 1;
		for (int at = 0; at < mib; at++)
			if (write(file, part, sizeof part) != sizeof part)
				return 1;
	}
	wait_with(0);
	return 0;
}
