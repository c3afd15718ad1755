// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package images

import (
	"errors"
	"fmt"
	"io"
	"sort"
	"sync"

	"golang.org/x/sys/unix"
)

// Assembly is the content of one area: its pieces, and zeros between them.
type Assembly struct {
	Area Area
	// Pieces are in order and do not overlap.
	Pieces []Piece
}

// Assemblies gives all areas of all processes with their pieces, in order.
func (c *Checkpoint) Assemblies() []Assembly {
	var all []Assembly
	for _, a := range c.Areas() {
		all = append(all, Assembly{Area: a, Pieces: c.Pieces(a.File)})
	}
	return all
}

// pieceAt gives the place of the piece that holds an offset, or of the next one.
func (a *Assembly) pieceAt(offset uint64) int {
	return sort.Search(len(a.Pieces), func(i int) bool { return offset < a.Pieces[i].Offset+a.Pieces[i].Bytes })
}

// AreaReader reads an area's content, by offsets in the area's file as
// Area.Offset is one. It opens a piece when it is first read. Several
// goroutines may read at once.
type AreaReader struct {
	area *Assembly

	mu   sync.Mutex
	open map[int]ReaderAtCloser
}

// Open gives a reader, which is to be closed.
func (a *Assembly) Open() *AreaReader {
	return &AreaReader{area: a, open: make(map[int]ReaderAtCloser)}
}

// ReadAt fills p with what is at an offset. It is zero where no piece is, and
// outside of the area's range. An error other than that of opening or reading a
// file is ErrDamaged: the file ends too early.
func (r *AreaReader) ReadAt(p []byte, offset int64) (int, error) {
	at, whole := uint64(offset), len(p)
	if begin := r.area.Area.Offset; at < begin { // what is before the range means nothing
		n := min(uint64(len(p)), begin-at)
		clear(p[:n])
		p, at = p[n:], at+n
	}
	for i := r.area.pieceAt(at); len(p) > 0; i++ {
		if i == len(r.area.Pieces) {
			clear(p)
			break
		}
		q := &r.area.Pieces[i]
		if at < q.Offset {
			n := min(uint64(len(p)), q.Offset-at)
			clear(p[:n])
			p, at = p[n:], at+n
		}
		n := min(uint64(len(p)), q.Offset+q.Bytes-at)
		if n == 0 {
			break
		}
		f, err := r.file(i)
		if err != nil {
			return whole - len(p), err
		}
		if m, err := f.ReadAt(p[:n], int64(at-q.Offset)); uint64(m) < n {
			if errors.Is(err, io.EOF) {
				return whole - len(p), fmt.Errorf("%w: %s is truncated", ErrDamaged, q.Path)
			}
			return whole - len(p), fmt.Errorf("read %s at %d: %w", q.Path, at-q.Offset, err)
		}
		p, at = p[n:], at+n
	}
	return whole, nil
}

// file gives an open piece.
func (r *AreaReader) file(i int) (io.ReaderAt, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if f, ok := r.open[i]; ok {
		return f, nil
	}
	f, err := r.area.Pieces[i].File.Open()
	if err != nil {
		return nil, fmt.Errorf("read GPU state: %w", err)
	}
	r.open[i] = f
	return f, nil
}

// Close closes the files.
func (r *AreaReader) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var errs []error
	for _, f := range r.open {
		errs = append(errs, f.Close())
	}
	clear(r.open)
	return errors.Join(errs...)
}

// NextData gives the offset of the next byte at or behind an offset that may be
// other than zero, by what the file systems say of holes; the area's end if
// there is none. It is free to be wrong about zeros, and about nothing else.
func (r *AreaReader) NextData(offset uint64) uint64 {
	for i := r.area.pieceAt(offset); i < len(r.area.Pieces); i++ {
		q := &r.area.Pieces[i]
		offset = max(offset, q.Offset)
		open, err := r.file(i)
		f, seeks := open.(io.Seeker)
		if err != nil || !seeks {
			return offset
		}
		at, err := f.Seek(int64(offset-q.Offset), unix.SEEK_DATA) // reads are by offset
		switch {
		case errors.Is(err, unix.ENXIO): // nothing but a hole to the file's end, wherever that is
			if size, err := f.Seek(0, io.SeekEnd); err != nil || uint64(size) < q.Bytes {
				return offset
			}
			offset = q.Offset + q.Bytes
			continue
		case err != nil:
			return offset
		}
		if at := q.Offset + uint64(at); at < q.Offset+q.Bytes {
			return at
		}
		offset = q.Offset + q.Bytes
	}
	return r.area.Area.Offset + r.area.Area.Bytes
}
