// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package mover makes GPU memory for processes that are being restored, before there are any, and fills
// it from their checkpoint. That goes on beside CRIU and the driver, rather than behind them.
//
// WarmUp starts a mover before it is needed. The life of a Fill: Begin has a mover make the memory and end. Take returns that of a
// process, once all of it is there. Compared tells whether the GPU has compared the digests. Close gives up what nobody has taken. A Fill that fails costs time
// alone: the process's interposer fills its memory itself.
package mover

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
	"github.com/gpuckpt/gpuckpt/runtime/internal/cudahelper"
)

const (
	// piece is what a process takes back at a time: the GPU has so much of its memory twice.
	piece = 512 << 20
	// spare is what a GPU must have free beside the memory of all processes, when the mover has its context (some 550 MB):
	// a piece, and what the driver takes for a moment.
	spare = 3 << 29
	// least is the memory for which a mover is started. An interposer copies less in a few milliseconds.
	least = 64 << 20
	// patience is how long a mover that is up waits. It has a context on the GPU, and the container may never be started.
	patience = 10 * time.Second
)

// Warm is a mover that comes up while the container is created. That takes 0.33 s where nobody has the GPU open (H200).
type Warm struct {
	stop  context.CancelFunc
	mover func() (*cuda.Mover, error) // waits for it
	timer *time.Timer                 // whoever stops it has the mover
}

// WarmUp begins to start a mover for a GPU, by its UUID, for areas that interposers have saved. It ends if Begin does not
// come within 10 s. It returns nil if there is too little to be made.
func WarmUp(ctx context.Context, all *cudahelper.Helpers, gpu string, areas []images.Area) *Warm {
	if bytes, _ := bytesOf(areas); bytes < least {
		return nil
	}
	return warmFor(ctx, patience, func(ctx context.Context) (*cuda.Mover, error) { return all.Mover(ctx, []string{gpu}, 0) })
}

// warmFor is a mover that start starts, and that waits for so long.
func warmFor(ctx context.Context, wait time.Duration, start func(context.Context) (*cuda.Mover, error)) *Warm {
	w := &Warm{}
	ctx, w.stop = context.WithCancel(context.WithoutCancel(ctx))
	w.mover = sync.OnceValues(func() (*cuda.Mover, error) { return start(ctx) })
	go func() { _, _ = w.mover() }()
	w.timer = time.AfterFunc(wait, w.end)
	return w
}

// take returns what waits for the mover, once; nil if there is none. It can be called on nil.
func (w *Warm) take() func() (*cuda.Mover, error) {
	if w == nil || !w.timer.Stop() {
		return nil
	}
	return w.mover
}

// Close ends a mover that Begin has not taken. It can be called on nil, and again.
func (w *Warm) Close() {
	if w.take() != nil {
		w.end()
	}
}

func (w *Warm) end() {
	w.stop()
	go func() {
		if m, err := w.mover(); err == nil {
			m.Kill()
			m.Close()
		}
	}()
}

// bytesOf returns the bytes of the areas that interposers have saved, and of the others.
func bytesOf(areas []images.Area) (bytes, others uint64) {
	for _, a := range areas {
		if a.Interposer {
			bytes += a.Bytes
		} else {
			others += a.Bytes
		}
	}
	return bytes, others
}

// Fill is the memory of a container's processes.
type Fill struct {
	stop   context.CancelFunc
	done   chan struct{}   // closed at the end
	mu     sync.Mutex      // several processes take their memory at once
	memory [][]cuda.Memory // of each area; nil where there is none, or it is taken
	// compared says, once done is closed, that the GPU has digested all of the memory, and each digest was right.
	compared bool
}

// Begin begins to make memory on a GPU, by its UUID, with the bytes of the areas that interposers have
// saved; the others are counted as what else the processes will have there. It returns nil if there is too
// little to be made. No byte of the areas may be arriving still. helper is asked for the room, and atOnce
// restores share the processors. warm is of WarmUp for the same GPU, or nil.
func Begin(ctx context.Context, all *cudahelper.Helpers, helper *cuda.Helper, gpu string, areas []images.Area, atOnce int, warm *Warm) *Fill {
	bytes, others := bytesOf(areas)
	if bytes < least {
		return nil
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(ctx))
	f := &Fill{stop: stop, done: make(chan struct{})}
	go func() {
		defer close(f.done)
		began := time.Now()
		start := warm.take()
		if start == nil {
			start = func() (*cuda.Mover, error) { return all.Mover(ctx, []string{gpu}, 0) }
		} else {
			defer context.AfterFunc(ctx, warm.stop)()
		}
		err := f.fill(ctx, start, helper, gpu, areas, bytes+others+spare, max(1, runtime.NumCPU()/max(1, atOnce)))
		if err == nil {
			log.G(ctx).WithField("bytes", bytes).WithField("took", time.Since(began)).WithField("digested", f.compared).Info("GPU memory is made for the processes")
			return
		}
		f.giveUp()
		if ctx.Err() == nil {
			log.G(ctx).WithError(err).Info("the processes fill their GPU memory themselves: it cannot be made for them")
		}
	}()
	return f
}

func (f *Fill) fill(ctx context.Context, start func() (*cuda.Mover, error), helper *cuda.Helper, gpu string, areas []images.Area, need uint64, threads int) error {
	mover, err := start()
	if err != nil {
		return err
	}
	defer func() { go mover.Close() }() // the driver takes 0.1 s to give up its context
	info, err := helper.InfoNow(ctx)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(info.GPUs, func(g cuda.GPU) bool { return g.UUID == gpu })
	if i < 0 || info.GPUs[i].Free < need { // 0 is unknown
		return fmt.Errorf("GPU %s has no room for it: %d bytes are needed", gpu, need)
	}
	defer context.AfterFunc(ctx, mover.Kill)()
	f.memory = make([][]cuda.Memory, len(areas))
	compared := true
	for i, a := range areas {
		if !a.Interposer {
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
