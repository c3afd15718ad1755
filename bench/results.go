// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// call is one call of this program: what it was asked, and on what.
type call struct {
	Date string   `json:"date"`
	Args []string `json:"args"`
	// DiskRate is that of parallel O_DIRECT writes, DiskReadRate that of reads,
	// bytes a second; 0 when it was not measured.
	DiskRate     float64  `json:"diskBytesPerSecond,omitempty"`
	DiskReadRate float64  `json:"diskReadBytesPerSecond,omitempty"`
	NotRun       []string `json:"notRun,omitempty"`
}

// results are the runs of one or more calls on machines of one kind. Their JSON
// is a published format: docs/results holds files of it.
type results struct {
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
	Calls      []call       `json:"calls"`
	Runs       []run        `json:"runs"`
	Limit      *limitResult `json:"limit,omitempty"`
	Short      *shortResult `json:"short,omitempty"`
	// ImageRuns and RegistryRuns are checkpoints as images (--images).
	ImageRuns    []imageRun    `json:"imageRuns,omitempty"`
	RegistryRuns []registryRun `json:"registryRuns,omitempty"`
	// ManyRuns are several restores of one image at once.
	ManyRuns []manyRun `json:"manyRuns,omitempty"`
	// WayRuns are images from a registry of a limited rate, in several ways.
	WayRuns []wayRun `json:"wayRuns,omitempty"`
	// HugePages are the kernel's settings of transparent huge pages, by file.
	HugePages map[string]string `json:"hugePages,omitempty"`
}

// newResults takes the machine's description from the harness.
func newResults(h *harness.Results, args []string, cpus int, memory uint64) *results {
	return &results{
		Commit: h.Commit, GPUKind: h.GPUKind, Driver: h.Driver, GPUs: h.GPUs, Kernel: h.Kernel,
		CgroupVersion: h.CgroupVersion, Versions: h.Versions, CPUs: cpus, MemoryBytes: memory,
		Calls: []call{{Date: h.Date, Args: args}}, HugePages: hugePages(),
	}
}

// hugePages reads how the kernel gives out huge pages: much of what is measured depends on it.
func hugePages() map[string]string {
	settings := make(map[string]string)
	for _, name := range []string{"enabled", "shmem_enabled", "defrag"} {
		data, err := os.ReadFile(filepath.Join("/sys/kernel/mm/transparent_hugepage", name))
		if err != nil {
			continue // a kernel without them
		}
		_, chosen, _ := strings.Cut(string(data), "[")
		settings[name], _, _ = strings.Cut(chosen, "]")
	}
	return settings
}

// readResults reads and merges result files, which must be of one commit, one
// driver and one model of GPU.
func readResults(paths []string) (*results, error) {
	var all *results
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("read results: %w", err)
		}
		r := new(results)
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
func (r *results) merge(o *results) error {
	switch {
	case r.Commit != o.Commit:
		return fmt.Errorf("commits %s and %s differ", o.Commit, r.Commit)
	case r.Driver != o.Driver || r.GPUKind != o.GPUKind:
		return fmt.Errorf("drivers %s and %s differ", o.Driver, r.Driver)
	case r.model() != o.model():
		return fmt.Errorf("GPUs %s and %s differ", o.model(), r.model())
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
	return nil
}

// model is the product name of the GPUs.
func (r *results) model() string {
	if len(r.GPUs) == 0 {
		return ""
	}
	return r.GPUs[0].Name
}

// firstFailed names the first run of ours that failed; empty when none did.
func (r *results) firstFailed() string {
	for _, m := range r.Runs {
		if m.Method == ours && !m.Verified {
			return m.shape.String()
		}
	}
	for _, m := range r.ImageRuns {
		if m.Method == ours && !m.Verified {
			return m.name()
		}
	}
	for _, m := range r.RegistryRuns {
		if !m.Verified {
			return m.name()
		}
	}
	for _, m := range r.ManyRuns {
		if !m.Verified {
			return m.name()
		}
	}
	for _, m := range r.WayRuns {
		if !m.Verified {
			return m.name()
		}
	}
	return ""
}

// diskRates are the fastest that were measured of the disk, in bytes a second.
func (r *results) diskRates() (write, read float64) {
	for _, c := range r.Calls {
		write, read = max(write, c.DiskRate), max(read, c.DiskReadRate)
	}
	return write, read
}

// write writes everything into dir: results.json, results.md and the pictures
// there is something to draw in.
func (r *results) write(dir string) error {
	data, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return fmt.Errorf("write the results: %w", err)
	}
	files := map[string][]byte{
		"results.json": append(data, '\n'),
		"results.md":   []byte(r.markdown()),
	}
	chart, cerr := r.chart()
	if chart != nil {
		files["chart.svg"] = chart
	}
	flow, ferr := r.flowPicture()
	if flow != nil {
		files["arrival.svg"] = flow
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
	shape
	runs map[string][]run
}

// groups are the shapes measured, in an order for reading.
func (r *results) groups() []group {
	var all []group
	for _, m := range r.Runs {
		if !m.Verified {
			continue
		}
		at := slices.IndexFunc(all, func(g group) bool { return g.shape == m.shape })
		if at < 0 {
			at = len(all)
			all = append(all, group{shape: m.shape, runs: map[string][]run{}})
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
func find(groups []group, s shape) group {
	for _, g := range groups {
		if g.shape == s {
			return g
		}
	}
	return group{shape: s}
}

// of is the spread of a number over a method's runs.
func (g group) of(method string, number func(run) float64) spread {
	var values []float64
	for _, m := range g.runs[method] {
		values = append(values, number(m))
	}
	return spreadOf(values)
}

// methods are those of the group that have runs, ours first.
func (g group) methods() []string {
	var present []string
	for _, m := range []string{ours, steered, byCRIU, companion, criugpu, stock} {
		if len(g.runs[m]) > 0 {
			present = append(present, m)
		}
	}
	return present
}

// The numbers of a run.
func checkpointSeconds(r run) float64 { return r.Checkpoint.Seconds }
func restoreSeconds(r run) float64    { return r.Restore.Seconds }

// operations are the two of each run, by name.
var operations = []struct {
	name    string
	seconds func(run) float64
	of      func(run) operation
}{
	{"checkpoint", checkpointSeconds, func(r run) operation { return r.Checkpoint }},
	{"restore", restoreSeconds, func(r run) operation { return r.Restore }},
}

// byStart sorts phases by their begin.
func byStart(phases []images.Phase) []images.Phase {
	sorted := slices.Clone(phases)
	slices.SortStableFunc(sorted, func(a, b images.Phase) int { return cmp.Compare(a.Start, b.Start) })
	return sorted
}

// seconds formats a time with three digits that count.
func seconds(s float64) string {
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
