// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/containers"
	coci "github.com/containerd/containerd/v2/pkg/oci"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// mostMemory returns how much more memory a process had at its peak, in bytes, while do ran.
func mostMemory(t *testing.T, pid int, do func()) uint64 {
	t.Helper()
	before := resident(t, pid)
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", pid), []byte("5"), 0); err != nil { // forgets the peak: proc_pid_clear_refs(5)
		t.Fatal(err)
	}
	do()
	status, err := proc.StatusOf(pid)
	if err != nil {
		t.Fatal(err)
	}
	peak := status.Bytes("VmHWM")
	t.Logf("the shim had %d MiB, and %d at its peak", before>>20, peak>>20)
	return peak - min(peak, before)
}

// A hook that writes without end costs neither the shim nor the node memory, and its error has the end.
func TestHookWritesMuch(t *testing.T) {
	results.Add(t)
	k := hooked(t, map[string]string{beforeCheckpoint: "gpuwork print 192"})
	more := mostMemory(t, shimOf(t, k), func() {
		harness.Says(t, checkpointTask(t, shared, k, t.TempDir()), "hook before-checkpoint", "status 3", `and the end of it`)
	})
	if more > 64<<20 {
		t.Errorf("192 MiB of a hook's output took %d MiB of the shim", more>>20)
	}
	k.Expect(t, "count", "102")
}

// greedy runs one of the programs of greedy.c, and waits until it is ready.
func greedy(t *testing.T, args ...string) *harness.Container {
	t.Helper()
	files := func(_ context.Context, _ coci.Client, _ *containers.Container, s *coci.Spec) error {
		s.Process.Rlimits = []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: 1 << 14, Hard: 1 << 14}}
		return nil
	}
	k, err := shared.Run(t.Context(), harness.RunSpec{ID: harness.Name(t), MemoryLimit: 256 << 20, OwnNetwork: true, Args: append([]string{"gpuwork"}, args...), Amend: []coci.SpecOpts{files}})
	if err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(3000))
	}
	k.RemoveAtEnd(t)
	harness.Within(t, "the program is ready", func() bool { return strings.Contains(k.Logs(), "ready") })
	return k
}

// A program with very many mappings of a file with a long path costs the shim no memory for each.
func TestManyMappings(t *testing.T) {
	results.Add(t)
	k := greedy(t, "map", "10000", "1")
	began := time.Now()
	more := mostMemory(t, shimOf(t, k), func() {
		if err := checkpointTask(t, shared, k, t.TempDir()); err != nil {
			t.Fatalf("%v\n%s", err, shared.LogTail(3000))
		}
	})
	t.Logf("the checkpoint took %v", time.Since(began))
	if more > 64<<20 {
		t.Errorf("20,000 mappings took %d MiB of the shim", more>>20)
	}
}

// A dump of processes that share memory since a fork is refused before anything is written, where it is
// by more than the node's limit more than the container has, or than there is room for. That of a server
// with 16 workers is not. Files that are open and were removed are part of it.
func TestForkedMemory(t *testing.T) {
	shared.Configured(t, "fork_limit = 1073741824\n")
	disk := func(t *testing.T) string { return harness.DiskDir(t) }
	for _, test := range []struct {
		name string
		args []string
		dir  func(*testing.T) string
		says []string // none for a checkpoint that is made
	}{
		{"few", []string{"fork", "24", "16"}, disk, nil},
		{"many", []string{"fork", "64", "36"}, disk, []string{"the memory of its 37 processes takes 2.3", "the container takes", "fork_limit"}},
		{"no room", []string{"fork", "24", "2"}, func(t *testing.T) string { return smallDir(t, "disk", 64) }, []string{"the memory of its 3 processes takes 7", "there is room for", "free some, or choose another directory"}},
		{"no room for removed files", []string{"remove", "50", "2"}, func(t *testing.T) string { return smallDir(t, "disk", 64) }, []string{"takes 10", "with open files that were removed", "there is room for"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			results.Add(t)
			k, dir := greedy(t, test.args...), filepath.Join(test.dir(t), "images")
			err := checkpointTask(t, shared, k, dir)
			if test.says == nil {
				if err != nil {
					t.Fatalf("%v\n%s", err, shared.LogTail(3000))
				}
				return
			}
			harness.Says(t, err, test.says...)
			if left, err := os.ReadDir(dir); len(left) > 0 {
				t.Errorf("%v are left, %v", left, err)
			}
			isPaused(t, k, false)
		})
	}
}

// Whatever a container has in a great number, its checkpoint costs the shim less than 64 MiB, and the node
// no more bytes than the container may have memory. One that is refused leaves nothing.
func TestGreedyNeighbours(t *testing.T) {
	for _, test := range []struct {
		name string
		args []string
		says []string // none for a checkpoint that is made
		// still, if set, has the neighbour stand still before its checkpoint.
		still func(*testing.T, *harness.Container)
	}{
		{"files", []string{"open", "8000", "1"}, nil, nil},
		{"too many files", []string{"open", "16000", "70"}, []string{"more than 1048576 open files together", "close some"}, nil},
		{"sockets", []string{"join", "3000", "0"}, nil, nil},
		{"groups", []string{"join", "1500", "20"}, []string{"too many multicast groups", "leave some"}, nil},
		{"threads", []string{"threads", "1000"}, nil, nil},
		{"stopped", []string{"open", "8000", "1"}, nil, func(t *testing.T, k *harness.Container) {
			if err := unix.Kill(k.MustPid(t), unix.SIGSTOP); err != nil {
				t.Fatal(err)
			}
		}},
		{"frozen", []string{"open", "8000", "1"}, nil, func(t *testing.T, k *harness.Container) { ctr(t, shared, "tasks", "pause", k.ID) }},
	} {
		t.Run(test.name, func(t *testing.T) {
			results.Add(t)
			k, dir := greedy(t, test.args...), filepath.Join(harness.DiskDir(t), "images")
			other := shared.Work(t, harness.RunSpec{ID: harness.Name(t) + "-other"}, "plain")
			other.Expect(t, "count", "101")
			if test.still != nil {
				test.still(t, k)
			}
			began, otherTook := time.Now(), make(chan time.Duration, 1)
			go func() { // whose owner has nothing to do with it
				if err := checkpointTask(t, shared, other, t.TempDir()); err != nil {
					t.Error(err)
				}
				otherTook <- time.Since(began)
			}()
			more := mostMemory(t, shimOf(t, k), func() {
				switch err := checkpointTask(t, shared, k, dir); {
				case test.says != nil:
					harness.Says(t, err, test.says...)
				case err != nil:
					t.Fatalf("%v\n%s", err, shared.LogTail(3000))
				}
			})
			bytes := int64(0)
			files, err := os.ReadDir(dir)
			for _, f := range files {
				if info, err := f.Info(); err == nil {
					bytes += info.Size()
				}
			}
			t.Logf("the checkpoint took %v, %d MiB of the shim and %d MiB of the disk; another's beside it %v", time.Since(began), more>>20, bytes>>20, <-otherTook)
			if test.says != nil && len(files) > 0 {
				t.Errorf("%d files are left, %v", len(files), err)
			}
			if more > 64<<20 || bytes > 256<<20 {
				t.Errorf("it took %d MiB of the shim and %d MiB of the disk", more>>20, bytes>>20)
			}
			isPaused(t, k, test.name == "frozen")
		})
	}
}
