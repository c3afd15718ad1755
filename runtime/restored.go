// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"strconv"

	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/config"
	"github.com/gpuckpt/gpuckpt/trace"
)

// restoredAreas are the GPU state files of a restore, on their way back. nil is
// those of a checkpoint that has none.
type restoredAreas struct {
	areas   []images.Area
	reader  *trace.Session // computes digests, from before there are processes
	checked chan error     // gets its answer
	tracer  *trace.Session // maps the files; nil before
}

// readRestored begins to compare the digests of the checkpoint's files, as the
// reading takes memory bandwidth that the driver wants later.
func (c *container) readRestored(ctx context.Context, node config.Node, pinned *pins) (*restoredAreas, error) {
	r := &restoredAreas{checked: make(chan error, 1)}
	for _, a := range c.restore.checkpoint.Areas() {
		a.Location = pinned.at(a.Location)
		r.areas = append(r.areas, a)
	}
	if len(r.areas) == 0 {
		return nil, nil
	}
	var err error
	if r.reader, err = startTracer(ctx, node); err != nil {
		return nil, err
	}
	go func() { r.checked <- checkAreas(r.reader, r.areas) }()
	return r, nil
}

// mapRestored maps the checkpoint's files over the restored processes' areas:
// one file for each area, or, from a checkpoint image, its pieces side by side,
// with the empty area left where there are none. Those on a disk are mapped as
// well: what the digests have read the driver finds in the page cache.
func (c *container) mapRestored(ctx context.Context, node config.Node, r *restoredAreas) error {
	if r == nil {
		return nil
	}
	var mappings []trace.Mapping
	var pids []int
	next := 0
	for _, p := range c.restore.metadata.Processes {
		if len(p.Areas) == 0 {
			continue
		}
		pid, err := c.hostPID(p.PID)
		if err != nil {
			return err
		}
		tid, err := hostTID(pid, cmp.Or(p.RestoreThread, p.PID))
		if err != nil {
			return err
		}
		pids = append(pids, pid)
		for _, a := range p.Areas {
			mappings = append(mappings, trace.Mapping{PID: pid, TID: tid, Start: a.Start, Bytes: a.Bytes})
			for _, q := range r.areas[next].Location {
				from, to := max(q.Offset, a.Offset), min(q.Offset+q.Bytes, a.End())
				if from >= to {
					continue // none of it is of the range
				}
				for _, part := range notZero(a, from, to) {
					mappings = append(mappings, trace.Mapping{PID: pid, TID: tid, Start: a.Start + part.from - a.Offset, Bytes: part.to - part.from, Path: q.Path, Offset: part.from - q.Offset})
				}
			}
			next++
		}
	}
	var err error
	if r.tracer, err = startTracer(ctx, node); err != nil {
		return err
	}
	if err := r.tracer.Map(mappings); err != nil {
		return err
	}
	return quicken(ctx, r.tracer, mappings, c.copyThreads(node, pids))
}

// calm ends what has been done to have the driver copy faster, which the driver
// does without then.
func (r *restoredAreas) calm(ctx context.Context) {
	if r != nil {
		calm(ctx, r.tracer)
	}
}

// span is a part of a file.
type span struct{ from, to uint64 }

// notZero gives the parts of an area's range that are in blocks with anything but
// zeros in them. The others, holes mostly, stay the empty area that CRIU has
// restored, whose pages cost little to read; a file's are made for the reader.
func notZero(a images.Area, from, to uint64) (parts []span) {
	for i, digest := range a.Digests {
		begin := a.Offset + uint64(i)*images.BlockBytes
		part := span{max(begin, from), min(begin+images.BlockBytes, to)}
		if digest == images.ZeroBlockDigest || part.from >= part.to {
			continue
		}
		if n := len(parts); n > 0 && parts[n-1].to == part.from {
			parts[n-1].to = part.to
		} else {
			parts = append(parts, part)
		}
	}
	return parts
}

// check waits until the digests of all blocks are compared. It can be called once.
func (r *restoredAreas) check() error {
	if r == nil {
		return nil
	}
	return <-r.checked
}

// bytes is the size of the areas.
func (r *restoredAreas) bytes() uint64 {
	if r == nil {
		return 0
	}
	return bytesOf(r.areas)
}

// checkAreas has a tracer compare the digests of all blocks.
func checkAreas(tracer *trace.Session, areas []images.Area) error {
	if err := tracer.Check(areas); err != nil {
		return fmt.Errorf("%w: %w", err, errdefs.ErrDataLoss)
	}
	return nil
}

func bytesOf(areas []images.Area) (bytes uint64) {
	for _, a := range areas {
		bytes += a.Bytes
	}
	return bytes
}

// close ends what is under way.
func (r *restoredAreas) close() {
	if r == nil {
		return
	}
	r.reader.Kill() // it may be reading still
	r.reader.Close()
	if r.tracer != nil {
		r.tracer.Close()
	}
}

// hostTID finds a thread of a process by its number inside the container.
func hostTID(pid, inside int) (int, error) {
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return 0, err
	}
	for _, e := range entries {
		if tid, err := strconv.Atoi(e.Name()); err == nil {
			if n, err := cuda.NSPID(tid); err == nil && n == inside {
				return tid, nil
			}
		}
	}
	return 0, fmt.Errorf("process %d of the restored container has no thread %d: %w", pid, inside, errdefs.ErrNotFound)
}

// hostPID finds a process of the container by its pid inside.
func (c *container) hostPID(inside int) (int, error) {
	pids, err := c.cgroup.Load().Pids()
	if err != nil {
		return 0, err
	}
	for _, pid := range pids {
		if n, err := cuda.NSPID(pid); err == nil && n == inside {
			return pid, nil
		}
	}
	return 0, fmt.Errorf("the restored container has no process %d: %w", inside, errdefs.ErrNotFound)
}
