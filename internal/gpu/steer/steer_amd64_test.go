// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
)

// target is a running target.
type target struct {
	t   *testing.T
	cmd *exec.Cmd
	in  io.Writer
	out *bufio.Reader
}

func newTarget(t *testing.T) *target {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), targetEnv+"=1")
	return startTarget(t, cmd, "sum")
}

// startTarget runs a target until the test ends. It is there when it has answered
// its first order.
func startTarget(t *testing.T, cmd *exec.Cmd, order string) *target {
	t.Helper()
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	g := &target{t: t, cmd: cmd, in: in, out: bufio.NewReader(out)}
	g.ask(order)
	return g
}

// ask sends an order and gives the answer.
func (g *target) ask(order string) string {
	g.t.Helper()
	if _, err := fmt.Fprintln(g.in, order); err != nil {
		g.t.Fatalf("%s: %v", order, err)
	}
	line := make(chan string, 1)
	go func() {
		s, err := g.out.ReadString('\n')
		if err != nil {
			s = err.Error()
		}
		line <- strings.TrimSpace(s)
	}()
	select {
	case s := <-line:
		return s
	case <-time.After(30 * time.Second):
		g.t.Fatalf("%s: no answer", order)
		return ""
	}
}

func (g *target) pid() int { return g.cmd.Process.Pid }

const (
	areaBytes    = 5<<20 + 3*4096
	stagingFlags = unix.MAP_PRIVATE | unix.MAP_ANONYMOUS | unix.MAP_POPULATE
)

// mapOrder asks for an area of areaBytes. Like the driver it does not ask for
// whole pages.
func mapOrder(flags int) string { return fmt.Sprintf("map %d %d", areaBytes-100, flags) }

// The whole life of a staging area, in a file and in memory, in a program that maps memory meanwhile.
func TestSteeredArea(t *testing.T) {
	for name, dir := range map[string]string{"file": "/dev/shm", "memory": ""} {
		t.Run(name, func(t *testing.T) {
			if dir != "" {
				var err error
				if dir, err = os.MkdirTemp(dir, "gpuckpt-trace-"); err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { os.RemoveAll(dir) })
			}
			g, s := newTarget(t), session(t)
			fds := g.ask("fds")
			g.ask("busy")
			if err := s.Steer(Target{PID: g.pid(), TID: g.pid(), Dir: dir, Name: "gpu-"}); err != nil {
				t.Fatal(err)
			}
			var starts []uint64
			for range 8 { // a driver may map in several calls
				start, err := strconv.ParseUint(g.ask(mapOrder(stagingFlags)), 16, 64)
				if err != nil {
					t.Fatal(err)
				}
				starts = append(starts, start)
			}
			sum := g.ask("sum")
			areas, notes, err := s.Commit()
			if err != nil || len(notes) > 0 {
				t.Fatal(err, notes)
			}
			if len(areas) != len(starts) {
				t.Fatalf("got %d areas, want %d: %+v", len(areas), len(starts), areas)
			}
			for _, a := range areas {
				if a.Start%staging.HugePage != 0 || a.Offset != 0 {
					t.Errorf("the area at %#x is at %d of its file, not where a huge page begins", a.Start, a.Offset)
				}
			}
			want := make([]byte, areaBytes)
			if got, zero := g.ask("sum"), strconv.FormatUint(sumOf(want), 10); got != zero {
				t.Errorf("the area is not empty after it was collected: sum %s", got)
			}
			fill(want)
			if sum != strconv.FormatUint(sumOf(want), 10) {
				t.Fatal("the test's own sum is wrong")
			}
			var mappings []Mapping
			var ranges []staging.FileRange
			for i, a := range areas {
				if a.PID != g.pid() || a.Start != starts[i] || a.Bytes != areaBytes || a.Offset != a.Start%staging.HugePage {
					t.Errorf("area %d: got %+v, want %d bytes at %#x", i, a, areaBytes, starts[i])
				}
				content := make([]byte, areaBytes)
				f, err := os.Open(a.Path)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := f.ReadAt(content, int64(a.Offset)); err != nil {
					t.Fatal(err)
				}
				f.Close()
				if !bytes.Equal(content, want) {
					t.Errorf("area %d: the file does not hold what the target wrote", i)
				}
				mappings = append(mappings, Mapping{PID: a.PID, TID: a.PID, Start: a.Start, Bytes: a.Bytes, Path: a.Path, Offset: a.Offset})
				ranges = append(ranges, staging.FileRange{Path: a.Path, Offset: a.Offset, Bytes: a.Bytes})
			}
			if err := s.Map(mappings); err != nil {
				t.Fatal(err)
			}
			if got := g.ask("sum"); got != sum {
				t.Errorf("mapped again: sum %s, want %s", got, sum)
			}
			if got := g.ask("fds"); got != fds {
				t.Errorf("the target has %s files open, had %s", got, fds)
			}
			checkDigests(t, ranges, want)
		})
	}
}

