// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"context"
	"slices"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
)

// Writer makes the areas of a State files among the images, and digests them, while CRIU dumps the
// rest and while the state returns to the GPUs. Its worker and descriptors outlive the areas.
type Writer struct {
	areas  []Area // their files are duplicates
	sizes  []uint64
	worker *staging.Digester
	stop   context.CancelFunc
	done   chan struct{} // closed at the end; then the following are set

	digests [][]string
	err     error
}

// Store begins to write the areas to dir. Close must be called on the Writer. stays says that the
// state is to return to the GPUs from the areas.
func (s *State) Store(ctx context.Context, dir string, stays bool) (*Writer, error) {
	if err := s.require("store GPU state", Saved); err != nil {
		return nil, err
	}
	w := &Writer{sizes: slices.Clone(s.sizes), done: make(chan struct{})}
	ctx, w.stop = context.WithCancel(context.WithoutCancel(ctx))
	if len(s.areas) == 0 {
		close(w.done)
		return w, nil
	}
	var err error
	if w.worker, err = s.tracers.digester(ctx); err != nil {
		w.stop()
		return nil, err
	}
	for i := range s.areas {
		w.areas = append(w.areas, s.areas[i].share())
	}
	path := s.path
	go func() {
		defer close(w.done)
		w.digests, w.err = path.Store(ctx, w.worker, w.areas, dir, stays)
	}()
	return w, nil
}

// Filling reports whether bytes that the driver did not have are on their way to the areas still.
func (w *Writer) Filling() bool {
	return slices.ContainsFunc(w.areas, func(a Area) bool { return a.filling != nil })
}

// Fill waits until all areas have their bytes, and returns how many were on their way.
func (w *Writer) Fill(ctx context.Context) (bytes uint64, err error) {
	for _, a := range w.areas {
		if a.filling == nil {
			continue
		}
		if _, err := a.filling.Wait(ctx); err != nil {
			return 0, err
		}
		bytes += a.Bytes
	}
	return bytes, nil
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
	if w.worker != nil {
		w.worker.Kill()
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
