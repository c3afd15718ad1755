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
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/gpu/ptrace"
)

// copyTarget builds the process of testdata, once, and gives its path.
func copyTarget(t *testing.T) string {
	t.Helper()
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("no gcc: the process whose driver copies is in C")
	}
	dir := t.TempDir()
	for _, args := range [][]string{
		{"-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", dir + "/libcuda.so.1", "-Wl,-soname,libcuda.so.1", "testdata/libcuda.c"},
		{"-O2", "-Wall", "-Werror", "-o", dir + "/target", "testdata/copytarget.c", dir + "/libcuda.so.1", "-Wl,-rpath," + dir, "-lpthread"},
	} {
		if out, err := exec.Command("gcc", args...).CombinedOutput(); err != nil {
			t.Fatalf("gcc %v: %v\n%s", args, err, out)
		}
	}
	return dir + "/target"
}

// startCopyTarget runs it until the test ends.
func startCopyTarget(t *testing.T, path string, args ...string) *target {
	t.Helper()
	return startTarget(t, exec.Command(path, args...), "threads")
}

// expect asks and compares.
func (g *target) expect(order, want string) {
	g.t.Helper()
	if got := g.ask(order); got != want {
		g.t.Fatalf("%s: got %q, want %q", order, got, want)
	}
}

// untouched says that nothing of ours is in the process.
func (g *target) untouched() {
	g.t.Helper()
	g.expect("threads", "2")
	g.expect("executable", "0")
}

// helped is the bytes that a note says were copied, and by how many threads.
func helped(t *testing.T, notes []string) (bytes, threads int) {
	t.Helper()
	for _, n := range notes {
		var pid int
		if _, err := fmt.Sscanf(n, "process %d: %d bytes were copied for the driver, by %d threads", &pid, &bytes, &threads); err == nil {
			return bytes, threads
		}
	}
	t.Fatalf("no note tells of copies: %q", notes)
	return 0, 0
}

// areaOfCopies is area_bytes of testdata/copytarget.c.
const areaOfCopies = 9 << 20

// The driver's copies into a staging area, and out of it, are ours meanwhile.
// Nothing is left behind.
func TestCopyThreads(t *testing.T) {
	g, s := startCopyTarget(t, copyTarget(t)), session(t)
	want := g.ask("back")
	if err := s.Steer(Target{PID: g.pid(), TID: g.pid(), Name: "gpu-", CopyThreads: 4}); err != nil {
		t.Fatal(err)
	}
	g.expect("map", want)
	g.expect("threads", "5") // three of ours
	time.Sleep(time.Second)  // the tracer lets calls by until it has seen that the area is full
	g.expect("map", want)
	areas, notes, err := s.Commit()
	if err != nil || len(areas) != 2 {
		t.Fatalf("got %+v, %v", areas, err)
	}
	if bytes, threads := helped(t, notes); bytes != 2*areaOfCopies || threads != 4 {
		t.Errorf("%d bytes were copied by %d threads, want %d by 4", bytes, threads, 2*areaOfCopies)
	}
	g.untouched()
	a := areas[1]
	if err := s.Map([]Mapping{{PID: a.PID, TID: a.PID, Start: a.Start, Bytes: a.Bytes, Path: a.Path, Offset: a.Offset}}); err != nil {
		t.Fatal(err)
	}
	if notes, err := s.StartCopyThreads([]Thread{{PID: g.pid(), TID: g.pid()}}, 3); err != nil || len(notes) > 0 {
		t.Fatal(notes, err)
	}
	g.expect("back", want)
	notes, err = s.StopCopyThreads()
	if err != nil {
		t.Fatal(err)
	}
	if bytes, threads := helped(t, notes); bytes != areaOfCopies || threads != 3 {
		t.Errorf("%d bytes were copied back by %d threads, want %d by 3", bytes, threads, areaOfCopies)
	}
	g.untouched()
	g.expect("back", want)
}

// A checkpoint that is given up leaves nothing behind either.
func TestCopyThreadsAborted(t *testing.T) {
	g, s := startCopyTarget(t, copyTarget(t)), session(t)
	want := g.ask("back")
	if err := s.Steer(Target{PID: g.pid(), TID: g.pid(), Name: "gpu-", CopyThreads: 2}); err != nil {
		t.Fatal(err)
	}
	g.expect("map", want)
	if _, err := s.Abort(); err != nil {
		t.Fatal(err)
	}
	g.untouched()
	g.expect("back", want)
}

// When there is no room for all of an area in the end, the driver gets the rest of
// it as it had asked for it. What copiers write goes nowhere else.
func TestCopyThreadsAndNoRoom(t *testing.T) {
	if err := os.WriteFile(fillFile(os.Getpid()), fmt.Appendf(nil, "fail %d", largeBytes*3/4), 0o600); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(fillFile(os.Getpid()))
	path := copyTarget(t)
	for range 2 {
		g, s := startCopyTarget(t, path, strconv.Itoa(largeBytes)), session(t)
		want := g.ask("back")
		if err := s.Steer(Target{PID: g.pid(), TID: g.pid(), Name: "gpu-", CopyThreads: 4}); err != nil {
			t.Fatal(err)
		}
		g.expect("map", want)
		areas, _, err := s.Commit()
		if err == nil || !strings.Contains(err.Error(), "no space") || len(areas) != 0 {
			t.Errorf("got areas %v, %v", areas, err)
		}
		g.expect("back", want)
		g.untouched()
		g.cmd.Process.Kill()
		g.cmd.Wait()
	}
}

