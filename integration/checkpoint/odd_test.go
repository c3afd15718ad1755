// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/internal/criu/different"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
)

// odd runs a container with a rare state (gpuwork odd), which has its files at a path.
func odd(t *testing.T, spec harness.RunSpec, state, file string) *harness.Container {
	t.Helper()
	return shared.Work(t, spec, "odd", "--state", state, "--file", file)
}

// answer asks a container of odd once.
func answer(t *testing.T, k *harness.Container) string {
	t.Helper()
	got, err := k.Ask(t.Context(), "same?")
	if err != nil {
		t.Fatalf("%v\n%s\n%s", err, k.Logs(), shared.LogTail(3000))
	}
	return got
}

// A file that was removed while it is open, and has another name, is the same file after a restore: of
// an image that is restored again, and in place, as nerdctl does it with a container that has ended. CRIU
// leaves nothing beside the file.
func TestRemovedWithAnotherName(t *testing.T) {
	results.Add(t)
	for _, at := range []string{"/removed", "/volume/removed", "/dev/shm/removed"} {
		t.Run(strings.ReplaceAll(at[1:], "/", "-"), func(t *testing.T) {
			k := odd(t, harness.RunSpec{Mounts: volume(t)}, "other-name", at)
			same := func() {
				t.Helper()
				if got := answer(t, k); got != "same" {
					t.Error(got)
				}
				left, err := filepath.Glob(fmt.Sprintf("/proc/%d/root%s/link_remap.*", k.MustPid(t), filepath.Dir(at)))
				if err != nil || len(left) > 0 {
					t.Errorf("CRIU has left %q, %v", left, err)
				}
			}
			same()
			ref := takeCheckpoint(t, shared, k, "1")
			same()
			for range 2 {
				k.MustRemove(t)
				k = restore(t, shared, k.ID, ref, k.Port)
				same()
			}
			dir := t.TempDir()
			if _, err := k.CheckpointTask(t.Context(), harness.TaskCheckpoint{ImagePath: dir, Exit: true}); err != nil {
				t.Fatalf("%v\n%s", err, shared.LogTail(3000))
			}
			restoreInPlace(t, k, dir)
			same()
		})
	}
}

// A program that watches files of its root file system, as tail -f and reloaders do, gets their events
// after a restore.
func TestWatch(t *testing.T) {
	results.Add(t)
	for _, at := range []string{"/watched", "/volume/watched", "/dev/shm/watched"} {
		t.Run(strings.ReplaceAll(at[1:], "/", "-"), func(t *testing.T) {
			k := odd(t, harness.RunSpec{Mounts: volume(t)}, "watch", at)
			if got := answer(t, k); got != "same" {
				t.Fatal(got)
			}
			ref := takeCheckpoint(t, shared, k, "1")
			k.MustRemove(t)
			if got := answer(t, restore(t, shared, k.ID, ref, k.Port)); got != "same" {
				t.Error(got)
			}
		})
	}
}

