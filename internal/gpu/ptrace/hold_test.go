// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package ptrace

import (
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// Threads that end while all are listed hide none of the others.
func TestThreadsThatEndHideNone(t *testing.T) {
	const rounds, listings, ending = 500, 20, 3
	for round := range rounds {
		var all sync.WaitGroup
		begin, end, last := make(chan struct{}), make(chan struct{}), make(chan int)
		for i := range ending {
			ready := make(chan struct{})
			all.Go(func() {
				runtime.LockOSThread() // never unlocked: the thread ends with this function
				close(ready)
				<-begin
				time.Sleep(time.Duration(i) * 20 * time.Microsecond)
			})
			<-ready
		}
		all.Go(func() {
			runtime.LockOSThread()
			last <- unix.Gettid()
			<-end
		})
		tid := <-last
		close(begin)
		for range listings {
			tids, err := Threads(os.Getpid())
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Contains(tids, tid) {
				t.Fatalf("round %d: thread %d lives, and is not in %v", round, tid, tids)
			}
		}
		close(end)
		all.Wait()
	}
}

// Held threads stand still, run in a breath, have the signals that come meanwhile, and stand still
// again. A process that a signal has stopped is not continued by it, nor one that is to stay still.
func TestBreathe(t *testing.T) {
	begin := func() (pid int, out *os.File) {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		cmd := exec.Command("sh", "-c", "trap 'echo signal' USR1; echo ready; while :; do :; done")
		cmd.Stdout = w
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait(); r.Close() })
		want(t, r, "ready\n")
		return cmd.Process.Pid, r
	}
	runs, out := begin()
	stopped, _ := begin()
	resting, _ := begin()
	if err := unix.Kill(stopped, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for !proc.Stopped(stopped, stopped) {
		time.Sleep(time.Millisecond)
	}
	h, err := HoldThreads([]int{runs, stopped, resting}, nil, nil, func(pid, _ int) bool { return pid == resting })
	if err != nil {
		t.Fatal(err)
	}
	defer h.Release()
	state := func(pid int) string {
		status, err := proc.StatusOf(pid)
		if err != nil {
			t.Fatal(err)
		}
		return status.Field("State")[:1]
	}
	still := func() (ticks uint64) {
		for state(runs) != "t" {
			time.Sleep(time.Millisecond)
		}
		return proc.Ticks(runs)
	}
	was := still()
	others := func() uint64 { return proc.Ticks(stopped) + proc.Ticks(resting) }
	for state(resting) != "t" {
		time.Sleep(time.Millisecond)
	}
	asleep := others()
	if err := unix.Kill(runs, unix.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	heard := make(chan string)
	go func() {
		line := make([]byte, len("signal\n"))
		_, _ = io.ReadFull(out, line)
		heard <- string(line)
	}()
	for line := ""; line == "" || still() == was; {
		for _, pid := range []int{runs, stopped, resting} {
			h.Breathe(pid, 20*time.Millisecond, func() bool { return false })
		}
		select {
		case line = <-heard:
			if line != "signal\n" {
				t.Fatalf("read %q", line)
			}
		default:
		}
	}
	if now := others(); now != asleep {
		t.Errorf("processes that are not to run had %d ticks", now-asleep)
	}
	h.Breathe(runs, time.Minute, func() bool { return true })
}

// want reads a line that a program writes.
func want(t *testing.T, r *os.File, line string) {
	t.Helper()
	got := make([]byte, len(line))
	if _, err := io.ReadFull(r, got); err != nil || string(got) != line {
		t.Fatalf("read %q, %v; want %q", got, err, line)
	}
}
