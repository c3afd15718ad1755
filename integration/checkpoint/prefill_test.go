// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// What the log says of the memory of a program that is restored.
const (
	madeForIt = "GPU memory is made for the processes"
	copied    = "the GPU memory that was kept is copied" // at its checkpoint
	byItself  = "the processes fill their GPU memory themselves"
)

// A program's memory is made and filled by another process while CRIU and the driver restore the program: in pieces that
// begin and end within the program's. The restored program is checkpointed and restored as before. Where the other process
// fails, or the GPU has no room, the program has its memory all the same.
func TestInterposerPrefilled(t *testing.T) {
	soft := gpu.Kind == harness.SoftwareGPU
	const room = "gpu0.memory_mib=8192\n"
	if soft {
		shared.SoftwareGPU(t, room)
	}
	k := shared.Work(t, withInterposer(), "pattern", "--bytes", "136M", "--chunks", "34", "--seed", "7")
	k.Expect(t, "verify", "bad=0")
	dir := t.TempDir()
	// again ends the program and restores it, beside meanwhile, and fails the test unless the log says so.
	again := func(meanwhile func(), says string) {
		t.Helper()
		endTask(t, shared, k)
		before := strings.Count(shared.Log(), says)
		task := createRestore(t, k, dir)
		done := make(chan error, 1)
		go func() { done <- task.Start(t.Context()) }()
		meanwhile()
		if err := <-done; err != nil {
			t.Fatalf("%v\n%s", err, shared.LogTail(3000))
		}
		if strings.Count(shared.Log(), says) == before {
			t.Errorf("the log does not say that %s:\n%s", says, shared.LogTail(3000))
		}
		k.Expect(t, "verify", "bad=0")
	}
	for range 2 {
		dir = t.TempDir()
		checkpointInto(t, shared, k, dir)
		m, err := images.ReadMetadata(dir)
		if err != nil {
			t.Fatal(err)
		}
		if areas := m.Processes[0].Areas; len(areas) != 2 || !areas[0].Interposer || areas[1].Interposer {
			t.Fatalf("areas: %+v", areas)
		}
		again(func() {}, madeForIt)
	}

	endTask(t, shared, k)
	file := areaFiles(t, dir)[0]
	harness.FlipBit(t, file)
	harness.Says(t, restoreTask(t, shared, k, dir), file, "is damaged")
	nothingRuns(t, shared, k)
	ctr(t, shared, "tasks", "delete", k.ID) // there is no process to kill: none has run
	harness.FlipBit(t, file)
	if err := restoreTask(t, shared, k, dir); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(3000))
	}
	k.Expect(t, "verify", "bad=0")
	if !soft { // it has so little memory copied before its driver has compiled the kernel that digests
		return
	}
	for line := range strings.Lines(shared.Log()) {
		if strings.Contains(line, madeForIt) && !strings.Contains(line, "digested=true") {
			t.Errorf("the GPU has not digested: %s", line)
		}
	}

	undo := shared.SoftwareGPU(t, room+"context_delay_ms=2000\n")
	earlier := helpersOf(t) // some may be about to end
	again(func() {
		var helpers []int
		harness.Within(t, "the mover", func() bool {
			helpers = slices.DeleteFunc(helpersOf(t), func(pid int) bool { return slices.Contains(earlier, pid) })
			return len(helpers) > 1
		})
		if err := unix.Kill(helpers[len(helpers)-1], unix.SIGKILL); err != nil {
			t.Error(err)
		}
	}, byItself)
	undo()
	shared.SoftwareGPU(t, "gpu0.memory_mib=1600\n")
	again(func() {}, "has no room for it")

	dir = t.TempDir()
	if _, err := k.CheckpointTask(t.Context(), harness.TaskCheckpoint{ImagePath: dir, Exit: true}); err != nil {
		t.Fatal(err)
	}
	if line := lastCopy(); !strings.Contains(line, "digested=true") {
		t.Errorf("the GPU has not digested what was copied for a checkpoint: %q", line)
	}
	ctr(t, shared, "tasks", "delete", k.ID)
	if err := restoreTask(t, shared, k, dir); err != nil {
		t.Fatal(err)
	}
	k.Expect(t, "verify", "bad=0")
}

// helpersOf returns the CUDA helpers of the shims, the last one last.
func helpersOf(t *testing.T) (pids []int) {
	t.Helper()
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		exe, _ := os.Readlink(filepath.Join(dir, "exe"))
		environ, _ := os.ReadFile(filepath.Join(dir, "environ"))
		if pid, err := strconv.Atoi(filepath.Base(dir)); err == nil && strings.HasSuffix(exe, "/gpuckpt-cuda-helper") && strings.Contains(string(environ), shared.Dir()) {
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids)
	return pids
}
