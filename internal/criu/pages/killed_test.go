// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package pages

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/vma"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// hasMemory makes the test's executable a program with so much memory, whose place it prints.
const hasMemory = "GPUCKPT_TEST_MEMORY"

const programBytes = 24 << 20

func TestMain(m *testing.M) {
	if IsWorker() {
		Main()
		os.Exit(0)
	}
	if os.Getenv(hasMemory) != "" {
		// Between pages of another kind: the kernel would make one mapping of it and a neighbour.
		room, err := unix.Mmap(-1, 0, programBytes+2*pageBytes, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		memory := room[pageBytes : pageBytes+programBytes]
		if err := unix.Mprotect(memory, unix.PROT_READ|unix.PROT_WRITE); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		for i := range memory {
			memory[i] = byte(i>>12 + 1)
		}
		fmt.Printf("%x\n", addressOf(memory))
		_, _ = io.Copy(io.Discard, os.Stdin) // until the test ends
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// program starts such a program, and returns its pid and where its memory is.
func program(t *testing.T) (pid int, at uint64) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{hasMemory + "=1"}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		_ = cmd.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err == nil {
		_, err = fmt.Sscanf(line, "%x", &at)
	}
	if err != nil {
		t.Fatalf("%q: %v", line, err)
	}
	return cmd.Process.Pid, at
}

// stopped starts a worker that does nothing from now on.
func stopped(t *testing.T, w *Worker) {
	t.Helper()
	if err := unix.Kill(w.Pid(), unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	// One of its threads may still work for a while.
	if err := unix.Waitid(unix.P_PID, w.Pid(), nil, unix.WSTOPPED|unix.WNOWAIT, nil); err != nil {
		t.Fatal(err)
	}
}

// killIn kills a worker in the middle of a call.
func killIn(t *testing.T, w *Worker, call func() error) error {
	t.Helper()
	answer := make(chan error, 1)
	go func() { answer <- call() }()
	for end := time.Now().Add(time.Minute); w.Pending() == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the worker was not asked for anything in a minute")
		}
	}
	w.Kill()
	return <-answer
}

// mappingsOf are those of a process that may be copied past CRIU, as CRIU has them if they are locked: maps of /proc
// does not say so.
func mappingsOf(t *testing.T, pid int) (all []*vma.VmaEntry) {
	t.Helper()
	maps, err := proc.Maps(pid, isPlain)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range maps {
		locked := func(v *vma.VmaEntry) { v.Flags = new(v.GetFlags() | unix.MAP_LOCKED) }
		all = append(all, mapping(m.Start/pageBytes, (m.End-m.Start)/pageBytes, locked))
	}
	return all
}

// A dump whose worker is killed fails, and CRIU's images are as CRIU wrote them: nobody takes them
// for a whole dump. The next dump of the program is whole.
func TestDumpWorkerKilled(t *testing.T) {
	pid, _ := program(t)
	inside, err := proc.Inside(func() ([]int, error) { return []int{pid}, nil }, pid)
	if err != nil || len(inside) != 1 {
		t.Fatalf("%v, %v", inside, err)
	}
	for number := range inside {
		for _, killed := range []bool{true, false} {
			dir := tmpfs(t, "huge=advise")
			writeImage(t, dir, fmt.Sprintf("mm-%d.img", number), "MM", memory(mappingsOf(t, pid)...))
			writeImage(t, dir, fmt.Sprintf("pagemap-%d.img", number), "PAGEMAP", head(3), run(10, 5))
			writePages(t, dir, "pages-3.img", 5)
			before := files(t, dir)
			list := filepath.Join(t.TempDir(), "list")
			d := NewDump(t.Context(), Dumping{
				Images: dir, List: list, Library: "/library.so", Least: programBytes, Init: pid,
				Pids:  func() ([]int, error) { return []int{pid}, nil },
				Start: func() (*Worker, error) { return StartWorker(nil, nil) },
			})
			d.MakeRoom()
			if d.wait(); d.worker == nil {
				t.Error("no room is made")
			}
			d.Begin()
			if len(d.taken) != 1 {
				t.Fatalf("of %d processes memory is left out, want one", len(d.taken))
			}
			if killed {
				stopped(t, d.worker)
				if err := killIn(t, d.worker, d.Complete); !errors.Is(err, ErrWorkerGone) {
					t.Errorf("the dump of a worker that was killed: %v", err)
				}
				if after := files(t, dir); after != before {
					t.Errorf("the images are\n%s, before they were\n%s", after, before)
				}
			} else if err := d.Complete(); err != nil {
				t.Error(err)
			} else if info, err := os.Stat(filepath.Join(dir, "pages-3.img")); err != nil || info.Size() < programBytes+5*pageBytes {
				t.Errorf("the next dump: %v, %v", info, err)
			}
			d.Close()
			if _, err := os.Stat(list); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the list is left: %v", err)
			}
		}
	}
}

// Of a process that was killed meanwhile it is not said that the checkpoint is damaged.
func TestFillKilled(t *testing.T) {
	cmd := exec.Command("sleep", "60")
	if err := errors.Join(cmd.Start(), cmd.Process.Kill(), unix.Waitid(unix.P_PID, cmd.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil)); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Wait() }()
	_, err := fill(cmd.Process.Pid, &images.Area{File: "pages-1.img", Bytes: pageBytes}, []Piece{{1 << 30, pageBytes, 0}}, false)
	if !errors.Is(err, errKilled) {
		t.Error(err)
	}
}

// A restore whose worker is killed fails. Whoever restores ends the processes then.
func TestFillWorkerKilled(t *testing.T) {
	pid, at := program(t)
	inside, err := proc.Inside(func() ([]int, error) { return []int{pid}, nil }, pid)
	if err != nil || len(inside) != 1 {
		t.Fatalf("%v, %v", inside, err)
	}
	name := filepath.Join(t.TempDir(), "pages-1.img")
	if err := os.WriteFile(name, bytes.Repeat([]byte{7}, programBytes), 0o600); err != nil {
		t.Fatal(err)
	}
	for number := range inside {
		p := &Plan{tasks: map[string]*task{"pagemap": {pid: number, from: fileArea(t, name), pieces: []Piece{{at, programBytes, 0}}}}}
		w, err := StartWorker(nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		stopped(t, w)
		err = killIn(t, w, func() error {
			_, err := p.Fill(func() (*Worker, error) { return w, nil }, inside)
			return err
		})
		if !errors.Is(err, ErrWorkerGone) || !strings.Contains(err.Error(), "fill the memory of process") {
			t.Errorf("the restore of a worker that was killed: %v", err)
		}
	}
}

// files describes a directory.
func files(t *testing.T, dir string) string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var all strings.Builder
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&all, "%s: %x\n", e.Name(), data)
	}
	return all.String()
}
