// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// gpuwork: programs to checkpoint, and small ones to look in on them with.

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "udp.h"
#include "workloads.h"

static const char usage[] =
	"usage: gpuwork WORKLOAD [--port P] [OPTIONS]\n"
	"  counter [--start N] [--gpu I] [--log PATH | --file PATH]\n"
	"                                    counts packets in device memory, and appends\n"
	"                                    each value to a log, or writes it to a file\n"
	"  managed [--start N] [--gpu I] [--bytes N]\n"
	"                                    the same in N bytes of managed memory, which the\n"
	"                                    host writes as well\n"
	"  loop    [--start N] [--gpu I] [--interface I] [--peer ADDRESS:PORT]\n"
	"                                    counter, and a TCP connection to itself, by the\n"
	"                                    loopback address or that of I, and one to a peer\n"
	"  peer    [--start N] [--share handle] [--bytes N]\n"
	"                                    the same in two memories of GPU 1, by a kernel of GPU 0;\n"
	"                                    by cuCtxEnablePeerAccess, or mapped for both\n"
	"  plain   [--start N] [--apart chroot|mounts|netlink]\n"
	"                                    the same in host memory, without CUDA; with a root or\n"
	"                                    mounts of its own, or a connected netlink socket\n"
	"  twice   [as plain]                plain, and on port P+1 a child, which is apart\n"
	"  pattern [--bytes N] [--chunks K] [--gpus G] [--gpu I] [--seed S] [--content C]\n"
	"                                    N bytes of pattern on each of G GPUs; C is\n"
	"                                    pattern, zero or weights (bf16)\n"
	"  memory  [--bytes N]               N bytes of host memory, a child, no CUDA\n"
	"  gpumemory [--bytes N] [--gpu I]   the same with a GPU in use\n"
	"  segments [--bytes N]              N bytes and more of shared memory, a child, no CUDA\n"
	"  multi   --procs P [as pattern]    P of those, on ports P, P+1, ...\n"
	"  ranks   --procs P [--gpus G] [--work US] [--ahead N] [--share large --bytes N]\n"
	"                                    P processes whose kernels wait for each other, all\n"
	"                                    the time, on ports P, P+1, ...; process i computes\n"
	"                                    i times US microseconds before N steps\n"
	"  web     [--start N] [--gpu I]     counter, by HTTP: GET /count\n"
	"  writer  --file PATH [--start N]   counter, and a thread that appends to PATH\n"
	"  spin    [--seconds N]             a kernel that does not end by itself\n"
	"  forked  [--start N] [--gpu I] [--apart A]\n"
	"                                    counter, and on port P+1 plain, in a child forked since\n"
	"  beside, plainbeside               counter or plain, and on port P+1 plain, in a child of two\n"
	"                                    threads that was forked before\n"
	"  oddly   [--gpu I]                 counter, or with --gpu -1 plain, with names that are no text\n"
	"  forking [--start N] [--gpu I]     counter; forks a child every 10 ms, which lives for 50 ms\n"
	"  vforking [--start N] [--gpu I]    counter; vforks a child every 20 ms, which lives for 50 ms\n"
	"  ipc     [--start N] [--gpu I] [--gpus G] [--share ipc|large|handle|handles|host] [--bytes N] [--procs 1]\n"
	"                                    counter, and on port P+1 another process's of the same\n"
	"                                    device memory\n"
	"  monitor [--start N]               plain, with NVML in use\n"
	"  ring    [--start N] [--gpu I]     counter, with io_uring in use where there is one\n"
	"  turns   --file PATH --start 0|1 [--gpu I]\n"
	"                                    one of two that count in turns in PATH\n"
	"  zoo                               one of every kind of file, timer and IPC object\n"
	"  odd     --state S [--file PATH]   a rare state of a process, see odd.c\n"
	"any of these with --open PATH keeps that file open, with --shared PATH a new one of\n"
	"8 MiB mapped, with --unlinked PATH the same without its name; with --unnamed DIR an unnamed file;\n"
	"with --with profile | draw the software GPU profiles it, or draws for it\n"
	"gpuwork list: the GPUs that NVML shows, as nvidia-smi -L; try: uses each that CUDA shows, once\n"
	"gpuwork print MIB: writes that much and fails; fork MIB N: that much memory, which N children have\n"
	"as well; map N CHILDREN: N mappings of a file with a long path\n"
	"gpuwork sleep | exit CODE | echo TEXT... | cat | eat MIB | send HOST:PORT TEXT\n";

