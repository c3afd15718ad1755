// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package pages

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// A file that cannot be written, on a full disk for one, stays as it was, and nothing lies beside it.
// What a worker that was killed has left is not in the way.
func TestReplace(t *testing.T) {
	dir := t.TempDir()
	path, left := filepath.Join(dir, "pagemap-1.img"), filepath.Join(dir, temporary+"pagemap-1.img")
	for name, text := range map[string]string{path: "old", left: "left by another"} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, fails := range []error{syscall.ENOSPC, nil} {
		want := "new"
		if fails != nil {
			want = "old"
		}
		err := replace(path, 0o600, nil, func(f *os.File) error {
			if _, err := f.WriteString("new"); err != nil {
				t.Error(err)
			}
			return fails
		})
		if !errors.Is(err, fails) {
			t.Errorf("error %v, want %v", err, fails)
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != want {
			t.Errorf("after %v the file has %q, error %v; want %q", fails, got, err, want)
		}
		if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
			t.Errorf("after %v there are %v, error %v", fails, entries, err)
		}
	}
}
