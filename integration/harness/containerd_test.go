// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/errdefs"
)

// startForTest starts a containerd with the workload's image, or skips the test
// where there are no programs to run or no root.
func startForTest(t *testing.T, opts Options) *Containerd {
	t.Helper()
	bins, err := FindBins()
	if errors.Is(err, ErrNoBins) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() != 0 {
		t.Skip("containerd needs root")
	}
	opts.Bins, opts.Logf = bins, t.Logf
	c, err := Start(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Stop(); err != nil {
			t.Error(err)
		}
	})
	if err := c.ImportWorkload(t.Context()); err != nil {
		t.Fatal(err)
	}
	return c
}

// plain runs the counter that has no CUDA in it with runc's own shim.
func plain(t *testing.T, c *Containerd, id string) *Container {
	t.Helper()
	port, err := FreePort()
	if err != nil {
		t.Fatal(err)
	}
	k, err := c.Run(t.Context(), RunSpec{
		ID: id, Runtime: RuncRuntime, Port: port,
		Args:        []string{"gpuwork", "plain", "--port", strconv.Itoa(port)},
		Annotations: map[string]string{"org.criu.config": c.CRIUConfigPath()},
	})
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// expect asks the container and compares its answer.
func expect(t *testing.T, k *Container, question, want string) {
	t.Helper()
	got, err := k.Ask(t.Context(), question)
	if err != nil {
		t.Fatalf("%v\n%s", err, k.Logs())
	}
	if got != want {
		t.Fatalf("%s answers %q to %q, want %q", k.ID, got, question, want)
	}
}

func TestRunAttached(t *testing.T) {
	c := startForTest(t, Options{})
	for _, test := range []struct {
		name  string
		args  []string
		stdin string
		want  Output
	}{
		{"exit code", []string{"gpuwork", "exit", "7"}, "", Output{ExitCode: 7}},
		{"output", []string{"gpuwork", "echo", "a", "b"}, "", Output{Stdout: "a b\n"}},
		{"input", []string{"gpuwork", "cat"}, "some input", Output{Stdout: "some input"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := c.RunAttached(t.Context(), RunSpec{ID: "attached", Runtime: RuncRuntime, Args: test.args}, strings.NewReader(test.stdin))
			if err != nil {
				t.Fatal(err)
			}
			if got != test.want {
				t.Errorf("got %+v, want %+v", got, test.want)
			}
		})
	}
}

func TestContainerLife(t *testing.T) {
	c := startForTest(t, Options{})
	k := plain(t, c, "life")
	expect(t, k, "x", "101")
	expect(t, k, "x", "102")

	pid, err := k.Pid(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	memory, err := ProcessMemory(pid)
	if err != nil || memory.RSS == 0 || memory.PSS == 0 || memory.PSS > memory.RSS {
		t.Errorf("memory of the container's process: %+v, error %v", memory, err)
	}
	if frozen, err := Frozen(pid); frozen || err != nil {
		t.Errorf("a running container is frozen: %v, error %v", frozen, err)
	}
	if _, err := c.Ctr(t.Context(), "tasks", "pause", k.ID); err != nil {
		t.Fatal(err)
	}
	if frozen, err := Frozen(pid); !frozen || err != nil {
		t.Errorf("a paused container is frozen: %v, error %v", frozen, err)
	}
	if status, err := k.Status(t.Context()); status != client.Paused || err != nil {
		t.Errorf("status %q, error %v, want paused", status, err)
	}
	if _, err := c.Ctr(t.Context(), "tasks", "resume", k.ID); err != nil {
		t.Fatal(err)
	}
	expect(t, k, "x", "103")

	if err := k.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if code, err := k.Wait(t.Context()); code != 128+9 || err != nil {
		t.Errorf("exit code %d, error %v, want 137", code, err)
	}
	if err := k.Remove(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := k.Status(t.Context()); !errdefs.IsNotFound(err) {
		t.Errorf("status of a removed container: error %v, want not found", err)
	}
	if err := k.Remove(t.Context()); err != nil {
		t.Errorf("remove it again: %v", err)
	}
}

func TestRunFailureLeavesNoContainer(t *testing.T) {
	c := startForTest(t, Options{})
	_, err := c.Run(t.Context(), RunSpec{ID: "wrong", Runtime: RuncRuntime, Args: []string{"no-such-program"}})
	var failed *CtrError
	if !errors.As(err, &failed) || !strings.Contains(failed.Output, "no-such-program") {
		t.Errorf("error %v does not say that no-such-program is missing", err)
	}
	if list, err := c.Ctr(t.Context(), "containers", "list", "--quiet"); list != "" || err != nil {
		t.Errorf("containers left: %q, error %v", list, err)
	}
}

func TestCheckpointAndRestore(t *testing.T) {
	c := startForTest(t, Options{})
	k := plain(t, c, "counter")
	expect(t, k, "x", "101")
	if err := k.Checkpoint(t.Context(), "gpuckpt.test/checkpoint:1"); err != nil {
		t.Fatalf("%v\n%s", err, c.LogTail(2000))
	}
	expect(t, k, "x", "102") // it runs on
	if err := k.Remove(t.Context()); err != nil {
		t.Fatal(err)
	}
	restored, err := c.Restore(t.Context(), k.ID, "gpuckpt.test/checkpoint:1", k.Port)
	if err != nil {
		t.Fatalf("%v\n%s", err, c.LogTail(2000))
	}
	expect(t, restored, "x", "102") // from the checkpoint's 101, not from now
	before, err := filepath.Glob("/run/containerd/fifo/*/counter-std*")
	if err != nil || len(before) == 0 {
		t.Errorf("ctr's FIFOs of the restored task: %v, error %v", before, err)
	}
	if err := restored.Remove(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, fifo := range before {
		if _, err := os.Lstat(fifo); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left: %v", fifo, err)
		}
	}
}

// A restore that CRIU refuses, here because the program's port is taken, is an
// error, and its FIFOs are gone once the container is.
func TestRestoreFailure(t *testing.T) {
	c := startForTest(t, Options{})
	k := plain(t, c, "refused")
	expect(t, k, "x", "101")
	if err := k.Checkpoint(t.Context(), "gpuckpt.test/checkpoint:1"); err != nil {
		t.Fatal(err)
	}
	if err := k.Remove(t.Context()); err != nil {
		t.Fatal(err)
	}
	taken, err := net.ListenUDP("udp4", &net.UDPAddr{Port: k.Port})
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	var failed *CtrError
	if _, err := c.Restore(t.Context(), k.ID, "gpuckpt.test/checkpoint:1", k.Port); !errors.As(err, &failed) {
		t.Fatalf("restore with the port taken: error %v, want ctr's", err)
	}
	if err := c.Remove(t.Context(), k.ID); err != nil {
		t.Fatal(err)
	}
	if left, err := filepath.Glob(fifoDir + "/*/refused-std*"); len(left) != 0 || err != nil {
		t.Errorf("FIFOs left: %v, error %v", left, err)
	}
}

// A restored task's output goes on in the log, and is read: the shell would
// block after 64 KiB otherwise. The shell's children are forked, by the parentheses: what is frozen in vfork,
// as runc alone may freeze it, CRIU does not dump.
func TestRestoredLogs(t *testing.T) {
	c := startForTest(t, Options{})
	img, err := BuildImage(t.Context(), ImageSpec{Files: map[string]string{"/bin/sh": "/bin/sh", "/bin/sleep": "/bin/sleep"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Import(t.Context(), "gpuckpt.test/shell:1", img); err != nil {
		t.Fatal(err)
	}
	k, err := c.Run(t.Context(), RunSpec{
		ID: "logs", Runtime: RuncRuntime, Image: "gpuckpt.test/shell:1",
		Args:        []string{"sh", "-c", `i=0; while :; do i=$((i+1)); printf '%4000d\n' $i; (sleep 0.02); done`},
		Annotations: map[string]string{"org.criu.config": c.CRIUConfigPath()},
	})
	if err != nil {
		t.Fatal(err)
	}
	counted := func(k *Container, from, least int) []string {
		t.Helper()
		for ctx, cancel := context.WithTimeout(t.Context(), time.Minute); ; time.Sleep(10 * time.Millisecond) {
			if fields := strings.Fields(k.Logs()[from:]); len(fields) >= least {
				cancel()
				return fields
			}
			if ctx.Err() != nil {
				t.Fatalf("%d bytes of log do not grow by %d lines", from, least)
			}
		}
	}
	counted(k, 0, 5)
	if err := k.Checkpoint(t.Context(), "gpuckpt.test/checkpoint:1"); err != nil {
		t.Fatalf("%v\n%s", err, c.LogTail(2000))
	}
	if err := k.Remove(t.Context()); err != nil {
		t.Fatal(err)
	}
	seen := len(k.Logs())
	restored, err := c.Restore(t.Context(), k.ID, "gpuckpt.test/checkpoint:1", 0)
	if err != nil {
		t.Fatalf("%v\n%s", err, c.LogTail(2000))
	}
	// The first may be a part of a number.
	if numbers := counted(restored, seen, 40); slices.Contains(numbers[1:], "2") {
		t.Errorf("the shell began anew: %v", numbers)
	}
}

// "ctr tasks checkpoint" into a directory, with the end of the container.
func TestCheckpointTask(t *testing.T) {
	c := startForTest(t, Options{})
	k := plain(t, c, "task")
	expect(t, k, "x", "101")
	dir := filepath.Join(c.Dir(), "dump")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := k.CheckpointTask(t.Context(), TaskCheckpoint{Exit: true, ImagePath: dir}); err != nil {
		t.Fatal(err)
	}
	if images, err := filepath.Glob(filepath.Join(dir, "core-*.img")); len(images) == 0 || err != nil {
		t.Errorf("CRIU's images: %v, error %v", images, err)
	}
	if _, err := k.Wait(t.Context()); err != nil {
		t.Errorf("the container did not end with the dump: %v", err)
	}
}

func TestStopLeavesNothing(t *testing.T) {
	c := startForTest(t, Options{})
	running := plain(t, c, "running")
	expect(t, running, "x", "101")
	paused := plain(t, c, "paused")
	expect(t, paused, "x", "101")
	if _, err := c.Ctr(t.Context(), "tasks", "pause", paused.ID); err != nil {
		t.Fatal(err)
	}
	mustBeEmpty := func(when string, want bool) {
		t.Helper()
		mounts, err := MountsUnder(c.Dir())
		if err != nil {
			t.Fatal(err)
		}
		cgroups, err := CgroupsOf(c.Namespace())
		if err != nil {
			t.Fatal(err)
		}
		processes := c.home.processes()
		sockets := c.home.shimSockets()
		if (len(mounts) == 0) != want || (len(cgroups) == 0) != want || (len(processes) == 0) != want || (len(sockets) == 0) != want {
			t.Errorf("%s: mounts %v, cgroups %v, processes %v, sockets %v", when, mounts, cgroups, processes, sockets)
		}
	}
	mustBeEmpty("before the stop", false)
	sockets := c.home.shimSockets()
	if err := c.Stop(); err != nil {
		t.Fatal(err)
	}
	mustBeEmpty("after the stop", true)
	for _, path := range append(sockets, c.Dir(), filepath.Join(containerdRun, "runc", c.Namespace())) {
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left: %v", path, err)
		}
	}
	if err := c.Stop(); err != nil {
		t.Errorf("stop it again: %v", err)
	}
}

// The end of the context stops the instance, as Ctrl-C does in Interruptible.
func TestContextEndStops(t *testing.T) {
	bins, err := FindBins()
	if err != nil || os.Geteuid() != 0 {
		t.Skip("no programs or no root: ", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	c, err := Start(ctx, Options{Bins: bins, Logf: t.Logf})
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := c.Stop(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(c.Dir()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is left: %v", c.Dir(), err)
	}
}

// What a killed program left is cleaned up by the next Start: containers that
// run, one of them frozen, and the daemon.
func TestSweep(t *testing.T) {
	parent := t.TempDir()
	c := startForTest(t, Options{Dir: parent})
	k := plain(t, c, "orphan")
	expect(t, k, "x", "101")
	if _, err := c.Ctr(t.Context(), "tasks", "pause", k.ID); err != nil {
		t.Fatal(err)
	}
	sweep(parent, t.Logf)
	if _, err := os.Lstat(c.Dir()); err != nil {
		t.Fatalf("the instance of a living program was swept: %v", err)
	}
	// As if this program were gone: no process has started at that time.
	if err := os.WriteFile(c.home.owner(), []byte(strconv.Itoa(os.Getpid())+" 1"), 0o600); err != nil {
		t.Fatal(err)
	}
	sweep(parent, t.Logf)
	if processes := c.home.processes(); len(processes) != 0 {
		t.Errorf("processes left: %v", processes)
	}
	if cgroups, err := CgroupsOf(c.Namespace()); len(cgroups) != 0 || err != nil {
		t.Errorf("cgroups left: %v, error %v", cgroups, err)
	}
	if _, err := os.Lstat(c.Dir()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is left: %v", c.Dir(), err)
	}
}

func TestStartFailureLeavesNothing(t *testing.T) {
	bins, err := FindBins()
	if err != nil || os.Geteuid() != 0 {
		t.Skip("no programs or no root: ", err)
	}
	parent := t.TempDir()
	_, err = Start(t.Context(), Options{Bins: bins, Dir: parent, Config: "this is no TOML"})
	if err == nil || !strings.Contains(err.Error(), "toml") {
		t.Errorf("error %v does not quote the daemon's log", err)
	}
	if left, err := os.ReadDir(parent); len(left) != 0 || err != nil {
		t.Errorf("left: %v, error %v", left, err)
	}
}
