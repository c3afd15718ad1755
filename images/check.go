// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package images

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
)

// BlockError reports a block of an area whose content is not what was dumped.
// It is an ErrDamaged.
type BlockError struct {
	// Area is the name of the area's file, as in Area.File. Block is the index
	// of the block in Area.Digests.
	Area  string
	Block int
	// Path is the file that holds the first part of the block that is in a file;
	// empty if no part is.
	Path string
	// Got and Want are digests, see DigestBlock.
	Got, Want string
}

func (e *BlockError) Error() string {
	in := e.Path
	if in == "" {
		in = "which no file holds"
	} else {
		in = "in " + in
	}
	return fmt.Sprintf("%s is damaged: block %d of %d bytes, %s, has the digest %s, not %s", e.Area, e.Block, BlockBytes, in, e.Got, e.Want)
}

// Is makes a BlockError an ErrDamaged.
func (e *BlockError) Is(target error) bool { return target == ErrDamaged }

// maxBlockErrors bounds how many wrong blocks a check names.
const maxBlockErrors = 32

// Check reads every byte of the areas and compares the digests of all blocks.
// workers is the number of blocks that it reads at a time; 0 means one for each
// core. progress receives the step "verify". The error joins a BlockError for each
// wrong block, up to 32.
func Check(ctx context.Context, areas []Area, workers int, progress Progress) error {
	type job struct{ area, block int }
	var jobs []job
	var total uint64
	for i, a := range areas {
		total += a.Bytes
		for j := range a.Digests {
			jobs = append(jobs, job{i, j})
		}
	}
	readers := make([]*AreaReader, len(areas))
	for i := range areas {
		readers[i] = areas[i].Open()
		defer readers[i].Close()
	}
	meter := progress.Begin("verify", total)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var (
		mu   sync.Mutex
		errs []error
		next int
		wg   sync.WaitGroup
	)
	if workers == 0 {
		workers = runtime.NumCPU()
	}
	for range min(workers, len(jobs)) {
		wg.Go(func() {
			buf := make([]byte, 1<<20)
			for {
				mu.Lock()
				at := next
				next++
				mu.Unlock()
				if at >= len(jobs) || ctx.Err() != nil {
					return
				}
				j := jobs[at]
				n, err := areas[j.area].checkBlock(ctx, readers[j.area], j.block, buf)
				if err != nil {
					mu.Lock()
					errs = append(errs, err)
					if len(errs) == maxBlockErrors || !errors.As(err, new(*BlockError)) {
						cancel()
					}
					mu.Unlock()
				}
				meter.Add(int64(n))
			}
		})
	}
	wg.Wait()
	if len(errs) > 0 {
		return errors.Join(errs...)
	}
	if err := context.Cause(ctx); err != nil {
		return err
	}
	meter.End("read")
	return nil
}

// checkBlock reads one block through buf, and returns its size.
func (a *Area) checkBlock(ctx context.Context, r *AreaReader, number int, buf []byte) (uint64, error) {
	from := a.Offset + uint64(number)*BlockBytes
	to := min(from+BlockBytes, a.End())
	var got string
	i := a.Location.at(from)
	stored := i < len(a.Location) && a.Location[i].Offset < to
	if to-from == BlockBytes && !stored {
		got = ZeroBlockDigest
	} else {
		h := NewBlockHash()
		for at := from; at < to; {
			if err := ctx.Err(); err != nil {
				return 0, err
			}
			part := buf[:min(uint64(len(buf)), to-at)]
			if _, err := r.ReadAt(part, int64(at)); err != nil {
				return 0, err
			}
			h.Write(part)
			at += uint64(len(part))
		}
		got = h.Digest()
	}
	if want := a.Digests[number]; got != want {
		e := &BlockError{Area: a.File, Block: number, Got: got, Want: want}
		if stored {
			e.Path = a.Location[i].String()
		}
		return to - from, e
	}
	return to - from, nil
}
