// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// A program with the interposer preloaded, on several software GPUs, whose threads make calls at once: what it is named
// for on the command line. Ends with 0, or says what is wrong. Under a ThreadSanitizer races end it.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

typedef unsigned long long CUdeviceptr;

#include "want.h"

enum { MIB = 1 << 20, MAX_GPUS = 8, MOST = 400 };

static int (*alloc)(CUdeviceptr *, size_t), (*release)(CUdeviceptr), (*current)(void *), (*enable)(void *, unsigned);
static int (*create)(void **, unsigned, int), (*destroy)(void *), (*retain)(void **, int), (*end)(int);
static int (*access_of)(unsigned long long *, const int[2], CUdeviceptr), (*attribute)(void *, int, CUdeviceptr);
static int (*new_event)(void **, unsigned), (*end_event)(void *), (*managed)(CUdeviceptr *, size_t, unsigned);
static int (*new_handle)(unsigned long long *, size_t, const void *, uint64_t), (*end_handle)(unsigned long long);
static int (*record)(void *, void *), (*query)(void *), (*waits)(void *, void *, unsigned), (*finish)(void *);
static int (*new_stream)(void **, unsigned), (*get_handle)(void *, void *);
struct handle {
	char bytes[64];
};
static int (*export)(struct handle *, CUdeviceptr), (*import)(CUdeviceptr *, struct handle, unsigned), (*end_import)(CUdeviceptr);
static int (*pin)(void **, size_t, unsigned), (*wait_for)(void *, CUdeviceptr, uint64_t, unsigned);
static void *contexts[MAX_GPUS];
static int gpus;
static pthread_barrier_t ready;
static uint32_t stop;

static void start(pthread_t *thread, void *(*run)(void *), void *arg)
{
	WANT(!pthread_create(thread, NULL, run, arg));
}

static bool stopped(void)
{
	return __atomic_load_n(&stop, __ATOMIC_SEQ_CST);
}

// Peers.

static int target; // the GPU that others are to reach
static CUdeviceptr all[MOST];
static int count;

static void *allocate(void *arg)
{
	(void)arg;
	WANT(!current(contexts[target]));
	pthread_barrier_wait(&ready);
	for (count = 0; count < MOST && !stopped(); count++)
		WANT(!alloc(&all[count], 2 * MIB));
	return NULL;
}

static void *reach(void *gpu)
{
	WANT(!current(contexts[(intptr_t)gpu]));
	pthread_barrier_wait(&ready);
	WANT(!enable(contexts[target], 0));
	return NULL;
}

// Threads that enable access to a GPU while another one allocates there: all GPUs reach all memory.
static void peers(void)
{
	pthread_t threads[MAX_GPUS], allocator;

	for (target = 0; target < gpus; target++) {
		stop = 0;
		WANT(!pthread_barrier_init(&ready, NULL, (unsigned)gpus));
		start(&allocator, allocate, NULL);
		for (intptr_t i = 0; i < gpus; i++)
			if (i != target)
				start(&threads[i], reach, (void *)i);
		for (int i = 0; i < gpus; i++)
			WANT(i == target || !pthread_join(threads[i], NULL));
		__atomic_store_n(&stop, 1, __ATOMIC_SEQ_CST);
		WANT(!pthread_join(allocator, NULL));
		for (int i = 0; i < count; i++) {
			for (int gpu = 0; gpu < gpus; gpu++) {
				unsigned long long flags = 0;
				WANT(!access_of(&flags, (int[]){1, gpu}, all[i]));
				WANT(flags == 3);
			}
			WANT(!release(all[i]));
		}
	}
}

// Contexts.

static void *make_contexts(void *arg)
{
	(void)arg;
	for (int i = 0; i < 100; i++) {
		void *c;
		CUdeviceptr p;
		WANT(!create(&c, 0, 0) && !alloc(&p, 2 * MIB) && !destroy(c));
	}
	return NULL;
}

static void *make_primaries(void *gpu)
{
	for (int i = 0; i < 100; i++) {
		void *c;
		CUdeviceptr p;
		WANT(!retain(&c, (int)(intptr_t)gpu) && !current(c) && !alloc(&p, 2 * MIB) && !end((int)(intptr_t)gpu));
		WANT(access_of(&(unsigned long long){0}, (int[]){1, 0}, p)); // it went with its context
	}
	return NULL;
}

static unsigned char ticket[64];

static void *share_events(void *arg)
{
	void *stream, *event;

	(void)arg;
	WANT(!current(contexts[0]) && !new_stream(&stream, 1));
	while (!stopped())
		WANT(!new_event(&event, 6) && !get_handle(ticket, event) && !record(event, stream) && !end_event(event));
	return NULL;
}

