// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
)

// onDisk is a directory that is not on a tmpfs.
func onDisk(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "gpuckpt-trace-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// throughTo is a target whose areas are written through to a directory.
func throughTo(g *target, dir string) Target {
	return Target{PID: g.pid(), TID: g.pid(), Dir: dir, Name: "gpu-", Window: staging.MinWindow, Reserve: 1 << 20}
}

// cached is how many bytes of a file are in the page cache.
func cached(t *testing.T, path string) (bytes uint64) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	if st.Size() == 0 { // just made
		return 0
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, int(st.Size()), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	pages := make([]byte, st.Size()/staging.PageSize)
	if err := mincore(mem, pages); err != nil {
		t.Fatal(err)
	}
	for _, p := range pages {
		bytes += uint64(p&1) * staging.PageSize
	}
	return bytes
}

// State that is written through takes no more memory than the window, and is all
// in the file: two areas, mapped one after the other.
func TestWrittenThrough(t *testing.T) {
	dir := onDisk(t)
	g, s := newTarget(t), session(t)
	fds := g.ask("fds")
	to := throughTo(g, dir)
	to.Window = 4 * staging.MinWindow
	if err := s.Steer(to); err != nil {
		t.Fatal(err)
	}
	var most atomic.Uint64
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			case <-time.After(5 * time.Millisecond):
			}
			sum := uint64(0)
			for _, name := range []string{"gpu-0", "gpu-1"} {
				if _, err := os.Stat(filepath.Join(dir, name)); err == nil {
					sum += cached(t, filepath.Join(dir, name))
				}
			}
			most.Store(max(most.Load(), sum))
		}
	}()
	g.ask(fmt.Sprintf("map %d %d", largeBytes, stagingFlags))
	want := make([]byte, largeBytes)
	fill(want)
	sum := g.ask(fmt.Sprintf("map %d %d", largeBytes, stagingFlags))
	close(stop)
	<-done
	// The look at what is cached is not of one moment, and a thread that is to be
	// held runs on until it is: the bound is a soft one on a busy machine.
	n := most.Load()
	t.Logf("%d bytes of the files were in memory, of a window of %d", n, to.Window)
	if n == 0 || n > largeBytes {
		t.Error("it was not bounded")
	}
	areas, notes, err := s.Commit()
	if err != nil || len(notes) > 0 || len(areas) != 2 {
		t.Fatal(err, notes, areas)
	}
	if strconv.FormatUint(areas[1].Start, 16) != sum {
		t.Errorf("the area is at %#x, the target has it at %s", areas[1].Start, sum)
	}
	if got, zero := g.ask("sum"), strconv.FormatUint(sumOf(make([]byte, largeBytes)), 10); got != zero {
		t.Errorf("the area is not empty after it was collected: sum %s", got)
	}
	var ranges []staging.FileRange
	for i, a := range areas {
		ranges = append(ranges, staging.FileRange{Path: a.Path, Offset: a.Offset, Bytes: a.Bytes, Disk: true, Punch: true})
		name := filepath.Join(dir, fmt.Sprintf("gpu-%d", i))
		got, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got[a.Offset:a.Offset+a.Bytes], want) {
			t.Errorf("%s is not what the target wrote", name)
		}
	}
	digests, err := digester(t).Digest(ranges)
	if err != nil {
		t.Fatal(err)
	}
	for i := range digests {
		for j, d := range digests[i] {
			if d != images.DigestBlock(want[j*images.BlockBytes:(j+1)*images.BlockBytes]) {
				t.Errorf("area %d: the digest of block %d is wrong", i, j)
			}
		}
	}
	a := areas[1]
	if err := s.Map([]Mapping{{PID: a.PID, TID: a.PID, Start: a.Start, Bytes: a.Bytes, Path: a.Path, Offset: a.Offset}}); err != nil {
		t.Fatal(err)
	}
	if got := g.ask("sum"); got != strconv.FormatUint(sumOf(want), 10) {
		t.Errorf("mapped again: sum %s", got)
	}
	if got := g.ask("fds"); got != fds {
		t.Errorf("the target has %s files open, had %s", got, fds)
	}
}