static int echo(char **words)
{
	for (; *words; words++)
		printf("%s%s", *words, words[1] ? " " : "");
	putchar('\n');
	return 0;
}

// cat passes on what it gets as soon as it comes.
static int cat(void)
{
	char part[65536];
	ssize_t n;

	while ((n = read(STDIN_FILENO, part, sizeof part)) != 0) {
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return 1;
		for (ssize_t done = 0, w; done < n; done += w)
			if ((w = write(STDOUT_FILENO, part + done, (size_t)(n - done))) < 0)
				return 1;
	}
	return 0;
}

// eat takes that much memory, piece by piece, then waits.
static int eat(int mib)
{
	for (int i = 0; i < mib; i++) {
		char *piece = malloc(1 << 20);
		if (!piece)
			return 1;
		memset(piece, i + 1, 1 << 20);
	}
	puts("ate");
	for (;;)
		pause();
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";
	char **rest = argc > 1 ? argv + 2 : argv + 1;
	int n = argc > 1 ? argc - 2 : 0;

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (getenv("GPUWORK_ENDS")) // process 1 outlives a signal that it does not handle
		signal(SIGTERM, _exit);
	if (!strcmp(what, "sleep")) {
		for (;;)
			pause();
	}
	if (!strcmp(what, "exit") && n == 1)
		return atoi(rest[0]);
	if (!strcmp(what, "echo"))
		return echo(rest);
	if (!strcmp(what, "cat") && n == 0)
		return cat();
	if (!strcmp(what, "eat") && n == 1)
		return eat(atoi(rest[0]));
	if (!strcmp(what, "print") && n == 1)
		return print_much(atoi(rest[0]));
	if (!strcmp(what, "fork") && n == 2)
		return fork_much(atoi(rest[0]), atoi(rest[1]));
	if (!strcmp(what, "map") && n == 2)
		return map_much(atoi(rest[0]), atoi(rest[1]));
	if (!strcmp(what, "open") && n == 2)
		return open_much(atoi(rest[0]), atoi(rest[1]));
	if (!strcmp(what, "join") && n == 2)
		return join_much(atoi(rest[0]), atoi(rest[1]));
	if (!strcmp(what, "remove") && n == 2)
		return remove_much(atoi(rest[0]), atoi(rest[1]));
	if (!strcmp(what, "threads") && n == 1)
		return run_much(atoi(rest[0]));
	if (!strcmp(what, "send") && n == 2)
		return udp_ask(rest[0], rest[1]);
	if (!strcmp(what, "list") && n == 0)
		return list_gpus();
	if (!strcmp(what, "try") && n == 0)
		return try_gpus();

	static const struct {
		const char *name;
		void (*run)(const struct options *);
	} workloads[] = {
		{"counter", run_counter}, {"web", run_web}, {"peer", run_peer}, {"loop", run_loop}, {"managed", run_managed}, {"plain", run_plain},
		{"pattern", run_pattern}, {"writer", run_writer},   {"spin", run_spin},
		{"forked", run_forked}, {"twice", run_twice}, {"beside", run_beside}, {"plainbeside", run_plainbeside}, {"oddly", run_oddly}, {"forking", run_forking}, {"vforking", run_vforking}, {"ipc", run_ipc}, {"monitor", run_monitor}, {"ring", run_ring}, {"turns", run_turns}, {"memory", run_memory}, {"gpumemory", run_gpumemory}, {"segments", run_segments}, {"zoo", run_zoo}, {"odd", run_odd},
	};
	for (size_t i = 0; i < sizeof workloads / sizeof *workloads; i++) {
		if (strcmp(what, workloads[i].name))
			continue;
		struct options o = options_parse(rest);
		workloads[i].run(&o);
	}
	if (!strcmp(what, "multi")) {
		struct options o = options_parse(rest);
		return run_multi(&o);
	}
	if (!strcmp(what, "ranks")) {
		struct options o = options_parse(rest);
		return run_ranks(&o);
	}
	fputs(usage, stderr);
	return 2;
}