// A log that is gone when its program is restored is made anew, with its mode, also below directories
// that are gone. A restore that fails leaves none. One that cannot be made is named.
func TestLogIsGone(t *testing.T) {
	results.Add(t)
	spec := harness.RunSpec{Mounts: volume(t)}
	dir := spec.Mounts[0].Source
	logs := filepath.Join(dir, "logs")
	if err := os.Mkdir(logs, 0o700); err != nil {
		t.Fatal(err)
	}
	k := odd(t, spec, "append", "/volume/logs/log")
	answer(t, k)
	ref := takeCheckpoint(t, shared, k, "1")
	k.MustRemove(t)
	if err := os.RemoveAll(logs); err != nil {
		t.Fatal(err)
	}
	taken, err := net.ListenPacket("udp", "127.0.0.1:"+strconv.Itoa(k.Port))
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	if _, err := shared.Restore(t.Context(), k.ID, ref, k.Port); err == nil {
		t.Fatal("a restore took the port of another program")
	}
	if _, err := os.Stat(logs); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a restore that failed left %s: %v", logs, err)
	}
	if err := errors.Join(taken.Close(), shared.Remove(t.Context(), k.ID)); err != nil {
		t.Fatal(err)
	}
	k = restore(t, shared, k.ID, ref, k.Port)
	if got := answer(t, k); got != "same" {
		t.Error(got)
	}
	if st, err := os.Stat(filepath.Join(logs, "log")); err != nil || st.Mode() != 0o640 || st.Size() != 5 {
		t.Errorf("the log is %v, %v", st, err)
	}
	k.MustRemove(t)
	if err := errors.Join(os.RemoveAll(logs), os.WriteFile(logs, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	_, err = shared.Restore(t.Context(), k.ID, ref, k.Port)
	harness.Says(t, err, "volume/logs/log", "Not a directory")
	if err := shared.Remove(t.Context(), k.ID); err != nil {
		t.Error(err)
	}
}

// What CRIU refuses is refused in the user's words, with what to do, and the program runs on.
func TestReasons(t *testing.T) {
	results.Add(t)
	admin := []string{"--cap-add", "CAP_SYS_ADMIN"}
	for _, test := range []struct {
		state, file, says string
		flags             []string
		machine           string // what a machine may lack, if the program says so
	}{
		{state: "packet-pipe", says: "pipe2 with O_DIRECT"},
		{state: "credentials", says: "try again when the program has read it"},
		{state: "message-queue", says: "such as a POSIX message queue"},
		{state: "left-queue", says: "there is a POSIX message queue"},
		{state: "secret-memory", says: "memory of memfd_secret", machine: "memfd_secret"},
		{state: "perf", says: "end the profiler before the checkpoint", machine: "perf_event_open"},
		{state: "userfaultfd", says: "handles its own page faults", machine: "userfaultfd"},
		{state: "vsock", says: "vsock (40)", machine: "socket"},
		{state: "path-of-socket", file: "/socket", says: "the name of a Unix socket open"},
		{state: "watch-removed", file: "/gone", says: "a file that was removed"},
		{state: "watch-async", says: "have the program clear them"},
		{state: "watch-proc", says: "one of /proc, /sys or /dev/pts"},
		{state: "thread-pidfd", says: "a pidfd of a thread", machine: "pidfd_open"},
		{state: "sealed-memfd", says: "sealed with F_SEAL_WRITE", machine: "mmap"},
		{state: "huge-memfd", says: "MFD_HUGETLB", machine: "memfd_create"},
		{state: "sent-too-early", file: "/early", says: "before its connection was accepted"},
		{state: "left-too-early", file: "/early", says: "before its connection was accepted"},
		{state: "pending-trap", says: "blocks SIGTRAP"},
		{state: "thread-directory", says: "a working directory of its own"},
		{state: "thread-files", says: "open files of its own"},
		{state: "from-memory", says: "started from memory"},
		{state: "same-number", says: "by which CRIU knows the content of both"},
		{state: "shared-directory", says: "shares its memory, its working directory"},
		{state: "renamed-below", file: "/tmp/renamed", says: "bind it by its whole path"},
		{state: "long-socket", says: "have the program bind a shorter one"},
		{state: "watch-link", file: "/watched-link", says: "have it watch the directory"},
		{state: "part-of-segment", says: "have it detach the segment"},
		{state: "corked", says: "UDP_CORK"},
		{state: "long-linked", says: "more than 245 bytes"},
		{state: "raw-connection", says: "a raw socket of TCP that is connected to a port", flags: []string{"--annotation", "dev.gpuckpt.io-uring=allow"}},
		{state: "connected-netlink", says: "a netlink socket is connected"},
		{state: "waiting-netlink", says: "a message waits in a netlink socket"},
		{state: "high-netlink", says: "a netlink socket is in a group"},
		{state: "process-directory", says: "is the directory of a process"},
		{state: "sent-timer", says: "is on its way through a socket"},
		{state: "high-terminal", says: "a program has the terminal 39 open, and 0 is free"},
		{state: "sent-socket", says: "a Unix socket without another end is on its way through a socket"},
		{state: "waking-timer", says: "a timer that wakes the machine", flags: []string{"--cap-add", "CAP_WAKE_ALARM"}},
		{state: "own-program", says: "its own file open by its name alone"},
		{state: "terminal-by-name", says: "a terminal open by its name alone"},
		{state: "sent-terminal", says: "a terminal is on its way"},
		{state: "fifo-by-name", says: "a FIFO open by its name alone"},
		{state: "renewed-directory", says: "have the program leave it"},
		{state: "own-network", says: "in a namespace of its own", flags: admin},
		{state: "own-children", says: "its children would be in a PID namespace of their own", flags: admin},
		{state: "own-time", says: "in a namespace of its own", flags: admin},
		{state: "own-overlay", says: "(type overlay), and CRIU does not restore that", flags: admin},
		{state: "own-ramfs", says: "a file system mounted that CRIU cannot dump", flags: admin},
		{state: "covered-directory", file: "/covered", says: "a mount covers a file", flags: admin},
		{state: "covered-file", file: "/covered", says: "another one is mounted over it", flags: admin},
		{state: "no-descriptors", says: "ulimit -n"},
		{state: "user-namespace", says: "the container has none: end it before a checkpoint", flags: admin},
		{state: "deadline", says: "scheduling policy 6", flags: []string{"--cap-add", "CAP_SYS_NICE"}, machine: "sched_setattr"},
		{state: "left-capability", says: "its inheritable capabilities have CAP_KILL"},
		{state: "full-maps", says: "mappings of memory"},
		{state: "many-signals", says: "waiting signals, and may have 4"},
		{state: "timer-above-limit", says: "has 1 timers and waiting signals"},
		{state: "threads-name", says: "comm: it is of a thread that is not the first one"},
		{state: "threads-file", says: "the kernel signals a thread for an open file"},
		{state: "system-v", says: "an IPC namespace of its own", flags: []string{"--with-ns", "ipc:/proc/self/ns/ipc"}},
	} {
		t.Run(test.state, func(t *testing.T) {
			k := odd(t, harness.RunSpec{CtrFlags: test.flags}, test.state, test.file)
			got, err := k.Ask(t.Context(), "same?")
			if err != nil && test.machine != "" && strings.Contains(k.Logs(), test.machine) {
				t.Skipf("this machine has no %s: %s", test.machine, k.Logs())
			}
			if err != nil || got != "same" {
				t.Fatalf("%q, %v\n%s", got, err, k.Logs())
			}
			_, err = k.CheckpointTask(t.Context(), harness.TaskCheckpoint{ImagePath: t.TempDir()})
			harness.Says(t, err, test.says)
			if got := answer(t, k); got != "same" {
				t.Errorf("afterwards it says %q", got)
			}
		})
	}
}

// How each thread is scheduled comes back: the processors that it may run on, its I/O priority and its
// timer slack.
func TestScheduling(t *testing.T) {
	results.Add(t)
	slackOf := func(k *harness.Container) string {
		pid := k.MustPid(t)
		tids, err := harness.Threads(pid)
		if err != nil || len(tids) != 2 {
			t.Fatalf("the threads are %v, %v", tids, err)
		}
		second := tids[0] + tids[1] - pid
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/timerslack_ns", second))
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(text))
	}
	k := odd(t, harness.RunSpec{}, "scheduling", "")
	want := answer(t, k)
	if want != "affinity of one, I/O priority 7, timer slack 2000000" || slackOf(k) != "1000000" {
		t.Fatalf("the program says %q, and has the slack %s", want, slackOf(k))
	}
	ref := takeCheckpoint(t, shared, k, "1")
	k.MustRemove(t)
	k = restore(t, shared, k.ID, ref, k.Port)
	if got := answer(t, k); got != want || slackOf(k) != "1000000" {
		t.Errorf("restored: %q, and the slack %s", got, slackOf(k))
	}
}

