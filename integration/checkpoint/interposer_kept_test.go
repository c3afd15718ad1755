// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// drained reports whether the last checkpoint in a directory kept GPU memory on the GPU and had it copied beside the driver.
func drained(t *testing.T, dir string) bool {
	t.Helper()
	m, err := images.ReadMetadata(dir)
	if err != nil {
		t.Fatal(err)
	}
	return slices.ContainsFunc(m.Phases, func(p images.Phase) bool { return p.Name == "drain GPU state" && p.Bytes > 0 })
}

// mover returns the process that copies memory for a shim, as the software GPU shows it; 0 for none.
func mover(t *testing.T, shim int) int {
	t.Helper()
	for _, pid := range childrenOf(shim, "gpuckpt-cuda-helper") {
		if keeps(t, pid) {
			return pid
		}
	}
	return 0
}

// keeps reports whether a process has memory mapped that is kept, as the software GPU shows it.
func keeps(t *testing.T, pid int) bool {
	t.Helper()
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(maps)) {
		if strings.Contains(line, "rwxs") && strings.Contains(line, "softcuda") {
			return true
		}
	}
	return false
}

// A program that is left running changes its GPU memory while what it had is copied: it has what it wrote, and the
// checkpoint what was there when it stood still. Its restored self is checkpointed as well. It has more pieces of
// memory than descriptors are handed over at a time.
func TestInterposerKept(t *testing.T) {
	k := shared.Work(t, withInterposer(), "pattern", "--bytes", "136M", "--chunks", "34", "--seed", "7")
	k.Expect(t, "count", "101")
	for next := 102; next < 104; next++ {
		keptInto(t, k, t.TempDir())
		dir := t.TempDir()
		keptInto(t, k, dir) // a process that has kept memory once
		k.Expect(t, "verify", "bad=0")
		endTask(t, shared, k)
		if err := restoreTask(t, shared, k, dir); err != nil {
			t.Fatal(err)
		}
		k.Expect(t, "verify", "bad=0")
		k.Expect(t, "count", strconv.Itoa(next))
	}
}

// keptInto takes a checkpoint of a program that changes its memory all the time.
func keptInto(t *testing.T, k *harness.Container, dir string) {
	t.Helper()
	soft := gpu.Kind == harness.SoftwareGPU
	hurry := func() {}
	if soft { // until the program has been seen at work beside the copy
		hurry = sync.OnceFunc(shared.SoftwareGPU(t, "out_delay_ms=500\n"))
		defer hurry()
	}
	done := make(chan error, 1)
	go func() { done <- checkpointTask(t, shared, k, dir) }()
	shim, beside := shimOf(t, k), 0
	for over := false; !over; {
		during := soft && mover(t, shim) != 0
		k.Expect(t, "write 700", "wrote 700")
		k.Expect(t, "write 300", "wrote 300")
		if during && mover(t, shim) != 0 {
			beside++
			hurry()
		}
		select {
		case err := <-done:
			if over = true; err != nil {
				t.Fatalf("%v\n%s", err, shared.LogTail(3000))
			}
		default:
		}
	}
	if !drained(t, dir) {
		t.Errorf("the memory was copied while the program stood still:\n%s", shared.LogTail(3000))
	}
	if soft && beside == 0 {
		t.Error("the program has not changed its memory while that was copied")
	}
	if line := lastCopy(); !strings.Contains(line, "digested=false") {
		t.Errorf("the GPU had kernels of the mover beside the program, whose own are not interrupted for them after a restore: %q", line)
	}
}

// lastCopy returns the log's last line about memory that was kept and is copied.
func lastCopy() (last string) {
	for line := range strings.Lines(shared.Log()) {
		if strings.Contains(line, copied) {
			last = line
		}
	}
	return last
}

// Without free GPU memory the program stands still while its memory is copied.
func TestInterposerKeptNoRoom(t *testing.T) {
	undo := shared.SoftwareGPU(t, "gpu0.memory_mib=1040\n")
	k := shared.Work(t, withInterposer(), "pattern", "--bytes", "24M", "--chunks", "3")
	k.Expect(t, "verify", "bad=0")
	dir := t.TempDir()
	checkpointInto(t, shared, k, dir)
	undo()
	if drained(t, dir) {
		t.Error("the memory was kept on a GPU that has no room for it twice")
	}
	if log := shared.Log(); !strings.Contains(log, "it cannot be kept on the GPU") {
		t.Errorf("the log does not say why:\n%s", shared.LogTail(3000))
	}
	k.Expect(t, "verify", "bad=0")
}

// Under a limit that leaves no room for the mover it is as without free GPU memory, and no worker is killed.
func TestInterposerKeptUnderALimit(t *testing.T) {
	if gpu.Kind != harness.SoftwareGPU {
		t.Skip("a context on a real GPU takes more than the limit")
	}
	k := shared.Work(t, withInterposer(), "pattern", "--bytes", "24M", "--chunks", "3")
	k.Expect(t, "verify", "bad=0")
	shared.Configured(t, shared.Staging("mover", fmt.Sprintf("memory_limit = %d", 400<<20)))
	dir := t.TempDir()
	checkpointInto(t, shared, k, dir)
	if drained(t, dir) {
		t.Error("there was room for a mover")
	}
	if log := shared.Log(); !strings.Contains(log, "a mover needs") {
		t.Errorf("the log does not say why:\n%s", shared.LogTail(3000))
	}
	k.Expect(t, "verify", "bad=0")
}

