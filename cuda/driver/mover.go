// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

// #include "memory.h"
import "C"

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cuda/internal/wire"
)

const (
	// chunkBytes is what a copier moves at a time: two buffers of this size are pinned for each.
	chunkBytes = 4 << 20
	// maxCopiers bounds the pinned memory: 256 MiB.
	maxCopiers = 32
	// behind is how nice copies out are: beside them the driver checkpoints and restores the program, on one thread,
	// and CRIU dumps it. At the same priority they took 0.7 s instead of 0.4 s (H200, 16 processors), in which a
	// program that is left running stands still.
	behind = 10
)

// mover copies GPU memory that lives by descriptors to files and back. Its contexts and its copiers
// stay until the process ends.
//
// Each copier is a thread with two pinned buffers: while the GPU moves one, the thread moves the other
// to or from the file. To register the file's pages for the GPU would cost more than the copy.
type mover struct {
	turn     sync.Mutex // one copy at a time
	loaded   bool
	contexts map[C.int]unsafe.Pointer // by the ordinals of their GPUs
	kernels  map[C.int]*kernel        // as the contexts
	copiers  []*copier
}

// cuError is a CUresult that is not CUDA_SUCCESS.
type cuError C.int

func (e cuError) Error() string { return fmt.Sprintf("CUresult %d: %s", int(e), text(C.int(e))) }

func check(r C.int) error {
	if r == 0 {
		return nil
	}
	return cuError(r)
}

// fileError is a file that cannot be read or written.
type fileError struct {
	step string
	err  error
}

func (e fileError) Error() string { return e.step + ": " + e.err.Error() }

// replyTo returns the answer to a copy that ended with err.
func replyTo(err error) wire.Reply {
	var refused cuError
	var file fileError
	switch {
	case err == nil:
		return wire.Reply{}
	case errors.As(err, &refused):
		return wire.Reply{Code: int(refused), Text: text(C.int(refused))}
	case !errors.As(err, &file):
		return wire.Reply{Fault: wire.FaultFile, Text: err.Error()}
	}
	if errno, ok := errors.AsType[syscall.Errno](file.err); ok {
		return wire.Reply{Fault: wire.FaultFile, Code: int(errno), Text: file.step}
	}
	if errors.Is(file.err, io.ErrUnexpectedEOF) {
		return wire.Reply{Fault: wire.FaultFile, Short: true, Text: file.step}
	}
	return wire.Reply{Fault: wire.FaultFile, Text: file.Error()}
}

// copyMemory carries out a request for copies. The files of the answer are the caller's.
func (m *mover) copyMemory(q wire.Request, files []*os.File) (wire.Reply, []*os.File) {
	m.turn.Lock()
	defer m.turn.Unlock()
	runtime.LockOSThread() // a context is a thread's
	defer runtime.UnlockOSThread()
	var made []*os.File
	digested := false
	err := m.load()
	if err == nil {
		switch q.Op {
		case wire.OpReady:
			err = m.ready(q)
		case wire.OpCopyOut:
			made, err = m.copyOut(q, files)
			digested = len(made) == 1
		case wire.OpCopyIn:
			made, err = m.copyIn(q, files)
			digested = len(made) == len(q.Pieces)+1
		}
	}
	reply := replyTo(err)
	reply.Digested = digested
	return reply, made
}

func (m *mover) load() error {
	if m.loaded {
		return nil
	}
	if err := check(C.gk_memory_load()); err != nil {
		return err
	}
	// containerd tells its shims to use two processors, and they their helpers. Copies want all.
	runtime.GOMAXPROCS(max(runtime.NumCPU(), runtime.GOMAXPROCS(0)))
	m.loaded, m.contexts, m.kernels = true, make(map[C.int]unsafe.Pointer), make(map[C.int]*kernel)
	return nil
}

// enter makes the context of a GPU the thread's.
func (m *mover) enter(ordinal C.int) error {
	context, ok := m.contexts[ordinal]
	if !ok {
		if err := check(C.gk_context(ordinal, &context)); err != nil {
			return err
		}
		m.contexts[ordinal] = context
		m.compile(ordinal)
	}
	return check(C.gk_set_current(context))
}

// gpu enters the GPU of a request, and returns its ordinal.
func (m *mover) gpu(q wire.Request) (ordinal C.int, err error) {
	id := uuid(q.GPU)
	if err := check(C.gk_ordinal(&id, &ordinal)); err != nil {
		return 0, err
	}
	return ordinal, m.enter(ordinal)
}