// What CRIU leaves out, and gpuckpt brings back; and what was refused once.
func TestBroughtBack(t *testing.T) {
	results.Add(t)
	for _, state := range []string{"semaphore", "locked-beside", "memory-policy", "core-filter", "multicast", "tcp-options", "personality", "merging", "first-thread-timer", "ended-thread-timer", "threads-time", "others-epoll", "renamed-socket", "jailed-sockets", "replaced-directory", "netlink", "links-of-processes", "appended-pipe", "repeating-timers", "absolute-timers", "shared-code", "own-memory", "removed-segment", "name-in-gone", "waiting-poll", "failing-waits", "closed-clients", "early-client", "ended-child", "dotted-socket", "long-removed", "orphans-epoll", "small-queue", "broadcast", "bound-group", "free-bind", "transparent", "without-vdso", "ghosts-name", "line-typed", "typed", "raw-sockets", "packet-sockets"} {
		t.Run(state, func(t *testing.T) {
			tries := 1
			if state == "failing-waits" {
				tries = 4
			}
			for try := 1; ; try++ {
				if broughtBack(t, state, try < tries, fmt.Sprint(try, ".")) {
					return
				}
				t.Log("runc's pause has ended calls: once more")
			}
		})
	}
}

// In a pod's network a program pings without CAP_NET_RAW, as CRI lets it, and one that listens on an interface (tcpdump)
// does on that of the same name, whose number is another one.
func TestNetwork(t *testing.T) {
	results.Add(t)
	for state, flags := range map[string][]string{"ping": {"--cap-drop", "CAP_NET_RAW"}, "interface": nil} {
		t.Run(state, func(t *testing.T) {
			network := filepath.Join(t.TempDir(), "network")
			if err := harness.NewNetwork(network); err != nil {
				t.Fatal(err)
			}
			defer unix.Unmount(network, unix.MNT_DETACH) //nolint:errcheck // the directory's removal says it
			in := func(program string, args ...string) {
				t.Helper()
				if err := harness.Program("nsenter", append([]string{"--net=" + network, program}, args...)...); err != nil {
					t.Fatal(err)
				}
			}
			same := func(k *harness.Container) {
				t.Helper()
				var got string
				err := host.InNetwork(network, func() (err error) {
					got, err = k.Ask(t.Context(), "same?")
					return err
				})
				if err != nil || got != "same" {
					t.Fatalf("%q, %v\n%s", got, err, k.Logs())
				}
			}
			in("ip", "link", "add", "e0", "type", "bridge")
			spec := harness.RunSpec{OwnNetwork: true, CtrFlags: append(flags, "--with-ns", "network:"+network), Amend: []oci.SpecOpts{setSysctl}}
			k := odd(t, spec, state, "")
			same(k)
			ref := takeCheckpoint(t, shared, k, "1")
			same(k)
			k.MustRemove(t)
			in("sh", "-c", "echo 1 0 > /proc/sys/net/ipv4/ping_group_range") // as a new network has it
			in("ip", "link", "set", "e0", "name", "e1")
			in("ip", "link", "add", "e0", "type", "bridge")
			same(restore(t, shared, k.ID, ref, k.Port))
		})
	}
}

