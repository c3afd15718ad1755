// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package images

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"
)

// BlockError is an ErrDamaged: a block of an area whose content is not what was dumped.
type BlockError struct {
	// Area is the name of the area's file, Block the index in Area.Digests.
	Area  string
	Block int
	// Path is the file that holds the first part of the block; empty if none does.
	Path string
	// Got and Want are digests, see BlockHash.
	Got, Want string
}

func (e *BlockError) Error() string {
	in := "which no file holds"
	if e.Path != "" {
		in = "in " + e.Path
	}
	// Not Got: an image that points to another's blob would be told what to claim.
	return fmt.Sprintf("%s is damaged: block %d of %d bytes, %s, has another digest than %s", e.Area, e.Block, BlockBytes, in, e.Want)
}

// Is makes a BlockError an ErrDamaged.
func (e *BlockError) Is(target error) bool { return target == ErrDamaged }

const maxBlockErrors = 32

// zeros are what holes are digested as. Nobody writes to them, so the kernel has one page for all.
var zeros [1 << 20]byte

// arrivingBlocks is how many blocks are read at a time while they arrive: most of them wait. More than
// twelve do not arrive at once (registry.DefaultParallel).
const arrivingBlocks = 16

// Check reads every byte of the areas but those in holes of files, so many blocks at a time (0: one
// for each core, and more while they arrive), and compares their digests. It reads blocks while they
// arrive, in their order. progress receives the step "verify". The error joins a BlockError for each
// wrong block, up to 32.
func Check(ctx context.Context, areas []Area, workers int, progress Progress) error {
	var total uint64
	for _, a := range areas {
		total += a.Bytes
	}
	meter := progress.Begin("verify", total)
	var mu sync.Mutex
	var wrong []error
	note := func(err error) error { // and the next block is read
		mu.Lock()
		defer mu.Unlock()
		if errors.As(err, new(*BlockError)) && len(wrong) < maxBlockErrors-1 {
			wrong = append(wrong, err)
			return nil
		}
		return err
	}
	buffers := sync.Pool{New: func() any { return new([len(zeros)]byte) }}
	group, gctx := errgroup.WithContext(ctx)
	if workers == 0 && slices.ContainsFunc(areas, func(a Area) bool { return a.Location.Arriving() }) {
		workers = max(arrivingBlocks, runtime.NumCPU())
	}
	group.SetLimit(cmp.Or(workers, runtime.NumCPU()))
	for i := range areas {
		a := &areas[i]
		r := a.Open(gctx)
		defer r.Close()
		for block := range a.Digests {
			if gctx.Err() != nil {
				break
			}
			group.Go(func() error {
				buf := buffers.Get().(*[len(zeros)]byte)
				defer buffers.Put(buf)
				if err := meter.Moving(); err != nil {
					return err
				}
				n, err := a.checkBlock(gctx, r, block, buf[:])
				meter.Add(int64(n))
				return note(err)
			})
		}
	}
	err := group.Wait()
	if err == nil && len(wrong) == 0 {
		err = context.Cause(ctx)
	}
	if err = errors.Join(append(wrong, err)...); err == nil {
		meter.End("read")
	}
	return err
}

// checkBlock reads one block through buf, and returns its size.
func (a *Area) checkBlock(ctx context.Context, r *AreaReader, number int, buf []byte) (uint64, error) {
	from := a.Offset + uint64(number)*BlockBytes
	to := min(from+BlockBytes, a.End())
	var got string
	want := a.Digests[number]
	i := a.Location.at(from)
	stored := i < len(a.Location) && a.Location[i].Offset < to
	if to-from == BlockBytes && (!stored || r.NextData(from) >= to) {
		got = ZeroBlockLike(want)
	} else {
		h := NewBlockHashLike(want)
		hash := func(b []byte) error {
			h.Write(b)
			return nil
		}
		view := r.view(from, to-from)
		for at := from; at < to; {
			if err := context.Cause(ctx); err != nil {
				return 0, err
			}
			part := buf[:min(uint64(len(buf)), to-at)]
			next := at + uint64(len(part))
			switch {
			case view != nil:
				if err := useView(view[at-from:next-from], hash); err != nil {
					return 0, fmt.Errorf("%s: %w", &a.Location[i], err)
				}
			case r.NextData(at) >= next:
				h.Write(zeros[:len(part)])
			default:
				if _, err := r.ReadAt(part, int64(at)); err != nil {
					return 0, err
				}
				h.Write(part)
			}
			at = next
		}
		got = h.Digest()
	}
	if got == want {
		return to - from, nil
	}
	e := &BlockError{Area: a.File, Block: number, Got: got, Want: want}
	if stored {
		e.Path = a.Location[i].String()
	}
	return to - from, e
}