// What fails after the memory was kept leaves the program with it, and the GPU without what was kept.
func TestInterposerKeptUndone(t *testing.T) {
	k := shared.Work(t, withInterposer(), "pattern", "--bytes", "16M", "--chunks", "2")
	k.Expect(t, "verify", "bad=0")
	goesOn := func() {
		t.Helper()
		goesOn(t, k)
		if pid := k.MustPid(t); gpu.Kind == harness.SoftwareGPU && keeps(t, pid) {
			t.Error("the process has memory that is kept")
		}
	}
	for _, step := range []string{"checkpoint:304:1", "restore:304:1", "restore:304"} {
		undo := shared.SoftwareGPU(t, "fail="+step+"\n")
		name, _, _ := strings.Cut(step, ":")
		harness.Says(t, checkpointTask(t, shared, k, t.TempDir()), name)
		undo()
		if step == "restore:304" { // a resume goes on with the way back
			ctr(t, shared, "tasks", "resume", k.ID)
		}
		goesOn()
	}
	dir := t.TempDir()
	checkpointInto(t, shared, k, dir)
	if !drained(t, dir) {
		t.Error("the memory was not kept")
	}
	goesOn()
	k.MustRemove(t)

	spec := withInterposer()
	spec.CtrFlags = []string{"--device", "/dev/cpu_dma_latency"} // CRIU cannot dump it
	k = shared.Work(t, spec, "pattern", "--bytes", "16M", "--chunks", "2", "--open", "/dev/cpu_dma_latency")
	k.Expect(t, "verify", "bad=0")
	harness.Says(t, checkpointTask(t, shared, k, t.TempDir()), "Can't dump file")
	goesOn()
}

// whileCopied takes a checkpoint and does something while memory is copied.
func whileCopied(t *testing.T, k *harness.Container, how harness.TaskCheckpoint, do func(mover int)) error {
	t.Helper()
	defer shared.SoftwareGPU(t, "out_delay_ms=500\n")()
	done := make(chan error, 1)
	go func() {
		_, err := k.CheckpointTask(t.Context(), how)
		done <- err
	}()
	shim, pid := shimOf(t, k), 0
	harness.Within(t, "the copy", func() bool {
		pid = mover(t, shim)
		return pid != 0
	})
	do(pid)
	select {
	case err := <-done:
		return err
	case <-time.After(time.Minute):
		t.Fatal("the checkpoint does not end")
		return nil
	}
}

// A program that ends while its memory is copied: the checkpoint has what was there.
func TestInterposerKeptEnded(t *testing.T) {
	k := shared.Work(t, withInterposer(), "pattern", "--bytes", "24M", "--chunks", "3")
	k.Expect(t, "verify", "bad=0")
	dir := t.TempDir()
	if err := whileCopied(t, k, harness.TaskCheckpoint{ImagePath: dir}, func(int) {
		k.Expect(t, "verify", "bad=0")
		if err := unix.Kill(k.MustPid(t), unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}); err != nil {
		t.Fatal(err)
	}
	harness.Within(t, "its end", func() bool {
		status, err := k.Status(t.Context())
		return err == nil && status == client.Stopped
	})
	ctr(t, shared, "tasks", "delete", k.ID)
	if err := restoreTask(t, shared, k, dir); err != nil {
		t.Fatal(err)
	}
	k.Expect(t, "verify", "bad=0")
}

// Who copies dies in the middle: the checkpoint fails, says why, and leaves nothing. The program goes on with its memory,
// also where it was to end. The next checkpoint is good.
func TestInterposerMoverKilled(t *testing.T) {
	k := shared.Work(t, withInterposer(), "pattern", "--bytes", "24M", "--chunks", "3")
	k.Expect(t, "verify", "bad=0")
	for _, exit := range []bool{false, true} {
		dir := t.TempDir()
		err := whileCopied(t, k, harness.TaskCheckpoint{ImagePath: dir, Exit: exit}, func(mover int) {
			if err := unix.Kill(mover, unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
		})
		harness.Says(t, err, "drain GPU state", "copy the GPU memory of process", "killed")
		if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Errorf("the checkpoint has left %v, %v", left, err)
		}
		goesOn(t, k)
	}
	dir := t.TempDir()
	if _, err := k.CheckpointTask(t.Context(), harness.TaskCheckpoint{ImagePath: dir, Exit: true}); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(3000))
	}
	if !drained(t, dir) {
		t.Error("the memory was not kept")
	}
	endTask(t, shared, k)
	if err := restoreTask(t, shared, k, dir); err != nil {
		t.Fatal(err)
	}
	k.Expect(t, "verify", "bad=0")
}
