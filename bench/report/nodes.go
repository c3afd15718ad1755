// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"math"
	"slices"

	"github.com/gpuckpt/gpuckpt/images"
)

// NodesRun is restores of one checkpoint image that begin at once on several nodes, each with nothing of the
// image. Times are the client's, in seconds.
type NodesRun struct {
	ImageOutcome
	Way string `json:"way"`
	// Nodes are in so many Racks, whose registries are pull-through caches; 0: they ask the registry itself.
	// On each PerNode restores begin.
	Nodes   int `json:"nodes"`
	PerNode int `json:"perNode"`
	Racks   int `json:"racks,omitempty"`
	// RegistryRate is what the registry sends in all, RackRate what a rack's registry gets and sends, NodeRate
	// what a node gets, in bytes a second.
	RegistryRate uint64 `json:"registryBytesPerSecond"`
	RackRate     uint64 `json:"rackBytesPerSecond"`
	NodeRate     uint64 `json:"nodeBytesPerSecond"`
	// Bytes are those of blobs that a node alone fetches, Sent what the registry has sent of blobs in all.
	Bytes uint64 `json:"bytes"`
	Sent  uint64 `json:"sentBytes"`
	// Running are the times from the first command until each program answers, ascending.
	Running []float64 `json:"runningSeconds"`
	// Phases are the shim's steps of the last one's restore.
	Phases []images.Phase `json:"lastPhases,omitempty"`
}

// The ways, in the order in which they are measured. A rack's registry is filled by the run before.
const (
	OneRegistry = "one registry"
	ColdRacks   = "a registry a rack, empty"
	WarmRacks   = "a registry a rack, filled"
)

// Name returns the name of the run in logs and tables.
func (r NodesRun) Name() string {
	return fmt.Sprintf("image of %s on %d nodes, %d each, %s, %s, round %d", FormatSize(r.Size), r.Nodes, r.PerNode, r.Way, r.rates(), r.Round)
}

func (r NodesRun) rates() string {
	return fmt.Sprintf("%d, %d, %d MB/s", r.RegistryRate/1e6, r.RackRate/1e6, r.NodeRate/1e6)
}

// Last is when the last program answers.
func (r NodesRun) Last() float64 {
	if len(r.Running) == 0 {
		return 0
	}
	return r.Running[len(r.Running)-1]
}

// Alone is how long the bytes take by the link that has most to carry for its rate: the registry's, a rack's,
// or a node's.
func (r NodesRun) Alone() float64 {
	longest := max(float64(r.Sent)/float64(r.RegistryRate), float64(r.Bytes)/float64(r.NodeRate))
	if r.Racks > 0 {
		perRack := (r.Nodes + r.Racks - 1) / r.Racks
		longest = max(longest, float64(r.Bytes)*float64(perRack)/float64(r.RackRate))
	}
	return longest
}

// nodesModel is what the time until the last node runs is made of: Fixed + Factor · Alone + PerNode · (nodes − 1).
// PerNode is this machine's: its processors restore for all nodes.
type nodesModel struct{ Fixed, Factor, PerNode float64 }

func (m nodesModel) of(alone float64, nodes int) float64 {
	return m.Fixed + m.Factor*alone + m.PerNode*float64(nodes-1)
}

// fitNodes finds the model by least squares over runs with one restore a node.
func fitNodes(runs []NodesRun) (nodesModel, error) {
	var rows [][]float64
	var last []float64
	for _, r := range runs {
		if r.Verified && r.PerNode == 1 {
			rows, last = append(rows, []float64{1, r.Alone(), float64(r.Nodes - 1)}), append(last, r.Last())
		}
	}
	x, err := fit(rows, last)
	if err != nil {
		return nodesModel{}, err
	}
	return nodesModel{Fixed: x[0], Factor: x[1], PerNode: x[2]}, nil
}

// nodesPoint is the verified runs of one kind.
type nodesPoint struct {
	NodesRun
	first, last, alone, copies spread
}

// nodesPoints are those of runs, in their order. Runs on more nodes than there were first come last.
func nodesPoints(runs []NodesRun) (points []nodesPoint) {
	kind := func(r NodesRun) string {
		return fmt.Sprint(r.Size, r.Way, r.Nodes, r.PerNode, r.Racks, r.RegistryRate, r.RackRate, r.NodeRate)
	}
	var of [][]NodesRun
	for _, r := range runs {
		if !r.Verified {
			continue
		}
		at := slices.IndexFunc(of, func(same []NodesRun) bool { return kind(same[0]) == kind(r) })
		if at < 0 {
			of = append(of, []NodesRun{r})
		} else {
			of[at] = append(of[at], r)
		}
	}
	for _, same := range of {
		number := func(value func(NodesRun) float64) spread {
			var all []float64
			for _, r := range same {
				all = append(all, value(r))
			}
			return spreadOf(all)
		}
		points = append(points, nodesPoint{
			NodesRun: same[0], first: number(func(r NodesRun) float64 { return r.Running[0] }), last: number(NodesRun.Last),
			alone: number(NodesRun.Alone), copies: number(func(r NodesRun) float64 { return float64(r.Sent) / float64(max(1, r.Bytes)) }),
		})
	}
	return points
}

