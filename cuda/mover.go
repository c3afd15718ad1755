// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/gpuckpt/gpuckpt/cuda/internal/wire"
)

// Memory is GPU memory that lives by a descriptor of cuMemExportToShareableHandle, also while no
// process has it mapped. Each maker chooses its Bytes, a multiple of 2 MiB.
type Memory struct {
	File  *os.File
	Bytes uint64
}

// CloseMemory gives up the descriptors. Memory that no process has, nor a descriptor of, is free.
func CloseMemory(memory []Memory) {
	for _, m := range memory {
		m.File.Close()
	}
}

// Parts are what a GPU has computed of memory that was copied: BLAKE3's chaining values of all MiB in their order, 32
// bytes each, as in blocks of 64 MiB that begin with the first. It is nil if the GPU has not computed all.
type Parts []byte

const (
	partBits  = 20
	partValue = 32
	maxParts  = 1 << 30 // bytes of all parts of a request
)

// partsOf collects the parts of several requests.
type partsOf struct {
	parts   Parts
	missing bool
}

func (p *partsOf) add(parts Parts) {
	p.parts = append(p.parts, parts...)
	p.missing = p.missing || parts == nil
}

func (p *partsOf) of(bytes uint64) Parts {
	if p.missing || uint64(len(p.parts)) != bytes>>partBits*partValue {
		return nil
	}
	return p.parts
}

// Span is a range of a file. A nil File has zeros.
type Span struct {
	File          *os.File
	Offset, Bytes uint64
}

// Mover is a helper that copies GPU memory to files and back, and changes no process: if it is killed,
// the memory that it was given is as it was. It has a context on each GPU that it copies memory of, so it
// should end with the operation that it serves. It carries out one call at a time.
type Mover struct{ helper *Helper }

// StartMover starts a mover within ctx. The first call reports whether there is a driver.
func StartMover(ctx context.Context, opts Options) (*Mover, error) {
	h, err := Start(ctx, opts)
	if err != nil {
		return nil, err
	}
	return &Mover{helper: h}, nil
}

// Pid is the mover's process id.
func (m *Mover) Pid() int { return m.helper.worker.Pid() }

// host is the pid of the process that works; 0 if that is not known: Options.Join has it in a child.
func (m *Mover) host() int {
	if m.helper.opts.Join != 0 {
		return 0
	}
	return m.Pid()
}

// Kill ends the mover at once: calls return ErrHelperGone. Close must still be called.
func (m *Mover) Kill() { m.helper.worker.Kill() }

// Close ends the mover and reaps it, as Helper.Close does.
func (m *Mover) Close() error { return m.helper.Close() }

// Ready has what copies of memory of a GPU, by its UUID, need: the context of the GPU, which takes
// 0.13 s and some 550 MB of its memory, and 8 MiB of pinned memory for each of so many threads. CopyOut
// and CopyIn do it themselves otherwise. threads is at most 32; 0: one for each processor.
func (m *Mover) Ready(ctx context.Context, gpu string, threads int) error {
	_, _, err := m.move(ctx, wire.Request{Op: wire.OpReady, GPU: gpu, Threads: threads}, nil)
	return err
}

// CopyOut copies memory, piece after piece, to a file from an offset on, and makes the file as large
// as that needs. Zeros stay holes if the file has nothing there yet. On a tmpfs the pages are huge
// where it allows them to who asks (huge=advise). The memory may be on any GPUs that the helper sees,
// and nobody should write to it meanwhile: the parts that CopyOut returns are of the memory, not of the file. threads is
// as in Ready.
//
// digest false runs no kernel, and returns no parts. It is for memory of programs that run before the copy is done: after
// a restore the driver (580) no longer interrupts their kernels for another process's, and ends one that a kernel has
// waited for some 5 s (docs/limits.md).
//
// An error that satisfies errors.Is with a syscall.Errno is the file's: ENOSPC. An *Error is the
// driver's: InvalidValue, say, for a descriptor that is none of such memory or a wrong size. After an
// error the file has some of the memory; the memory is as it was.
func (m *Mover) CopyOut(ctx context.Context, memory []Memory, to *os.File, offset uint64, threads int, digest bool) (Parts, error) {
	var all partsOf
	done := uint64(0)
	for some := range slices.Chunk(memory, wire.MaxPieces) {
		q := wire.Request{Op: wire.OpCopyOut, Offset: offset + done, Threads: threads, NoKernel: !digest, Part: int(done >> partBits)}
		var files []*os.File
		for _, piece := range some {
			q.Pieces, files = append(q.Pieces, piece.Bytes), append(files, piece.File)
			done += piece.Bytes
		}
		_, parts, err := m.move(ctx, q, append(files, to))
		if err != nil {
			return nil, err
		}
		all.add(parts)
	}
	return all.of(done), nil
}

