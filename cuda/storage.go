// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"

	"github.com/gpuckpt/gpuckpt/cuda/internal/wire"
	"github.com/gpuckpt/gpuckpt/internal/worker"
)

// Storage holds GPU memory of processes in files, by the driver's custom storage (CUDA 13.4, driver 615). The driver maps
// all GPU memory of a process into a mover while it checkpoints or restores the process. The mover copies it out, or in,
// and tells the driver that it is done. Then the process is checkpointed, or locked.
//
// The life of a process's memory: a checkpoint through the Storage makes its files, or Put gives them. A restore fills the
// GPUs from the files, which stay as they are. So a process that is checkpointed once more, because the restore of another
// has failed, is not copied again.
//
// The driver has no call that gives an operation up when it has begun. If a copy fails, the mover is killed. What the
// driver does with the process then is not documented: the error tells the state that the process is in.
//
// Several goroutines may use a Storage; the steps take turns. Close ends the mover.
type Storage struct {
	// File makes the file for the memory that a process has on one GPU, counted from 0. The first is made before the driver
	// is asked. The Storage closes no file.
	File func(p PID, number int) (*os.File, error)
	// Room is how many bytes a checkpoint of a process makes room for before the driver is asked; 0 for none.
	Room func(p PID) uint64
	// GPUs are the UUIDs of the GPUs that a checkpointed process may have memory on. The mover has a context on each.
	GPUs []string
	// Start starts a mover. nil: a helper like the one that the step is asked of.
	Start func(context.Context) (*Mover, error)

	procs []PID

	mu    sync.Mutex
	mover *Mover // nil while none runs
	kept  map[PID][]Stored
	out   map[PID]bool // the process is checkpointed: the files have the only copy
}

// Stored is the memory of a process on one GPU.
type Stored struct {
	GPU   string // the UUID
	Bytes uint64 // as the driver says
	// Spans have the bytes, in whole pages of 4 KiB.
	Spans []Span
	Parts Parts // of a checkpoint, if the GPU has computed them
}

// Pages returns the bytes in whole pages of 4 KiB.
func (s Stored) Pages() uint64 { return (s.Bytes + 4095) &^ 4095 }

// copyThreads is how many threads copy: each has two streams. See customChunk of package driver.
const copyThreads = 2

// maxSpanFiles is how many spans of a Stored are filled at a time: a message carries 253 files.
const maxSpanFiles = 128

// NewStorage returns a Storage for processes, which has nothing of them yet.
func NewStorage(procs Group) *Storage {
	s := &Storage{kept: make(map[PID][]Stored), out: make(map[PID]bool)}
	for _, p := range procs {
		s.procs = append(s.procs, p.PID)
	}
	return s
}

// Put says what a checkpointed process has in files.
func (s *Storage) Put(p PID, stored []Stored) {
	s.kept[p], s.out[p] = stored, true
}

// Through returns a helper whose checkpoints and restores go through the Storage: also those of a Group. It is the same
// process; only one of the two is closed. A nil Storage returns the helper itself.
func (s *Storage) Through(h *Helper) *Helper {
	if s == nil {
		return h
	}
	through := *h
	through.storage = s
	return &through
}

// Out returns the memory of the processes that are checkpointed, and have it in files alone. After an error there may be
// processes among them that are not.
func (s *Storage) Out() map[PID][]Stored {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := maps.Clone(s.kept)
	maps.DeleteFunc(out, func(p PID, _ []Stored) bool { return !s.out[p] })
	return out
}

// Close ends the mover and reaps it. It can be called on nil, and a later step starts another.
func (s *Storage) Close() {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.end(false)
}

func (s *Storage) end(kill bool) {
	if s.mover == nil {
		return
	}
	if kill {
		s.mover.Kill()
	}
	_ = s.mover.Close() // nobody misses one that fails to end well
	s.mover = nil
}

