// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
	"github.com/gpuckpt/gpuckpt/internal/operation/imagedir"
)

func begun(t *testing.T, dir string) *Journal {
	t.Helper()
	j := new(Journal)
	if err := j.Write(dir, Record{Namespace: "ns", Container: "c", Operation: "checkpoint", Images: &imagedir.Dir{Path: "/i", Made: true}}); err != nil {
		t.Fatal(err)
	}
	return j
}

// A record is there from Write on, follows the steps, and goes with End.
func TestJournal(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "not", "yet")
	j := begun(t, dir)
	path := Path(dir, "ns", "c")
	r, err := Read(path)
	if err != nil {
		t.Fatal(err)
	}
	boot, err := Boot()
	if err != nil {
		t.Fatal(err)
	}
	if r.Boot != boot || r.Shim.PID != os.Getpid() || !r.Shim.Lives() || !r.Images.Made || r.Step != "" || r.Init.Lives() {
		t.Errorf("the first record is %+v", r)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the file is %v, %v", info, err)
	}
	j.Note(t.Context(), "dump", []string{"give back", "resume"})
	j.Spills(t.Context(), "/spill")
	if r, err = Read(path); err != nil || r.Step != "dump" || !slices.Equal(r.Undo, []string{"give back", "resume"}) || r.Spill != "/spill" {
		t.Errorf("the record is %+v, %v", r, err)
	}
	j.End(t.Context(), Stuck, errors.New("thaw: why"))
	if r, err = Read(path); err != nil || r.State != Stuck || r.Why != "thaw: why" {
		t.Errorf("the record is %+v, %v", r, err)
	}
	j.End(t.Context(), "", nil)
	j.Note(t.Context(), "late", nil)
	j.End(t.Context(), Paused, nil)
	if left, err := os.ReadDir(filepath.Dir(path)); err != nil || len(left) > 0 {
		t.Errorf("left are %v, %v", left, err)
	}
}

// Records that cannot be looked for are not none.
func TestListUnreadable(t *testing.T) {
	file := filepath.Join(t.TempDir(), "records")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if paths, err := List(file, "*"); err == nil {
		t.Errorf("listed %q", paths)
	}
}

// An operation does not begin without its record.
func TestNoRecord(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := new(Journal).Write(file, Record{Namespace: "ns", Container: "c", Operation: "checkpoint"}); err == nil || !strings.Contains(err.Error(), "write the record of the checkpoint") {
		t.Errorf("error %v", err)
	}
}

// What is not a record of this version is refused.
func TestRead(t *testing.T) {
	dir := t.TempDir()
	begun(t, dir)
	good, err := os.ReadFile(Path(dir, "ns", "c"))
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct{ text, says string }{
		{"", "it is empty"},
		{strings.Replace(string(good), `"schema": 1`, `"schema": 2`, 1), "has schema 2 and this program knows 1"},
		{strings.Replace(string(good), `"container": "c"`, `"container": "d"`, 1), "is of container d"},
	} {
		if err := os.WriteFile(Path(dir, "ns", "c"), []byte(test.text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Read(Path(dir, "ns", "c")); err == nil || !strings.Contains(err.Error(), test.says) {
			t.Errorf("error %v, want one that says %q", err, test.says)
		}
	}
	if _, err := Read(Path(dir, "ns", "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("error %v", err)
	}
	for namespace, want := range map[string]int{"ns": 1, "*": 1, "other": 0} {
		if paths, err := List(dir, namespace); err != nil || len(paths) != want {
			t.Errorf("%s: %v, %v", namespace, paths, err)
		}
	}
	if _, err := List(dir, "../ns"); err == nil {
		t.Error("a path is no namespace")
	}
}

// A pid that is used again is another process.
func TestLives(t *testing.T) {
	self, err := proc.Identify(os.Getpid())
	if err != nil || !self.Lives() {
		t.Fatalf("%+v, %v", self, err)
	}
	self.Start++
	if self.Lives() {
		t.Error("a process with another start is taken for this one")
	}
}

// A record that is written is there for a crash of processes. It is on the disk, with its name, before
// anything else can be noted.
func TestFlushBeside(t *testing.T) {
	dir := t.TempDir()
	j := new(Journal)
	var flushed []string
	j.sync = func(f *os.File) error {
		if j.mu.TryLock() {
			j.mu.Unlock()
			t.Error("the record can change while it is flushed")
		}
		flushed = append(flushed, f.Name())
		return f.Sync()
	}
	if err := j.Write(dir, Record{Namespace: "ns", Container: "c", Operation: "restore"}); err != nil {
		t.Fatal(err)
	}
	path := Path(dir, "ns", "c")
	if _, err := Read(path); err != nil || flushed != nil {
		t.Errorf("after the write: %v, flushed are %q", err, flushed)
	}
	wait := j.FlushBeside()
	j.Note(t.Context(), "next", nil)
	if want := []string{path, filepath.Dir(path), dir}; !slices.Equal(flushed, want) {
		t.Errorf("at the next note flushed are %q, want %q", flushed, want)
	}
	if err := wait(); err != nil {
		t.Error(err)
	}
	full := errors.New("the disk is gone")
	j.sync = func(*os.File) error { return full }
	if err := j.FlushBeside()(); !errors.Is(err, full) {
		t.Errorf("the error is %v", err)
	}
	j.End(t.Context(), "", nil)
	if err := j.FlushBeside()(); err != nil {
		t.Errorf("without a record: %v", err)
	}
}
