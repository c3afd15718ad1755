// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package mover starts movers beside other work, and has them make GPU memory for processes that are being
// restored, before there are any, and fill it from their checkpoint. That goes on beside CRIU and the
// driver, rather than behind them.
//
// The life of a Fill: WarmUp begins to start a mover, Begin has it make the memory and end, Take returns
// that of a process, once all of it is there. Compared tells whether the GPU has compared the digests.
// Close gives up what nobody has taken. A Fill that fails costs time alone: the process's interposer fills
// its memory itself.
package mover

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
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
	// pieces are made by one request, which carries 253 files at most: those of an image have 64 MiB each, or 16 between zeros.
	pieces = 4
	// spare is what a GPU must have free beside the memory of all processes, when the mover has its context (some 550 MB):
	// a piece, and what the driver takes for a moment.
	spare = 3 << 29
	// least is the memory for which a mover is started. An interposer copies less in a few milliseconds.
	least = 64 << 20
	// patience is how long a mover that is up waits. It has a context on the GPU, and the container may never be started.
	patience = 10 * time.Second
)

// errTaken says that a mover was taken, or given up.
var errTaken = errors.New("the mover has gone")

// Warm is a mover that comes up beside other work. That takes 0.33 s where nobody has the GPU open (H200).
type Warm struct {
	stop  context.CancelFunc
	mover func() (*cuda.Mover, error) // waits for it
	taken atomic.Bool                 // or given up
}

// Start begins to start a mover. It outlives ctx. Take or Close must follow.
func Start(ctx context.Context, start func(context.Context) (*cuda.Mover, error)) *Warm {
	w := new(Warm)
	ctx, w.stop = context.WithCancel(context.WithoutCancel(ctx))
	w.mover = sync.OnceValues(func() (*cuda.Mover, error) { return start(ctx) })
	go func() { _, _ = w.mover() }()
	return w
}

// Take waits for the mover, which is the caller's then, unless ctx ends first.
func (w *Warm) Take(ctx context.Context) (*cuda.Mover, error) {
	if w.taken.Swap(true) {
		return nil, errTaken
	}
	defer context.AfterFunc(ctx, w.stop)()
	return w.mover()
}