// serves returns the process of a request that goes through the Storage.
func (s *Storage) serves(h *Helper, q wire.Request) (PID, bool) {
	if s == nil || q.Op != wire.OpCheckpoint && q.Op != wire.OpRestore {
		return PID{}, false
	}
	i := slices.IndexFunc(s.procs, func(p PID) bool { return h.number(p) == q.PID })
	if i < 0 {
		return PID{}, false
	}
	return s.procs[i], true
}

// step checkpoints or restores a process. From when the driver has begun on, the end of ctx does not end it: there would be
// no way back.
func (s *Storage) step(ctx context.Context, h *Helper, p PID, q wire.Request) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%s: %w", doing(q.Op, q.PID), err)
	}
	if s.mover != nil && !s.mover.helper.Alive() {
		s.end(true)
	}
	if s.mover == nil {
		start := s.Start
		if start == nil {
			start = func(ctx context.Context) (*Mover, error) { return StartMover(ctx, h.opts) }
		}
		var err error
		if s.mover, err = start(ctx); err != nil {
			return fmt.Errorf("%s: %w", doing(q.Op, q.PID), err)
		}
	}
	o := &operation{s: s, h: h, p: p, q: q}
	o.q.Custom, o.q.GPUs = true, s.GPUs
	if kept, ok := s.kept[p]; ok {
		o.q.GPUs = nil
		for _, k := range kept {
			o.q.GPUs = append(o.q.GPUs, o.goesTo(k.GPU))
		}
	}
	err := o.run(ctx)
	if err != nil && o.begun {
		s.end(true)
	}
	if err == nil {
		s.out[p] = q.Op == wire.OpCheckpoint
	}
	return err
}

// operation is one step of a process.
type operation struct {
	s     *Storage
	h     *Helper
	p     PID
	q     wire.Request
	begun bool // there is no way back
}

func (o *operation) run(ctx context.Context) error {
	kept, known := o.s.kept[o.p]
	if o.q.Op == wire.OpRestore && !known {
		return fmt.Errorf("%s: its GPU memory is in no file", doing(o.q.Op, o.q.PID))
	}
	saves := o.q.Op == wire.OpCheckpoint && !known
	var file *os.File
	if saves {
		var err error
		if file, err = o.room(ctx); err != nil {
			return fmt.Errorf("%s: %w", doing(o.q.Op, o.q.PID), err)
		}
	}
	ctx = context.WithoutCancel(ctx)
	mapped, err := o.begin(ctx)
	if err != nil {
		return err
	}
	switch {
	case saves:
		kept, err = o.save(ctx, mapped, file)
	case o.q.Op == wire.OpRestore:
		kept, err = o.fill(ctx, mapped, kept)
	default:
		err = o.unchanged(mapped, kept)
	}
	if err == nil {
		// From here on the files have what the process has, or had: whether the driver completes it may not be known.
		o.s.kept[o.p], o.s.out[o.p] = kept, true
		_, err = o.call(ctx, wire.Request{Op: wire.OpComplete})
	}
	if err != nil {
		return fmt.Errorf("%s: %w", doing(o.q.Op, o.q.PID), err)
	}
	return nil
}

// room makes the first file, and makes room there for all memory of the process.
func (o *operation) room(ctx context.Context) (*os.File, error) {
	file, err := o.s.File(o.p, 0)
	if err != nil || o.s.Room == nil {
		return file, err
	}
	if bytes := o.s.Room(o.p); bytes > 0 {
		err = o.reserve(ctx, file, bytes)
	}
	return file, err
}

func (o *operation) reserve(ctx context.Context, file *os.File, bytes uint64) error {
	_, _, err := o.s.mover.move(ctx, wire.Request{Op: wire.OpReserve, Pieces: []uint64{bytes}}, []*os.File{file})
	return err
}

// begin has the driver begin, and returns the memory. A driver that has refused has changed nothing.
func (o *operation) begin(ctx context.Context) ([]wire.Mapped, error) {
	r, err := o.call(ctx, o.q)
	_, refused := errors.AsType[*Error](err)
	o.begun = r.Begun || !refused
	if err != nil {
		return nil, err
	}
	var mapped []wire.Mapped
	if err := worker.Decode(r.Answer, &mapped); err != nil {
		return nil, fmt.Errorf("%s: %w: %w", doing(o.q.Op, o.q.PID), ErrHelperGarbled, err)
	}
	return mapped, nil
}

