// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"context"
	"errors"
	"fmt"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/runtime/internal/cudahelper"
	"github.com/gpuckpt/gpuckpt/runtime/internal/gpustate/internal/gpulist"
)

// pair decides where the checkpoint's GPUs go, or refuses. info is what the helper has said early
// of this node's GPUs. NVML's word is enough to agree; before anything is refused CUDA is asked.
func (r *Restoration) pair(ctx context.Context, helper *cuda.Helper, info cuda.Info, m *images.Metadata, wanted string) error {
	request := r.s.opts.Request
	switch {
	case request.MPS != "":
		return fmt.Errorf("%w: the container is to share a GPU by MPS (%s), which NVIDIA's driver cannot restore to: %w", cdi.ErrPairs, request.MPS, errdefs.ErrFailedPrecondition)
	case request.MIG != "":
		return fmt.Errorf("%w: the container is to get an instance of a partitioned GPU (MIG; %s), and NVIDIA's driver restores to whole GPUs only: %w", cdi.ErrPairs, request.MIG, errdefs.ErrFailedPrecondition)
	}
	early := true
	var err error
	r.pairs, err = cdi.PairWhenFree(ctx, gpulist.Required(m), wanted, func(ctx context.Context) (_ []cdi.GPU, err error) {
		if !early {
			if info, err = helper.InfoNow(ctx); err != nil {
				return nil, err
			}
		}
		early = false
		granted := gpulist.Granted(request, info)
		r.granted = len(granted)
		return granted, nil
	})
	if errors.Is(err, cdi.ErrPairs) {
		return fmt.Errorf("%w (it asks for %v): %w", err, request, errdefs.ErrFailedPrecondition)
	}
	if err != nil {
		return err
	}
	for _, p := range r.pairs {
		log.G(ctx).WithFields(log.Fields{"from": p.Old.UUID, "to": p.New.UUID}).Info("GPU of the checkpoint")
	}
	return nil
}

// same reports whether the container has the checkpoint's GPUs, and no others.
func (r *Restoration) same() bool { return cdi.IsIdentity(r.pairs) && r.granted == len(r.pairs) }

// onto has the driver restore the processes onto the GPUs of the pairs. The helper at hand can ask
// for it if all keep their GPUs; one inside the container's namespaces, for others.
func (r *Restoration) onto(ctx context.Context, helper *cuda.Helper) error {
	s := r.s
	if r.same() {
		if err := s.procs.Restore(ctx, helper, nil); !cuda.IsDeviceMapRejected(err) {
			return err
		}
	}
	inside, err := s.helpers.Start(ctx, cuda.Options{Join: s.target.Init(), Visible: s.opts.Visible})
	if err != nil {
		return err
	}
	defer cudahelper.CloseAsync(inside)
	tries := r.tries()
	taken, err := s.procs.RestoreRemapped(ctx, inside, tries)
	for pid, set := range taken {
		if pairs := tries[pid]; set < len(pairs) && pairs[set] != nil {
			log.G(ctx).WithFields(log.Fields{"pid": pid, "pairs": pairs[set], "refused": set}).Info("GPU pairs taken by the driver")
		}
	}
	return err
}

// tries returns the sets of GPU pairs to restore each process with, by its pid in the container:
// pairs of the GPUs that it could see at the checkpoint. If the spec did not tell those, the
// metadata names the ones that the process had open; the checkpoint's GPUs all together come
// nearer, so they are tried next. No pairs at all, which leaves every GPU its place, come first
// where nothing has changed.
func (r *Restoration) tries() map[int][][]cuda.Pair {
	tries := map[int][][]cuda.Pair{}
	for _, p := range r.metadata.Processes {
		var sets [][]cuda.Pair
		if r.same() {
			sets = append(sets, nil)
		}
		for _, set := range cdi.Subsets(r.pairs, p.GPUs, nil) {
			sets = append(sets, gpulist.Pairs(set))
		}
		if cdi.IsIdentity(r.pairs) && r.granted != len(r.pairs) {
			sets = append(sets, nil)
		}
		tries[p.PID] = sets
	}
	return tries
}
