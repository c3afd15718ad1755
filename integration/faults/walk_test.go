// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

// walk is the log of the cells that were tried; without a file it notes nothing.
type walk struct {
	file   *os.File
	commit string
	// programs names the programs under test by their content.
	programs string
	passed   map[string]bool // with these programs, by the cell's name
}

// openWalk opens the log, if there is to be one.
func openWalk(t *testing.T) *walk {
	t.Helper()
	path := os.Getenv(envWalk)
	if path == "" {
		return &walk{}
	}
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = file.Close() })
	all, err := ReadWalk(file)
	if err != nil {
		t.Fatal(err)
	}
	w := &walk{file: file, commit: short(session.Results.Commit), programs: digestOfPrograms(t)}
	w.continues(all)
	return w
}

// short is a commit as the log has it: a bundle knows all 40 digits.
func short(commit string) string {
	if len(commit) < 40 {
		return commit
	}
	return commit[:7] + commit[40:] // "-dirty" stays
}

// continues notes what has passed with the same programs.
func (w *walk) continues(all []Tried) {
	w.passed = make(map[string]bool)
	for _, r := range all {
		if r.Programs == w.programs {
			w.passed[r.Cell] = r.Passed
		}
	}
}

// left are the cells that did not pass yet.
func (w *walk) left(cells []Cell) []Cell {
	return slices.DeleteFunc(cells, func(c Cell) bool { return w.passed[c.String()] })
}

// note writes what came of a cell.
func (w *walk) note(t *testing.T, c Cell, passed bool, took time.Duration) {
	if w.file == nil || session.Context().Err() != nil { // what was cut off was not tried
		return
	}
	if err := (Tried{w.commit, w.programs, passed, took, c.String()}).Write(w.file); err != nil {
		t.Error(err)
	}
}

// digestOfPrograms is the beginning of a digest of the programs that the walk is about.
func digestOfPrograms(t *testing.T) string {
	t.Helper()
	h := sha256.New()
	for _, program := range []string{"containerd-shim-gpuckpt-v2", "gpuckpt", "gpuckpt-cuda-helper", "gpuckpt-tmpfs", "gpuckpt_criu.so", "libgpuckpt.so"} {
		path, err := session.Bins.Path("faults/" + program)
		if err != nil {
			t.Fatal(err)
		}
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		_, err = io.Copy(h, f)
		if err := errors.Join(err, f.Close()); err != nil {
			t.Fatal(err)
		}
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:6])
}

// A walk goes on where it was cut off: what has passed with the same programs is not tried again.
func TestWalkGoesOn(t *testing.T) {
	cells := Cells()[:4]
	var log strings.Builder
	for i, r := range []Tried{
		{"c0", "these", true, 1500 * time.Millisecond, cells[0].String()},
		{"c0", "others", true, time.Second, cells[1].String()},
		{"c0", "these", false, time.Second, cells[2].String()},
	} {
		if err := r.Write(&log); err != nil {
			t.Fatalf("line %d: %v", i, err)
		}
	}
	all, err := ReadWalk(strings.NewReader(log.String()))
	if err != nil {
		t.Fatal(err)
	}
	if first := (Tried{"c0", "these", true, 1500 * time.Millisecond, cells[0].String()}); all[0] != first {
		t.Errorf("read %+v, wrote %+v", all[0], first)
	}
	w := &walk{programs: "these"}
	w.continues(all)
	left := w.left(slices.Clone(cells))
	if want := cells[1:]; len(left) != len(want) || left[0].String() != want[0].String() {
		t.Errorf("left are %v, want %v", left, want)
	}
}

// What is known of an earlier walk is what came of a cell's last try, with whatever programs.
func TestUnknown(t *testing.T) {
	cells := Cells()[:4]
	walk := []Tried{
		{Programs: "some", Passed: true, Cell: cells[0].String()},
		{Programs: "others", Passed: false, Cell: cells[0].String()},
		{Programs: "some", Passed: false, Cell: cells[1].String()},
		{Programs: "others", Passed: true, Cell: cells[1].String()},
		{Programs: "some", Passed: true, Cell: cells[2].String()},
	}
	var names []string
	for _, c := range Unknown(cells, walk) {
		names = append(names, c.String())
	}
	if want := []string{cells[0].String(), cells[3].String()}; !slices.Equal(names, want) {
		t.Errorf("unknown are %v, want %v", names, want)
	}
}
