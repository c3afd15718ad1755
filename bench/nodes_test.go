// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/bench/report"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// The nodes' network is not the machine's.
func TestMain(m *testing.M) {
	if os.Getenv(harness.EnvBin) != "" {
		if err := harness.InOwnNetwork(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

func TestParseNodeRates(t *testing.T) {
	if got, err := parseNodeRates("40MB,1GB,20MB"); err != nil || got != (nodeRates{40e6, 1e9, 20e6}) {
		t.Errorf("%d, %v", got, err)
	}
	for _, text := range []string{"", "40MB", "40MB,40MB,0", "40MB,40MB,40MB,40MB", "40MB,40MB,fast"} {
		if got, err := parseNodeRates(text); err == nil {
			t.Errorf("%q is %d, want an error", text, got)
		}
	}
}

// The whole of `--image-cases nodes`, small. Each node fetches for itself, from the registry or from that of
// its rack, which has the image afterwards; restores on one node share what it fetches.
func TestNodes(t *testing.T) {
	if os.Getenv(harness.EnvBin) == "" {
		t.Skipf("%s is not set: `make test` sets it", harness.EnvBin)
	}
	out := t.TempDir()
	cmd, err := parse([]string{"--sizes", "none", "--warm-up=false", "--methods", "ours", "--runs", "1", "--images", "--images-size", "48MiB",
		"--image-cases", "nodes", "--nodes", "2", "--racks", "1", "--node-rates", "100MB,100MB,100MB", "--out", out})
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
	if len(r.NodesRuns) != 4 || len(r.Calls[0].NotRun) > 0 {
		t.Fatalf("%d runs, not made were %q", len(r.NodesRuns), r.Calls[0].NotRun)
	}
	for i, want := range []struct {
		way         string
		nodes, each int
		least, most float64 // images that the registry sends
	}{{report.OneRegistry, 2, 1, 1.9, 2.5}, {report.ColdRacks, 2, 1, 0.9, 2.5}, {report.WarmRacks, 2, 1, 0, 0.1}, {report.OneRegistry, 1, 2, 0.9, 1.5}} {
		m := r.NodesRuns[i]
		if m.Way != want.way || m.Nodes != want.nodes || m.PerNode != want.each || !m.Verified || len(m.Running) != 2 || m.Running[0] <= 0 || !slices.IsSorted(m.Running) || m.Bytes < 48<<20 {
			t.Errorf("%+v", m)
		}
		if sent := float64(m.Sent) / float64(m.Bytes); sent < want.least || sent > want.most {
			t.Errorf("%s: the registry sent %.2f images, want %g to %g", m.Name(), sent, want.least, want.most)
		}
	}
	text, err := os.ReadFile(filepath.Join(out, "results.md"))
	if err != nil || !strings.Contains(string(text), "## Many nodes at once") {
		t.Errorf("%v, %s", err, text)
	}
}