// setSysctl lets all users ping.
func setSysctl(_ context.Context, _ oci.Client, _ *containers.Container, s *oci.Spec) error {
	s.Linux.Sysctl = map[string]string{"net.ipv4.ping_group_range": "0 2147483647"}
	return nil
}

// endedByPause is what failing-waits says if the client's pause alone has ended calls: runc freezes a cgroup of version
// 1 by trying, and thaws it now and then. The kernel then ends epoll_wait and semop, and no others of these.
const endedByPause = "these have ended: 10"

// broughtBack checkpoints and restores a program with a state twice. It reports false if again is set and the client's
// pause has changed the state.
func broughtBack(t *testing.T, state string, again bool, tag string) bool {
	t.Helper()
	k := odd(t, harness.RunSpec{}, state, "/odd")
	if got := answer(t, k); got != "same" {
		t.Fatalf("before: %s\n%s", got, k.Logs())
	}
	for _, round := range []string{"1", "2"} { // also of one that was restored
		ref := takeCheckpoint(t, shared, k, tag+round)
		got := answer(t, k)
		if again && got == endedByPause {
			k.MustRemove(t)
			return false
		}
		if got != "same" {
			t.Errorf("left running: %q", got)
		}
		k.MustRemove(t)
		k = restore(t, shared, k.ID, ref, k.Port)
		if got := answer(t, k); got != "same" {
			t.Errorf("restored: %q\n%s", got, shared.LogTail(3000))
		}
	}
	k.MustRemove(t)
	return true
}

// What becomes of a program that is left running, and of it alone.
func TestLeftRunning(t *testing.T) {
	results.Add(t)
	for state, want := range map[string]string{
		"long-sleep":    "awake", // begun anew by a checkpoint each half an hour, an hour would have no end
		"full-terminal": "same",  // more waits there than could be written back
	} {
		t.Run(state, func(t *testing.T) {
			k := odd(t, harness.RunSpec{}, state, "")
			before := answer(t, k)
			takeCheckpoint(t, shared, k, "1")
			if after := answer(t, k); before != "same" || after != want {
				t.Errorf("%s before, and left running %s, want %s", before, after, want)
			}
		})
	}
}