// Threads that make and end contexts, primary ones too, while another one shares events of a context that stays.
static void ends(void)
{
	pthread_t threads[4];

	WANT(!end(1) && !end(2)); // what main has retained
	start(&threads[0], make_contexts, NULL);
	start(&threads[1], make_primaries, (void *)1);
	start(&threads[2], make_primaries, (void *)2);
	start(&threads[3], share_events, NULL);
	for (int i = 0; i < 4; i++) {
		__atomic_store_n(&stop, i == 3, __ATOMIC_SEQ_CST);
		WANT(!pthread_join(threads[i], NULL));
	}
}

// Events.

static void *common;

static void *use(void *stream)
{
	WANT(!current(contexts[0]));
	for (int i = 0; i < 50; i++) {
		pthread_barrier_wait(&ready);
		WANT(!record(common, stream));
		int r = query(common);
		WANT(!r || r == 600);
		WANT(!waits(stream, common, 0));
		for (int more = 0; more < 20; more++) // than the numbers that may be under way in the words of an event
			WANT(!record(common, stream));
		WANT(!finish(common));
		pthread_barrier_wait(&ready);
	}
	return NULL;
}

// Threads that record, wait for and ask for one event, while another one shares it.
static void events(void)
{
	pthread_t threads[3];
	void *stream;

	WANT(!pthread_barrier_init(&ready, NULL, 4));
	for (int i = 0; i < 3; i++) {
		WANT(!new_stream(&stream, 1));
		start(&threads[i], use, stream);
	}
	for (int i = 0; i < 50; i++) {
		WANT(!new_event(&common, 6));
		pthread_barrier_wait(&ready);
		WANT(!get_handle(ticket, common) && !memcmp(ticket, "gpce", 4));
		pthread_barrier_wait(&ready);
		WANT(!end_event(common));
	}
	for (int i = 0; i < 3; i++)
		WANT(!pthread_join(threads[i], NULL));
}

// Forks.

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { FORKS = 10 }; // of a process whose page tables are large
#else
enum { FORKS = 200 };
#endif

static struct {
	int type, types, where, id;
	void *metadata;
	char flags[8];
} exportable = {1, 1, 1, 0, NULL, {0}};

static void *allocate_and_free(void *arg)
{
	(void)arg;
	WANT(!current(contexts[0]));
	while (!stopped()) {
		unsigned long long handle;
		CUdeviceptr p;
		void *event;
		WANT(!alloc(&p, 2 * MIB) && !release(p));
		WANT(!new_handle(&handle, 2 * MIB, &exportable, 0) && !end_handle(handle));
		WANT(!new_event(&event, 6) && !end_event(event));
		WANT(!managed(&p, 64, 1) && !release(p));
	}
	return NULL;
}

static void *look(void *arg)
{
	void *context;

	(void)arg;
	while (!stopped())
		WANT(!attribute(&context, 1, all[0]) && context == contexts[0]);
	return NULL;
}

// in_a_child returns its exit status. It has no CUDA, and says so: it waits for no lock that a thread of its parent's had.
static int in_a_child(void *event, unsigned long long handle)
{
	void *context;
	CUdeviceptr p;

	alarm(10);
	if (alloc(&p, 2 * MIB) != 3 || managed(&p, 64, 1) != 3 || new_event(&event, 6) != 3 || new_handle(&handle, 2 * MIB, &exportable, 0) != 3)
		return 1;
	attribute(&context, 1, all[0]); // the interposer's answer or the driver's
	return release(all[0]) != 3 || end_event(event) != 3 || current(contexts[0]) != 3 ? 2 : end_handle(1) != 3;
}

static void forks(void)
{
	pthread_t threads[4];
	unsigned long long handle;
	void *event;

	for (count = 0; count < MOST; count++)
		WANT(!alloc(&all[count], 2 * MIB));
	WANT(!new_event(&event, 6) && !new_handle(&handle, 2 * MIB, &exportable, 0));
	for (int i = 0; i < 4; i++)
		start(&threads[i], i % 2 ? look : allocate_and_free, NULL);
	for (int i = 0; i < FORKS; i++) {
		int status = -1;
		pid_t child = fork();
		if (!child)
			_exit(in_a_child(event, handle));
		WANT(waitpid(child, &status, 0) == child);
		if (status)
			fprintf(stderr, "child %d ends with %#x\n", i, status);
		WANT(!status);
	}
	__atomic_store_n(&stop, 1, __ATOMIC_SEQ_CST);
	for (int i = 0; i < 4; i++)
		WANT(!pthread_join(threads[i], NULL));
}

// Imports.