func (m *mover) ready(q wire.Request) error {
	ordinal, err := m.gpu(q)
	if err != nil {
		return err
	}
	return m.all(copiersFor(q), func(c *copier) error { return c.ready(m.contexts[ordinal], ordinal) })
}

func copiersFor(q wire.Request) int {
	if q.Threads == 0 {
		return min(runtime.NumCPU(), maxCopiers)
	}
	return min(q.Threads, maxCopiers)
}

// all has so many copiers do something, each in a thread of its own.
func (m *mover) all(count int, do func(*copier) error) error {
	for len(m.copiers) < count {
		m.copiers = append(m.copiers, &copier{})
	}
	errs := make([]error, count)
	var group sync.WaitGroup
	for i, c := range m.copiers[:count] {
		group.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			errs[i] = do(c)
		})
	}
	group.Wait()
	return errors.Join(errs...)
}

// copyOut copies the memory of a request, whose descriptors are files but for the last, to that. It returns the file of
// digests.values, if there is one.
func (m *mover) copyOut(q wire.Request, files []*os.File) (made []*os.File, err error) {
	if len(files) != len(q.Pieces)+1 {
		return nil, fmt.Errorf("%d pieces came with %d files", len(q.Pieces), len(files))
	}
	memory := make([]C.gk_memory, 0, len(q.Pieces))
	defer func() { letGo(memory) }()
	if len(m.contexts) == 0 {
		if err := m.enter(0); err != nil {
			return nil, err
		}
	}
	only := C.int(-1)
	for ordinal := range m.contexts {
		if err := m.enter(ordinal); err != nil {
			return nil, err
		}
		if only = ordinal; len(m.contexts) > 1 {
			only = -1
			break
		}
	}
	for i, bytes := range q.Pieces {
		piece := C.gk_memory{bytes: C.uint64_t(bytes)}
		if err := check(C.gk_import(C.int(files[i].Fd()), &piece, only)); err != nil {
			return nil, err
		}
		memory = append(memory, piece)
		if err := m.enter(piece.ordinal); err != nil {
			return nil, err
		}
		if err := check(C.gk_map(&memory[i])); err != nil {
			return nil, err
		}
	}
	j := &job{chunks: chunksOf(memory)}
	if j.to, err = openTarget(files[len(q.Pieces)], q.Offset, sumOf(q.Pieces)); err != nil {
		return nil, err
	}
	defer j.to.close()
	if !q.NoKernel {
		if j.digests, err = m.digest(memory, q.Part); err != nil {
			return nil, err
		}
	}
	err = m.copy(copiersFor(q), j)
	return j.digests.added(nil, err)
}

// copyIn makes the memory of a request, fills it, and returns its descriptors, and the file of digests.values.
func (m *mover) copyIn(q wire.Request, files []*os.File) (made []*os.File, err error) {
	ordinal, err := m.gpu(q)
	if err != nil {
		return nil, err
	}
	memory := make([]C.gk_memory, 0, len(q.Pieces))
	defer func() { letGo(memory) }()
	for i, bytes := range q.Pieces {
		piece := C.gk_memory{bytes: C.uint64_t(bytes), ordinal: ordinal}
		if err := check(C.gk_create(&piece)); err != nil {
			return nil, err
		}
		memory = append(memory, piece)
		if err := check(C.gk_map(&memory[i])); err != nil {
			return nil, err
		}
	}
	j := &job{chunks: chunksOf(memory)}
	if j.from, err = openSource(files, q.Spans); err != nil {
		return nil, err
	}
	if err := m.copy(copiersFor(q), j); err != nil {
		return nil, err
	}
	for i := range memory {
		var fd C.int
		if err := check(C.gk_export(&memory[i], &fd)); err != nil {
			closeFiles(made)
			return nil, err
		}
		made = append(made, os.NewFile(uintptr(fd), "GPU memory"))
	}
	digests, err := m.digest(memory, q.Part)
	return digests.added(made, err)
}

func letGo(memory []C.gk_memory) {
	for i := range memory {
		C.gk_let_go(&memory[i])
	}
}