// An area that cannot be filled, and is too small to be paced, is left alone.
func TestCopyThreadsAndNoRoomForSmall(t *testing.T) {
	if err := os.WriteFile(fillFile(os.Getpid()), []byte("fail 4194304"), 0o600); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(fillFile(os.Getpid()))
	g, s := startCopyTarget(t, copyTarget(t)), session(t)
	want := g.ask("back")
	if err := s.Steer(Target{PID: g.pid(), TID: g.pid(), Name: "gpu-", CopyThreads: 4}); err != nil {
		t.Fatal(err)
	}
	g.expect("map", want)
	areas, notes, err := s.Commit()
	if err != nil || len(areas) != 0 || !strings.Contains(strings.Join(notes, "\n"), "no space") {
		t.Errorf("got areas %v, notes %q, %v", areas, notes, err)
	}
	g.expect("back", want)
	g.untouched()
}

// Whatever is copied arrives, by one thread, two or many.
func TestCopyThreadsCopyAsMemcpy(t *testing.T) {
	path := copyTarget(t)
	for _, n := range []int{1, 2, 8} {
		t.Run(strconv.Itoa(n), func(t *testing.T) {
			g, s := startCopyTarget(t, path), session(t)
			g.expect("odd", "ok")
			if notes, err := s.StartCopyThreads([]Thread{{PID: g.pid(), TID: g.pid()}}, n); err != nil || len(notes) > 0 {
				t.Fatal(notes, err)
			}
			g.expect("odd", "ok")
			g.expect("odd", "ok")
			notes, err := s.StopCopyThreads()
			if err != nil {
				t.Fatal(err)
			}
			if bytes, _ := helped(t, notes); bytes == 0 {
				t.Error("no copy was ours")
			}
			g.untouched()
			g.expect("odd", "ok")
		})
	}
}

// Threads of the process may be in the middle of a copy at the begin and at the end.
func TestCopyThreadsComeAndGo(t *testing.T) {
	g, s := startCopyTarget(t, copyTarget(t)), session(t)
	g.expect("churn", "churning")
	for range 20 {
		if notes, err := s.StartCopyThreads([]Thread{{PID: g.pid(), TID: g.pid()}}, 3); err != nil || len(notes) > 0 {
			t.Fatal(notes, err)
		}
		g.ask("back")
		if _, err := s.StopCopyThreads(); err != nil {
			t.Fatal(err)
		}
		g.expect("executable", "0")
		g.expect("threads", "3")
	}
}

// A thread may be at anything when a call is made in it. Its vector registers are as
// they were, on a processor too that has more than the thread makes use of (AMX), and a
// restartable sequence is restarted.
func TestCallsAtAnyInstant(t *testing.T) {
	path := copyTarget(t)
	for _, what := range []string{"registers", "sequences"} {
		t.Run(what, func(t *testing.T) {
			g, s := startCopyTarget(t, path), session(t)
			tid, err := strconv.Atoi(g.ask(what))
			if err != nil {
				t.Fatal(err)
			}
			if tid == 0 {
				t.Skip("the C library has registered no restartable sequences here")
			}
			for range 20 {
				if notes, err := s.StartCopyThreads([]Thread{{PID: g.pid(), TID: tid}}, 2); err != nil || len(notes) > 0 {
					t.Fatal(notes, err)
				}
				if _, err := s.StopCopyThreads(); err != nil {
					t.Fatal(err)
				}
			}
			g.expect("threads", "3")
		})
	}
}

// What the driver has unmapped it may map again, at the same address.
func TestCopyThreadsTakeNoHole(t *testing.T) {
	g, s := startCopyTarget(t, copyTarget(t)), session(t)
	g.expect("hole", "made")
	if notes, err := s.StartCopyThreads([]Thread{{PID: g.pid(), TID: g.pid()}}, 4); err != nil || len(notes) > 0 {
		t.Fatal(notes, err)
	}
	g.expect("fill", "filled")
	if _, err := s.StopCopyThreads(); err != nil {
		t.Fatal(err)
	}
	g.untouched()
}

// Copiers end when they are told to, whatever they are at: about to sleep, say, when
// they have had nothing to do for some time.
func TestCopyThreadsEnd(t *testing.T) {
	g, s := startCopyTarget(t, copyTarget(t)), session(t)
	for i := range 150 {
		if notes, err := s.StartCopyThreads([]Thread{{PID: g.pid(), TID: g.pid()}}, 4); err != nil || len(notes) > 0 {
			t.Fatal(notes, err)
		}
		time.Sleep(time.Duration(i) * 20 * time.Microsecond)
		if _, err := s.StopCopyThreads(); err != nil {
			t.Fatal(err)
		}
	}
	g.untouched()
}

