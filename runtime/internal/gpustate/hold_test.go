// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/images"
)

// A checkpoint by custom storage, which earlier commits made, is read, and refused with what to do.
func TestCustomStorageIsRefused(t *testing.T) {
	checkpoint, err := images.Open("../../../images/testdata/schema-3")
	if err != nil {
		t.Fatal(err)
	}
	_, err = New(&work{}, runPlain).Prepare(t.Context(), checkpoint.Metadata, "", checkpoint, Options{})
	if !errors.Is(err, errdefs.ErrFailedPrecondition) || !strings.Contains(err.Error(), "custom storage") {
		t.Errorf("got %v", err)
	}
}

// Digests are compared from Prepare on, by a process that ends when it is done. What changes between
// Prepare and Load is compared again, and a restore that is given up holds no file.
func TestHold(t *testing.T) {
	w := startWork(t, "12M")
	dir := diskDir(t)
	m := w.leave(dir)
	checkpoint, err := images.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	opts := w.options()
	hold := func() *Restoration {
		t.Helper()
		r, err := New(w, runPlain).Prepare(t.Context(), m, "", checkpoint, opts)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(r.Close)
		if err := r.check.Wait(); err != nil {
			t.Fatal(err)
		}
		return r
	}
	r := hold()
	if held := descriptorsOf(t, dir); held == 0 {
		t.Error("the checkpoint's directory is not held")
	}
	r.Close()
	if held := descriptorsOf(t, dir); held != 0 {
		t.Errorf("a restore that was given up holds the directory %d times", held)
	}
	other := *m
	other.DriverVersion = "1.0"
	if _, err := New(w, runPlain).Prepare(t.Context(), &other, "", checkpoint, opts); !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("another driver: %v", err)
	}
	if held := descriptorsOf(t, dir); held != 0 {
		t.Errorf("a restore that was refused holds the directory %d times", held)
	}
	r = hold()
	path := filepath.Join(dir, r.areas[0].File)
	state, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	state[len(state)/2] ^= 1
	if err := os.WriteFile(path, state, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := r.Load(t.Context(), checkpoint, openGate{}, opts); err != nil {
		t.Fatal(err)
	}
	if err := r.check.Wait(); !errors.Is(err, errdefs.ErrDataLoss) {
		t.Errorf("a file that changed since its digest: %v", err)
	}
}

// descriptorsOf returns how many descriptors this process has of a directory.
func descriptorsOf(t *testing.T, dir string) (held int) {
	t.Helper()
	want, err := os.Stat(dir)
	if err != nil {
		t.Fatal(err)
	}
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		if is, err := os.Stat("/proc/self/fd/" + fd.Name()); err == nil && os.SameFile(is, want) {
			held++
		}
	}
	return held
}
