// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package execs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// enters reports whether the gate lets somebody in within a moment.
func enters(t *testing.T, g *Gate) chan error {
	t.Helper()
	done := make(chan error, 1)
	go func() {
		leave, err := g.Enter(t.Context(), time.Minute)
		if err == nil {
			leave()
		}
		done <- err
	}()
	return done
}

func waits(t *testing.T, done chan error) {
	t.Helper()
	select {
	case err := <-done:
		t.Fatalf("nobody waited: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
}

func TestGate(t *testing.T) {
	var g Gate
	if err := <-enters(t, &g); err != nil {
		t.Fatal(err)
	}
	g.Hold()
	done := enters(t, &g)
	waits(t, done)
	reopen := g.Close()
	g.LetIn()
	waits(t, done) // held no more, and closed still
	reopen()
	reopen() // once counts
	if err := <-done; err != nil {
		t.Error(err)
	}
	if err := g.RefuseStarting(); err != nil {
		t.Error(err)
	}
	leave, err := g.Enter(t.Context(), time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	if err := g.RefuseStarting(); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("one on its way in: %v", err)
	}
	if err := g.Settle(t.Context(), time.Millisecond); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("one that does not arrive: %v", err)
	}
	ended, end := context.WithCancel(t.Context())
	end()
	if err := g.Settle(ended, time.Minute); !errors.Is(err, context.Canceled) {
		t.Errorf("given up: %v", err)
	}
	settled := make(chan error, 1)
	go func() { settled <- g.Settle(t.Context(), time.Minute) }()
	waits(t, settled)
	leave()
	if err := <-settled; err != nil {
		t.Error(err)
	}

	g.Hold()
	_, err = g.Enter(t.Context(), time.Millisecond)
	if !errors.Is(err, errdefs.ErrFailedPrecondition) || !strings.Contains(err.Error(), "has waited 1ms") {
		t.Errorf("after its time: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err = g.Enter(ctx, time.Minute); !errors.Is(err, context.Canceled) {
		t.Errorf("given up: %v", err)
	}
	done = enters(t, &g)
	waits(t, done)
	g.End("it has ended")
	for range 2 { // the one that waits, and a later one
		if err := <-done; !errors.Is(err, errdefs.ErrFailedPrecondition) || !strings.Contains(err.Error(), "it has ended") {
			t.Errorf("of a container that has ended: %v", err)
		}
		done = enters(t, &g)
	}
}

// start starts a process with a terminal or without.
func start(t *testing.T, terminal bool, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(args[0], args[1:]...)
	if terminal {
		ptmx, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { ptmx.Close() })
		if err := unix.IoctlSetPointerInt(int(ptmx.Fd()), unix.TIOCSPTLCK, 0); err != nil {
			t.Fatal(err)
		}
		n, err := unix.IoctlGetInt(int(ptmx.Fd()), unix.TIOCGPTN)
		if err != nil {
			t.Fatal(err)
		}
		if cmd.Stdin, err = os.OpenFile("/dev/pts/"+strconv.Itoa(n), os.O_RDWR|unix.O_NOCTTY, 0); err != nil {
			t.Fatal(err)
		}
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { _ = cmd.Wait() }()
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	return cmd
}

// container is one whose first process is not the parent of those given.
func container(cmds ...*exec.Cmd) Container {
	return Container{Init: 1 << 30, Pids: func() (pids []int, err error) {
		for _, c := range cmds {
			pids = append(pids, c.Process.Pid)
		}
		return pids, nil
	}}
}

func TestDrain(t *testing.T) {
	var g Gate
	g.Hold()
	probe := container(start(t, false, "sleep", "0.3"))
	if err := Refuse(probe); err == nil {
		t.Error("nobody found")
	}
	if err := g.Drain(t.Context(), probe, Options{Wait: time.Minute}); err != nil {
		t.Errorf("one that ends by itself: %v", err)
	}
	if err := Refuse(probe); err != nil {
		t.Error(err)
	}

	stays := start(t, false, "sleep", "600")
	name := fmt.Sprintf("%d (sleep)", stays.Process.Pid)
	err := g.Drain(t.Context(), container(stays), Options{Wait: 30 * time.Millisecond, EndShells: true})
	if !errors.Is(err, errdefs.ErrFailedPrecondition) || !strings.Contains(err.Error(), name) {
		t.Errorf("one that stays: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := g.Drain(ctx, container(stays), Options{Wait: time.Minute}); !errors.Is(err, context.Canceled) {
		t.Errorf("given up: %v", err)
	}
	if err := g.Drain(t.Context(), Container{Init: stays.Process.Pid, Pids: container(stays).Pids}, Options{}); err != nil {
		t.Errorf("the first process itself: %v", err)
	}
}

func TestShells(t *testing.T) {
	var g Gate
	for _, args := range [][]string{{"sleep", "600"}, {"sh", "-c", "trap '' HUP; sleep 600 & while :; do sleep 0.1; done"}} {
		shell := start(t, true, args...)
		name := fmt.Sprintf("%d (%s)", shell.Process.Pid, args[0])
		began := time.Now()
		err := g.Drain(t.Context(), container(shell), Options{Wait: time.Minute})
		if !errors.Is(err, errdefs.ErrFailedPrecondition) || !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), `shells = "end"`) {
			t.Errorf("%q is not refused: %v", args, err)
		}
		if time.Since(began) > 30*time.Second {
			t.Error("it was waited for")
		}
		if err := g.Drain(t.Context(), container(shell), Options{Wait: time.Minute, EndShells: true}); err != nil {
			t.Errorf("%q is not ended: %v", args, err)
		}
	}
}

// One on its way in is waited for like one that is in.
func TestDrainStarting(t *testing.T) {
	var g Gate
	leave, err := g.Enter(t.Context(), time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	g.Hold()
	if err := g.Drain(t.Context(), container(), Options{}); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("one on its way in: %v", err)
	}
	time.AfterFunc(50*time.Millisecond, leave)
	if err := g.Drain(t.Context(), container(), Options{Wait: time.Minute}); err != nil {
		t.Error(err)
	}
}
