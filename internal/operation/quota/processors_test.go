// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"os"
	"path/filepath"
	"testing"
)

func TestProcessors(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "processors")
	var all []*Processors
	for want := 1; want <= 3; want++ {
		l, err := takeProcessors(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Give()
		if all = append(all, l); l.AtOnce() != want {
			t.Errorf("%d restores count %d", want, l.AtOnce())
		}
	}
	all[1].Give()
	all[1].Give()
	if n := all[0].AtOnce(); n != 2 {
		t.Errorf("one of three has left, and %d are counted", n)
	}
	// The kernel ends the lock of a shim that dies.
	died := filepath.Join(dir, "lane-died")
	if err := os.WriteFile(died, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if n := all[0].AtOnce(); n != 2 {
		t.Errorf("%d are counted beside the lane of a dead shim, want 2", n)
	}
	if _, err := os.Stat(died); !os.IsNotExist(err) {
		t.Errorf("the lane of a dead shim is still there: %v", err)
	}
	var alone *Processors
	if alone.Give(); alone.AtOnce() != 1 {
		t.Error("without a lane a restore does not count for one")
	}
}
