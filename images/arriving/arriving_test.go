// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package arriving

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// What a killed program has left is removed, and what another holds is not. Who waits for that one gets no directory
// that was removed meanwhile.
func TestSweep(t *testing.T) {
	all := t.TempDir()
	left, held := filepath.Join(all, "left"), filepath.Join(all, "held")
	for _, dir := range []string{left, held} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "blob"), []byte("state"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	lock, err := lockDir(t.Context(), held)
	if err != nil || lock == nil {
		t.Fatal(lock, err)
	}
	sweep(all)
	if _, err := os.Stat(left); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("left behind: %v", err)
	}
	if _, err := os.Stat(filepath.Join(held, "blob")); err != nil {
		t.Error(err)
	}
	brief, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if f, err := lockDir(brief, held); f != nil || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("held by another: %v, %v", f, err)
	}
	waited := make(chan error, 1)
	go func() {
		f, err := lockDir(t.Context(), held)
		if f != nil {
			err = errors.Join(err, errors.New("a directory that is gone is locked"), f.Close())
		}
		waited <- err
	}()
	if err := errors.Join(os.RemoveAll(held), lock.Close()); err != nil {
		t.Fatal(err)
	}
	if err := <-waited; err != nil {
		t.Error(err)
	}
	if f, err := lockDir(t.Context(), held); f != nil || err != nil {
		t.Errorf("it is not there: %v, %v", f, err)
	}
}
