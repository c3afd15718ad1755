// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/bench/report"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// The whole of `bench --images`, small, as `make test` has it run with the
// programs under test.
func TestImages(t *testing.T) {
	if os.Getenv(harness.EnvBin) == "" {
		t.Skipf("%s is not set: `make test` sets it", harness.EnvBin)
	}
	out := t.TempDir()
	const size = 48 << 20
	cmd, err := parse([]string{"--sizes", "none", "--warm-up=false", "--methods", "ours,stock", "--runs", "1", "--images", "--images-size", "48MiB",
		"--image-cases", "none,zstd,registry,many", "--many", "2", "--arrival-rates", "200MB,0", "--out", out})
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.run(t.Context()); err != nil {
		t.Fatal(err)
	}
	r, err := report.Read([]string{filepath.Join(out, "results.json")})
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Runs) > 0 || len(r.Calls[0].NotRun) > 0 {
		t.Errorf("beside the images %d runs were made, not made were %q", len(r.Runs), r.Calls[0].NotRun)
	}
	var ways []string
	for _, m := range r.ImageRuns {
		ways = append(ways, report.ImageWay(m.Method, m.Compression))
		if !m.Verified || m.Checkpoint <= 0 || m.Restore <= 0 || (m.Resume > 0) != (m.Method == report.Ours) || m.Stored < size || m.Stored > 3*size {
			t.Errorf("%s: %+v", m.Name(), m)
		}
	}
	if want := []string{"gpuckpt, none", "gpuckpt, zstd", "ctr, CUDA steps by hand"}; !slices.Equal(ways, want) {
		t.Errorf("images were made by %q, not by %q", ways, want)
	}
	if len(r.RegistryRuns) != 1 {
		t.Fatalf("%d runs with a registry, want one", len(r.RegistryRuns))
	}
	// One layer of 64 MiB: all of it is new each time.
	m := r.RegistryRuns[0]
	for _, s := range []report.SentImage{m.First, m.Second} {
		if s.Checkpoint <= 0 || s.Paused <= 0 || s.Push <= 0 || s.Sent < size || s.Sent > 2*size || s.GPUWritten < size {
			t.Errorf("%s: sent %+v", m.Name(), s)
		}
	}
	if !m.Verified || m.LayerBytes != 64<<20 || m.Pull <= 0 || m.Fetched < size || m.Resume <= 0 {
		t.Errorf("%s: %+v", m.Name(), m)
	}
	if m.NextPull <= 0 || m.NextFetched == 0 || m.NextFetched > m.Fetched || m.Alone <= 0 || len(m.Arrivals) != 2 {
		t.Errorf("%s: %+v", m.Name(), m)
	}
	for _, a := range m.Arrivals {
		if a.Running <= 0 || a.Restore <= 0 || a.Fetched < size || len(a.Phases) == 0 || len(a.Flow) < 2 || a.Flow[len(a.Flow)-1].Sent < size || a.Flow[len(a.Flow)-1].Copied < size/2 {
			t.Errorf("%s: %+v", m.Name(), a)
		}
	}
	if len(r.ManyRuns) != 1 {
		t.Fatalf("%d runs of several restores, want one", len(r.ManyRuns))
	}
	if m := r.ManyRuns[0]; !m.Verified || m.Count != 2 || m.One <= 0 || m.All <= 0 {
		t.Errorf("%s: %+v", m.Name(), m)
	}
	if picture, err := os.ReadFile(filepath.Join(out, "arrival.svg")); err != nil || !strings.Contains(string(picture), "sent by the registry") {
		t.Errorf("there is no picture of the bytes: %v", err)
	}
	text, err := os.ReadFile(filepath.Join(out, "results.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, title := range []string{"## Checkpoint images", "## Several restores of one image", "## A second checkpoint, and a registry", "## And back", "## While it arrives"} {
		if !strings.Contains(string(text), title) {
			t.Errorf("the tables lack %q", title)
		}
	}
}