// A tracer may die after any of its steps: every copy arrives all the same, and
// the next tracer takes over what it finds, and takes it out.
func TestCopyThreadsTracerDiesAtEachStep(t *testing.T) {
	defer os.Remove(killFile(os.Getpid()))
	path := copyTarget(t)
	died, left := 0, 0
	for n := 0; ; n++ {
		if err := os.WriteFile(killFile(os.Getpid()), []byte(strconv.Itoa(n)), 0o600); err != nil {
			t.Fatal(err)
		}
		g, s := startCopyTarget(t, path), session(t)
		want := g.ask("back")
		threads := []Thread{{PID: g.pid(), TID: g.pid()}}
		notes, err := s.StartCopyThreads(threads, 2)
		if err == nil && len(notes) > 0 {
			t.Fatal(notes)
		}
		if err == nil {
			g.expect("back", want)
			_, err = s.StopCopyThreads()
		}
		if err == nil {
			g.untouched()
			break // it got to the end
		}
		if !errors.Is(err, ErrTracerGone) {
			t.Fatalf("step %d: %v", n, err)
		}
		died++
		g.expect("back", want)
		if err := os.Remove(killFile(os.Getpid())); err != nil {
			t.Fatal(err)
		}
		before := g.ask("executable")
		next := session(t)
		if notes, err := next.StartCopyThreads(threads, 2); err != nil || len(notes) > 0 {
			t.Fatalf("step %d: %v %v", n, notes, err)
		}
		g.expect("back", want)
		if _, err := next.StopCopyThreads(); err != nil {
			t.Fatalf("step %d: %v", n, err)
		}
		g.expect("back", want)
		// What the dead one had put in its place is taken out; a page that nothing
		// points to stays.
		if before != "0" && g.ask("executable") == "0" {
			left++
		}
		g.cmd.Process.Kill()
		g.cmd.Wait()
	}
	if left == 0 {
		t.Error("no tracer took out what another had left")
	}
	if died < 30 {
		t.Errorf("the tracer died at %d steps only", died)
	}
	t.Logf("%d steps, %d taken over", died, left)
}

// The copiers of a tracer that was killed are not held by the next one, which takes
// them out: held, they could not end.
func TestHoldLeavesCopyThreads(t *testing.T) {
	g, dead, s := startCopyTarget(t, copyTarget(t)), session(t), session(t)
	want := g.ask("back")
	driver := []Thread{{PID: g.pid(), TID: g.pid()}}
	theirs, err := ptrace.Threads(g.pid())
	if err != nil {
		t.Fatal(err)
	}
	if notes, err := dead.StartCopyThreads(driver, 3); err != nil || len(notes) > 0 {
		t.Fatal(notes, err)
	}
	if err := unix.Kill(dead.Pid(), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "two copiers sleep", func() bool {
		tids, err := ptrace.Threads(g.pid())
		if err != nil {
			t.Fatal(err)
		}
		return len(slices.DeleteFunc(tids, func(tid int) bool { return !isCopyThread(g.pid(), tid) })) == 2
	})
	if err := s.Hold([]int{g.pid()}, theirs); err != nil {
		t.Fatal(err)
	}
	if notes, err := s.StartCopyThreads(driver, 3); err != nil || len(notes) > 0 {
		t.Fatal(notes, err)
	}
	g.expect("back", want)
	if _, err := s.StopCopyThreads(); err != nil {
		t.Fatal(err)
	}
	if err := s.Release(); err != nil {
		t.Fatal(err)
	}
	g.untouched()
	g.expect("back", want)
}

// A process without the driver's library is left alone, with a note.
func TestCopyThreadsWithoutDriver(t *testing.T) {
	g, s := newTarget(t), session(t)
	notes, err := s.StartCopyThreads([]Thread{{PID: g.pid(), TID: g.pid()}}, 4)
	if err != nil || len(notes) != 1 || !strings.Contains(notes[0], "no libcuda.so mapped") {
		t.Fatalf("got %q, %v", notes, err)
	}
	if notes, err := s.StopCopyThreads(); err != nil || len(notes) > 0 {
		t.Fatalf("got %q, %v", notes, err)
	}
	g.ask("sum")
}

// The code is what its source says.
func TestCopierCode(t *testing.T) {
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("no gcc to assemble copier/copier.S")
	}
	dir := t.TempDir()
	for _, args := range [][]string{
		{"gcc", "-c", "-o", dir + "/copier.o", "copier/copier.S"},
		{"objcopy", "-O", "binary", "-j", ".text", dir + "/copier.o", dir + "/copier.bin"},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
	}
	got, err := os.ReadFile(filepath.Join(dir, "copier.bin"))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, copierCode) {
		t.Error("copier/copier.bin is not made of copier/copier.S: make internal/gpu/steer/copier/copier.bin")
	}
}
