// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// The thread runs the program's C library. What it asks for beyond the GPU memory of its process is its
// own affair: memory of its container, or nothing where there is no memory.
func TestAreasAreBounded(t *testing.T) {
	for name, dir := range map[string]string{"memory": "", "disk": onDisk(t)} {
		t.Run(name, func(t *testing.T) {
			g, s := newTarget(t), session(t)
			to := Target{PID: g.pid(), TID: g.pid(), Name: "gpu-", Most: largeBytes}
			if dir != "" {
				to = throughTo(g, dir)
				to.Most = largeBytes
			}
			if err := s.Steer(to); err != nil {
				t.Fatal(err)
			}
			g.ask(mapOrder(stagingFlags))
			// Together they are too much.
			got := g.ask(fmt.Sprintf("map %d %d", largeBytes, stagingFlags))
			if refused := got == "mmap cannot allocate memory"; refused != (dir != "") {
				t.Errorf("the target got %q", got)
			}
			if dir != "" {
				if _, err := s.Abort(); err == nil || !strings.Contains(err.Error(), "needs 268435456 at most") {
					t.Errorf("got %v, want that it is too much", err)
				}
				if left, _ := os.ReadDir(dir); len(left) != 0 {
					t.Errorf("files left: %v", left)
				}
				return
			}
			sum := g.ask("sum")
			areas, notes, err := s.Commit()
			if err != nil || len(areas) != 1 || areas[0].Bytes != areaBytes {
				t.Fatal(areas, notes, err)
			}
			if len(notes) != 1 || !strings.Contains(notes[0], "needs 268435456 at most") {
				t.Errorf("got notes %v", notes)
			}
			if now := g.ask("sum"); now != sum {
				t.Errorf("sum %s of the area that is its own, want %s", now, sum)
			}
		})
	}
}

// What the thread makes while it is steered executes nothing: it would have the thread's descriptors.
func TestNewProcessesAreHeld(t *testing.T) {
	for _, signal := range []unix.Signal{unix.SIGCHLD, 0} { // the kernel reports a fork, and a clone
		g, s := newTarget(t), session(t)
		if err := s.Steer(Target{PID: g.pid(), TID: g.pid(), Name: "gpu-", CopyThreads: 2}); err != nil {
			t.Fatal(err)
		}
		child, err := strconv.Atoi(g.ask(fmt.Sprintf("child %d", signal)))
		if err != nil || child == 0 {
			t.Fatal(child, err)
		}
		t.Cleanup(func() { _ = unix.Kill(child, unix.SIGKILL) })
		g.ask(mapOrder(stagingFlags)) // it is steered as ever
		sum := g.ask("sum")
		time.Sleep(100 * time.Millisecond)
		if n := g.ask("count"); n != "0" {
			t.Errorf("the new process has counted to %s", n)
		}
		areas, notes, err := s.Commit()
		if err != nil || len(areas) != 1 {
			t.Fatal(areas, notes, err)
		}
		if !slices.ContainsFunc(notes, func(n string) bool { return strings.Contains(n, fmt.Sprint(child, ", which is held")) }) {
			t.Errorf("notes %q do not name process %d", notes, child)
		}
		eventually(t, "the new process goes on", func() bool { return g.ask("count") != "0" })
		a := areas[0]
		if err := s.Map([]Mapping{{PID: g.pid(), TID: g.pid(), Start: a.Start, Bytes: a.Bytes, Path: a.Path, Offset: a.Offset}}); err != nil {
			t.Fatal(err)
		}
		if got := g.ask("sum"); got != sum {
			t.Errorf("sum %s, want %s", got, sum)
		}
	}
}

// A container whose steered program has made processes can be killed.
func TestNewProcessesAreKilled(t *testing.T) {
	g, s := newTarget(t), session(t)
	if err := s.Steer(Target{PID: g.pid(), TID: g.pid(), Name: "gpu-"}); err != nil {
		t.Fatal(err)
	}
	child, err := strconv.Atoi(g.ask(fmt.Sprintf("child %d", unix.SIGCHLD)))
	if err != nil || child == 0 {
		t.Fatal(child, err)
	}
	if err := unix.Kill(child, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	g.ask("sum")
	if err := g.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "both have ended", func() bool {
		for _, pid := range []int{child, g.pid()} {
			if status, err := proc.StatusOf(pid); err == nil && !status.Ended() {
				return false
			}
		}
		return true
	})
	if _, err := s.Abort(); err != nil {
		t.Error(err)
	}
}

// A thread that keeps the descriptor of a file that it restores from cannot write to the file.
func TestWhatIsMappedCannotBeWritten(t *testing.T) {
	path := filepath.Join(onDisk(t), "gpu-1-0")
	if err := os.WriteFile(path, []byte("state"), 0o600); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	f, err := openMapped(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	t.Logf("opened within %v", time.Since(began))
	again := fmt.Sprintf("/proc/self/fd/%d", f.Fd())
	if w, err := os.OpenFile(again, os.O_RDWR, 0); !errors.Is(err, unix.EROFS) {
		w.Close()
		t.Errorf("it was opened for writing: %v", err)
	}
	if text, err := os.ReadFile(again); err != nil || string(text) != "state" {
		t.Errorf("it reads %q, %v", text, err)
	}
}
