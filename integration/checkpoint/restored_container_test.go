// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"

	eventstypes "github.com/containerd/containerd/api/events"
	"github.com/containerd/typeurl/v2"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// A restored container is checkpointed like any other, and so is the one
// restored from that.
func TestThreeInARow(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	count := 101
	k.Expect(t, "count", "101")
	for round := range 3 {
		ref := takeCheckpoint(t, shared, k, fmt.Sprint(round))
		k.MustRemove(t)
		k = restore(t, shared, k.ID, ref, k.Port)
		count++
		k.Expect(t, "count", strconv.Itoa(count))
	}
	noneUnpacked(t, shared)
}

// To its user a restored container is a container: it has a pid, statistics
// and a name in the list.
func TestRestoredContainer(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "8M")
	k.Expect(t, "verify", "bad=0")
	ref := takeCheckpoint(t, shared, k, "1")
	k.MustRemove(t)
	r := restore(t, shared, k.ID, ref, k.Port)
	r.Expect(t, "verify", "bad=0")

	pid := r.MustPid(t)
	if name, err := harness.StatusField(pid, "Name"); err != nil || name != "gpuwork" {
		t.Errorf("process %d is %q, error %v; want gpuwork", pid, name, err)
	}
	listed := ""
	for line := range strings.Lines(ctr(t, shared, "tasks", "list")) {
		if fields := strings.Fields(line); fields[0] == r.ID {
			listed = strings.Join(fields[1:], " ")
		}
	}
	if want := fmt.Sprintf("%d RUNNING", pid); listed != want {
		t.Errorf("ctr tasks list has %q, want %q", listed, want)
	}
	if ps := ctr(t, shared, "tasks", "ps", r.ID); !strings.Contains(ps, strconv.Itoa(pid)) {
		t.Errorf("ctr tasks ps has no process %d:\n%s", pid, ps)
	}
	if bytes := memoryUsage(t, ctr(t, shared, "tasks", "metrics", r.ID)); bytes == 0 {
		t.Error("ctr tasks metrics tells of no memory")
	}
	if shim := commandLine(shimOf(t, r)); !strings.Contains(shim, "containerd-shim-gpuckpt-v2") {
		t.Errorf("the process is a child of %q, want it to be the shim's", shim)
	}
	if out := ctr(t, shared, "tasks", "exec", "--exec-id", "hello", r.ID, "gpuwork", "echo", "hello"); out != "hello\n" {
		t.Errorf("exec wrote %q, want hello", out)
	}
}

// The statistics of a restored container are there while it is checkpointed:
// containerd asks one container after the other, so that those of a whole node
// would wait.
func TestStatisticsDuringCheckpoint(t *testing.T) {
	results.Add(t)
	k, hurry := slow(t)
	hurry()
	ref := takeCheckpoint(t, shared, k, "1")
	k.MustRemove(t)
	r := restore(t, shared, k.ID, ref, k.Port)
	if gpu.Kind == harness.SoftwareGPU {
		hurry = shared.SoftwareGPU(t, "checkpoint_delay_ms=20000\n")
	}
	done := make(chan error, 1)
	dir := t.TempDir()
	go func() { done <- checkpointTask(t, shared, r, dir) }()
	inCheckpoint(t, r)
	if memoryUsage(t, ctr(t, shared, "tasks", "metrics", r.ID)) == 0 {
		t.Error("it uses no memory")
	}
	hurry()
	select {
	case err := <-done:
		t.Errorf("the statistics came after the checkpoint, which ended with %v", err)
	default:
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	goesOn(t, r)
}

// memoryUsage reads the memory in use, in bytes, out of ctr's table of metrics.
func memoryUsage(t *testing.T, metrics string) uint64 {
	t.Helper()
	for line := range strings.Lines(metrics) {
		fields := strings.Fields(line)
		// memory.usage_in_bytes with cgroup v1, memory.usage with v2
		if len(fields) == 2 && strings.HasPrefix(fields[0], "memory.usage") && !strings.HasPrefix(fields[0], "memory.usage_limit") {
			n, err := strconv.ParseUint(fields[1], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatalf("no memory usage in ctr's metrics:\n%s", metrics)
	return 0
}

// A restored container keeps its memory limit, and whoever listens hears of a
// process killed for it.
func TestRestoredOOM(t *testing.T) {
	results.Add(t)
	limit := uint64(256 << 20)
	if gpu.Kind == harness.RealGPU {
		limit = 3 << 30 // its context alone takes half a gigabyte
	}
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}, MemoryLimit: limit}, "counter")
	k.Expect(t, "count", "101")
	ref := takeCheckpoint(t, shared, k, "1")
	k.MustRemove(t)
	r := restore(t, shared, k.ID, ref, k.Port)
	r.Expect(t, "count", "102")

	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	events, errs := shared.Client().Subscribe(ctx, `topic=="/tasks/oom"`)
	execDetached(t, shared, r, "eater", "gpuwork", "eat", fmt.Sprint(limit>>20+64))
	select {
	case e := <-events:
		event, err := typeurl.UnmarshalAny(e.Event)
		if err != nil {
			t.Fatal(err)
		}
		if oom, ok := event.(*eventstypes.TaskOOM); !ok || oom.ContainerID != r.ID {
			t.Errorf("event %#v, want an OOM of %s", event, r.ID)
		}
	case err := <-errs:
		t.Fatalf("no OOM event: %v\n%s", err, shared.LogTail(3000))
	}
	r.Expect(t, "count", "103")
}
