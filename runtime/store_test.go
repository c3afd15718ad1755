// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/trace"
)

func TestMain(m *testing.M) {
	if trace.IsTracer() {
		trace.Main()
	}
	os.Exit(m.Run())
}

// ownTracer starts a tracer that the test reaps.
func ownTracer(t *testing.T) *trace.Session {
	t.Helper()
	s, err := trace.Start(func(cmd *exec.Cmd) (func() (int, error), error) {
		if err := cmd.Start(); err != nil {
			return nil, err
		}
		return func() (int, error) { err := cmd.Wait(); return cmd.ProcessState.ExitCode(), err }, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// savedFile is an area of one page whose file holds a letter.
func savedFile(t *testing.T, proc int, start uint64, letter string) savedArea {
	t.Helper()
	a := savedArea{Area: trace.Area{PID: proc + 1, Start: start, Bytes: 4096, Path: filepath.Join(t.TempDir(), "area")}, proc: proc, name: images.AreaFile(proc+1, 0)}
	write(t, a, letter)
	return a
}

func write(t *testing.T, a savedArea, letter string) {
	t.Helper()
	if err := os.WriteFile(a.Path, bytes.Repeat([]byte(letter), 4096), 0o600); err != nil {
		t.Fatal(err)
	}
}

// What was stored while the driver was busy with another process is not stored
// again with the rest.
func TestStoredEarlyIsStoredOnce(t *testing.T) {
	first, second := savedFile(t, 0, 0x1000, "1"), savedFile(t, 1, 0x1000, "2")
	g := &gpuState{inImages: true, early: &storing{tracer: ownTracer(t)}}
	if err := g.early.add(t.Context(), g, "", []savedArea{{Area: second.Area}}); err != nil {
		t.Fatal(err)
	}
	g.early.work.Wait()
	write(t, first, "3")
	write(t, second, "4")
	g.areas = []savedArea{first, second}
	s, err := g.startStoring(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer s.end()
	if err := s.wait(); err != nil {
		t.Fatal(err)
	}
	m := &images.Metadata{Processes: make([]images.Process, 2)}
	s.describe(m)
	for i, letter := range []string{"3", "2"} {
		want := images.DigestBlock(bytes.Repeat([]byte(letter), 4096))
		areas := m.Processes[i].Areas
		if len(areas) != 1 || areas[0].File != images.AreaFile(i+1, 0) || len(areas[0].Digests) != 1 || areas[0].Digests[0] != want {
			t.Errorf("process %d has %+v, want the digest %s", i, areas, want)
		}
	}
	if s.bytes() != 8192 {
		t.Errorf("%d bytes are stored", s.bytes())
	}
}

// An area that was stored early and then was not collected is no image.
func TestStoredEarlyAndGone(t *testing.T) {
	g := &gpuState{inImages: true, early: &storing{tracer: ownTracer(t)}}
	if err := g.early.add(t.Context(), g, "", []savedArea{savedFile(t, 0, 0x1000, "1")}); err != nil {
		t.Fatal(err)
	}
	if s, err := g.startStoring(t.Context(), ""); err == nil {
		s.end()
		t.Error("it is stored")
	}
}