// checkDigests compares a digester's digests, and its copies, with the content.
func checkDigests(t *testing.T, ranges []staging.FileRange, want []byte) {
	t.Helper()
	s := digester(t)
	digests, err := s.Digest(ranges)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for i := range ranges {
		ranges[i].To = filepath.Join(dir, strconv.Itoa(i))
	}
	copied, err := s.Copy(ranges)
	if err != nil {
		t.Fatal(err)
	}
	if len(digests) != len(ranges) || fmt.Sprint(digests) != fmt.Sprint(copied) || len(digests[0]) != 1 || digests[0][0] != digests[1][0] {
		t.Errorf("digests %v, of the copies %v", digests, copied)
	}
	for _, r := range ranges {
		b, err := os.ReadFile(r.To)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(b[r.Offset:], want) {
			t.Errorf("the copy %s differs", r.To)
		}
	}
	if _, err := s.Copy(ranges); err == nil {
		t.Error("a copy overwrote a file")
	}
}

// Abandoned, the area stays as the target filled it, and the file's name goes.
func TestAbortedArea(t *testing.T) {
	dir := t.TempDir()
	g, s := newTarget(t), session(t)
	if err := s.Steer(Target{PID: g.pid(), TID: g.pid(), Dir: dir, Name: "gpu-"}); err != nil {
		t.Fatal(err)
	}
	g.ask(mapOrder(stagingFlags))
	sum := g.ask("sum")
	if files, _ := os.ReadDir(dir); len(files) != 1 {
		t.Fatalf("got files %v, want one", files)
	}
	if _, err := s.Abort(); err != nil {
		t.Fatal(err)
	}
	if got := g.ask("sum"); got != sum {
		t.Errorf("sum %s, want %s", got, sum)
	}
	if files, _ := os.ReadDir(dir); len(files) != 0 {
		t.Errorf("files left: %v", files)
	}
}

// What is not a staging area stays the target's own.
func TestOtherMappingsAreLeftAlone(t *testing.T) {
	g, s := newTarget(t), session(t)
	if err := s.Steer(Target{PID: g.pid(), TID: g.pid(), Name: "gpu-"}); err != nil {
		t.Fatal(err)
	}
	for _, flags := range []int{unix.MAP_PRIVATE | unix.MAP_ANONYMOUS, unix.MAP_SHARED | unix.MAP_ANONYMOUS | unix.MAP_POPULATE} {
		g.ask(mapOrder(flags))
		sum := g.ask("sum")
		areas, _, err := s.Commit()
		if err != nil {
			t.Fatal(err)
		}
		if len(areas) != 0 {
			t.Errorf("flags %#x: got areas %+v", flags, areas)
		}
		if got := g.ask("sum"); got != sum {
			t.Errorf("flags %#x: sum %s, want %s", flags, got, sum)
		}
		if err := s.Steer(Target{PID: g.pid(), TID: g.pid(), Name: "gpu-"}); err != nil {
			t.Fatal(err)
		}
	}
}

// A file system without room leaves the area with the driver.
func TestNoRoomForTheFile(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatalf("mount a small tmpfs (the tests need root): %v", err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	g, s := newTarget(t), session(t)
	if err := s.Steer(Target{PID: g.pid(), TID: g.pid(), Dir: dir, Name: "gpu-"}); err != nil {
		t.Fatal(err)
	}
	g.ask(mapOrder(stagingFlags))
	sum := g.ask("sum")
	areas, notes, err := s.Commit()
	if err != nil {
		t.Fatal(err)
	}
	if len(areas) != 0 || len(notes) != 1 || !strings.Contains(notes[0], "no space") {
		t.Errorf("got areas %v, notes %v", areas, notes)
	}
	if got := g.ask("sum"); got != sum {
		t.Errorf("sum %s, want %s", got, sum)
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("files left: %v", left)
	}
}

// What is mapped over an area is a plain file, and no link to one.
func TestOnlyPlainFilesAreMapped(t *testing.T) {
	g, s := newTarget(t), session(t)
	start, err := strconv.ParseUint(g.ask(mapOrder(stagingFlags)), 16, 64)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	file, link, fifo := filepath.Join(dir, "file"), filepath.Join(dir, "link"), filepath.Join(dir, "fifo")
	if err := errors.Join(os.WriteFile(file, make([]byte, staging.PageSize), 0o600), os.Symlink(file, link), unix.Mkfifo(fifo, 0o600)); err != nil {
		t.Fatal(err)
	}
	want := g.ask("sum")
	for _, path := range []string{link, fifo, dir, "/dev/zero"} {
		if err := s.Map([]Mapping{{PID: g.pid(), TID: g.pid(), Start: start, Bytes: staging.PageSize, Path: path}}); err == nil {
			t.Errorf("%s was mapped", path)
		}
		if got := g.ask("sum"); got != want {
			t.Errorf("%s: the area has changed", path)
		}
	}
	if err := s.Map([]Mapping{{PID: g.pid(), TID: g.pid(), Start: start, Bytes: staging.PageSize, Path: file}}); err != nil {
		t.Error(err)
	}
}

// What stays empty is read by the huge page of zeros, not by small ones.
func TestEmptyAreaOfHugePages(t *testing.T) {
	if !hugeZeros() {
		t.Skip("this kernel has no huge page of zeros, or is told not to use it")
	}
	g, s := newTarget(t), session(t)
	start, err := strconv.ParseUint(g.ask(mapOrder(stagingFlags)), 16, 64)
	if err != nil {
		t.Fatal(err)
	}
	want := g.ask("sum")
	for _, advised := range []bool{false, true} {
		smaps, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps", g.pid()))
		if err != nil {
			t.Fatal(err)
		}
		_, area, _ := strings.Cut(string(smaps), fmt.Sprintf("%x-", start))
		_, flags, _ := strings.Cut(area, "VmFlags: ")
		flags, _, _ = strings.Cut(flags, "\n")
		if slices.Contains(strings.Fields(flags), "hg") != advised {
			t.Errorf("the area's flags are %q, advised: %v", flags, advised)
		}
		if err := s.Map([]Mapping{{PID: g.pid(), TID: g.pid(), Start: start, Bytes: areaBytes}}); err != nil {
			t.Fatal(err)
		}
	}
	if got := g.ask("sum"); got != want {
		t.Error("the area has changed")
	}
}

// openFiles are a process's, without sockets: of these a tracer that dies before it
// has sent anything may leave two.
func openFiles(t *testing.T, pid int) (links []string) {
	t.Helper()
	names, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if link, err := os.Readlink(name); err == nil && !strings.HasPrefix(link, "socket:") {
			links = append(links, filepath.Base(name)+" "+link)
		}
	}
	return links
}

