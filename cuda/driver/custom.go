// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

// #include "custom.h"
import "C"

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cuda/internal/wire"
)

// customChunk is what a copier moves at a time of memory that the driver has mapped. With 2 to 4 streams of 32 to 64 MiB
// others had 12 GB/s from such memory, with 32 streams 5 GB/s (A10G, driver 615). It was not measured here.
const customChunk = 32 << 20

// pageBytes is what areas of a checkpoint are multiples of.
const pageBytes = 4096

// hasCustomStorage reports whether the driver has it. load has looked.
func hasCustomStorage() bool { return C.gk_custom() != 0 }

// operation is a checkpoint or a restore by custom storage that has begun: the GPU memory of a process is mapped here until
// complete. The driver has no call that gives it up. If something fails, this process must end.
type operation struct {
	handle unsafe.Pointer
	memory []C.gk_memory // by GPU
}

// begin begins a checkpoint or a restore, and returns what memory there is.
func (m *mover) begin(q wire.Request) ([]wire.Mapped, error) {
	if m.operation != nil {
		return nil, errors.New("another process's GPU memory is mapped")
	}
	for _, gpu := range q.GPUs {
		if _, err := m.gpu(wire.Request{GPU: gpu}); err != nil {
			return nil, err
		}
	}
	if len(m.copiers) == 0 {
		m.chunk = customChunk
	}
	o := &operation{}
	var err error
	if q.Op == wire.OpCheckpoint {
		err = check(C.gk_custom_save(C.int(q.PID), &o.handle))
	} else {
		pairs := pairsOf(q)
		err = check(C.gk_custom_fill(C.int(q.PID), unsafe.SliceData(pairs), C.uint(len(pairs)), &o.handle))
	}
	if err != nil {
		return nil, err
	}
	m.operation = o
	count := C.gk_custom_count(o.handle)
	if count < 0 {
		return nil, begunError{errors.New("the driver does not say where the GPU memory is")}
	}
	all := []wire.Mapped{}
	for i := range count {
		var piece C.gk_memory
		var id C.gk_uuid
		if err := check(C.gk_custom_part(o.handle, i, &piece, &id)); err != nil {
			return nil, begunError{err}
		}
		if err := m.enter(piece.ordinal); err != nil {
			return nil, begunError{err}
		}
		o.memory = append(o.memory, piece)
		all = append(all, wire.Mapped{GPU: wire.FormatUUID(*(*[16]byte)(unsafe.Pointer(&id))), Bytes: uint64(piece.bytes)})
	}
	return all, nil
}

// begunError is an error after which the operation has begun.
type begunError struct{ error }

func (e begunError) Unwrap() error { return e.error }

// complete has the driver end the operation, which is over whatever the driver says.
func (m *mover) complete() error {
	if m.operation == nil {
		return errors.New("no process's GPU memory is mapped")
	}
	handle := m.operation.handle
	m.operation = nil
	return check(C.gk_custom_complete(handle))
}

// mapped returns the memory of a request that the driver has mapped.
func (m *mover) mapped(q wire.Request) (C.gk_memory, error) {
	if m.operation == nil || q.Mapped > len(m.operation.memory) {
		return C.gk_memory{}, fmt.Errorf("no process's GPU memory number %d is mapped", q.Mapped)
	}
	piece := m.operation.memory[q.Mapped-1]
	return piece, m.enter(piece.ordinal)
}

// mappedOut copies all memory of one GPU to a file.
func (m *mover) mappedOut(q wire.Request, files []*os.File) ([]*os.File, error) {
	piece, err := m.mapped(q)
	if err == nil && len(files) != 1 {
		err = fmt.Errorf("%d files came", len(files))
	}
	if err != nil {
		return nil, err
	}
	memory := []C.gk_memory{piece}
	j := &job{chunks: chunksOf(memory, m.chunk)}
	if j.to, err = openTarget(files[0], q.Offset, (uint64(piece.bytes)+pageBytes-1)&^(pageBytes-1)); err != nil {
		return nil, err
	}
	defer j.to.close()
	if j.digests, err = m.digest(memory, q.Part); err != nil {
		return nil, err
	}
	err = m.copy(copiersFor(q), j)
	return j.digests.added(nil, err)
}

// mappedIn fills a range of the memory of one GPU. The last page may have fewer bytes there than in the spans.
func (m *mover) mappedIn(q wire.Request, files []*os.File) error {
	piece, err := m.mapped(q)
	if err != nil {
		return err
	}
	bytes := uint64(0)
	for _, s := range q.Spans {
		bytes += s.Bytes
	}
	most := uint64(piece.bytes)
	if end := (most + pageBytes - 1) &^ (pageBytes - 1); q.Offset >= end || bytes > end-q.Offset {
		return fmt.Errorf("%d bytes at %d are not of %d bytes of GPU memory", bytes, q.Offset, most)
	}
	piece.address += C.uint64_t(q.Offset)
	piece.bytes = C.uint64_t(min(bytes, most-min(most, q.Offset)))
	j := &job{chunks: chunksOf([]C.gk_memory{piece}, m.chunk)}
	if j.from, err = openSource(files, q.Spans); err != nil {
		return err
	}
	return m.copy(copiersFor(q), j)
}

// reserve makes a file so large, with room for all of it. The copy must not fail for want of it.
func reserve(q wire.Request, files []*os.File) error {
	if len(files) != 1 || len(q.Pieces) != 1 {
		return errors.New("room is made in one file")
	}
	const step = 64 << 20 // a signal has the kernel undo one
	fd, bytes := int(files[0].Fd()), q.Pieces[0]
	for at := uint64(0); at < bytes; {
		n := min(step, bytes-at)
		err := unix.Fallocate(fd, 0, int64(at), int64(n)) //nolint:gosec // Check bounds it
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil {
			return fileError{"have it in the file", err}
		}
		at += n
	}
	if err := files[0].Truncate(int64(bytes)); err != nil { //nolint:gosec // as above
		return fileError{"make the file as large as the memory", err}
	}
	return nil
}
