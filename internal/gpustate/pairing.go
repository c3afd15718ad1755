// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images"
)

// memoryPatience is how long a restore waits for GPU memory that is in use: a driver
// may free that of a process some time after the process has ended.
const memoryPatience = 3 * time.Second

// pair decides where the checkpoint's GPUs go, or refuses. info is what the helper
// has said early of this node's GPUs. NVML's word is enough to agree; before
// anything is refused CUDA is asked.
func (r *Restoration) pair(ctx context.Context, helper *cuda.Helper, info cuda.Info, m *images.Metadata, wanted string) error {
	request := r.s.opts.Request
	switch {
	case request.MPS != "":
		return refused(fmt.Errorf("%w: the container is to share a GPU by MPS (%s), which NVIDIA's driver cannot restore to", cdi.ErrPairs, request.MPS))
	case request.MIG != "":
		return refused(fmt.Errorf("%w: the container is to get an instance of a partitioned GPU (MIG; %s), and NVIDIA's driver restores to whole GPUs only", cdi.ErrPairs, request.MIG))
	}
	patience, early := time.Now().Add(memoryPatience), true
	for {
		granted := grantedGPUs(request, info)
		r.granted = len(granted)
		var err error
		r.pairs, err = cdi.Pairs(demandOf(m), granted, wanted)
		if err == nil {
			break
		}
		refusal := refused(fmt.Errorf("%w (it asks for %v)", err, request))
		if !early {
			if !errors.Is(err, cdi.ErrMemory) || time.Now().After(patience) {
				return refusal
			}
			select {
			case <-time.After(100 * time.Millisecond):
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		early = false
		if info, err = helper.InfoNow(ctx); err != nil {
			return fmt.Errorf("%w; %w", refusal, err)
		}
	}
	for _, p := range r.pairs {
		log.G(ctx).WithFields(log.Fields{"from": p.Old.UUID, "to": p.New.UUID}).Info("GPU of the checkpoint")
	}
	return nil
}

// refused gives an error the code for what the user must change.
func refused(err error) error { return fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition) }

// grantedGPUs are those of this node's GPUs that a spec grants.
func grantedGPUs(request cdi.Request, info cuda.Info) []cdi.GPU {
	var granted []cdi.GPU
	mig := map[int]bool{}
	for _, g := range info.Partitioned {
		mig[g.Minor] = true
	}
	for _, g := range slices.Concat(info.Partitioned, info.GPUs) {
		gpu := cdi.GPU{
			UUID: g.UUID, Name: g.Name, Memory: g.Memory, Index: g.Index, Minor: g.Minor,
			PCIBusID: g.PCIBusID, Free: g.Free, VGPU: g.VGPU, MIG: mig[g.Minor],
		}
		twice := slices.ContainsFunc(granted, func(have cdi.GPU) bool { return have.Minor == g.Minor })
		if request.Grants(gpu) && !twice {
			granted = append(granted, gpu)
		}
	}
	return granted
}

// demandOf is what a checkpoint needs. The state of a process is known for
// sure only where it is in files: what else the driver maps is in Bytes too.
func demandOf(m *images.Metadata) cdi.Demand {
	var demand cdi.Demand
	for _, g := range m.GPUs {
		demand.GPUs = append(demand.GPUs, cdi.GPU{UUID: g.UUID, Name: g.Name, Memory: g.Memory, Index: g.Index})
	}
	for _, p := range m.Processes {
		use := cdi.Use{GPUs: p.GPUs}
		for _, a := range p.Areas {
			use.Bytes += a.Bytes
		}
		demand.Processes = append(demand.Processes, use)
	}
	return demand
}

// same reports whether the container has the checkpoint's GPUs, and no others.
func (r *Restoration) same() bool { return cdi.IsIdentity(r.pairs) && r.granted == len(r.pairs) }

// onto has the driver restore the processes onto the GPUs of the pairs. The helper
// at hand can ask for it if all return to the GPUs that they had; only a helper
// inside the container's namespaces can ask for others.
func (r *Restoration) onto(ctx context.Context, helper *cuda.Helper) error {
	s := r.s
	if r.same() {
		if err := cuda.RestoreAll(ctx, helper, s.procs, nil); !cuda.IsWrongSet(err) {
			return err
		}
	}
	inside, err := s.startHelper(ctx, cuda.Options{Join: s.target.Init(), Visible: s.opts.Visible})
	if err != nil {
		return err
	}
	defer closeAsync(inside)
	tries := r.tries()
	taken, err := cuda.RestoreAllOnto(ctx, inside, insidePIDs(s.procs), tries)
	for pid, set := range taken {
		if pairs := tries[pid]; set < len(pairs) && pairs[set] != nil {
			log.G(ctx).WithFields(log.Fields{"pid": pid, "pairs": pairs[set], "refused": set}).Info("GPU pairs taken by the driver")
		}
	}
	return err
}

// insidePIDs are processes as a helper in their pid namespace counts them.
func insidePIDs(procs []cuda.Process) []cuda.Process {
	procs = slices.Clone(procs)
	for i := range procs {
		procs[i].PID = procs[i].NSPID
	}
	return procs
}

// tries are the sets of GPU pairs to restore each process with, by its pid
// in the container: pairs of the GPUs that it could see at the checkpoint. Where
// the spec did not tell those, the metadata names the ones it had open, and the
// checkpoint's GPUs all together come nearer, so they are tried next. No pairs
// at all, which leaves every GPU its place, come first where nothing has changed.
func (r *Restoration) tries() map[int][][]cuda.Pair {
	tries := map[int][][]cuda.Pair{}
	pairsOf := func(uuids []string) []cuda.Pair {
		var pairs []cuda.Pair
		for _, p := range r.pairs {
			if uuids == nil || slices.Contains(uuids, p.Old.UUID) {
				pairs = append(pairs, cuda.Pair{Old: p.Old.UUID, New: p.New.UUID})
			}
		}
		return pairs
	}
	identity := cdi.IsIdentity(r.pairs)
	for _, p := range r.metadata.Processes {
		var sets [][]cuda.Pair
		if r.same() {
			sets = append(sets, nil)
		}
		if len(p.GPUs) > 0 {
			sets = append(sets, pairsOf(p.GPUs))
		}
		if len(p.GPUs) != len(r.pairs) && len(r.pairs) > 0 {
			sets = append(sets, pairsOf(nil))
		}
		if identity && r.granted != len(r.pairs) {
			sets = append(sets, nil)
		}
		tries[p.PID] = sets
	}
	return tries
}