func closeFiles(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

func sumOf(pieces []uint64) (sum uint64) {
	for _, bytes := range pieces {
		sum += bytes
	}
	return sum
}

// job is one copy, which all copiers share: out of GPU memory if to is set, else from.
type job struct {
	chunks  []chunk
	next    atomic.Int64 // the chunk that nobody has taken
	stopped atomic.Bool  // a copier has failed
	to      *target
	digests *digests // of what is copied out
	from    *source
}

// chunk is what one copier moves at a time.
type chunk struct {
	ordinal C.int
	address C.uint64_t
	bytes   int
	at      uint64 // from the beginning of the first piece
}

func chunksOf(memory []C.gk_memory) (chunks []chunk) {
	at := uint64(0)
	for _, piece := range memory {
		for done := C.uint64_t(0); done < piece.bytes; done += chunkBytes {
			n := min(chunkBytes, piece.bytes-done)
			chunks = append(chunks, chunk{piece.ordinal, piece.address + done, int(n), at})
			at += uint64(n)
		}
	}
	return chunks
}

// copy carries out a job.
func (m *mover) copy(copiers int, j *job) error {
	return m.all(min(copiers, len(j.chunks)), func(c *copier) error {
		if j.to != nil {
			_ = unix.Setpriority(unix.PRIO_PROCESS, 0, behind) // of this thread
		}
		err := m.share(c, j)
		if err != nil {
			j.stopped.Store(true)
		}
		return err
	})
}

// share has a copier take chunks until there are none.
func (m *mover) share(c *copier, j *job) (err error) {
	defer func() { err = cmp.Or(err, c.settle(j)) }()
	current := C.int(-1)
	for turn := 0; !j.stopped.Load(); turn = 1 - turn {
		n := int(j.next.Add(1)) - 1
		if n >= len(j.chunks) {
			return nil
		}
		if k := j.chunks[n]; k.ordinal != current {
			if err := c.settle(j); err != nil { // a stream is its context's
				return err
			}
			if err := c.ready(m.contexts[k.ordinal], k.ordinal); err != nil {
				return err
			}
			current = k.ordinal
		}
		if j.to != nil && j.to.holes && j.digests.areZeros(j.chunks[n].at, j.chunks[n].bytes) {
			continue
		}
		s := &c.sides[turn]
		if err := s.settle(j); err != nil {
			return err
		}
		if err := s.begin(j, j.chunks[n]); err != nil {
			return err
		}
	}
	return nil
}

// copier is a thread's buffers.
type copier struct{ sides [2]side }

// side is one buffer, and what is under way with it.
type side struct {
	buffer  []byte // pinned
	streams map[C.int]unsafe.Pointer
	busy    unsafe.Pointer // the stream that works with the buffer; nil: none does
	chunk   chunk
}

// ready enters a context, and has buffers and streams of it.
func (c *copier) ready(context unsafe.Pointer, ordinal C.int) error {
	if err := check(C.gk_set_current(context)); err != nil {
		return err
	}
	for i := range c.sides {
		s := &c.sides[i]
		if s.buffer == nil {
			var at unsafe.Pointer
			if err := check(C.gk_buffer(&at, chunkBytes)); err != nil {
				return err
			}
			s.buffer, s.streams = unsafe.Slice((*byte)(at), chunkBytes), make(map[C.int]unsafe.Pointer)
		}
		if s.streams[ordinal] == nil {
			var stream unsafe.Pointer
			if err := check(C.gk_stream(&stream)); err != nil {
				return err
			}
			s.streams[ordinal] = stream
		}
	}
	return nil
}

func (c *copier) settle(j *job) error {
	return errors.Join(c.sides[0].settle(j), c.sides[1].settle(j))
}

// settle waits for the GPU, and writes what that has copied out.
func (s *side) settle(j *job) error {
	if s.busy == nil {
		return nil
	}
	err := check(C.gk_wait(s.busy))
	s.busy = nil
	if err == nil && j.to != nil {
		err = j.to.write(s.buffer[:s.chunk.bytes], s.chunk.at)
	}
	return err
}

// begin has the GPU copy a chunk.
func (s *side) begin(j *job, k chunk) error {
	s.chunk, s.busy = k, s.streams[k.ordinal]
	if j.to != nil {
		return check(C.gk_out(unsafe.Pointer(&s.buffer[0]), k.address, C.size_t(k.bytes), s.busy))
	}
	read := 0 // where what is read and not yet copied begins
	flush := func(to int) error {
		if to == read {
			return nil
		}
		return check(C.gk_in(k.address+C.uint64_t(read), unsafe.Pointer(&s.buffer[read]), C.size_t(to-read), s.busy))
	}
	for done := 0; done < k.bytes; {
		n, zeros, err := j.from.read(s.buffer[done:k.bytes], k.at+uint64(done))
		if err != nil {
			return err
		}
		if zeros {
			if err := flush(done); err != nil {
				return err
			}
			if err := check(C.gk_zero(k.address+C.uint64_t(done), C.size_t(n), s.busy)); err != nil {
				return err
			}
			read = done + n
		}
		done += n
	}
	return flush(k.bytes)
}
