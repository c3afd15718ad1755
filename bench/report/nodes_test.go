// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// madeNodes are runs that take what a model says.
func madeNodes(m nodesModel) (runs []NodesRun) {
	const image = 200e6
	for _, rates := range [][3]uint64{{40e6, 40e6, 40e6}, {80e6, 40e6, 20e6}} {
		for _, nodes := range []int{1, 2, 4, 8} {
			for _, way := range []string{OneRegistry, ColdRacks, WarmRacks} {
				r := NodesRun{
					ImageOutcome: ImageOutcome{Size: 128 << 20, Round: 1, Verified: true}, Way: way, Nodes: nodes, PerNode: 1,
					RegistryRate: rates[0], RackRate: rates[1], NodeRate: rates[2], Bytes: image, Sent: uint64(nodes) * image,
				}
				if way != OneRegistry {
					r.Racks = min(nodes, 2)
				}
				if way == WarmRacks {
					r.Sent = 0
				}
				last := m.of(r.Alone(), nodes)
				r.Running = []float64{last}
				if nodes > 1 {
					r.Running = []float64{last / 2, last}
				}
				runs = append(runs, r)
			}
		}
	}
	two := runs[0]
	two.PerNode, two.Running = 2, []float64{7, 8}
	failed := runs[0]
	failed.Verified, failed.Error, failed.Running = false, "cut off", nil
	return append(runs, two, failed)
}

// How long the bytes take is by the link that has most to carry.
func TestNodesAlone(t *testing.T) {
	r := NodesRun{Nodes: 8, PerNode: 1, RegistryRate: 100, RackRate: 50, NodeRate: 20, Bytes: 1000}
	for name, of := range map[string]struct {
		sent  uint64
		racks int
		want  float64
	}{"the registry's": {8000, 0, 80}, "a node's": {100, 0, 50}, "a rack's": {0, 2, 80}, "a rack's of three": {0, 3, 60}} {
		r.Sent, r.Racks = of.sent, of.racks
		if got := r.Alone(); got != of.want {
			t.Errorf("%s: %v, want %v", name, got, of.want)
		}
	}
}

// The model is found in what was made by one, and is told, with how far the points are from it.
func TestNodesModel(t *testing.T) {
	want := nodesModel{Fixed: 1.5, Factor: 1.05, PerNode: 0.25}
	runs := madeNodes(want)
	m, err := fitNodes(runs)
	if err != nil || math.Abs(m.Fixed-want.Fixed) > 1e-6 || math.Abs(m.Factor-want.Factor) > 1e-6 || math.Abs(m.PerNode-want.PerNode) > 1e-6 {
		t.Errorf("%+v, %v, want %+v", m, err, want)
	}
	if _, err := fitNodes(runs[:2]); !errors.Is(err, errFit) {
		t.Errorf("two runs give %v", err)
	}
	text := strings.Join(strings.Fields((&Results{NodesRuns: runs}).Markdown()), " ")
	for _, want := range []string{
		"the last runs after 1.50 s + 1.05 × the bytes alone + 0.25 s × (nodes − 1)", "at most 0 % from the medians",
		"| 128 MiB | 40, 40, 40 MB/s | one registry | 8 | 1 | 0 | 1 | 8.0 | 22.62 | 45.25 | 40.00 s | 45.25 s |",
		"| 128 MiB | 40, 40, 40 MB/s | a registry a rack, filled | 8 | 1 | 2 | 1 | 0.0 | 12.12 | 24.25 | 20.00 s | 24.25 s |",
		"| 128 MiB | 40, 40, 40 MB/s | one registry | 1 | 2 | 0 | 1 | 1.0 | 7.00 | 8.00 | 5.00 s | – |",
		// 16 GB: 100 of them at 3.1 GB/s are 516 s, 16 at 12.5 GB/s 20.5 s; both × 1.05 + 1.5 s
		"| 100 | 9m3s | 23.00 s | 36.13 s | 5.16 s |",
		"- failed: image of 128 MiB on 1 nodes, 1 each, one registry, 40, 40, 40 MB/s, round 1: cut off",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the tables lack %q", want)
		}
	}
	if t.Failed() {
		t.Log(text)
	}
}

// The picture is well-formed, has a dot with its numbers for each kind of run, and names no line over another.
func TestNodesPicture(t *testing.T) {
	dir := t.TempDir()
	if err := (&Results{NodesRuns: madeNodes(nodesModel{Fixed: 1.5, Factor: 1.05, PerNode: 0.25})}).Write(dir); err != nil {
		t.Fatal(err)
	}
	picture, err := os.ReadFile(filepath.Join(dir, "nodes.svg"))
	if err != nil {
		t.Fatal(err)
	}
	for d := xml.NewDecoder(bytes.NewReader(picture)); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if dots := bytes.Count(picture, []byte(`r="5"`)); dots != 12 { // of the first rates
		t.Errorf("%d dots", dots)
	}
	for _, want := range []string{"<title>one registry, 8 nodes: 45.25 s, of 1 runs; by the model 45.25 s; the registry sent 8.0 images</title>", "<title>a registry a rack, filled: ", "prefers-color-scheme: dark"} {
		if !bytes.Contains(picture, []byte(want)) {
			t.Errorf("no %q", want)
		}
	}
	var out bytes.Buffer
	panel{out: &out}.labels([]end{{"one", "lowest", 100}, {"warm", "same", 100}, {"node", "near", 96}})
	if text := out.String(); !strings.Contains(text, `y="100.0">near`) || !strings.Contains(text, `y="115.0">lowest`) || !strings.Contains(text, `y="130.0">same`) {
		t.Error(text)
	}
	if nodesPicture(nil) != nil {
		t.Error("a picture of nothing")
	}
}

// The picture that the documents show is of the results beside it: bench --out DIR FILE... draws it anew.
func TestNodesPublished(t *testing.T) {
	found, err := filepath.Glob("../../docs/results/*-many-nodes/results.json")
	if err != nil || len(found) == 0 {
		t.Fatalf("no results, %v", err)
	}
	for _, path := range found {
		r, err := Read([]string{path})
		if err != nil {
			t.Fatal(err)
		}
		picture, err := os.ReadFile(filepath.Join(filepath.Dir(path), "nodes.svg"))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(picture, nodesPicture(r.NodesRuns)) {
			t.Errorf("%s has another picture", filepath.Dir(path))
		}
	}
}
