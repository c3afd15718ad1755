// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package gpulist lists GPUs. The packages cuda, cdi and images do not know each other, and each has a GPU of
// its own: the driver's, the one that is paired, and the one on disk.
package gpulist

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/docker/go-units"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// UUIDs returns the UUIDs of GPUs, in their order.
func UUIDs(gpus []cuda.GPU) (uuids []string) {
	for _, d := range gpus {
		uuids = append(uuids, d.UUID)
	}
	return uuids
}

// Without returns the GPUs that are not among the others.
func Without(gpus, others []cuda.GPU) (left []cuda.GPU) {
	out := UUIDs(others)
	for _, d := range gpus {
		if !slices.Contains(out, d.UUID) {
			left = append(left, d)
		}
	}
	return left
}

// Named finds GPUs by UUID or by CUDA's index, each once.
func Named(all []cuda.GPU, names []string) (found []cuda.GPU, err error) {
	for _, name := range names {
		i := slices.IndexFunc(all, func(d cuda.GPU) bool { return d.UUID == name || strconv.Itoa(d.Index) == name })
		if i < 0 {
			return nil, fmt.Errorf("this node has no GPU %s; it has %s: %w", name, List(all), errdefs.ErrNotFound)
		}
		if slices.Contains(UUIDs(found), all[i].UUID) {
			return nil, fmt.Errorf("GPU %s is named twice: %w", name, errdefs.ErrInvalidArgument)
		}
		found = append(found, all[i])
	}
	return found, nil
}

// List names GPUs for a person: "0 (GPU-…), 1 (GPU-…)".
func List(gpus []cuda.GPU) string {
	var names []string
	for _, d := range gpus {
		names = append(names, fmt.Sprintf("%d (%s)", d.Index, d.UUID))
	}
	return cmp.Or(strings.Join(names, ", "), "none")
}

// Surveyed returns GPUs with what NVML says of their memory; it may say nothing.
func Surveyed(gpus []cuda.GPU, survey cuda.Survey) (all []cdi.GPU) {
	for _, d := range gpus {
		gpu := ForPairing(d)
		gpu.Free = 0
		for _, v := range survey.Devices {
			if v.UUID != d.UUID || v.Memory == 0 {
				continue
			}
			var users []string
			for _, u := range v.Users {
				users = append(users, fmt.Sprintf("process %s has %s", proc.Describe(u.PID), units.BytesSize(float64(u.Bytes))))
			}
			gpu.Free, gpu.Users = max(1, v.Free), strings.Join(users, ", ") // 0 is unknown
		}
		all = append(all, gpu)
	}
	return all
}

// Granted returns those of this node's GPUs that a spec grants.
func Granted(request cdi.Request, info cuda.Info) []cdi.GPU {
	var granted []cdi.GPU
	for i, g := range slices.Concat(info.Partitioned, info.GPUs) {
		gpu := ForPairing(g)
		gpu.MIG = i < len(info.Partitioned)
		twice := slices.ContainsFunc(granted, func(have cdi.GPU) bool { return have.Minor == g.Minor })
		if request.Grants(gpu) && !twice {
			granted = append(granted, gpu)
		}
	}
	return granted
}

// Required returns what a checkpoint needs. The state of a process is known for
// sure only where it is in files: Bytes has what else the driver maps as well.
func Required(m *images.Metadata) cdi.Requirement {
	var need cdi.Requirement
	for _, g := range m.GPUs {
		need.GPUs = append(need.GPUs, cdi.GPU{UUID: g.UUID, Name: g.Name, Memory: g.Memory, Index: g.Index})
	}
	for _, p := range m.Processes {
		use := cdi.ProcessUse{GPUs: p.GPUs}
		for _, a := range p.Areas {
			use.Bytes += a.Bytes
		}
		need.Processes = append(need.Processes, use)
	}
	return need
}

// ForPairing returns a GPU of this node as cdi describes it.
func ForPairing(g cuda.GPU) cdi.GPU {
	return cdi.GPU{
		UUID: g.UUID, Name: g.Name, Memory: g.Memory, Index: g.Index, Minor: g.Minor,
		PCIBusID: g.PCIBusID, Free: g.Free, VGPU: g.VGPU,
	}
}

// Pairs returns pairs as the driver takes them.
func Pairs(pairs []cdi.Pair) (all []cuda.Pair) {
	for _, p := range pairs {
		all = append(all, cuda.Pair{Old: p.Old.UUID, New: p.New.UUID})
	}
	return all
}
