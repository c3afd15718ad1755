// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package report is what bench has measured: the format of results.json, which docs/results holds files
// of, and the tables and pictures drawn from it. It measures nothing.
package report

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"time"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// Call is one call of this program: what it was asked, and on what.
type Call struct {
	Date string   `json:"date"`
	Args []string `json:"args"`
	// DiskRate is that of parallel O_DIRECT writes, DiskReadRate that of reads,
	// bytes a second; 0 when it was not measured.
	DiskRate     float64  `json:"diskBytesPerSecond,omitempty"`
	DiskReadRate float64  `json:"diskReadBytesPerSecond,omitempty"`
	NotRun       []string `json:"notRun,omitempty"`
}

// Results are the runs of one or more calls on machines of one kind. Their JSON
// is a published format: docs/results holds files of it.
type Results struct {
	Commit        string              `json:"commit"`
	GPUKind       harness.GPUKind     `json:"gpuKind"`
	Driver        string              `json:"driver"`
	GPUs          []harness.ResultGPU `json:"gpus"`
	Kernel        string              `json:"kernel"`
	CgroupVersion int                 `json:"cgroupVersion"`
	Versions      map[string]string   `json:"versions"`
	CPUs          int                 `json:"cpus"`
	// MemoryBytes is the machine's.
	MemoryBytes uint64 `json:"memoryBytes"`
	// PCIe is the rate of a pinned copy that the chart shows as the limit, in
	// bytes a second, and PCIeSource where it comes from.
	PCIe       float64      `json:"pcieBytesPerSecond,omitempty"`
	PCIeSource string       `json:"pcieSource,omitempty"`
	Calls      []Call       `json:"calls"`
	Runs       []Run        `json:"runs"`
	Limit      *LimitResult `json:"limit,omitempty"`
	Short      *ShortResult `json:"short,omitempty"`
	// ImageRuns and RegistryRuns are checkpoints as images (--images).
	ImageRuns    []ImageRun    `json:"imageRuns,omitempty"`
	RegistryRuns []RegistryRun `json:"registryRuns,omitempty"`
	// ManyRuns are several restores of one image at once.
	ManyRuns []ManyRun `json:"manyRuns,omitempty"`
	// WayRuns are images from a registry of a limited rate, in several ways.
	WayRuns []WayRun `json:"wayRuns,omitempty"`
	// NodesRuns are nodes that restore one image at once.
	NodesRuns []NodesRun `json:"nodesRuns,omitempty"`
	// HugePages are the kernel's settings of transparent huge pages, by file.
	HugePages map[string]string `json:"hugePages,omitempty"`
}

// companion is the method Interposer by the name that it had until November 2026.
var companion = regexp.MustCompile(`("method":\s*)"companion"`)

// Read reads and merges result files, which must be of one commit, one
// driver and one model of GPU.
func Read(paths []string) (*Results, error) {
	var all *Results
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("read results: %w", err)
		}
		data = companion.ReplaceAll(data, []byte(`${1}"`+Interposer+`"`))
		r := new(Results)
		if err := json.Unmarshal(data, r); err != nil {
			return nil, fmt.Errorf("read results %s: %w", path, err)
		}
		if all == nil {
			all = r
			continue
		}
		if err := all.merge(r); err != nil {
			return nil, fmt.Errorf("merge %s with %s: %w", path, paths[0], err)
		}
	}
	return all, nil
}

// merge adds the runs of another call. On an error nothing was added.
func (r *Results) merge(o *Results) error {
	switch {
	case r.Commit != o.Commit:
		return fmt.Errorf("commits %s and %s differ", o.Commit, r.Commit)
	case r.Driver != o.Driver || r.GPUKind != o.GPUKind:
		return fmt.Errorf("drivers %s and %s differ", o.Driver, r.Driver)
	case r.Model() != o.Model():
		return fmt.Errorf("GPUs %s and %s differ", o.Model(), r.Model())
	}
	if len(o.GPUs) > len(r.GPUs) {
		r.GPUs, r.CPUs, r.MemoryBytes = o.GPUs, o.CPUs, o.MemoryBytes
	}
	r.Calls = append(r.Calls, o.Calls...)
	r.Runs = append(r.Runs, o.Runs...)
	r.Limit = cmp.Or(r.Limit, o.Limit)
	r.Short = cmp.Or(r.Short, o.Short)
	r.ImageRuns = append(r.ImageRuns, o.ImageRuns...)
	r.RegistryRuns = append(r.RegistryRuns, o.RegistryRuns...)
	r.ManyRuns = append(r.ManyRuns, o.ManyRuns...)
	r.WayRuns = append(r.WayRuns, o.WayRuns...)
	r.NodesRuns = append(r.NodesRuns, o.NodesRuns...)
	return nil
}

// Model is the product name of the GPUs.
func (r *Results) Model() string {
	if len(r.GPUs) == 0 {
		return ""
	}
	return r.GPUs[0].Name
}