// What the driver writes to again, long after it was there, is in the file.
func TestWrittenThroughTwice(t *testing.T) {
	dir := onDisk(t)
	g, s := newTarget(t), session(t)
	if err := s.Steer(throughTo(g, dir)); err != nil {
		t.Fatal(err)
	}
	g.ask(fmt.Sprintf("map %d %d", largeBytes, stagingFlags))
	want := make([]byte, largeBytes)
	fill(want)
	for _, at := range []int{0, 5 << 20, largeBytes/2 + 77, largeBytes - 1} {
		want[at] = 0xa5
		g.ask(fmt.Sprintf("set %d %d", at, 0xa5))
	}
	clear(want[96<<20 : 104<<20])
	g.ask(fmt.Sprintf("clear %d %d", 96<<20, 8<<20))
	if got := g.ask("sum"); got != strconv.FormatUint(sumOf(want), 10) {
		t.Fatal("the target reads something else than it wrote")
	}
	areas, notes, err := s.Commit()
	if err != nil || len(notes) > 0 || len(areas) != 1 {
		t.Fatal(err, notes, areas)
	}
	a := areas[0]
	digests, err := digester(t).Digest([]staging.FileRange{{Path: a.Path, Offset: a.Offset, Bytes: a.Bytes, Disk: true, Punch: true}})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "gpu-0")
	got, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got[a.Offset:a.Offset+a.Bytes], want) {
		t.Error("the file is not what the target wrote")
	}
	for j, d := range digests[0] {
		if d != images.DigestBlock(want[j*images.BlockBytes:(j+1)*images.BlockBytes]) {
			t.Errorf("the digest of block %d is wrong", j)
		}
	}
	var st unix.Stat_t
	if err := unix.Stat(file, &st); err != nil {
		t.Fatal(err)
	}
	if taken := uint64(st.Blocks) * 512; taken > largeBytes-4<<20 {
		t.Errorf("the file takes %d bytes: its zeros are no holes", taken)
	}
}

// A disk without room is told before the driver is asked for anything; one that
// fills up later refuses the driver its area.
func TestNoRoomToWriteThrough(t *testing.T) {
	dir := onDisk(t)
	image := filepath.Join(dir, "image")
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(image, 32<<20); err != nil {
		t.Fatal(err)
	}
	small := t.TempDir()
	for _, c := range [][]string{{"mkfs.ext4", "-q", image}, {"mount", "-o", "loop", image, small}} {
		if out, err := exec.Command(c[0], c[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%q: %v\n%s", c, err, out)
		}
	}
	t.Cleanup(func() {
		if err := unix.Unmount(small, 0); err != nil {
			t.Error(err)
		}
	})
	noFiles := func() {
		t.Helper()
		if left, _ := filepath.Glob(filepath.Join(small, "gpu-*")); len(left) != 0 {
			t.Errorf("files left: %v", left)
		}
	}
	g, s := newTarget(t), session(t)
	target := throughTo(g, small)
	target.Reserve = largeBytes
	if err := s.Steer(target); err == nil || !strings.Contains(err.Error(), "no space left") {
		t.Errorf("got %v, want no space left", err)
	}
	noFiles()
	g.ask(mapOrder(stagingFlags)) // as ever
	sum := g.ask("sum")

	target.Reserve = 1 << 20 // less than the area
	if err := s.Steer(target); err != nil {
		t.Fatal(err)
	}
	if got := g.ask(fmt.Sprintf("map %d %d", largeBytes, stagingFlags)); got != "mmap cannot allocate memory" {
		t.Errorf("the target got %q", got)
	}
	if _, err := s.Abort(); err == nil || !strings.Contains(err.Error(), "no space left") {
		t.Errorf("got %v, want no space left", err)
	}
	noFiles()
	if got := g.ask("sum"); got != sum {
		t.Errorf("what it had before: sum %s, want %s", got, sum)
	}

	// A file system that cannot reserve.
	ramfs := t.TempDir()
	if err := unix.Mount("ramfs", ramfs, "ramfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(ramfs, 0); err != nil {
			t.Error(err)
		}
	})
	if err := s.Steer(throughTo(g, ramfs)); err == nil || !strings.Contains(err.Error(), "cannot reserve room") {
		t.Errorf("got %v, want that it cannot reserve room", err)
	}
	if left, _ := os.ReadDir(ramfs); len(left) != 0 {
		t.Errorf("files left: %v", left)
	}
}

