// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0
//
// init PROGRAM ARGUMENT...: a container's first process, which starts a test of CRIU's suite in
// /zdtm/static. The test goes on in the background as a child of init. SIGUSR1 asks it for its
// verdict, by a SIGTERM to the process that PROGRAM.pid names.

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static void stop(const char *program)
{
	char path[256], text[32] = "";
	snprintf(path, sizeof path, "%s.pid", program);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return;
	if (read(fd, text, sizeof text - 1) > 0)
		kill(atoi(text), SIGTERM);
	close(fd);
}

int main(int argc, char **argv)
{
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, SIGCHLD);
	sigaddset(&set, SIGUSR1);
	sigprocmask(SIG_BLOCK, &set, NULL);
	// Tests make their files there as users of their own.
	if (argc < 2 || chdir("/zdtm/static") || chmod(".", 0777))
		return 1;
	pid_t starter = fork();
	if (!starter) {
		sigprocmask(SIG_UNBLOCK, &set, NULL);
		execv(argv[1], argv + 1);
		_exit(127);
	}
	for (;;) {
		int signal, status;
		pid_t pid;
		if (sigwait(&set, &signal))
			continue;
		if (signal == SIGUSR1)
			stop(argv[1]);
		else
			while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
				if (pid == starter)
					printf("started: %d\n", status), fflush(stdout);
	}
}
