// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/integration/harness"
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
	at := volume(t)
	stream, err := net.Listen("unix", filepath.Join(at[0].Source, "stream"))
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	datagrams, err := net.ListenPacket("unixgram", filepath.Join(at[0].Source, "datagrams"))
	if err != nil {
		t.Fatal(err)
	}
	defer datagrams.Close()
	for _, test := range []struct {
		state, file, says string
		mounts            []specs.Mount
		flags             []string
		machine           string // what a machine may lack, if the program says so
	}{
		{state: "packet-pipe", says: "pipe2 with O_DIRECT"},
		{state: "credentials", says: "try again when the program has read it"},
		{state: "message-queue", says: "such as a POSIX message queue"},
		{state: "secret-memory", says: "memory of memfd_secret", machine: "memfd_secret"},
		{state: "perf", says: "end the profiler before the checkpoint", machine: "perf_event_open"},
		{state: "userfaultfd", says: "handles its own page faults", machine: "userfaultfd"},
		{state: "vsock", says: "vsock (40)", machine: "socket"},
		{state: "path-of-socket", file: "/socket", says: "the name of a Unix socket open"},
		{state: "host-stream", file: "/volume/stream", mounts: at, says: "a program outside of the container"},
		{state: "host-datagrams", file: "/volume/datagrams", mounts: at, says: "a program outside of the container"},
		{state: "watch-removed", file: "/gone", says: "a file that has no name any more"},
		{state: "first-thread-timer", says: "SIGEV_THREAD_ID"},
		{state: "ended-thread-timer", says: "SIGEV_THREAD_ID"},
		{state: "others-epoll", says: "take the file out of the epoll"},
		{state: "no-descriptors", says: "ulimit -n"},
		{state: "user-namespace", says: "in a user namespace of its own", flags: []string{"--cap-add", "CAP_SYS_ADMIN"}},
		{state: "system-v", says: "an IPC namespace of its own", flags: []string{"--with-ns", "ipc:/proc/self/ns/ipc"}},
	} {
		t.Run(test.state, func(t *testing.T) {
			k := odd(t, harness.RunSpec{Mounts: test.mounts, CtrFlags: test.flags}, test.state, test.file)
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

// What comes back different is what docs/limits.md says, no more and no less.
func TestDifferent(t *testing.T) {
	results.Add(t)
	page, err := os.ReadFile("../../docs/limits.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rows, _ := strings.Cut(string(page), "| what a program has set | after a restore |\n| --- | --- |\n")
	rows, _, _ = strings.Cut(rows, "\n\n")
	listed := strings.Split(rows, "\n")
	for _, test := range []struct{ state, says, row string }{
		{"memory-policy", "the default", "| memory policy (`set_mempolicy`, numactl) | the default |"},
		{"lock-future", "new memory is not locked", "| `mlockall(MCL_FUTURE)` | what is locked stays so, new memory is not locked |"},
		{"personality", "the default", "| personality (setarch) | the default |"},
		{"merging", "off", "| memory that KSM merges (`PR_SET_MEMORY_MERGE`) | off |"},
		{"semaphore", "a read took all", "| `EFD_SEMAPHORE` | a read takes the whole count |"},
		{"multicast", "the defaults", "| multicast groups and options of a socket | none, and the defaults |"},
		{"tcp-options", "the defaults", "| `TCP_USER_TIMEOUT`, `TCP_CONGESTION`, `TCP_DEFER_ACCEPT` | the defaults |"},
		{"queued-udp", "lost", "| UDP datagrams that no program has read | lost, as in a network |"},
		{"queued-sender", "without a sender", "| sender of a Unix datagram that no program has read | none |"},
		{"landlock", "the domain is gone", "| a Landlock domain, in a container without GPUs and seccomp profile | **gone**: [secure.md](secure.md#landlock) |"},
		{"start-time", "that of the restore", "| start time of a process, by which psutil and Ray know it | that of the restore |"},
	} {
		t.Run(test.state, func(t *testing.T) {
			if !slices.Contains(listed, test.row) {
				t.Errorf("docs/limits.md lacks %s", test.row)
			}
			listed = slices.DeleteFunc(listed, func(l string) bool { return l == test.row })
			k := odd(t, harness.RunSpec{}, test.state, "/odd")
			if got := answer(t, k); got != "same" {
				t.Fatalf("before: %s\n%s", got, k.Logs())
			}
			dir := t.TempDir()
			if _, err := k.CheckpointTask(t.Context(), harness.TaskCheckpoint{ImagePath: dir, Exit: true}); err != nil {
				t.Fatalf("%v\n%s", err, shared.LogTail(3000))
			}
			restoreInPlace(t, k, dir)
			if got := answer(t, k); got != test.says {
				t.Errorf("restored: %q, want %q", got, test.says)
			}
		})
	}
	if len(listed) > 0 {
		t.Errorf("docs/limits.md has more: %q", listed)
	}
}

// A program does not lock itself in with Landlock where its domain would be lost: it is told that there
// is none.
func TestLandlock(t *testing.T) {
	results.Add(t)
	for name, spec := range map[string]harness.RunSpec{"GPU": {GPUs: []int{0}}, "seccomp": {CtrFlags: []string{"--seccomp"}}} {
		t.Run(name, func(t *testing.T) {
			if got := answer(t, odd(t, spec, "landlock", "/odd")); got != "there is none" {
				t.Error(got)
			}
		})
	}
}
