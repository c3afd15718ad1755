// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/internal/node/visible"
)

// ErrNoFacts reports that annotations have no facts of a GPU checkpoint.
var ErrNoFacts = errors.New("no dev.gpuckpt.* annotations")

// Facts are what a node has, or what a checkpoint needs.
type Facts struct {
	// Schema is the checkpoint's; for a node, the newest that it reads.
	Schema int
	Driver string
	CUDA   string
	// Count of GPUs, their products, and the sum of their memory in bytes; of a checkpoint: of the
	// GPUs that it needs.
	Count  int
	Models []string
	Memory uint64
	// State is the checkpoint's GPU state in bytes; 0 for a node.
	State uint64
	// Free is the node's free GPU memory in bytes; HostFree is its free host memory, which changes
	// too fast for an annotation. 0: not known.
	Free     uint64
	HostFree uint64
}

// OfNode returns what a node has, as far as its GPUs can be used, and so much free host memory.
func OfNode(g GPUs, free uint64) Facts {
	f := Facts{Schema: images.SchemaVersion, Driver: g.Survey.DriverVersion, CUDA: g.Info.CUDAVersion, HostFree: free}
	for _, d := range g.Survey.Devices {
		if unusable(d) != "" {
			continue
		}
		f.Count++
		f.Models = append(f.Models, d.Name)
		f.Memory += d.Memory
		f.Free += d.Free
	}
	f.Models = sortedSet(f.Models)
	return f
}

func sortedSet(names []string) []string { return slices.Compact(slices.Sorted(slices.Values(names))) }

// Annotations returns the facts as annotations.
func (f Facts) Annotations() map[string]string {
	a := map[string]string{
		annotations.Schema:    strconv.Itoa(f.Schema),
		annotations.Driver:    f.Driver,
		annotations.CUDA:      f.CUDA,
		annotations.GPUCount:  strconv.Itoa(f.Count),
		annotations.GPUModels: strings.Join(f.Models, ", "),
		annotations.GPUMemory: strconv.FormatUint(f.Memory, 10),
	}
	if f.State > 0 {
		a[annotations.GPUState] = strconv.FormatUint(f.State, 10)
	}
	if f.Free > 0 {
		a[annotations.GPUFree] = strconv.FormatUint(f.Free, 10)
	}
	maps.DeleteFunc(a, func(_, v string) bool { return v == "" })
	return a
}

// FromAnnotations reads facts. Without a schema among the annotations it returns ErrNoFacts.
func FromAnnotations(a map[string]string) (f Facts, err error) {
	if _, ok := a[annotations.Schema]; !ok {
		return Facts{}, ErrNoFacts
	}
	if f.Schema, err = strconv.Atoi(a[annotations.Schema]); err != nil {
		return Facts{}, fmt.Errorf("annotation %s: %w", annotations.Schema, err)
	}
	f.Driver, f.CUDA = a[annotations.Driver], a[annotations.CUDA]
	if v, ok := a[annotations.GPUCount]; ok {
		if f.Count, err = strconv.Atoi(v); err != nil || f.Count < 0 {
			return Facts{}, fmt.Errorf("annotation %s: %q is not a count", annotations.GPUCount, v)
		}
	}
	if v := a[annotations.GPUModels]; v != "" {
		f.Models = sortedSet(strings.Split(v, ", "))
	}
	for key, to := range map[string]*uint64{annotations.GPUMemory: &f.Memory, annotations.GPUState: &f.State, annotations.GPUFree: &f.Free} {
		if v, ok := a[key]; ok {
			if *to, err = strconv.ParseUint(v, 10, 64); err != nil {
				return Facts{}, fmt.Errorf("annotation %s: %q is not a number of bytes", key, v)
			}
		}
	}
	return f, nil
}

// Match checks whether a checkpoint can be restored on a node. It judges by sums, as annotations
// have them; the shim pairs single GPUs at the restore.
func Match(need, have Facts) []Check {
	a := area{name: "checkpoint"}
	// An image says this of itself: it stays in its line, where no command to be run looks like a fix.
	need.Driver, need.Models = visible.Text(need.Driver), slices.Clone(need.Models)
	for i, m := range need.Models {
		need.Models[i] = visible.Text(m)
	}
	a.either(need.Schema >= 1 && need.Schema <= have.Schema, "schema", fmt.Sprintf("version %d", need.Schema),
		Failure, fmt.Sprintf("version %d, and this node reads versions 1 to %d", need.Schema, have.Schema), "a newer gpuckpt made it", "# install the gpuckpt that made it, or a newer one")
	if need.Count == 0 && need.Driver == "" {
		a.ok("GPUs", "none needed")
		return a.checks
	}
	a.either(need.Driver == have.Driver, "driver", need.Driver,
		Failure, fmt.Sprintf("made with %s, and this node has %s", cmp.Or(need.Driver, "an unknown one"), cmp.Or(have.Driver, "none")),
		"only the same driver can restore it", "# restore it on a node with driver "+cmp.Or(need.Driver, "of the same version"))
	a.either(have.Count >= need.Count, "GPUs", fmt.Sprintf("needs %d of %d", need.Count, have.Count),
		Failure, fmt.Sprintf("needs %d, and this node has %d", need.Count, have.Count), "its GPU state does not fit", "# restore it on a node with more GPUs")
	if len(need.Models) > 0 {
		missing := strings.Join(slices.DeleteFunc(slices.Clone(need.Models), func(m string) bool { return slices.Contains(have.Models, m) }), ", ")
		a.either(missing == "", "model", strings.Join(need.Models, ", "),
			Failure, "needs "+missing+", and this node has "+cmp.Or(strings.Join(have.Models, ", "), "none"), "GPU state belongs to its model", "# restore it on a node with "+missing)
	}
	if have.Memory < need.Memory {
		a.add(Failure, "GPU memory", fmt.Sprintf("its GPUs have %s, and this node's %s", size(need.Memory), size(have.Memory)), "its GPU state does not fit", "# restore it on a node with larger GPUs")
	}
	if have.Free > 0 {
		a.either(have.Free >= need.State, "free GPU memory", fmt.Sprintf("needs %s of %s", size(need.State), size(have.Free)),
			Failure, fmt.Sprintf("needs %s, and %s is free", size(need.State), size(have.Free)), "the GPUs are in use", "gpuckpt suspend CONTAINER  # nvidia-smi names who has it")
	}
	if have.HostFree > 0 && have.HostFree < need.State {
		a.add(Warning, "free memory", fmt.Sprintf("needs %s, and %s is free", size(need.State), size(have.HostFree)), "GPU state passes through memory, unless it lies on a tmpfs", "# free memory, or add some")
	}
	return a.checks
}