// Connections to programs of the host by Unix sockets come back closed, whoever has made them. The
// program that is left running keeps them.
func TestOutside(t *testing.T) {
	results.Add(t)
	for state, says := range map[string]string{
		"host-stream": "closed", "host-packets": "closed", "host-datagrams": "closed", "host-client": "closed behind what was sent",
	} {
		t.Run(state, func(t *testing.T) {
			spec := harness.RunSpec{Mounts: volume(t)}
			at := filepath.Join(spec.Mounts[0].Source, "s")
			var err error
			var end io.Closer
			switch state {
			case "host-stream":
				var l net.Listener
				if l, err = net.Listen("unix", at); err == nil {
					accepted := make(chan net.Conn, 1)
					defer runtime.KeepAlive(accepted) // the garbage collector would close it
					go func() {
						c, _ := l.Accept() // the connection to the other one is not accepted
						accepted <- c
					}()
				}
				end = l
			case "host-packets":
				end, err = net.Listen("unixpacket", at)
			case "host-datagrams":
				end, err = net.ListenPacket("unixgram", at)
			}
			if err != nil {
				t.Fatal(err)
			}
			k := odd(t, spec, state, "/volume/s")
			if state == "host-client" {
				harness.Within(t, "it listens", func() bool { end, err = net.Dial("unix", at); return err == nil })
			}
			defer end.Close()
			if got := answer(t, k); got != "same" {
				t.Fatalf("before: %s", got)
			}
			if state == "host-client" {
				if _, err := end.(net.Conn).Write([]byte("hello")); err != nil {
					t.Fatal(err)
				}
			}
			ref := takeCheckpoint(t, shared, k, "1")
			if state != "host-client" {
				if got := answer(t, k); got != "same" {
					t.Errorf("the program that is left running says %s", got)
				}
			}
			if log := shared.LogTail(100_000); !strings.Contains(log, "come back closed") || !strings.Contains(log, "gpuwork) to ") {
				t.Errorf("the log does not say so: %s", log)
			}
			k.MustRemove(t)
			if got := answer(t, restore(t, shared, k.ID, ref, k.Port)); got != says {
				t.Errorf("restored: %q, want %q", got, says)
			}
		})
	}
}

// What comes back different is what docs/limits.md says, no more and no less, and what can be seen is told
// by the checkpoint's and the restore's events.
func TestDifferent(t *testing.T) {
	results.Add(t)
	page, err := os.ReadFile(filepath.Join(cmp.Or(os.Getenv("GPUCKPT_SOURCE"), "../.."), "docs/limits.md")) // of a bundle, or the tree
	if err != nil {
		t.Fatal(err)
	}
	_, rows, _ := strings.Cut(string(page), "| what a program has set | after a restore |\n| --- | --- |\n")
	rows, _, _ = strings.Cut(rows, "\n\n")
	listed := strings.Split(rows, "\n")
	says := map[string]string{
		"mapping-policy": "the default", "lock-future": "new memory is not locked", "queued-udp": "lost", "queued-sender": "without a sender",
		"not-accepted": "closed", "queued-events": "lost", "undo": "not given back when the process ends", "own-settings": "the default", "locked-segment": "not locked",
		"peers-user": "root, without an address", "behind-empty": "lost", "nameless": "it gets no name", "keys": "gone", "removed-attributes": "gone", "netlink-type": "SOCK_RAW", "refused-datagram": "none", "shared-port": "the kernel shares it out", "urgent": "without its mark",
		"md5": "anybody can connect", "full-terminal": "less", "both-ways": "for reading", "watch-flags": "off", "childs-terminal": "none", "exclusive": "off", "exit-signal": "SIGCHLD", "lock-when-used": "all of it",
		"raw-address": "gone", "day-timer": "it ends too late", "shared-mount": "a group of its own", "landlock": "the domain is gone", "start-time": "that of the restore", "processor-time": "that since the restore",
	}
	seen := map[string]bool{"queued-udp": true, "not-accepted": true, "queued-events": true, "undo": true, "locked-segment": true, "md5": true, "both-ways": true, "watch-flags": true, "childs-terminal": true, "exclusive": true, "exit-signal": true, "raw-address": true, "shared-mount": true}
	for _, kind := range different.Kinds {
		t.Run(kind.State, func(t *testing.T) {
			if !slices.Contains(listed, kind.Row()) {
				t.Errorf("docs/limits.md lacks %s", kind.Row())
			}
			listed = slices.DeleteFunc(listed, func(l string) bool { return l == kind.Row() })
			spec := harness.RunSpec{}
			if kind.State == "landlock" { // which no other container has
				spec.Annotations = map[string]string{"dev.gpuckpt.io-uring": "allow"}
			}
			if kind.State == "shared-mount" {
				spec.Mounts, spec.Amend = sharedVolumes(t, "/volume"), []oci.SpecOpts{sharedRoot}
			}
			k := odd(t, spec, kind.State, "/odd")
			if got := answer(t, k); got != "same" {
				t.Fatalf("before: %s\n%s", got, k.Logs())
			}
			ref := "checkpoint.test/" + k.ID + ":1"
			var told struct{ Different []string }
			tells := func(args ...string) {
				t.Helper()
				told.Different = nil
				if err := shared.Gpuckpt(t.Context(), &told, args...); err != nil {
					t.Fatalf("%v\n%s", err, shared.LogTail(3000))
				}
				if slices.Contains(told.Different, kind.String()) != seen[kind.State] {
					t.Errorf("%s tells %q", args[0], told.Different)
				}
			}
			tells("checkpoint", k.ID, "--image", ref)
			k.MustRemove(t)
			restore := []string{"restore", ref, "--name", k.ID, "--net-host"}
			for _, m := range spec.Mounts {
				restore = append(restore, "--mount", fmt.Sprintf("type=bind,src=%s,dst=%s,options=rbind:rshared", m.Source, m.Destination))
			}
			tells(restore...)
			k = shared.Adopt(k.ID, k.Port)
			defer k.MustRemove(t)
			if got := answer(t, k); got != says[kind.State] {
				t.Errorf("restored: %q, want %q", got, says[kind.State])
			}
		})
	}
	if len(listed) > 0 {
		t.Errorf("docs/limits.md has more: %q", listed)
	}
}

