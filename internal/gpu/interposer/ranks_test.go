// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build amd64

package interposer

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/node/freeport"
)

// ranking starts processes on the software GPU whose kernels wait for each other's, step after step. Each has its
// memory by its interposer. A later rank computes for so much longer before its steps, of which there are so many
// between two waits. Their parent ends all when one ends.
func ranking(t *testing.T, n int, compute time.Duration, ahead int) (all []rank, procs cuda.Group, parent int) {
	t.Helper()
	dir := build(t)
	port, err := freeport.Row(n)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(filepath.Join(dir, "gpuwork"), "ranks", "--procs", strconv.Itoa(n), "--share", "large", "--bytes", "4M",
		"--work", fmt.Sprint(compute.Microseconds()), "--ahead", strconv.Itoa(ahead), "--port", strconv.Itoa(port))
	cmd.Env = append(os.Environ(), environment(dir)...)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	for i := range n {
		conn, err := net.Dial("udp", fmt.Sprintf("127.0.0.1:%d", port+i))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		r := rank{t: t, conn: conn}
		r.says("steps", "")
		if _, err := fmt.Sscanf(r.ask("info"), "pid=%d", &r.pid); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Kill(r.pid, unix.SIGKILL) })
		all, procs = append(all, r), append(procs, r.process())
	}
	for _, r := range all {
		r.goesOn()
	}
	return all, procs, cmd.Process.Pid
}

func (r rank) ask(request string) string {
	r.t.Helper()
	buf := make([]byte, 2048)
	r.conn.SetDeadline(time.Now().Add(10 * time.Second))
	_, err := r.conn.Write([]byte(request))
	n := 0
	if err == nil {
		n, err = r.conn.Read(buf)
	}
	if err != nil {
		r.t.Fatal(err)
	}
	return strings.TrimRight(string(buf[:n]), "\x00\n")
}

// steps returns how many steps a rank has taken, and fails the test if one was wrong.
func (r rank) steps() (n int) {
	r.t.Helper()
	var bad int
	reply := r.ask("steps")
	if _, err := fmt.Sscanf(reply, "steps=%d bad=%d", &n, &bad); err != nil || bad != 0 {
		r.t.Fatalf("a rank answers %q", reply)
	}
	return n
}

func (r rank) goesOn() {
	r.t.Helper()
	before := r.steps()
	for end := time.Now().Add(time.Minute); r.steps() <= before; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			r.t.Fatalf("a rank stands still at step %d", before)
		}
	}
}

// Ranks that take steps without a pause are parked in every try, and their memory is saved. Asked once they are not.
func TestSoftRanksAreParked(t *testing.T) {
	for _, test := range []struct {
		n, ahead int
		compute  time.Duration
	}{{2, 1, 2 * time.Millisecond}, {2, 20, 0}, {4, 3, 500 * time.Microsecond}} {
		t.Run(fmt.Sprintf("%d ranks, %d ahead", test.n, test.ahead), func(t *testing.T) {
			all, procs, _ := ranking(t, test.n, test.compute, test.ahead)
			interposers, err := of(procs)
			if err != nil || len(interposers) != test.n {
				t.Fatalf("%d interposers: %v", len(interposers), err)
			}
			// Asked once, one of them is still waiting when the time is over: else they do not wait for each other.
			for tries := 0; ; tries++ {
				_, err := each(interposers, func(c *Interposer) (control, error) {
					return c.ask(t.Context(), "park", askPark, within(100*time.Millisecond), time.Minute)
				})
				if oerr := Open(t.Context(), procs); oerr != nil {
					t.Fatal(oerr)
				}
				if errors.Is(err, ErrBusy) {
					break
				}
				if tries == 200 || err != nil {
					t.Fatalf("the ranks were parked each time that each was asked once: %v", err)
				}
			}
			var longest time.Duration
			for try := range 25 {
				began := time.Now()
				p, err := Park(t.Context(), procs, 2*time.Minute)
				if err != nil {
					t.Fatalf("try %d: %v", try, err)
				}
				longest = max(longest, time.Since(began))
				if p.Bytes != uint64(test.n)*4<<20 || len(p.all) != test.n {
					t.Fatalf("parked %+v", p)
				}
				if try%5 == 0 {
					if _, err := p.save(t.Context(), nil); err != nil {
						t.Fatal(err)
					}
				}
				before := make([]int, test.n)
				for i, r := range all {
					before[i] = r.steps()
				}
				if try == 0 {
					time.Sleep(50 * time.Millisecond)
				}
				for i, r := range all {
					if now := r.steps(); now != before[i] {
						t.Errorf("parked rank %d went from step %d to %d", i, before[i], now)
					}
				}
				if err := Open(t.Context(), procs); err != nil {
					t.Fatal(err)
				}
				for _, r := range all {
					r.goesOn()
				}
			}
			t.Logf("the longest took %v", longest)
		})
	}
}

