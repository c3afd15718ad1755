// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"context"
	"slices"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/gpu/interposer"
	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
)

// Writer makes the areas of a State files among the images, and digests them, while CRIU dumps the
// rest and while the state returns to the GPUs. Its worker and descriptors outlive the areas.
type Writer struct {
	areas  []Area // their files are duplicates
	sizes  []uint64
	worker *staging.Digester
	kept   *interposer.Kept // what the areas lack before Drain; nil for nothing
	write  func()           // what is to be done still
	stop   context.CancelFunc
	done   chan struct{} // closed at the end; then the following are set

	digests [][]string
	err     error
}

// Store begins to write the areas to dir. Close must be called on the Writer. stays says that the
// state is to return to the GPUs from the areas. If Kept reports true, it is Drain that begins.
func (s *State) Store(ctx context.Context, dir string, stays bool) (_ *Writer, err error) {
	if err := s.require("store GPU state", Saved); err != nil {
		return nil, err
	}
	ctx = context.WithoutCancel(ctx)
	w := &Writer{sizes: slices.Clone(s.sizes), kept: s.parked.Kept(), done: make(chan struct{})}
	w.kept.Want()
	ctx, w.stop = context.WithCancel(ctx)
	if len(s.areas) == 0 {
		close(w.done)
		return w, nil
	}
	defer func() {
		if err != nil {
			close(w.done)
			w.Close()
		}
	}()
	for i := range s.areas {
		w.areas = append(w.areas, s.areas[i].share())
	}
	if w.worker, err = s.tracers.digester(ctx); err != nil {
		return nil, err
	}
	path := s.path
	w.write = func() {
		defer close(w.done)
		w.digests, w.err = path.Store(ctx, w.worker, w.areas, dir, stays)
	}
	if w.kept == nil {
		w.begin()
	}
	return w, nil
}

func (w *Writer) begin() {
	if w.write != nil {
		go w.write()
		w.write = nil
	}
}

// Kept reports whether GPU memory is on its way to the areas still, and Drain must be called.
func (w *Writer) Kept() bool { return w.kept != nil }

// Drain waits until what was kept is in the areas, and has the areas written. It returns the bytes of what was kept.
func (w *Writer) Drain(ctx context.Context) (bytes uint64, err error) {
	if bytes, err = w.kept.Wait(ctx); err == nil {
		w.kept.InArea()
		for i, a := range w.areas {
			if a.keeper != 0 {
				w.areas[i].Computed = images.DigestsOfParts(a.Bytes, w.kept.Parts(a.keeper))
			}
		}
		w.begin()
	}
	return bytes, err
}

// Wait waits until the files are complete. On an error some may be there in part.
func (w *Writer) Wait() error {
	<-w.done
	return w.err
}

// Bytes returns the size of the areas.
func (w *Writer) Bytes() uint64 { return bytesOf(w.areas) }

// Describe completes the processes in the metadata: the bytes and the areas of
// each. Wait must have returned no error.
func (w *Writer) Describe(m *images.Metadata) {
	for i, n := range w.sizes[:min(len(w.sizes), len(m.Processes))] {
		m.Processes[i].Bytes = n
	}
	in := make([]uint64, len(m.Processes))
	for i, a := range w.areas {
		a.Digests = w.digests[i]
		p := &m.Processes[a.Process]
		p.Areas = append(p.Areas, a.Area)
		in[a.Process] += a.Area.Bytes
		p.Bytes = max(p.Bytes, in[a.Process]) // an interposer's areas are not the driver's
	}
}

// Close ends the writing and lets go of the areas. It can be called on nil, and again.
func (w *Writer) Close() {
	if w == nil {
		return
	}
	w.stop()
	w.kept.Close()
	if w.worker != nil {
		w.worker.Kill()
	}
	if w.write != nil { // what was kept has not come
		close(w.done)
		w.write = nil
	}
	<-w.done
	if w.worker != nil {
		w.worker.Close()
		w.worker = nil
	}
	for i := range w.areas {
		w.areas[i].release()
	}
}
