// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package powerdisk

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// A disk that is broken fails what has to reach it, and has what was written before when it is good again.
func TestBreak(t *testing.T) {
	d, err := Make(t.TempDir(), 32<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Stop() //nolint:errcheck // once more, after an error
	write := func(name string) error {
		f, err := os.Create(filepath.Join(d.Dir, name))
		if err != nil {
			return err
		}
		_, err = f.WriteString("content of " + name)
		return errors.Join(err, f.Sync(), f.Close())
	}
	forget := func(name string) error {
		f, err := os.Open(filepath.Join(d.Dir, name))
		if err != nil {
			return err
		}
		return errors.Join(unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED), f.Close())
	}
	if err := write("before"); err != nil {
		t.Fatal(err)
	}
	if err := forget("before"); err != nil {
		t.Fatal(err)
	}
	d.Break(Reads)
	if _, err := os.ReadFile(filepath.Join(d.Dir, "before")); !errors.Is(err, unix.EIO) {
		t.Errorf("a read of a broken disk: %v", err)
	}
	d.Break(0)
	if text, err := os.ReadFile(filepath.Join(d.Dir, "before")); err != nil || string(text) != "content of before" {
		t.Errorf("of a disk that is good again %q was read, %v", text, err)
	}
	d.Break(Writes)
	if err := write("broken"); !errors.Is(err, unix.EIO) {
		t.Errorf("a flush to a broken disk: %v", err)
	}
	d.Break(0)
	if d.Failed() < 2 {
		t.Errorf("the disk failed %d times", d.Failed())
	}
	if err := d.Stop(); err != nil {
		t.Fatal(err)
	}
	err = d.Look(func(dir string) error {
		_, err := os.Stat(filepath.Join(dir, "before"))
		return err
	})
	if err != nil {
		t.Error(err)
	}
}
