// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// memoryDir is a directory whose files are memory.
func memoryDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// areaFiles are the files of GPU state in a checkpoint's directory.
func areaFiles(t *testing.T, dir string) []string {
	t.Helper()
	m, err := images.ReadMetadata(dir)
	if err != nil {
		t.Fatal(err)
	}
	var files []string
	for _, p := range m.Processes {
		for _, a := range p.Areas {
			files = append(files, filepath.Join(dir, a.File))
		}
	}
	return files
}

// places are where images lie: GPU state goes there by different ways.
func places(t *testing.T, test func(t *testing.T, dir string)) {
	t.Run("disk", func(t *testing.T) { results.Add(t); test(t, harness.DiskDir(t)) })
	t.Run("memory", func(t *testing.T) { results.Add(t); test(t, memoryDir(t)) })
}

// GPU state lies in files beside CRIU's. A restored program that changes its
// memory does not change them: the same checkpoint is restored again.
func TestRestoredTwice(t *testing.T) {
	places(t, func(t *testing.T, dir string) {
		k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "24M")
		k.Expect(t, "verify", "bad=0")
		checkpointInto(t, shared, k, dir)
		if len(areaFiles(t, dir)) == 0 {
			t.Error("the GPU state is in no file of its own")
		}
		k.Expect(t, "write 1000", "wrote 1000") // neither does the one that was left running
		for range 2 {
			endTask(t, shared, k)
			if err := restoreTask(t, shared, k, dir); err != nil {
				t.Fatalf("%v\n%s", err, shared.LogTail(3000))
			}
			k.Expect(t, "verify", "bad=0")
			k.Expect(t, "count", "101")
			k.Expect(t, "write 1000", "wrote 1000")
			k.Expect(t, "verify", "bad=0")
		}
	})
}

// A directory that holds a checkpoint keeps it.
func TestDirectoryIsTaken(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	dir := t.TempDir()
	k.Expect(t, "count", "101")
	checkpointInto(t, shared, k, dir)
	k.Expect(t, "count", "102")
	harness.Says(t, checkpointTask(t, shared, k, dir), "preflight", "holds a GPU checkpoint already")
	k.Expect(t, "count", "103")
	// Nor does one without a GPU take it.
	p := shared.Work(t, harness.RunSpec{ID: harness.Name(t) + "-plain"}, "plain")
	p.Expect(t, "count", "101")
	harness.Says(t, checkpointTask(t, shared, p, dir), "holds a GPU checkpoint already")
	p.Expect(t, "count", "102")
	endTask(t, shared, k)
	if err := restoreTask(t, shared, k, dir); err != nil {
		t.Fatal(err)
	}
	k.Expect(t, "count", "102") // as at the first
}

// A directory in which a checkpoint was cut short, by the end of its shim, say, has
// GPU state that belongs to nothing. A checkpoint beside it could not be restored.
func TestDirectoryHasLeftovers(t *testing.T) {
	places(t, func(t *testing.T, dir string) {
		k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
		k.Expect(t, "count", "101")
		left := filepath.Join(dir, images.AreaFile(1, 0))
		write(t, left, "half of it", 0o600)
		harness.Says(t, checkpointTask(t, shared, k, dir), "preflight", left, "choose an empty directory")
		isPaused(t, k, false)
		k.Expect(t, "count", "102")
		if data, err := os.ReadFile(left); err != nil || string(data) != "half of it" {
			t.Errorf("what was there is %q, %v", data, err)
		}
	})
}

// A bit of GPU state that has flipped since is found out.
func TestDamagedState(t *testing.T) {
	places(t, func(t *testing.T, dir string) {
		k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "24M")
		k.Expect(t, "verify", "bad=0")
		checkpointInto(t, shared, k, dir)
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
	})
}

// Where the staging area is not steered, by the node's wish or because its
// memory is limited, the driver fills the process's memory and CRIU dumps it.
func TestLeftToCRIU(t *testing.T) {
	for _, test := range []struct{ name, settings, bytes string }{
		{"unsteered", "steer = false", "512M"}, // as a real driver's least
		{"limited", "memory_limit = 20_000_000\nwhen_short = \"driver\"", "512M"},
		{"no-room-for-workers", "memory_limit = 20_971_520\nwhen_short = \"driver\"", "14M"}, // besides
	} {
		t.Run(test.name, func(t *testing.T) {
			results.Add(t)
			shared.Configured(t, shared.Staging(test.name, test.settings))
			k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", test.bytes)
			k.Expect(t, "verify", "bad=0")
			dir := memoryDir(t)
			checkpointInto(t, shared, k, dir)
			k.Expect(t, "verify", "bad=0")
			if files := areaFiles(t, dir); len(files) > 0 {
				t.Errorf("there are files of GPU state: %v", files)
			}
			endTask(t, shared, k)
			if err := restoreTask(t, shared, k, dir); err != nil {
				t.Fatalf("%v\n%s", err, shared.LogTail(3000))
			}
			k.Expect(t, "verify", "bad=0")
		})
	}
}

// The tracer is killed while the driver copies: a clear error, and the container
// goes on. What the tracer has left in it is in nobody's way, for a checkpoint at once
// neither.
func TestTracerKilled(t *testing.T) {
	results.Add(t)
	k, hurry := slow(t)
	shim, pid := shimOf(t, k), k.MustPid(t)
	dir := t.TempDir()
	threads := func() int {
		tids, err := harness.Threads(pid)
		if err != nil {
			t.Fatal(err)
		}
		return len(tids)
	}
	before := threads()
	done := make(chan error, 1)
	go func() { done <- checkpointTask(t, shared, k, dir) }()
	harness.Within(t, "threads that copy for the driver", func() bool { return threads() != before })
	killTracer(t, shim)
	hurry()
	harness.Says(t, <-done, "tracer", "code = Unavailable")
	goesOn(t, k)
	if left, err := filepath.Glob(filepath.Join(dir, images.AreaPrefix(1)+"*")); err != nil || len(left) > 0 {
		t.Errorf("files of the failed checkpoint are left: %v, error %v", left, err)
	}
	checkpointInto(t, shared, k, t.TempDir())
	goesOn(t, k)
}

// What a checkpoint adds to CRIU's images is for root alone.
func TestFilesAreForRoot(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	dir := filepath.Join(t.TempDir(), "images")
	checkpointInto(t, shared, k, dir)
	files, err := filepath.Glob(filepath.Join(dir, "gpu*"))
	if err != nil || len(files) < 3 { // metadata, manifest, a signature, state
		t.Fatal(files, err)
	}
	for _, file := range files {
		if info, err := os.Stat(file); err != nil || info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s: mode %v, %v", file, info.Mode(), err)
		}
	}
}