// nodesText describes the model and how far it is from the points.
func nodesText(runs []NodesRun) string {
	text := "Restores of one image begin at once, by gpuckpt restore --pull, on nodes that have nothing of it; each node is a containerd with a network of its own. " +
		"The rates are those of the registry, which are of all that it sends of blobs, of a rack's registry, each way, and of a node. Images sent are those by the registry, in images that a node alone fetches. " +
		"A rack's registry is distribution's as a pull-through cache: empty before the run, or filled by the run before. The bytes alone are by the link that has most to carry for its rate."
	m, err := fitNodes(runs)
	if err != nil {
		return text
	}
	worst := 0.0
	for _, p := range nodesPoints(runs) {
		if p.PerNode == 1 {
			worst = max(worst, math.Abs(p.last.Median/m.of(p.alone.Median, p.Nodes)-1))
		}
	}
	return text + fmt.Sprintf("\n\nThe model, by least squares: the last runs after %.2f s + %.2f × the bytes alone + %.2f s × (nodes − 1). The last part is this machine's, whose processors work for all nodes. It is at most %.0f %% from the medians.", m.Fixed, m.Factor, m.PerNode, 100*worst)
}

func nodesTable(runs []NodesRun) table {
	t := table{columns: []string{"GPU memory", "rates", "way", "nodes", "on each", "racks", "runs", "images sent", "first runs", "last runs", "the bytes alone", "model"}}
	m, err := fitNodes(runs)
	for _, p := range nodesPoints(runs) {
		model := "–"
		if err == nil && p.PerNode == 1 {
			model = Seconds(m.of(p.alone.Median, p.Nodes))
		}
		t.add(FormatSize(p.Size), p.rates(), p.Way, fmt.Sprint(p.Nodes), fmt.Sprint(p.PerNode), fmt.Sprint(p.Racks), fmt.Sprint(p.last.N),
			fmt.Sprintf("%.1f", p.copies.Median), p.first.text(), p.last.text(), Seconds(p.alone.Median), model)
	}
	return t
}

// example is what the model is drawn for: links of 25 Gbit/s, and of 100 Gbit/s from a rack's registry.
var example = struct {
	bytes, registry, rack, node float64
	perRack                     int
}{16e9, 3.1e9, 12.5e9, 3.1e9, 16}

const exampleText = "The model for 16 GB, without the part that is this machine's: the registry and each node have 3.1 GB/s (25 Gbit/s), a rack's registry has 12.5 GB/s (100 Gbit/s) for 16 nodes. " +
	"Filling is all racks' registries from the registry, once, before any node asks."

// exampleLine is a topology for many nodes: how long its bytes take.
type exampleLine struct {
	name, class string
	limit       bool // of a link, and not a time
	alone       func(nodes float64) float64
}

// exampleLines are drawn, and the table's columns.
var exampleLines = []exampleLine{
	{OneRegistry, "one", false, func(n float64) float64 { return example.bytes * max(n/example.registry, 1/example.node) }},
	{WarmRacks, "warm", false, func(n float64) float64 {
		return example.bytes * max(min(n, float64(example.perRack))/example.rack, 1/example.node)
	}},
	{"filling the racks' registries", "fill", true, func(n float64) float64 {
		return example.bytes * math.Ceil(n/float64(example.perRack)) / example.registry
	}},
	{"a node's network", "node", true, func(float64) float64 { return example.bytes / example.node }},
}

func exampleTable(runs []NodesRun) table {
	t := table{columns: []string{"nodes"}}
	m, err := fitNodes(runs)
	if err != nil {
		return t
	}
	for _, l := range exampleLines {
		t.columns = append(t.columns, l.name)
	}
	for _, n := range []float64{10, 30, 100, 300, 1000} {
		row := []string{fmt.Sprint(n)}
		for _, l := range exampleLines {
			row = append(row, Seconds(m.example(l, n)))
		}
		t.add(row...)
	}
	return t
}

// example is a point of a line: a limit is its bytes' time alone.
func (m nodesModel) example(l exampleLine, nodes float64) float64 {
	if l.limit {
		return l.alone(nodes)
	}
	return m.of(l.alone(nodes), 1)
}
