// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/gpu/interposer"
	"github.com/gpuckpt/gpuckpt/internal/gpu/steer"
	"github.com/gpuckpt/gpuckpt/internal/operation/quota"
)

// arriving is a source of checkpoint bytes of this test alone, and the example of a new one: a
// file that another goroutine fills, from its end, while the restore reads it.
type arriving struct {
	mu    sync.Mutex
	from  uint64        // all behind it has arrived
	err   error         // why no more arrives
	grown chan struct{} // closed, and replaced, when one of these changes
}

// Await is that of images.Arrival.
func (a *arriving) Await(ctx context.Context, from, _ uint64) error {
	for {
		a.mu.Lock()
		at, err, grown := a.from, a.err, a.grown
		a.mu.Unlock()
		if at <= from || err != nil {
			return err
		}
		select {
		case <-grown:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (a *arriving) note(from uint64, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.from, a.err = from, err
	close(a.grown)
	a.grown = make(chan struct{})
}

// send fills the file to with the bytes of from. chunk is called before each chunk is written, with
// the file's name, the chunk and how many bytes are missing; its error is the last that is heard of the source.
func (a *arriving) send(from, to string, chunk func(file string, data []byte, missing int) error) {
	const chunkBytes = 1 << 20
	data, err := os.ReadFile(from)
	f, oerr := os.OpenFile(to, os.O_WRONLY, 0)
	err = errors.Join(err, oerr)
	for at := len(data); at > 0 && err == nil; {
		part := data[max(0, at-chunkBytes):at]
		if err = chunk(filepath.Base(to), part, at); err != nil {
			break
		}
		at -= len(part)
		if _, err = f.WriteAt(part, int64(at)); err == nil {
			a.note(uint64(at), nil)
		}
	}
	if err != nil {
		a.note(uint64(len(data)), err)
	}
	f.Close()
}

// arrivingCheckpoint opens the checkpoint in dir as one whose GPU state arrives in a second
// directory.
func arrivingCheckpoint(t *testing.T, dir string, chunk func(file string, data []byte, missing int) error) *images.Checkpoint {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var files []images.File
	to := memoryDir(t)
	var senders sync.WaitGroup
	t.Cleanup(senders.Wait)
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		file := images.File{Name: e.Name(), Path: filepath.Join(dir, e.Name()), Bytes: uint64(info.Size())}
		if images.IsAreaFile(e.Name()) {
			sent := file.Path
			file.Path = filepath.Join(to, e.Name())
			a := &arriving{from: file.Bytes, grown: make(chan struct{})}
			file.Arrival = a
			if err := errors.Join(os.WriteFile(file.Path, nil, 0o600), os.Truncate(file.Path, info.Size())); err != nil {
				t.Fatal(err)
			}
			senders.Go(func() { a.send(sent, file.Path, chunk) })
		}
		files = append(files, file)
	}
	c, err := images.OpenFiles(files)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// openGate is a gate at which nobody waits.
type openGate struct{}

func (openGate) Free(int) error  { return nil }
func (openGate) Loose(int) error { return nil }
func (openGate) Hold(int) error  { return nil }

// leave saves the state of a process to dir, and leaves the process as CRIU restores one:
// checkpointed, with empty areas.
func (w *work) leave(dir string) *images.Metadata {
	w.t.Helper()
	s := w.lock()
	if err := s.Preflight(w.t.Context(), dir); err != nil {
		w.t.Fatal(err)
	}
	m, err := s.Describe(time.Now())
	if err != nil {
		w.t.Fatal(err)
	}
	if _, err := s.Save(w.t.Context(), dir, Suspended); err != nil {
		w.t.Fatal(err)
	}
	writer, err := s.Store(w.t.Context(), dir, false)
	if err != nil {
		w.t.Fatal(err)
	}
	defer writer.Close()
	if err := writer.Wait(); err != nil {
		w.t.Fatal(err)
	}
	writer.Describe(m)
	if err := images.WriteMetadata(dir, m); err != nil {
		w.t.Fatal(err)
	}
	s.Forget()
	return m
}

// A restore reads GPU state while it arrives, on all processors, also in a shim that uses few. The driver is given no byte before all digests are
// right, and a source that fails half way is the restore's error.
func TestRestoreWhileArriving(t *testing.T) {
	cut := errors.New("connection reset by peer")
	const half = 6 << 20
	for _, test := range []struct {
		name  string
		chunk func(data []byte, missing int) error
		err   error // nil for a restore that succeeds
		says  string
	}{
		{"whole", func([]byte, int) error { return nil }, nil, ""},
		{"slow", func([]byte, int) error { time.Sleep(20 * time.Millisecond); return nil }, nil, ""},
		{"cut off", func(_ []byte, missing int) error {
			if missing < half {
				return cut
			}
			return nil
		}, cut, "to arrive: connection reset by peer"},
		{"wrong", func(data []byte, missing int) error {
			if missing < half {
				data[0] ^= 1
			}
			return nil
		}, errdefs.ErrDataLoss, "is damaged: block 0"},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := startWork(t, "12M")
			dir := diskDir(t)
			m := w.leave(dir)
			s := New(w, runPlain)
			opts := w.options()
			r, err := s.Prepare(t.Context(), m, "", nil, opts)
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			before := runtime.GOMAXPROCS(1)
			defer runtime.GOMAXPROCS(before)
			begin, most := make(chan struct{}), 0
			checkpoint := arrivingCheckpoint(t, dir, func(_ string, data []byte, missing int) error {
				<-begin
				most = max(most, runtime.GOMAXPROCS(0))
				return test.chunk(data, missing)
			})
			if err := r.Load(t.Context(), checkpoint, openGate{}, opts); err != nil {
				t.Fatal(err)
			}
			a := r.areas[0]
			if n := w.memory(a.Start, a.Bytes); n > 0 {
				t.Fatalf("the process has %d bytes of GPU state before any has arrived", n)
			}
			close(begin)
			_, err = r.Map(t.Context())
			if test.err != nil {
				if !errors.Is(err, test.err) || !strings.Contains(err.Error(), test.says) {
					t.Errorf("got %v, want %q", err, test.says)
				}
				if n := w.memory(a.Start, a.Bytes); n > 0 {
					t.Errorf("the process was given %d bytes", n)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if now := runtime.GOMAXPROCS(0); test.name == "slow" && most != runtime.NumCPU() || now != 1 {
				t.Errorf("the digests were compared on %d processors, and %d are used after them", most, now)
			}
			if bytes, err := r.Restore(t.Context()); err != nil || bytes < 12<<20 {
				t.Fatalf("%d bytes: %v", bytes, err)
			}
			w.verify()
		})
	}
}

// An interposer's memory is filled while it arrives, and the driver's is mapped before all of that is there. The program
// gets no byte of what was damaged on its way.
func TestFillWhileArriving(t *testing.T) {
	if !steer.CanSteer {
		t.Skip("an interposer is for processors whose processes can be steered")
	}
	for name, damaged := range map[string]bool{"whole": false, "wrong": true} {
		t.Run(name, func(t *testing.T) {
			w := startWork(t, "136M", "LD_PRELOAD="+softDir+"/"+interposer.LibraryName)
			dir := diskDir(t)
			m := w.leave(dir)
			areas := m.Areas()
			if len(areas) != 2 || !areas[0].Interposer || areas[1].Interposer {
				t.Fatalf("areas: %+v", areas)
			}
			s := New(w, runPlain)
			opts := w.options()
			r, err := s.Prepare(t.Context(), m, "", nil, opts)
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			mapped := make(chan struct{})
			checkpoint := arrivingCheckpoint(t, dir, func(file string, data []byte, missing int) error {
				if file == areas[0].File && missing == 1<<20 {
					<-mapped
					if damaged {
						data[0] ^= 1
					}
				}
				return nil
			})
			if err := r.Load(t.Context(), checkpoint, openGate{}, opts); err != nil {
				t.Fatal(err)
			}
			late := time.AfterFunc(time.Minute, func() {
				t.Error("the driver's memory is not mapped before the interposer's is there")
				close(mapped)
			})
			_, err = r.Map(t.Context())
			if late.Stop() {
				close(mapped)
			}
			if err != nil {
				t.Fatal(err)
			}
			_, err = r.Restore(t.Context())
			if damaged {
				if !errors.Is(err, errdefs.ErrDataLoss) || !strings.Contains(err.Error(), "is damaged: block 0") {
					t.Errorf("got %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if !r.fill.Compared() {
				t.Error("nobody has filled the memory beforehand")
			}
			w.verify()
		})
	}
}

// A restore that is given up does not wait for its source.
func TestGiveUpWhileArriving(t *testing.T) {
	w := startWork(t, "2M")
	dir := diskDir(t)
	m := w.leave(dir)
	s := New(w, runPlain)
	r, err := s.Prepare(t.Context(), m, "", nil, w.options())
	if err != nil {
		t.Fatal(err)
	}
	silent := make(chan struct{})
	checkpoint := arrivingCheckpoint(t, dir, func(string, []byte, int) error { <-silent; return errors.New("over") })
	defer close(silent)
	opts := w.options()
	opts.Config.Staging.Cgroup = fmt.Sprintf("test-%d", os.Getpid()) // of no other restore's node
	if err := r.Load(t.Context(), checkpoint, openGate{}, opts); err != nil {
		t.Fatal(err)
	}
	other, err := quota.TakeProcessors(opts.Config.Staging.Cgroup)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Give()
	if n := other.AtOnce(); n != 2 {
		t.Errorf("%d restores share the processors, want 2", n)
	}
	check := r.check
	r.Close()
	if n := other.AtOnce(); n != 1 {
		t.Errorf("%d restores share the processors after one was given up, want 1", n)
	}
	if err := check.Wait(); !errors.Is(err, context.Canceled) {
		t.Errorf("the check ends with %v", err)
	}
}
