// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"strings"
	"testing"
)

// Texts of CRIU 4.2's logs.
const (
	rlimitError = "(00.069) Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted\n"
	afterError  = "(00.2) Error (criu/files.c:1221): Unable to open fd=3 id=0x8\n(00.2) Error (criu/cr-restore.c:2331): Restoring FAILED.\n" +
		"(00.2) Error (criu/cgroup.c:2055): cg: cgroupd: recv req error: No such file or directory\n"
)

func TestFirstCause(t *testing.T) {
	long := "Error (criu/x.c:1): " + strings.Repeat("x", 1000)
	for _, test := range []struct{ name, log, said, means string }{
		{name: "empty"},
		{name: "no error", log: "(00.000001) Version: 4.2\n(00.000002) Warn  (criu/a.c:1): odd\n"},
		{name: "one", log: "(00.1) Error (criu/a.c:1): bad\n(00.2) fine\n", said: "Error (criu/a.c:1): bad"},
		{name: "no line feed at the end", log: "(00.1) Error (criu/a.c:1): bad", said: "Error (criu/a.c:1): bad"},
		{name: "the first", log: "Error (a:1): 1\nError (a:2): 2\n" + afterError, said: "Error (a:1): 1"},
		{name: "a known one after others", log: "Error (a:1): 1\nError (a:2): Can't fork for 7: File exists\n", said: "Error (a:2): Can't fork", means: "a process id"},
		{name: "no process", log: "Error (criu/cr-restore.c:1237): Can't fork for 8: Resource temporarily unavailable\n", said: "Error (criu/cr-restore.c:1237)", means: "three more"},
		{name: "no helper", log: "Error (criu/mount.c:4102): mnt: Can't clone helper process: Resource temporarily unavailable\n", said: "Error (criu/mount.c:4102)", means: "three more"},
		{name: "a long one", log: "(00.1) " + long + "\n", said: long[:quotedBytes]},
		{name: "the harmless one", log: rlimitError},
		{name: "only followers", log: rlimitError + afterError, said: "Error (criu/files.c:1221): Unable to open fd=3"},
		{name: "killed", log: rlimitError + "(00.07) Error (criu/cr-restore.c:1269): 8259 killed by signal 9: Killed\n" + afterError, said: "Error (criu/cr-restore.c:1269): 8259 killed"},
		{
			name: "port", log: rlimitError + "(00.1) Error (criu/sk-inet.c:1059): inet: Can't bind inet socket (id 8): Address already in use\n" + afterError,
			said: "Error (criu/sk-inet.c:1059): inet: Can't bind inet socket (id 8): Address already in use", means: "a port of the container is taken",
		},
		{
			name: "device", log: rlimitError + "Error (criu/files-ext.c:98): Can't dump file 4 of that type [20600] (chr 10:124)\n" +
				"Error (criu/cr-dump.c:1698): Dump files (pid: 27151) failed with -1\nError (criu/cr-dump.c:2128): Dumping FAILED.\n",
			said: "Error (criu/files-ext.c:98): Can't dump file 4", means: "has a device open",
		},
		{name: "io_uring", log: "Error (criu/files-ext.c:98): Can't dump file 4 of that type [600] (unknown anon_inode:[io_uring])\n", said: "Error", means: "uses io_uring"},
		{name: "io_uring mapped", log: "Error (criu/proc_parse.c:738): Can't open 64105's mapfile link 7f77e2cd5000: No such device or address\n", said: "Error", means: "io_uring"},
		{name: "connection", log: "Error (criu/sk-inet.c:200): inet: Connected TCP socket, consider using --tcp-established option.\n", said: "Error", means: "criu.tcp-established=true"},
		{name: "in flight", log: "Error (criu/sk-inet.c:185): inet: In-flight connection (l) for 2a\n", said: "Error", means: "skip-in-flight = false"},
		{name: "removed file", log: "Error (criu/files-reg.c:1122): Can't create link remap for /dev/shm/sem.mp-x. Use link-remap option.\n", said: "Error", means: "remove link-remap = false"},
		{name: "large removed file", log: "Error (criu/files-reg.c:1031): Can't dump ghost file /tmp/big of 2097152 size, increase limit\n", said: "Error", means: "criu.ghost-limit=BYTES"},
		{name: "changed file", log: "Error (criu/files-reg.c:2175): File data/log has bad size 20 (expect 10)\n", said: "Error", means: "has changed since the checkpoint"},
		{name: "disk", log: "Error (criu/bfd.c:132): bfd: Error flushing image: No space left on device\nError (criu/cr-dump.c:2128): Dumping FAILED.\n", said: "Error (criu/bfd.c:132)", means: "is full"},
		{name: "tmpfs too small", log: "Error (gpuckpt tmpfs): /dev/shm: restore the content of a tmpfs: it does not fit: write a: no space left on device\n", said: "Error (gpuckpt tmpfs)", means: "a tmpfs is smaller"},
		{name: "no room for a tmpfs", log: "Error (gpuckpt tmpfs): save the content of a tmpfs: write x.img: no space left on device\n", said: "Error (gpuckpt tmpfs)", means: "the images is full"},
		// Of TestReasons are those that any machine shows.
		{name: "uprobes", log: "Error (criu/proc_parse.c:614): PID 7 has uprobes vma. Consider using --allow-uprobes.\n", said: "Error", means: "a tracer of the node"},
		{name: "graphics", log: "Error (compel/src/lib/ptrace.c:72): POKEDATA failed: Input/output error\n", said: "Error", means: "for graphics (EGL"},
		{name: "shared mount", log: "Error (criu/mount.c:1093): mnt: Mount 7 ./v (master_id: 1 shared_id: 0) has unreachable sharing. Try --enable-external-masters.\n", said: "Error", means: "mount it rprivate"},
		{name: "protocol", log: "Error (criu/sk-inet.c:137): inet: Unsupported proto 132 for socket 1f\n", said: "Error", means: "SCTP"},
		{name: "namespace", log: "Error (criu/namespaces.c:460): Can't dump nested user namespace for 7\n", said: "Error", means: "a namespace of its own"},
		{name: "no peer", log: "Error (criu/sk-unix.c:418): unix: Unix socket 17 without peer 18\n", said: "Error", means: "a program outside of the container"},
		{name: "replaced file", log: "Error (criu/files-reg.c:1444): Unaccessible path opened 43:7, need 43:9\n", said: "Error", means: "replaced by another one"},
		{name: "a file of a kind", log: "Error (criu/files-ext.c:94): Can't dump file 3 of that type [600] (anon anon_inode:[x])\n", said: "Error", means: "of a kind that CRIU cannot dump"},
		{name: "directory of the image", log: "Error (criu/files-reg.c:1159): Can't link remap to /app: Operation not permitted\n", said: "Error", means: "have the program leave it"},
		{name: "long removed name", log: "Error (criu/files-reg.c:1426): Can't stat path: File name too long\n", said: "Error", means: "more than 245 bytes"},
		{name: "left by a restore", log: "Error (criu/files-reg.c:467): Can't create ghost regfile: File exists\n", said: "Error", means: "NAME.cr.N.ghost"},
		{name: "eBPF", log: "Error (criu/sockets.c:371): sockets: Can't get socket filter len: Permission denied\n", said: "Error", means: "SO_ATTACH_BPF"},
		{name: "reset", log: "Error (criu/sk-queue.c:235): skqueue: recvmsg fail: error: Connection reset by peer\n", said: "Error", means: "has not noticed"},
		{name: "corked", log: "Error (criu/sk-inet.c:504): inet: Can't dump corked dgram socket 3ba7e92\n", said: "Error", means: "UDP_CORK"},
		{name: "a namespace alone", log: "Error (criu/namespaces.c:532): No NS ID with kid 4026532194\n", said: "Error", means: "no process of the container is in"},
		{name: "a signal for a stopped process", log: "Error (compel/src/lib/infect.c:608): Unexpected 14363 task interruption, aborting\n", said: "Error", means: "kill -CONT"},
		{name: "limit of memory", log: "Error (compel/arch/x86/src/lib/infect.c:541): remote mmap() failed: Cannot allocate memory\n", said: "Error", means: "ulimit -v"},
		{name: "an interface", log: "Error (criu/sk-packet.c:449): packet: Can't bind packet socket: No such device\n", said: "Error", means: "-i any"},
		{name: "a part of a segment", log: "Error (criu/shmem.c:924): Can't open 0/map_files/7f97a6b99000-7f97a6ba5000 on procfs: No such file or directory\n", said: "Error", means: "shmdt"},
		{name: "a connection twice", log: "Error (soccr/soccr.c:529): Can't connect inet socket back: Cannot assign requested address\n", said: "Error", means: "still open here"},
		{name: "huge pages", log: "Error (criu/files-reg.c:1790): Can't lookup mount=18 for fd=-3 path=/anon_hugepage (deleted)\n", said: "Error", means: "MAP_HUGETLB"},
		{name: "no descriptor", log: "Error (compel/src/lib/infect-rpc.c:44): Message reply from daemon is trimmed (12/0)\n", said: "Error", means: "ulimit -n"},
		{name: "FIFO", log: "Error (criu/pipes.c:425): Can't obtain piped data size\n", said: "Error", means: "O_PATH"},
		{name: "terminal on its way", log: "Error (criu/tty.c:1865): tty: No CTL for TTY dump, likely SCM case\n", said: "Error", means: "a terminal is on its way"},
		{name: "terminal", log: "Error (criu/tty.c:1018): tty: Don't have tty to inherit session from, aborting\n", said: "Error", means: "--tty"},
	} {
		t.Run(test.name, func(t *testing.T) {
			said, means := firstCause(strings.NewReader(test.log))
			if !strings.HasPrefix(said, test.said) || (test.said == "") != (said == "") {
				t.Errorf("said %q, want %q", said, test.said)
			}
			if !strings.Contains(means, test.means) || (test.means == "") != (means == "") {
				t.Errorf("means %q, want %q", means, test.means)
			}
		})
	}
}

func FuzzFirstCause(f *testing.F) {
	f.Add("(00.1) Error (a:1): b\n")
	f.Add("Error (Error (\n\nError (")
	f.Add(strings.Repeat("Error (x", 200) + "\xff\n")
	f.Fuzz(func(t *testing.T, log string) {
		said, means := firstCause(strings.NewReader(log))
		if len(said) > quotedBytes || strings.Contains(said, "\n") || said != "" && !strings.HasPrefix(said, "Error (") || said == "" && means != "" {
			t.Errorf("quoted %q, which means %q", said, means)
		}
	})
}
