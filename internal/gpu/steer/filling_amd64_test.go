// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
)

// The target is stopped before it gets to what is not filled.
func TestTargetStaysBehindFilling(t *testing.T) {
	const hold = largeBytes * 3 / 4
	if err := os.WriteFile(fillFile(os.Getpid()), fmt.Appendf(nil, "hold %d", hold), 0o600); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(fillFile(os.Getpid()))
	g, s := newTarget(t), session(t)
	if err := s.Steer(Target{PID: g.pid(), TID: g.pid(), Name: "gpu-"}); err != nil {
		t.Fatal(err)
	}
	before, err := sharedMemory(g.pid())
	if err != nil {
		t.Fatal(err)
	}
	grown := func() uint64 {
		now, err := sharedMemory(g.pid())
		if err != nil {
			t.Fatal(err)
		}
		return now - min(now, before)
	}
	mapped := make(chan string)
	go func() { mapped <- g.ask(fmt.Sprintf("map %d %d", largeBytes, stagingFlags)) }()
	eventually(t, "the target has written to a quarter of the area", func() bool { return grown() >= largeBytes/4 })
	time.Sleep(200 * time.Millisecond) // a target that is not stopped is done long before
	if n := grown(); n > hold {
		t.Errorf("the target has %d bytes of the area, of which %d are filled", n, hold)
	}
	select {
	case <-mapped:
		t.Error("the target was not stopped")
	default:
	}
	os.Remove(fillFile(os.Getpid()))
	<-mapped
	sum := g.ask("sum")
	areas, notes, err := s.Commit()
	if err != nil || len(notes) > 0 || len(areas) != 1 {
		t.Fatal(err, notes, areas)
	}
	a := areas[0]
	if err := s.Map([]Mapping{{PID: g.pid(), TID: g.pid(), Start: a.Start, Bytes: a.Bytes, Path: a.Path, Offset: a.Offset}}); err != nil {
		t.Fatal(err)
	}
	if got := g.ask("sum"); got != sum {
		t.Errorf("mapped again: sum %s, want %s", got, sum)
	}
}

// Memory that is to go to a disk goes there while the target writes. What has
// changed since is written again.
func TestWriteBehind(t *testing.T) {
	const size = 5 * images.BlockBytes
	dir := t.TempDir()
	g, s := newTarget(t), session(t)
	if err := s.Steer(Target{PID: g.pid(), TID: g.pid(), Name: "gpu-", CopyTo: dir}); err != nil {
		t.Fatal(err)
	}
	g.ask(fmt.Sprintf("map %d %d", size, stagingFlags))
	// Three blocks are far enough behind the target's end.
	file := filepath.Join(dir, "gpu-0")
	eventually(t, "most of the area is on the disk", func() bool {
		var st unix.Stat_t
		return unix.Stat(file, &st) == nil && st.Blocks*512 >= 3*images.BlockBytes
	})
	areas, notes, err := s.Commit()
	if err != nil || len(notes) > 0 || len(areas) != 1 {
		t.Fatal(err, notes, areas)
	}
	a := areas[0]
	if a.Written[0].Mark == "" || a.Written[1].Mark == "" || a.Written[4].Mark != "" {
		t.Fatalf("written blocks: %v", a.Written)
	}
	memory, err := os.OpenFile(a.Path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer memory.Close()
	if _, err := memory.WriteAt([]byte("changed"), int64(a.Offset)+12345); err != nil {
		t.Fatal(err)
	}
	if _, err := memory.WriteAt(make([]byte, images.BlockBytes), int64(a.Offset)+images.BlockBytes); err != nil {
		t.Fatal(err)
	}
	digests, err := digester(t).Copy([]staging.FileRange{{Path: a.Path, Offset: a.Offset, Bytes: a.Bytes, To: file, Written: a.Written}})
	if err != nil {
		t.Fatal(err)
	}
	want, got := make([]byte, size), make([]byte, size)
	if _, err := memory.ReadAt(want, int64(a.Offset)); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.ReadAt(got, int64(a.Offset)); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Error("the copy differs from the memory")
	}
	for i, d := range digests[0] {
		if d != images.DigestBlock(want[i*images.BlockBytes:(i+1)*images.BlockBytes]) {
			t.Errorf("the digest of block %d is wrong", i)
		}
	}
}

// State that stays in memory is digested while the target writes.
func TestDigestBehind(t *testing.T) {
	if raceDetector {
		t.Skip("the race detector slows the digests down, which then are never ready: hack/test runs it without")
	}
	const size = 5 * images.BlockBytes
	// How far it is cannot be seen from here: each try waits longer than the one before.
	for wait := 100 * time.Millisecond; wait < 20*time.Second; wait *= 2 {
		dir := t.TempDir()
		g, s := newTarget(t), session(t)
		if err := s.Steer(Target{PID: g.pid(), TID: g.pid(), Name: "gpu-", Dir: dir}); err != nil {
			t.Fatal(err)
		}
		g.ask(fmt.Sprintf("map %d %d", size, stagingFlags))
		time.Sleep(wait)
		areas, _, err := s.Commit()
		if err != nil || len(areas) != 1 {
			t.Fatal(err, areas)
		}
		a := areas[0]
		if len(a.Written) < 3 || a.Written[2].Mark == "" {
			continue
		}
		memory, err := os.ReadFile(a.Path)
		if err != nil {
			t.Fatal(err)
		}
		for i, k := range a.Written[:3] {
			block := memory[a.Offset:][i*images.BlockBytes : (i+1)*images.BlockBytes]
			if k.Mark != images.MarkBlock(block) || k.Digest != images.DigestBlock(block) {
				t.Errorf("block %d: %+v is wrong", i, k)
			}
		}
		return
	}
	t.Error("nothing is digested while the target works")
}

// A write-behind whose area is given up leaves no file.
func TestWriteBehindAborted(t *testing.T) {
	dir := t.TempDir()
	g, s := newTarget(t), session(t)
	if err := s.Steer(Target{PID: g.pid(), TID: g.pid(), Name: "gpu-", CopyTo: dir}); err != nil {
		t.Fatal(err)
	}
	g.ask(mapOrder(stagingFlags))
	if _, err := s.Abort(); err != nil {
		t.Fatal(err)
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("files left: %v", left)
	}
}

// When the room ends while the area is filled the target goes on, with the
// whole area, and the collection says why there is none.
func TestFillingFails(t *testing.T) {
	if err := os.WriteFile(fillFile(os.Getpid()), fmt.Appendf(nil, "fail %d", largeBytes*3/4), 0o600); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(fillFile(os.Getpid()))
	dir := t.TempDir()
	g, s := newTarget(t), session(t)
	if err := s.Steer(Target{PID: g.pid(), TID: g.pid(), Dir: dir, Name: "gpu-"}); err != nil {
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