// When a page cannot be had after all, the target goes on with the whole area.
func TestWritingThroughFails(t *testing.T) {
	if err := os.WriteFile(fillFile(os.Getpid()), fmt.Appendf(nil, "fail %d", largeBytes/2), 0o600); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(fillFile(os.Getpid()))
	dir := onDisk(t)
	g, s := newTarget(t), session(t)
	if err := s.Steer(throughTo(g, dir)); err != nil {
		t.Fatal(err)
	}
	g.ask(fmt.Sprintf("map %d %d", largeBytes, stagingFlags))
	sum := g.ask("sum")
	areas, _, err := s.Commit()
	if err == nil || !strings.Contains(err.Error(), "no space") || len(areas) != 0 {
		t.Errorf("got areas %v, %v", areas, err)
	}
	want := make([]byte, largeBytes)
	fill(want)
	if sum != strconv.FormatUint(sumOf(want), 10) || g.ask("sum") != sum {
		t.Error("the area does not hold what the target wrote")
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("files left: %v", left)
	}
}

// A tracer may die after any of its steps of writing through.
func TestWriteThroughTracerDiesAtEachStep(t *testing.T) {
	const size = 20 << 20 // more than the window
	order := fmt.Sprintf("map %d %d", size, stagingFlags)
	content := make([]byte, size)
	fill(content)
	want := strconv.FormatUint(sumOf(content), 10)
	empty := strconv.FormatUint(sumOf(make([]byte, size)), 10)
	defer os.Remove(killFile(os.Getpid()))
	died := 0
	// What is filled and written goes the same way a megabyte at a time.
	for n, by := 0, 1; ; n += by {
		if n > 50 {
			by = 7
		}
		if err := os.WriteFile(killFile(os.Getpid()), []byte(strconv.Itoa(n)), 0o600); err != nil {
			t.Fatal(err)
		}
		dir := onDisk(t)
		g, s := newTarget(t), session(t)
		err := s.Steer(throughTo(g, dir))
		var areas []Area
		if err == nil {
			g.ask(order)
			if got := g.ask("sum"); got != want {
				t.Fatalf("step %d: sum %s, want %s", n, got, want)
			}
			areas, _, err = s.Commit()
		}
		if err == nil {
			a := areas[0]
			err = s.Map([]Mapping{{PID: g.pid(), TID: g.pid(), Start: a.Start, Bytes: a.Bytes, Path: a.Path, Offset: a.Offset}})
		}
		if err == nil {
			break // it got to the end
		}
		if !errors.Is(err, ErrTracerGone) {
			t.Fatalf("step %d: %v", n, err)
		}
		died++
		if areas == nil && n > 0 {
			// Before it was collected the content is in place.
			if got := g.ask("sum"); got != want && got != empty && got != "0" {
				t.Fatalf("step %d: sum %s, want %s", n, got, want)
			}
		}
		g.ask(order) // it still can
		if got := g.ask("sum"); got != want {
			t.Fatalf("step %d: sum of a new area %s, want %s", n, got, want)
		}
		s.Close()
		g.cmd.Process.Kill()
		g.cmd.Wait()
		os.RemoveAll(dir)
	}
	if died < 40 {
		t.Errorf("the tracer died at %d steps only", died)
	}
	t.Logf("%d steps", died)
}