// A tracer may die after any of its steps: the target goes on as if it had
// never been there. Once its areas are settled, who has opened their files has
// what was in them, and can give it back.
func TestTracerDiesAtEachStep(t *testing.T) {
	defer os.Remove(killFile(os.Getpid()))
	died, emptied, swept := 0, 0, 0
	for n := 0; ; n++ {
		if err := os.WriteFile(killFile(os.Getpid()), []byte(strconv.Itoa(n)), 0o600); err != nil {
			t.Fatal(err)
		}
		g, s := newTarget(t), session(t)
		files := openFiles(t, g.pid())
		if err := s.Steer(Target{PID: g.pid(), TID: g.pid(), Name: "gpu-"}); err != nil {
			t.Fatal(err)
		}
		g.ask(mapOrder(stagingFlags))
		want := g.ask("sum")
		var kept []Mapping
		areas, err := s.Stop()
		if err == nil {
			for _, a := range areas {
				f, ferr := os.Open(a.Path)
				if ferr != nil {
					err = errors.Join(ErrTracerGone, ferr) // it died with the answer
					break
				}
				defer f.Close()
				kept = append(kept, Mapping{
					PID: g.pid(), TID: g.pid(), Start: a.Start, Bytes: a.Bytes, Offset: a.Offset,
					Path: fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), f.Fd()),
				})
			}
		}
		if err == nil {
			_, _, err = s.Commit()
		}
		if err == nil {
			err = s.Map(kept)
		}
		if err == nil {
			s.Close()
			break // it got to the end
		}
		if !errors.Is(err, ErrTracerGone) {
			t.Fatalf("step %d: %v", n, err)
		}
		died++
		if kept != nil {
			if g.ask("sum") != want {
				emptied++
			}
			if err := os.Remove(killFile(os.Getpid())); err != nil {
				t.Fatal(err)
			}
			if err := session(t).Map(kept); err != nil {
				t.Fatalf("step %d: %v", n, err)
			}
		}
		if got := g.ask("sum"); got != want {
			t.Fatalf("step %d: sum %s, want %s", n, got, want)
		}
		again := g.ask(mapOrder(stagingFlags)) // it still can
		if _, err := strconv.ParseUint(again, 16, 64); err != nil {
			t.Fatalf("step %d: the target answers %q", n, again)
		}
		if got := g.ask("sum"); got != want {
			t.Fatalf("step %d: sum of a new area %s, want %s", n, got, want)
		}
		// What it has left open the next one closes.
		if err := os.Remove(killFile(os.Getpid())); err != nil && kept == nil {
			t.Fatal(err)
		}
		next := session(t)
		if err := next.Steer(Target{PID: g.pid(), TID: g.pid(), Name: "gpu-", Sweep: true}); err != nil {
			t.Fatalf("step %d: %v", n, err)
		}
		if !slices.Equal(openFiles(t, g.pid()), files) {
			swept++
		}
		g.ask("sum")
		if _, err := next.Abort(); err != nil {
			t.Fatalf("step %d: %v", n, err)
		}
		if now := openFiles(t, g.pid()); !slices.Equal(now, files) {
			t.Fatalf("step %d: %v are open, want %v", n, now, files)
		}
		next.Kill() // the race detector's exit takes a second
		next.Close()
		s.Close()
		g.cmd.Process.Kill()
		g.cmd.Wait()
	}
	if swept == 0 {
		t.Error("no tracer left anything open")
	}
	if emptied == 0 {
		t.Error("the tracer never died between the emptying of an area and its return")
	}
	if died < 50 {
		t.Errorf("the tracer died at %d steps only", died)
	}
	t.Logf("%d steps", died)
}
