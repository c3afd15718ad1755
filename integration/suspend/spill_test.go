// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package suspend

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// spillBytes is how much GPU memory is spilled to a disk: as in TestShareGPU,
// 8 GiB at most.
func spillBytes(t *testing.T) uint64 {
	t.Helper()
	return min(session.Sizes(t)[0].Bytes, 8<<30)
}

// spilledFiles are the files of GPU state in a directory.
func spilledFiles(t *testing.T, dir string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "gpuckpt-spill-*", "gpu-*"))
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// Spilled, a suspended container takes neither GPU memory nor host memory for it.
func TestSpill(t *testing.T) {
	result := results.Add(t)
	bytes := spillBytes(t)
	result.Number("gpu_memory_bytes", float64(bytes))
	dir := diskDir(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", strconv.FormatUint(bytes, 10), "--seed", "9")
	k.Expect(t, "verify", "bad=0")
	free, _ := memory(t, 0, k)

	if err := result.Time("suspend", func() error { suspend(t, shared, k, "--spill", dir); return nil }); err != nil {
		t.Fatal(err)
	}
	result.Phases(t, k)
	hasNone(t, 0, k, free)
	if taken := stagingMemory(t, "staging"); taken > bytes/4 {
		t.Errorf("%d bytes of host memory are taken, though the state is on a disk", taken)
	}
	files := spilledFiles(t, dir)
	if len(files) == 0 {
		t.Fatal("no GPU state on the disk")
	}
	for _, file := range files {
		if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 || uint64(info.Size()) < bytes {
			t.Errorf("%s: %v, error %v; want %d bytes that only root reads", file, info, err, bytes)
		}
	}

	if err := result.Time("resume", func() error { resume(t, shared, k); return nil }); err != nil {
		t.Fatal(err)
	}
	result.Phases(t, k)
	k.Expect(t, "verify", "bad=0")
	if taken := stagingMemory(t, "staging"); taken > bytes/4 {
		t.Errorf("%d bytes of host memory are taken after the resume", taken)
	}
}

// Where memory is short a spill is written while the driver is at work, and
// without a spill the suspension is refused.
func TestSpillWrittenThrough(t *testing.T) {
	results.Add(t)
	const bytes = 256 << 20
	shared.Configured(t, shared.Staging("through", "memory_limit = 134217728\nwhen_short = \"write-through\""))
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", strconv.FormatUint(bytes, 10), "--seed", "9")
	k.Expect(t, "verify", "bad=0")
	free, _ := memory(t, 0, k)
	harness.Says(t, gpuckpt(t, shared, "suspend", k.ID), "preflight", "suspend with a spill")
	isPaused(t, shared, k, false)
	k.Expect(t, "verify", "bad=0")

	suspend(t, shared, k, "--spill", diskDir(t))
	hasNone(t, 0, k, free)
	if taken := stagingMemory(t, "through"); taken > bytes/4 {
		t.Errorf("%d bytes of host memory are taken, though the state is on a disk", taken)
	}
	resume(t, shared, k)
	k.Expect(t, "verify", "bad=0")
}

// A disk without room makes the suspension fail, and the container runs on.
func TestSpillDiskFull(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "32M")
	k.Expect(t, "verify", "bad=0")
	full := harness.SmallDisk(t, "8m")
	harness.Says(t, gpuckpt(t, shared, "suspend", "--spill", full, k.ID), "spill", "no space left on device", full)
	isPaused(t, shared, k, false)
	k.Expect(t, "verify", "bad=0")
	k.Expect(t, "count", "101")
	if left, err := os.ReadDir(full); err != nil || len(left) > 0 {
		t.Errorf("left on the full disk: %v, error %v", left, err)
	}
	// On another it works.
	suspend(t, shared, k, "--spill", diskDir(t))
	resume(t, shared, k)
	k.Expect(t, "verify", "bad=0")
}