// sharedVolumes are volumes of one mount of the host, with which they are shared.
func sharedVolumes(t *testing.T, at ...string) (volumes []specs.Mount) {
	t.Helper()
	dir := t.TempDir()
	if err := errors.Join(unix.Mount(dir, dir, "", unix.MS_BIND, ""), unix.Mount("", dir, "", unix.MS_SHARED, "")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) }) // the directory's removal says it
	for _, path := range at {
		source := filepath.Join(dir, path)
		if err := os.Mkdir(source, 0o700); err != nil {
			t.Fatal(err)
		}
		volumes = append(volumes, specs.Mount{Destination: path, Source: source, Type: "bind", Options: []string{"rbind", "rshared"}})
	}
	return volumes
}

// sharedRoot has mounts that are to be shared be so with the host's, and no others, as other clients than ctr do.
func sharedRoot(_ context.Context, _ oci.Client, _ *containers.Container, s *oci.Spec) error {
	s.Linux.RootfsPropagation = "shared"
	for i, m := range s.Mounts {
		if m.Type == "bind" && !slices.Contains(m.Options, "rshared") {
			s.Mounts[i].Options = append(m.Options, "rprivate")
		}
	}
	return nil
}

// A container with two volumes that are shared with one mount of the host is refused, and runs on.
func TestSharedVolumes(t *testing.T) {
	results.Add(t)
	spec := harness.RunSpec{Mounts: sharedVolumes(t, "/one", "/two"), Amend: []oci.SpecOpts{sharedRoot}}
	k := odd(t, spec, "copied-output", "")
	answer(t, k)
	_, err := k.CheckpointTask(t.Context(), harness.TaskCheckpoint{ImagePath: t.TempDir()})
	harness.Says(t, err, "mounts /one and /two of the container are of one group")
	answer(t, k)
}

// A program does not lock itself in with Landlock where its domain would be lost: it is told that there
// is none.
func TestLandlock(t *testing.T) {
	results.Add(t)
	for name, spec := range map[string]harness.RunSpec{"plain": {}, "GPU": {GPUs: []int{0}}, "seccomp": {CtrFlags: []string{"--seccomp"}}} {
		t.Run(name, func(t *testing.T) {
			if got := answer(t, odd(t, spec, "landlock", "/odd")); got != "there is none" {
				t.Error(got)
			}
		})
	}
}