// Close ends a mover that nobody has taken. It can be called on nil, and again.
func (w *Warm) Close() {
	if w == nil || w.taken.Swap(true) {
		return
	}
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

// Fill is the memory of a container's processes. All methods can be called on nil: there is none.
type Fill struct {
	start func(context.Context) (*cuda.Mover, error)
	gpu   string // its UUID
	warm  *Warm

	stop   context.CancelFunc
	done   chan struct{}   // closed at the end; nil before Begin
	mu     sync.Mutex      // several processes take their memory at once
	memory [][]cuda.Memory // of each area; nil where there is none, or it is taken
	// compared says, once done is closed, that the GPU has digested all of the memory, and each digest was right.
	compared bool
}

// WarmUp begins to start a mover for a GPU, by its UUID, for areas that interposers have saved. It ends if Begin does not
// come within 10 s. It returns nil if there is too little to be made.
func WarmUp(ctx context.Context, all *cudahelper.Helpers, gpu string, areas []images.Area) *Fill {
	if bytes, _ := bytesOf(areas); bytes < least {
		return nil
	}
	start := all.Mover([]string{gpu}, 0)
	f := &Fill{start: start, gpu: gpu, warm: Start(ctx, start)}
	time.AfterFunc(patience, f.warm.Close)
	return f
}

// Begin begins to make the memory, with the bytes of the areas that interposers have saved; the others are counted as
// what else the processes will have there. Bytes that are arriving still are waited for, a piece at a time. helper is
// asked for the room, and atOnce restores share the processors.
func (f *Fill) Begin(ctx context.Context, helper *cuda.Helper, areas []images.Area, atOnce int) {
	if f == nil {
		return
	}
	ctx, f.stop = context.WithCancel(context.WithoutCancel(ctx))
	f.done = make(chan struct{})
	go func() {
		defer close(f.done)
		bytes, others := bytesOf(areas)
		began := time.Now()
		err := f.fill(ctx, helper, areas, bytes+others+spare, max(1, runtime.NumCPU()/max(1, atOnce)))
		if err == nil {
			log.G(ctx).WithField("bytes", bytes).WithField("took", time.Since(began)).WithField("digested", f.compared).Info("GPU memory is made for the processes")
			return
		}
		f.giveUp()
		if ctx.Err() == nil {
			log.G(ctx).WithError(err).Info("the processes fill their GPU memory themselves: it cannot be made for them")
		}
	}()
}

func (f *Fill) fill(ctx context.Context, helper *cuda.Helper, areas []images.Area, need uint64, threads int) error {
	for _, a := range areas { // a context on the GPU takes memory of it, for as long as the rest takes to come
		if !a.Interposer {
			continue
		}
		first := a.Part(0, min(piece, a.Bytes))
		if err := first.Await(ctx); err != nil {
			return err
		}
		break
	}
	mover, err := f.warm.Take(ctx)
	if errors.Is(err, errTaken) {
		mover, err = f.start(ctx)
	}
	if err != nil {
		return err
	}
	defer func() { go mover.Close() }() // the driver takes 0.1 s to give up its context
	info, err := helper.InfoNow(ctx)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(info.GPUs, func(g cuda.GPU) bool { return g.UUID == f.gpu })
	if i < 0 || info.GPUs[i].Free < need { // 0 is unknown
		return fmt.Errorf("GPU %s has no room for it: %d bytes are needed", f.gpu, need)
	}
	defer context.AfterFunc(ctx, mover.Kill)()
	f.memory = make([][]cuda.Memory, len(areas))
	compared := true
	for i, a := range areas {
		if !a.Interposer {
			continue
		}
		step := uint64(pieces * piece)
		if a.Location.Arriving() {
			step = piece
		}
		for at := uint64(0); at < a.Bytes; at += step {
			part := a.Part(at, min(step, a.Bytes-at))
			if err := part.Await(ctx); err != nil {
				return err
			}
			made, digested, err := copyIn(ctx, mover, f.gpu, &part, threads)
			f.memory[i] = append(f.memory[i], made...)
			if err != nil {
				return err
			}
			compared = compared && digested
		}
	}
	f.compared = compared
	return nil
}

// copyIn makes the memory of an area, and reports whether the GPU has digested it. Memory with wrong digests is returned
// with an error.
func copyIn(ctx context.Context, mover *cuda.Mover, gpu string, a *images.Area, threads int) ([]cuda.Memory, bool, error) {
	spans, err := spansOf(a)
	defer func() {
		for _, s := range spans {
			if s.File != nil {
				s.File.Close()
			}
		}
	}()
	if err != nil {
		return nil, false, err
	}
	memory, parts, err := mover.CopyIn(ctx, gpu, piece, spans, threads)
	if err != nil {
		return nil, false, err
	}
	digests := images.DigestsOfParts(a.Bytes, parts)
	if digests != nil && !slices.Equal(digests, a.Digests) {
		return memory, false, fmt.Errorf("%s has other digests on the GPU than in the checkpoint", a.File)
	}
	return memory, digests != nil, nil
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
// nil: there is none.
func (f *Fill) Take(ctx context.Context, area int) (memory []cuda.Memory) {
	if f == nil || f.done == nil {
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
// others must compare them: where the driver cannot compile the kernel, or one was wrong.
func (f *Fill) Compared() bool {
	if f == nil || f.done == nil {
		return false
	}
	<-f.done
	return f.compared
}

// Close ends the mover, and gives up what is not taken. It can be called again.
func (f *Fill) Close() {
	if f == nil {
		return
	}
	f.warm.Close()
	if f.done == nil {
		return
	}
	f.stop()
	<-f.done
	f.mu.Lock()
	defer f.mu.Unlock()
	f.giveUp()
}