// FirstFailed names the first run of ours that failed; empty when none did.
func (r *Results) FirstFailed() string {
	for _, m := range r.Runs {
		if m.Method == Ours && !m.Verified {
			return m.Shape.String()
		}
	}
	for _, m := range r.ImageRuns {
		if m.Method == Ours && !m.Verified {
			return m.Name()
		}
	}
	for _, m := range r.RegistryRuns {
		if !m.Verified {
			return m.Name()
		}
	}
	for _, m := range r.ManyRuns {
		if !m.Verified {
			return m.Name()
		}
	}
	for _, m := range r.WayRuns {
		if !m.Verified {
			return m.Name()
		}
	}
	for _, m := range r.NodesRuns {
		if !m.Verified {
			return m.Name()
		}
	}
	return ""
}

// diskRates are the fastest that were measured of the disk, in bytes a second.
func (r *Results) diskRates() (write, read float64) {
	for _, c := range r.Calls {
		write, read = max(write, c.DiskRate), max(read, c.DiskReadRate)
	}
	return write, read
}

// Write writes everything into dir: results.json, results.md and the pictures
// there is something to draw in.
func (r *Results) Write(dir string) error {
	data, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return fmt.Errorf("write the results: %w", err)
	}
	files := map[string][]byte{
		"results.json": append(data, '\n'),
		"results.md":   []byte(r.Markdown()),
	}
	chart, cerr := r.chart()
	if chart != nil {
		files["chart.svg"] = chart
	}
	flow, ferr := r.flowPicture()
	if flow != nil {
		files["arrival.svg"] = flow
	}
	if n := nodesPicture(r.NodesRuns); n != nil {
		files["nodes.svg"] = n
	}
	if t := r.timeline(); t != nil {
		files["timeline.svg"] = t
	}
	errs := []error{cerr, ferr}
	for name, data := range files {
		errs = append(errs, os.WriteFile(filepath.Join(dir, name), data, 0o644))
	}
	return errors.Join(errs...)
}

// group is what was measured of one shape, by method: verified runs only.
type group struct {
	Shape
	runs map[string][]Run
}

// groups are the shapes measured, in an order for reading.
func (r *Results) groups() []group {
	var all []group
	for _, m := range r.Runs {
		if !m.Verified {
			continue
		}
		at := slices.IndexFunc(all, func(g group) bool { return g.Shape == m.Shape })
		if at < 0 {
			at = len(all)
			all = append(all, group{Shape: m.Shape, runs: map[string][]Run{}})
		}
		all[at].runs[m.Method] = append(all[at].runs[m.Method], m)
	}
	slices.SortStableFunc(all, func(a, b group) int {
		return cmp.Or(-cmp.Compare(a.Media, b.Media), cmp.Compare(a.Mode, b.Mode), cmp.Compare(a.Content, b.Content),
			cmp.Compare(a.Procs, b.Procs), cmp.Compare(a.GPUs, b.GPUs), cmp.Compare(a.Size, b.Size), cmp.Compare(a.Host, b.Host))
	})
	return all
}

// find is the group of a shape, with no runs where there is none.
func find(groups []group, s Shape) group {
	for _, g := range groups {
		if g.Shape == s {
			return g
		}
	}
	return group{Shape: s}
}

// of is the spread of a number over a method's runs.
func (g group) of(method string, number func(Run) float64) spread {
	var values []float64
	for _, m := range g.runs[method] {
		values = append(values, number(m))
	}
	return spreadOf(values)
}

// methods are those of the group that have runs, ours first.
func (g group) methods() []string {
	var present []string
	for _, m := range []string{Ours, Steered, ByCRIU, Interposer, CRIUPlugin, Stock} {
		if len(g.runs[m]) > 0 {
			present = append(present, m)
		}
	}
	return present
}

// The numbers of a run.
func checkpointSeconds(r Run) float64 { return r.Checkpoint.Seconds }
func restoreSeconds(r Run) float64    { return r.Restore.Seconds }

// operations are the two of each run, by name.
var operations = []struct {
	name    string
	seconds func(Run) float64
	of      func(Run) Operation
}{
	{"checkpoint", checkpointSeconds, func(r Run) Operation { return r.Checkpoint }},
	{"restore", restoreSeconds, func(r Run) Operation { return r.Restore }},
}

// ByStart sorts phases by their begin.
func ByStart(phases []images.Phase) []images.Phase {
	sorted := slices.Clone(phases)
	slices.SortStableFunc(sorted, func(a, b images.Phase) int { return cmp.Compare(a.Start, b.Start) })
	return sorted
}

// Seconds formats a time with three digits that count.
func Seconds(s float64) string {
	switch {
	case s == 0:
		return "–"
	case s < 1:
		return fmt.Sprintf("%.3f s", s)
	case s < 100:
		return fmt.Sprintf("%.2f s", s)
	}
	return time.Duration(s * float64(time.Second)).Round(time.Second).String()
}
