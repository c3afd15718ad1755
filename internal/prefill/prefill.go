// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package prefill makes GPU memory for processes that are being restored, before there are any, and fills
// it from their checkpoint. That goes on beside CRIU and the driver, rather than behind them.
//
// The life of a Fill: Begin starts a mover, which makes the memory and ends. Take returns that of a
// process, once all of it is there. Compared tells whether the GPU has compared the digests. Close gives up what nobody has taken. A Fill that fails costs time
// alone: the process's companion fills its memory itself.
package prefill

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/containerd/log"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/helpers"
)

const (
	// piece is what a process takes back at a time: the GPU has so much of its memory twice.
	piece = 512 << 20
	// spare is what a GPU must have free beside the memory of all processes: a piece, the mover's context
	// (some 550 MB), and what the driver takes for a moment.
	spare = 2 << 30
	// least is the memory for which a mover is started. A companion copies less in a few milliseconds.
	least = 64 << 20
)

// Fill is the memory of a container's processes.
type Fill struct {
	stop   context.CancelFunc
	done   chan struct{}   // closed at the end
	mu     sync.Mutex      // several processes take their memory at once
	memory [][]cuda.Memory // of each area; nil where there is none, or it is taken
	// compared says, once done is closed, that the GPU has digested all of the memory, and each digest was right.
	compared bool
}

// Begin begins to make memory on a GPU, by its UUID, with the bytes of the areas that companions have
// saved; the others are counted as what else the processes will have there. It returns nil if there is too
// little to be made. No byte of the areas may be arriving still. helper is asked for the room, and atOnce
// restores share the processors.
func Begin(ctx context.Context, all *helpers.Helpers, helper *cuda.Helper, gpu string, areas []images.Area, atOnce int) *Fill {
	var bytes, others uint64
	for _, a := range areas {
		if a.Companion {
			bytes += a.Bytes
		} else {
			others += a.Bytes
		}
	}
	if bytes < least {
		return nil
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(ctx))
	f := &Fill{stop: stop, done: make(chan struct{})}
	go func() {
		defer close(f.done)
		began := time.Now()
		err := f.fill(ctx, all, helper, gpu, areas, bytes+others+spare, max(1, runtime.NumCPU()/max(1, atOnce)))
		if err == nil {
			log.G(ctx).WithField("bytes", bytes).WithField("took", time.Since(began)).Info("GPU memory is made for the processes")
			return
		}
		f.giveUp()
		if ctx.Err() == nil {
			log.G(ctx).WithError(err).Info("the processes fill their GPU memory themselves: it cannot be made for them")
		}
	}()
	return f
}

func (f *Fill) fill(ctx context.Context, all *helpers.Helpers, helper *cuda.Helper, gpu string, areas []images.Area, need uint64, threads int) error {
	info, err := helper.InfoNow(ctx)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(info.GPUs, func(g cuda.GPU) bool { return g.UUID == gpu })
	if i < 0 || info.GPUs[i].Free < need { // 0 is unknown
		return fmt.Errorf("GPU %s has no room for it: %d bytes are needed", gpu, need)
	}
	mover, err := all.Mover(ctx, []string{gpu}, 0)
	if err != nil {
		return err
	}
	defer func() { go mover.Close() }() // the driver takes 0.1 s to give up its context
	defer context.AfterFunc(ctx, mover.Kill)()
	f.memory = make([][]cuda.Memory, len(areas))
	compared := true
	for i, a := range areas {
		if !a.Companion {
			continue
		}
		spans, err := spansOf(&a)
		var parts cuda.Parts
		if err == nil {
			f.memory[i], parts, err = mover.CopyIn(ctx, gpu, piece, spans, threads)
		}
		for _, s := range spans {
			if s.File != nil {
				s.File.Close()
			}
		}
		if err != nil {
			return err
		}
		digests := images.DigestsOfParts(a.Bytes, parts)
		if digests != nil && !slices.Equal(digests, a.Digests) {
			return fmt.Errorf("%s has other digests on the GPU than in the checkpoint", a.File)
		}
		compared = compared && digests != nil
	}
	f.compared = compared
	return nil
}

// spansOf returns an area's bytes. The files are the caller's, also after an error; a file may be there
// several times.
func spansOf(a *images.Area) (spans []cuda.Span, err error) {
	at := a.Start
	files := make(map[string]*os.File)
	for _, e := range a.Extents() {
		if e.Start > at {
			spans = append(spans, cuda.Span{Bytes: e.Start - at})
		}
		file := files[e.Path]
		if file == nil {
			if file, err = open(e.Path); err != nil {
				return spans, err
			}
			files[e.Path] = file
		}
		spans = append(spans, cuda.Span{File: file, Offset: e.Offset, Bytes: e.Bytes})
		at = e.Start + e.Bytes
	}
	if end := a.Start + a.Bytes; end > at {
		spans = append(spans, cuda.Span{Bytes: end - at})
	}
	return spans, nil
}

// open opens a file, and nothing else that a checkpoint of others may have there.
func open(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fmt.Errorf("%s is no file", path)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// giveUp gives up what is not taken.
func (f *Fill) giveUp() {
	for _, memory := range f.memory {
		cuda.CloseMemory(memory)
	}
	f.memory = nil
}

// Take waits for the memory, and returns that of an area by its place in Begin, once. It is the caller's.
// nil: there is none. It can be called on nil.
func (f *Fill) Take(ctx context.Context, area int) (memory []cuda.Memory) {
	if f == nil {
		return nil
	}
	select {
	case <-f.done:
	case <-ctx.Done():
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.memory != nil {
		memory, f.memory[area] = f.memory[area], nil
	}
	return memory
}

// Compared waits until the memory is there, and reports whether the GPU has digested it and each digest was right. Else
// others must compare them: where the driver cannot compile the kernel, or one was wrong. It can be called on nil.
func (f *Fill) Compared() bool {
	if f == nil {
		return false
	}
	<-f.done
	return f.compared
}

// Close ends the mover, and gives up what is not taken. It can be called on nil.
func (f *Fill) Close() {
	if f == nil {
		return
	}
	f.stop()
	<-f.done
	f.mu.Lock()
	defer f.mu.Unlock()
	f.giveUp()
}