// CopyIn makes memory on a GPU, by its UUID, and fills it from the spans, one after the other. The
// memory is in pieces of so many bytes, a multiple of 2 MiB as the sum of the spans is; the last may
// be smaller. It lives by the descriptors, which are the caller's. What is a hole in a file is not
// read. threads is as in Ready. The parts are of what the memory has then.
//
// The error is an *Error with the Result OutOfMemory if the GPU has no room. One that satisfies
// errors.Is with io.ErrUnexpectedEOF or a syscall.Errno is a file's. After an error there is no memory.
func (m *Mover) CopyIn(ctx context.Context, gpu string, piece uint64, from []Span, threads int) (memory []Memory, _ Parts, err error) {
	if piece == 0 {
		return nil, nil, errors.New("bring GPU memory back: in pieces of no bytes")
	}
	var all partsOf
	done := uint64(0)
	defer func() {
		if err != nil {
			CloseMemory(memory)
			memory = nil
		}
	}()
	for len(from) > 0 {
		q := wire.Request{Op: wire.OpCopyIn, GPU: gpu, Threads: threads, Part: int(done >> partBits)}
		var some []Span
		some, from = split(from, piece*wire.MaxPieces)
		sum, files := uint64(0), []*os.File(nil)
		q.Spans, files = spansOf(some)
		for _, s := range some {
			sum += s.Bytes
		}
		for at := uint64(0); at < sum; at += piece {
			q.Pieces = append(q.Pieces, min(piece, sum-at))
		}
		got, parts, err := m.move(ctx, q, files)
		for i, f := range got {
			memory = append(memory, Memory{File: f, Bytes: q.Pieces[min(i, len(q.Pieces)-1)]})
		}
		if err != nil {
			return memory, nil, err
		}
		if len(got) != len(q.Pieces) {
			return memory, nil, fmt.Errorf("%s: %w: %d pieces instead of %d", doing(q.Op, 0), ErrHelperGarbled, len(got), len(q.Pieces))
		}
		all.add(parts)
		done += sum
	}
	return memory, all.of(done), nil
}

// spansOf returns spans as a request has them, and the files that go with it.
func spansOf(spans []Span) (all []wire.Span, files []*os.File) {
	for _, s := range spans {
		at := -1
		if s.File != nil {
			if at = slices.Index(files, s.File); at < 0 {
				at, files = len(files), append(files, s.File)
			}
		}
		all = append(all, wire.Span{File: at, Offset: s.Offset, Bytes: s.Bytes})
	}
	return all, files
}

// split returns the spans of the first so many bytes, and the rest.
func split(spans []Span, bytes uint64) (first, rest []Span) {
	for i, s := range spans {
		if s.Bytes > bytes {
			if bytes > 0 {
				first = append(first, Span{File: s.File, Offset: s.Offset, Bytes: bytes})
			}
			s.Offset, s.Bytes = s.Offset+bytes, s.Bytes-bytes
			return first, append([]Span{s}, spans[i+1:]...)
		}
		first = append(first, s)
		bytes -= s.Bytes
	}
	return first, nil
}

// move carries out a request, and returns the files of the answer and the parts. The helper may stand still for a while
// when it does not work.
func (m *Mover) move(ctx context.Context, q wire.Request, files []*os.File) ([]*os.File, Parts, error) {
	doing := doing(q.Op, 0)
	if err := q.Check(); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", doing, err)
	}
	var r wire.Reply
	got, err := m.helper.worker.CallFiles(ctx, doing, q, files, &r, m.helper.whileTheyWork([]int{m.host()}))
	if err != nil {
		return nil, nil, err
	}
	err = refusal(q, r)
	var parts Parts
	if r.Digested && len(got) > 0 {
		last := got[len(got)-1]
		got = got[:len(got)-1]
		defer last.Close()
		if err == nil {
			parts, err = io.ReadAll(io.NewSectionReader(last, 0, maxParts))
		}
	}
	return got, parts, err
}
