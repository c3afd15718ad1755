// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"path/filepath"
	"regexp"
	"testing"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/powerdisk"
)

// disk is one with a file system of its own, whose block device a cell breaks.
type disk struct{ *powerdisk.Disk }

func newDisk(t testing.TB) *disk {
	t.Helper()
	d, err := powerdisk.Make(harness.DiskDir(t), 128<<20)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Stop(); err != nil {
			t.Error(err)
		}
	})
	return &disk{d}
}

// breaks has the disk of a cell fail until the operation is over.
func (h *hit) breaks(what powerdisk.Broken) string {
	d := h.l.disk
	if what == powerdisk.Reads {
		if err := harness.ForgetCache(d.Dir); err != nil {
			h.t.Error(err)
		}
	}
	d.Break(what)
	h.undo = append(h.undo, func() { d.Break(0) })
	return ""
}

// judge looks at what is on the disk when it is good again and mounted anew. dir is that of the
// checkpoint that was to be taken.
func (d *disk) judge(t testing.TB, c Cell, h *hit, dir string) {
	t.Helper()
	t.Logf("the block device failed %d times", d.Failed())
	if d.Failed() == 0 && c.Outcome&Through == 0 {
		t.Error("the block device was not asked for anything while it was broken")
	}
	if h.err != nil && !regexp.MustCompile("input/output error|read-only file system|could not be read").MatchString(h.err.Error()) {
		t.Errorf("the error does not say that the disk is broken: %v", h.err)
	}
	if err := d.Stop(); err != nil {
		t.Fatal(err)
	}
	if c.Place.Scenario.Operation != "checkpoint" {
		return
	}
	err := d.Look(func(at string) error {
		_, err := images.ReadMetadata(filepath.Join(at, filepath.Base(dir)))
		if complete := err == nil; complete != (h.err == nil) {
			t.Errorf("the operation's error is %v, and the checkpoint on the disk is complete: %t (%v)", h.err, complete, err)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}