// export_to is a process that exports two pieces of memory.
static void export_to(int pipe)
{
	struct handle handle;
	CUdeviceptr p;

	for (int i = 0; i < 2; i++)
		WANT(!alloc(&p, 2 * MIB) && !export(&handle, p) && write(pipe, &handle, sizeof handle) == sizeof handle);
	pause();
}

static pid_t closer;

static void *close_one(void *p)
{
	WANT(!current(contexts[0]));
	__atomic_store_n(&closer, (pid_t)syscall(SYS_gettid), __ATOMIC_SEQ_CST);
	WANT(!end_import(*(CUdeviceptr *)p));
	return NULL;
}

static bool sleeps(pid_t tid)
{
	char path[64], text[256] = "";

	snprintf(path, sizeof path, "/proc/self/task/%d/stat", tid);
	FILE *f = fopen(path, "re");
	WANT(f && fread(text, 1, sizeof text - 1, f) && !fclose(f));
	return strstr(text, ") S ");
}

// A thread that closes an import waits for the GPU, which waits for what the program does next: it opens another one.
static void imports(int pipe)
{
	struct handle handles[2];
	CUdeviceptr p[2];
	pthread_t thread;
	void *stream, *word;

	alarm(20);
	for (int i = 0; i < 2; i++)
		WANT(read(pipe, &handles[i], sizeof handles[i]) == sizeof handles[i]);
	WANT(!import(&p[0], handles[0], 1) && !new_stream(&stream, 1) && !pin(&word, sizeof(uint64_t), 2));
	*(uint64_t *)word = 0;
	WANT(!wait_for(stream, (CUdeviceptr)word, 1, 0));
	start(&thread, close_one, &p[0]);
	for (pid_t tid; !(tid = __atomic_load_n(&closer, __ATOMIC_SEQ_CST)) || !sleeps(tid);)
		usleep(1000);
	WANT(!import(&p[1], handles[1], 1));
	__atomic_store_n((uint64_t *)word, 1, __ATOMIC_SEQ_CST);
	WANT(!pthread_join(thread, NULL) && !end_import(p[1]));
}

static void *library;

static void *by_name(const char *name)
{
	void *f = dlsym(library, name);

	WANT(f);
	return f;
}

int main(int argc, char **argv)
{
	int ends_of[2];
	pid_t exporter = -1;

	if (argc == 2 && !strcmp(argv[1], "imports")) {
		WANT(!pipe(ends_of) && (exporter = fork()) >= 0);
		if (!exporter)
			prctl(PR_SET_PDEATHSIG, SIGKILL);
	}
	library = dlopen("libcuda.so.1", RTLD_NOW);
	WANT(library && argc == 2);
	int (*init)(unsigned) = by_name("cuInit"), (*devices)(int *) = by_name("cuDeviceGetCount");
	alloc = by_name("cuMemAlloc_v2"), release = by_name("cuMemFree_v2"), current = by_name("cuCtxSetCurrent");
	enable = by_name("cuCtxEnablePeerAccess"), create = by_name("cuCtxCreate_v2"), destroy = by_name("cuCtxDestroy_v2");
	retain = by_name("cuDevicePrimaryCtxRetain"), end = by_name("cuDevicePrimaryCtxRelease_v2");
	access_of = by_name("cuMemGetAccess"), attribute = by_name("cuPointerGetAttribute");
	new_event = by_name("cuEventCreate"), end_event = by_name("cuEventDestroy_v2"), managed = by_name("cuMemAllocManaged");
	record = by_name("cuEventRecord"), query = by_name("cuEventQuery"), waits = by_name("cuStreamWaitEvent");
	finish = by_name("cuEventSynchronize"), new_stream = by_name("cuStreamCreate"), get_handle = by_name("cuIpcGetEventHandle");
	new_handle = by_name("cuMemCreate"), end_handle = by_name("cuMemRelease");
	export = by_name("cuIpcGetMemHandle"), import = by_name("cuIpcOpenMemHandle_v2"), end_import = by_name("cuIpcCloseMemHandle");
	pin = by_name("cuMemHostAlloc"), wait_for = by_name("cuStreamWaitValue64_v2");
	WANT(!init(0) && !devices(&gpus) && gpus >= 3 && gpus <= MAX_GPUS);
	for (int i = 0; i < gpus; i++)
		WANT(!retain(&contexts[i], i));
	WANT(!current(contexts[0]));
	if (!exporter)
		export_to(ends_of[1]);
	else if (exporter > 0)
		imports(ends_of[0]);
	else if (!strcmp(argv[1], "peers"))
		peers();
	else if (!strcmp(argv[1], "ends"))
		ends();
	else if (!strcmp(argv[1], "events"))
		events();
	else if (!strcmp(argv[1], "forks"))
		forks();
	else
		return 1;
	return 0;
}
