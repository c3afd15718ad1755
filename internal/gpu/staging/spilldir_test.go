// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package staging

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"
)

// What a crash has left in the directory for spills goes when the next container spills there, and
// blocks none of its name. What a shim that lives has there stays.
func TestSpillsThatACrashHasLeft(t *testing.T) {
	parent := t.TempDir()
	for _, name := range []string{"ns-job", "ns-other"} {
		if err := os.MkdirAll(filepath.Join(parent, spillPrefix+name), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(parent, spillPrefix+name, "gpu-1-0"), []byte("old"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	live, err := MakeSpillDir(parent, "ns-job", t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	state := filepath.Join(live.Path, "gpu-1-0")
	if _, err := os.Stat(state); err == nil {
		t.Error("the old state is there")
	}
	if err := os.WriteFile(state, []byte("new"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := MakeSpillDir(parent, "ns-job", t.TempDir()); !errors.Is(err, errdefs.ErrAlreadyExists) {
		t.Errorf("a second of the name: error %v", err)
	}
	third, err := MakeSpillDir(parent, "ns-third", t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if data, err := os.ReadFile(state); err != nil || string(data) != "new" {
		t.Errorf("the live state: %q, %v", data, err)
	}
	for _, d := range []*SpillDir{live, third} {
		if err := d.Remove(); err != nil {
			t.Error(err)
		}
	}
	if left, err := os.ReadDir(parent); err != nil || len(left) > 0 {
		t.Errorf("left are %v, error %v", left, err)
	}
}