// isOpen fails the test unless the gates of processes open within some seconds.
func isOpen(t *testing.T, procs cuda.Group) {
	t.Helper()
	all, err := of(procs)
	if err != nil || len(all) != len(procs) {
		t.Fatalf("%d interposers: %v", len(all), err)
	}
	for _, c := range all {
		for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
			now, err := c.read()
			if err == nil && now.state == open && now.request == now.answered {
				break
			}
			if err != nil || time.Now().After(end) {
				t.Fatalf("process %d is in state %d: %v", c.PID, now.state, err)
			}
		}
	}
}

// stuck returns when one of two ranks is parked and the other waits for it.
func stuck(t *testing.T, procs cuda.Group) (behind *Interposer) {
	t.Helper()
	all, err := of(procs)
	if err != nil {
		t.Fatal(err)
	}
	for range 200 {
		for _, c := range all {
			if _, err := c.begin(askPark, within(time.Minute)); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(100 * time.Millisecond)
		for i, c := range all {
			now, err := c.read()
			other, oerr := all[1-i].read()
			if err != nil || oerr != nil {
				t.Fatal(err, oerr)
			}
			if now.state == parked && other.state == parking {
				return c
			}
		}
		if err := Open(t.Context(), procs); err != nil {
			t.Fatal(err)
		}
		isOpen(t, procs)
	}
	t.Fatal("the ranks do not wait for each other")
	return nil
}

// Ranks of which one does not come to its step in time go on with open gates, and are parked the next time. So does a
// rank whose other one ends.
func TestSoftRanksAreNotParked(t *testing.T) {
	all, procs, parent := ranking(t, 2, 300*time.Millisecond, 1)
	failed := false
	for try := 0; try < 50 && !failed; try++ {
		time.Sleep(37 * time.Millisecond)
		_, err := Park(t.Context(), procs, 200*time.Millisecond)
		if failed = err != nil; failed && !errors.Is(err, ErrBusy) {
			t.Fatal(err)
		}
		if err := Open(t.Context(), procs); err != nil {
			t.Fatal(err)
		}
		isOpen(t, procs)
	}
	if !failed {
		t.Error("the ranks were parked each time")
	}
	for _, r := range all {
		r.goesOn()
	}
	if _, err := Park(t.Context(), procs, time.Minute); err != nil {
		t.Fatal(err)
	}
	if err := Open(t.Context(), procs); err != nil {
		t.Fatal(err)
	}
	for _, r := range all {
		r.goesOn()
	}
	if err := unix.Kill(parent, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(20*time.Millisecond, func() { unix.Kill(all[1].pid, unix.SIGKILL) })
	if _, err := Park(t.Context(), procs, 2*time.Second); err == nil { // they were parked before the one's end
		if err := Open(t.Context(), procs[:1]); err != nil {
			t.Fatal(err)
		}
	}
	isOpen(t, procs[:1])
}

// Whoever parked ranks may die while one waits for the other one: Open is the way back from there.
func TestSoftRanksHalfWay(t *testing.T) {
	all, procs, _ := ranking(t, 2, 2*time.Millisecond, 1)
	for _, pass := range []uint32{0, 1, mostTurns} {
		if c := stuck(t, procs); pass > 0 {
			if err := (&own{c: c}).pass(pass, time.Minute); err != nil {
				t.Fatal(err)
			}
		}
		if err := Open(t.Context(), procs); err != nil {
			t.Fatal(err)
		}
		isOpen(t, procs)
		for _, r := range all {
			r.goesOn()
		}
	}
}