// call sends a request in which the driver works in the process, too.
func (o *operation) call(ctx context.Context, q wire.Request) (wire.Reply, error) {
	m := o.s.mover
	return m.helper.within(ctx, q, m.helper.whileTheyWork([]int{m.host(), o.p.Host}))
}

// save copies the memory to files.
func (o *operation) save(ctx context.Context, mapped []wire.Mapped, file *os.File) (all []Stored, err error) {
	all = []Stored{}
	for i, g := range mapped {
		stored := Stored{GPU: g.GPU, Bytes: g.Bytes}
		if i > 0 {
			if file, err = o.s.File(o.p, i); err != nil {
				return nil, err
			}
		}
		// The first had room for all, which the others take.
		if err := o.reserve(ctx, file, stored.Pages()); err != nil {
			return nil, err
		}
		q := wire.Request{Op: wire.OpCopyOut, Mapped: i + 1, Threads: copyThreads}
		if _, stored.Parts, err = o.s.mover.move(ctx, q, []*os.File{file}); err != nil {
			return nil, err
		}
		stored.Spans = []Span{{File: file, Bytes: stored.Pages()}}
		all = append(all, stored)
	}
	return all, nil
}

// fill copies files into the memory. It returns what is kept, by the GPUs that it is on now.
func (o *operation) fill(ctx context.Context, mapped []wire.Mapped, kept []Stored) ([]Stored, error) {
	places, err := o.places(mapped, kept)
	if err != nil {
		return nil, err
	}
	now := slices.Clone(kept)
	for i, g := range mapped {
		stored := &now[places[i]]
		stored.GPU = g.GPU
		at := uint64(0)
		for some := range slices.Chunk(stored.Spans, maxSpanFiles) {
			q := wire.Request{Op: wire.OpCopyIn, Mapped: i + 1, Offset: at, Threads: copyThreads}
			var files []*os.File
			q.Spans, files = spansOf(some)
			for _, span := range some {
				at += span.Bytes
			}
			if _, _, err := o.s.mover.move(ctx, q, files); err != nil {
				return nil, err
			}
		}
		if at != stored.Pages() {
			return nil, fmt.Errorf("its files have %d bytes for %d of GPU %s", at, stored.Bytes, stored.GPU)
		}
	}
	return now, nil
}

// places returns where the memory of each GPU is kept. The driver does not promise that a restore asks for as much as the
// checkpoint had, and all else would be another program's memory.
func (o *operation) places(mapped []wire.Mapped, kept []Stored) ([]int, error) {
	if len(mapped) != len(kept) {
		return nil, fmt.Errorf("the driver wants the memory of %d GPUs, and that of %d is in files", len(mapped), len(kept))
	}
	var places []int
	for _, g := range mapped {
		at := slices.IndexFunc(kept, func(s Stored) bool { return o.goesTo(s.GPU) == g.GPU })
		if at < 0 && len(kept) == 1 {
			at = 0
		}
		if at < 0 || slices.Contains(places, at) {
			return nil, fmt.Errorf("no file has the memory that the driver wants on GPU %s", g.GPU)
		}
		// Metadata has whole pages alone.
		if g.Bytes != kept[at].Bytes && (g.Bytes+4095)&^4095 != kept[at].Bytes {
			return nil, fmt.Errorf("the driver wants %d bytes on GPU %s, and the checkpoint has %d", g.Bytes, g.GPU, kept[at].Bytes)
		}
		places = append(places, at)
	}
	return places, nil
}

// goesTo returns the GPU that a GPU's memory goes to.
func (o *operation) goesTo(gpu string) string {
	for _, p := range o.q.Pairs {
		if p.Old == gpu {
			return p.New
		}
	}
	return gpu
}

// unchanged is a checkpoint of a process that was restored and has not run: the files have what it has.
func (o *operation) unchanged(mapped []wire.Mapped, kept []Stored) error {
	_, err := o.places(mapped, kept)
	return err
}
