// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
	"github.com/gpuckpt/gpuckpt/internal/gpu/steer"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// The tests here run a State, its helper and its tracer against a real process on the
// software GPU. They need a C compiler and root, and fail without.

// dataPaths are the ways that GPU state can take, each with a directory that it works
// with.
func dataPaths(t *testing.T) map[string]way {
	t.Helper()
	ways := map[string]way{
		"driver alone": {driverAlone{}, diskDir(t)},
		"plain file":   {plainFile{}, diskDir(t)},
	}
	if steer.CanSteer {
		ways["image file"] = way{imageFile{}, memoryDir(t)}
		ways["memory, then disk"] = way{memoryFirst{}, diskDir(t)}
		ways["write-through"] = way{writeThrough{window: staging.MinWindow}, diskDir(t)}
	}
	return ways
}

type way struct {
	path DataPath
	dir  string
}

func diskDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if staging.OnMemory(dir) {
		var err error
		if dir, err = os.MkdirTemp("/var/tmp", "gpuckpt-gpustate-test-"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(dir) })
	}
	return dir
}

func memoryDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "gpuckpt-gpustate-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// A checkpoint that leaves its process running: by every data path the process goes on
// with its GPU memory, and the checkpoint is good.
func TestCheckpointAndRestoreInPlace(t *testing.T) {
	for name, way := range dataPaths(t) {
		t.Run(name, func(t *testing.T) {
			w := startWork(t, "12M")
			s := w.lock()
			if err := s.Preflight(t.Context(), way.dir); err != nil {
				t.Fatal(err)
			}
			s.path = way.path
			m, err := s.Describe(time.Now())
			if err != nil {
				t.Fatal(err)
			}
			bytes, err := s.Save(t.Context(), way.dir, Suspended)
			if err != nil || s.Phase() != Saved || bytes < 12<<20 {
				t.Fatalf("saved %d bytes, the state is %v: %v", bytes, s.Phase(), err)
			}
			if _, alone := way.path.(driverAlone); alone != (len(s.areas) == 0) {
				t.Fatalf("%d areas", len(s.areas))
			}
			for _, a := range s.areas {
				if n := w.memory(a.Start, a.Bytes); n > 0 {
					t.Errorf("the process has %d bytes of GPU state still", n)
				}
			}
			writer, err := s.Store(t.Context(), way.dir, true)
			if err != nil {
				t.Fatal(err)
			}
			defer writer.Close()
			if err := s.RestoreInPlace(t.Context()); err != nil || s.Phase() != Locked {
				t.Fatalf("the state is %v: %v", s.Phase(), err)
			}
			if err := s.Unlock(t.Context()); err != nil || s.Phase() != Unlocked {
				t.Fatalf("the state is %v: %v", s.Phase(), err)
			}
			w.verify()
			if err := writer.Wait(); err != nil {
				t.Fatal(err)
			}
			writer.Describe(m)
			if err := images.WriteMetadata(way.dir, m); err != nil {
				t.Fatal(err)
			}
			c, err := images.Open(way.dir)
			if err == nil {
				err = images.Check(t.Context(), c.Areas(), 0, nil)
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
}

// A suspension with a spill: the only copy is on the disk, and checked before it is
// given back.
func TestSpill(t *testing.T) {
	for name, way := range dataPaths(t) {
		t.Run(name, func(t *testing.T) {
			w := startWork(t, "12M")
			s := w.lock()
			if err := s.Preflight(t.Context(), way.dir); err != nil {
				t.Fatal(err)
			}
			s.path = way.path
			if _, err := s.Save(t.Context(), way.dir, Suspended); err != nil {
				t.Fatal(err)
			}
			_, err := s.Spill(t.Context(), way.dir)
			if _, alone := way.path.(driverAlone); alone {
				if !errors.Is(err, errdefs.ErrFailedPrecondition) || s.Phase() != Saved {
					t.Errorf("what is in the process is spilled: the state is %v: %v", s.Phase(), err)
				}
			} else {
				if err != nil || s.Phase() != Spilled {
					t.Fatalf("the state is %v: %v", s.Phase(), err)
				}
				s.Close() // as for a container that stays suspended
				file := filepath.Join(way.dir, s.areas[0].File)
				flipBit(t, file)
				if _, err := s.CheckSpilled(t.Context()); !errors.Is(err, errdefs.ErrDataLoss) {
					t.Errorf("a spill that is damaged: %v", err)
				}
				flipBit(t, file)
				if n, err := s.CheckSpilled(t.Context()); err != nil || n < 12<<20 {
					t.Errorf("%d bytes: %v", n, err)
				}
				if _, err := s.ChooseGPUs(t.Context(), []string{"1"}); !errors.Is(err, errdefs.ErrNotFound) {
					t.Errorf("a GPU that is not there: %v", err)
				}
				if _, err := s.ChooseGPUs(t.Context(), nil); err != nil {
					t.Error(err)
				}
			}
			if err := s.RestoreInPlace(t.Context()); err != nil || s.Phase() != Locked {
				t.Fatalf("the state is %v: %v", s.Phase(), err)
			}
			if err := s.Unlock(t.Context()); err != nil {
				t.Fatal(err)
			}
			w.verify()
		})
	}
}

func flipBit(t *testing.T, file string) {
	t.Helper()
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, 1)
	if _, err := f.ReadAt(b, 1<<20); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 1
	if _, err := f.WriteAt(b, 1<<20); err != nil {
		t.Fatal(err)
	}
}

// A call that is not legal in the phase changes nothing.
func TestPhases(t *testing.T) {
	w := startWork(t, "2M")
	s := w.lock()
	ctx := t.Context()
	calls := map[string]func() error{
		"Lock":       func() error { return s.Lock(ctx, nil, Options{}) },
		"Store":      func() error { _, err := s.Store(ctx, "", true); return err },
		"Spill":      func() error { _, err := s.Spill(ctx, ""); return err },
		"ChooseGPUs": func() error { _, err := s.ChooseGPUs(ctx, nil); return err },
		"Prepare":    func() error { _, err := s.Prepare(ctx, nil, "", nil, Options{}); return err },
	}
	for name, call := range calls {
		if err := call(); !errors.Is(err, errdefs.ErrFailedPrecondition) || s.Phase() != Locked {
			t.Errorf("%s: the state is %v: %v", name, s.Phase(), err)
		}
	}
	if err := s.RestoreInPlace(ctx); err != nil || s.Phase() != Locked {
		t.Errorf("nothing to restore: the state is %v: %v", s.Phase(), err)
	}
	if err := s.Unlock(ctx); err != nil {
		t.Fatal(err)
	}
	calls = map[string]func() error{
		"Preflight": func() error { return s.Preflight(t.Context(), "") },
		"Save":      func() error { _, err := s.Save(ctx, "", Suspended); return err },
		"Store":     calls["Store"],
	}
	for name, call := range calls {
		if err := call(); !errors.Is(err, errdefs.ErrFailedPrecondition) || s.Phase() != Unlocked {
			t.Errorf("%s: the state is %v: %v", name, s.Phase(), err)
		}
	}
	w.verify()
}

// A helper that is killed beside an unlock is replaced: nobody may ask again, and the program would
// wait for ever.
func TestUnlockBesideKill(t *testing.T) {
	w := startWork(t, "1M")
	s := w.lock()
	var helper int
	for _, pid := range proc.Children(os.Getpid()) {
		if name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)); err == nil && strings.HasPrefix(string(name), cuda.HelperName[:15]) {
			helper = pid
		}
	}
	if helper == 0 {
		t.Fatal("there is no helper")
	}
	// Stopped it lives, as far as anybody can tell, and does not answer.
	if err := unix.Kill(helper, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	unlocked := make(chan error, 1)
	go func() { unlocked <- s.Unlock(t.Context()) }()
	select {
	case err := <-unlocked:
		t.Fatalf("a stopped helper has unlocked: %v", err)
	case <-time.After(50 * time.Millisecond): // or later: either way it is the call that fails
	}
	if err := unix.Kill(helper, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := <-unlocked; err != nil {
		t.Fatal(err)
	}
	if s.Phase() != Unlocked {
		t.Errorf("the state is %v", s.Phase())
	}
	w.verify()
}