// What a spill cannot work with is refused, and the container runs on.
func TestSpillRefused(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")

	tmpfs := t.TempDir()
	if err := unix.Mount("tmpfs", tmpfs, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(tmpfs, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	harness.Says(t, gpuckpt(t, shared, "suspend", "--spill", tmpfs, k.ID), tmpfs, "tmpfs", "choose a directory on a disk")
	harness.Says(t, gpuckpt(t, shared, "suspend", "--spill", file, k.ID), file, "no directory")
	harness.Says(t, gpuckpt(t, shared, "suspend", "--spill", file+"-none", k.ID), file+"-none", "no such file")
	disk := diskDir(t)
	left := filepath.Join(disk, "gpuckpt-spill-"+shared.Namespace()+"-"+k.ID)
	if err := os.Mkdir(left, 0o700); err != nil {
		t.Fatal(err)
	}
	held, err := os.Open(left)
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	if err := unix.Flock(int(held.Fd()), unix.LOCK_EX); err != nil { // else it would be swept
		t.Fatal(err)
	}
	harness.Says(t, gpuckpt(t, shared, "suspend", "--spill", disk, k.ID), left, "has died: remove it")
	if err := os.Remove(left); err != nil {
		t.Errorf("what was there: %v", err)
	}
	isPaused(t, shared, k, false)
	k.Expect(t, "count", "102")

	// Left to the driver, the state stays in the process.
	shared.Configured(t, shared.Staging("staging", "steer = false"))
	harness.Says(t, gpuckpt(t, shared, "suspend", "--spill", diskDir(t), k.ID), "spill", "(gpuwork)", "without a spill")
	isPaused(t, shared, k, false)
	k.Expect(t, "count", "103")
	free, _ := memory(t, 0, k)
	suspend(t, shared, k)
	hasNone(t, 0, k, free)
	resume(t, shared, k)
	k.Expect(t, "count", "104")
}

// State that was damaged on the disk is never given back: the container stays
// suspended.
func TestSpillDamaged(t *testing.T) {
	results.Add(t)
	dir := diskDir(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "16M")
	k.Expect(t, "verify", "bad=0")
	suspend(t, shared, k, "--spill", dir)
	file := spilledFiles(t, dir)[0]
	harness.FlipBit(t, file)
	harness.Says(t, gpuckpt(t, shared, "resume", k.ID), file, "is damaged")
	isPaused(t, shared, k, true)
	harness.FlipBit(t, file)
	resume(t, shared, k)
	k.Expect(t, "verify", "bad=0")
}

// The same with an interposer, whose memory is spilled beside the driver's; and without a spill.
func TestInterposer(t *testing.T) {
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}, Annotations: map[string]string{"dev.gpuckpt.interposer": "true"}}, "pattern", "--bytes", "16M", "--chunks", "2")
	k.Expect(t, "verify", "bad=0")
	dir := diskDir(t)
	for _, flags := range [][]string{{"--spill", dir}, nil} {
		suspend(t, shared, k, flags...)
		if files := spilledFiles(t, dir); flags != nil && len(files) != 2 {
			t.Errorf("on the disk are %v, want the interposer's state and the driver's", files)
		}
		resume(t, shared, k)
		k.Expect(t, "verify", "bad=0")
		k.Expect(t, "write 500", "wrote 500")
	}
}

// Two processes that share GPU memory by their interposers are suspended and resumed.
func TestInterposerShared(t *testing.T) {
	for name, up := range map[string]bool{"up": true, "starting": false} {
		t.Run(name, func(t *testing.T) {
			spec := harness.RunSpec{GPUs: []int{0}, Ports: 2, Annotations: map[string]string{"dev.gpuckpt.interposer": "true"}}
			spec.Env = []string{"SOFTCUDA_CONTEXT_DELAY_MS=400"} // as with a real one, the second process is up later
			k := shared.Work(t, spec, "ipc", "--share", "large", "--bytes", "8M")
			t.Cleanup(func() { sayShim(t) })
			k.Expect(t, "count", "101")
			next := 102
			if up {
				k.Process(1).Expect(t, "count", strconv.Itoa(next))
				next++
			}
			for _, flags := range [][]string{{"--spill", diskDir(t)}, nil} {
				suspend(t, shared, k, flags...)
				resume(t, shared, k)
				k.Process(1).Expect(t, "count", strconv.Itoa(next))
				k.Expect(t, "count", strconv.Itoa(next+1))
				k.Process(1).Expect(t, "verify", "bad=0")
				next += 2
			}
		})
	}
}

// sayShim logs what the shims have said last, for a test that has failed.
func sayShim(t *testing.T) {
	if t.Failed() {
		t.Log(shared.LogTail(6000))
	}
}

// A program that is suspended while it starts CUDA goes on, or is not suspended.
func TestStarting(t *testing.T) {
	moments := []time.Duration{0, 100, 200, 300, 400, 500, 700, 900}
	if gpu.Kind == harness.SoftwareGPU { // before, in and after its delays
		moments = []time.Duration{100, 500, 900}
	}
	for i, after := range moments {
		after *= time.Millisecond
		slow := []string{"SOFTCUDA_INIT_DELAY_MS=300", "SOFTCUDA_CONTEXT_DELAY_MS=300"}
		k := shared.Work(t, harness.RunSpec{ID: fmt.Sprint("starting-", after), GPUs: []int{0}, Env: slow}, "counter")
		t.Cleanup(func() { sayShim(t) })
		time.Sleep(after)
		args := []string{k.ID}
		if i%2 == 1 {
			args = []string{"--spill", diskDir(t), k.ID}
		}
		err := gpuckpt(t, shared, "suspend", args...)
		if err == nil {
			resume(t, shared, k)
		}
		t.Logf("after %v: suspend: %v", after, err)
		k.Expect(t, "count", "101")
	}
}

// Two processes that hand memory to each other by events of CUDA IPC go on after a suspension.
func TestInterposerSharedEvents(t *testing.T) {
	spec := harness.RunSpec{GPUs: []int{0}, Ports: 2, Annotations: map[string]string{"dev.gpuckpt.interposer": "true"}}
	k := shared.Work(t, spec, "ipc", "--share", "events", "--bytes", "24M")
	turns := func() (n int) {
		wrong := -1
		reply := k.Process(1).Answer(t, "turns")
		if _, err := fmt.Sscanf(reply, "turns=%d wrong=%d", &n, &wrong); err != nil || wrong != 0 {
			t.Fatalf("%q: %v", reply, err)
		}
		return n
	}
	for range 2 {
		before := turns()
		harness.Within(t, "their turns", func() bool { return turns() > before+20 })
		suspend(t, shared, k)
		resume(t, shared, k)
		before = turns()
		harness.Within(t, "their turns after the suspension", func() bool { return turns() > before+20 })
	}
}
