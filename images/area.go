// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package images

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sort"
	"sync"

	"golang.org/x/sys/unix"
)

// Area is a range of a process's memory whose bytes are in files beside CRIU's images, where it is
// empty. A restore maps the files over it. With a GPU it is all memory of the process on that GPU. gpuckpt.json has all but the Location, which Open finds.
type Area struct {
	// File is the name of the area's file in a flat checkpoint, see AreaFile.
	File string `json:"file"`
	// The range's address, its length, and its begin in the file: multiples of 4 KiB.
	Start  uint64 `json:"start"`
	Bytes  uint64 `json:"bytes"`
	Offset uint64 `json:"offset"`
	// Digests are the digests of the range's blocks of BlockBytes, by DigestBlock.
	Digests []string `json:"digests"`
	// Interposer reports that the interposer in the process has saved the area: it is GPU memory of the
	// program, nothing of the driver's, in the order of the program's blocks.
	Interposer bool `json:"companion,omitempty"`
	// GPU is the UUID of the GPU whose memory it is, by custom storage: Start is 0. "" for memory of the process.
	GPU string `json:"gpu,omitempty"`
	// Location is where the bytes are.
	Location Location `json:"-"`
}

// End returns the offset in the area's file at which the range ends.
func (a *Area) End() uint64 { return a.Offset + a.Bytes }

// Part returns so many bytes of the area from the one at a distance from its start: a multiple of BlockBytes.
func (a Area) Part(at, bytes uint64) Area {
	a.Start, a.Offset, a.Bytes = a.Start+at, a.Offset+at, bytes
	if a.Digests != nil {
		a.Digests = a.Digests[at/BlockBytes : (at+bytes+BlockBytes-1)/BlockBytes]
	}
	return a
}

// Await waits until all bytes of the area have arrived.
func (a *Area) Await(ctx context.Context) error {
	for i := range a.Location {
		p := &a.Location[i]
		from, to := max(p.Offset, a.Offset), min(p.Offset+p.Bytes, a.End())
		if p.Arrival == nil || from >= to {
			continue
		}
		if err := p.await(ctx, from, to); err != nil {
			return err
		}
	}
	return nil
}

// await waits until bytes of the piece have arrived, whose offsets are counted as the piece's.
func (p *Piece) await(ctx context.Context, from, to uint64) error {
	if err := p.Arrival.Await(ctx, from-p.Offset, to-p.Offset); err != nil {
		return fmt.Errorf("wait for %s to arrive: %w", p, err)
	}
	return nil
}

// In returns the area with all of its bytes in one file, at their offsets.
func (a Area) In(path string) Area {
	a.Location = Location{{Path: path, Bytes: a.End()}}
	return a
}

// Location is where the bytes of an area are: in pieces, in order and without overlaps.
// Bytes in no piece are zero. A Location can be sent to another process on the host as
// JSON, unless a piece has Data or an Arrival.
type Location []Piece

// Arriving reports whether bytes of a piece are still arriving.
func (l Location) Arriving() bool {
	return slices.ContainsFunc(l, func(p Piece) bool { return p.Arrival != nil })
}

// Piece is a part of an area's bytes.
type Piece struct {
	// Path opens the file that holds the piece. With Data it is only a name for errors.
	Path string `json:"path"`
	// Known is the path by which errors call the file, if it is not Path.
	Known string `json:"known,omitempty"`
	// Data reads the piece if it is a part of an archive; it is nil for a file.
	Data io.ReaderAt `json:"-"`
	// Arrival is set if the piece's bytes are still arriving; nil for a complete piece.
	// An AreaReader waits for what it reads. Who reads by the Path must wait as well.
	Arrival Arrival `json:"-"`
	// Offset is where the piece begins, counted as Area.Offset is, and Bytes its length.
	Offset uint64 `json:"offset"`
	Bytes  uint64 `json:"bytes"`
}

// At returns the piece, opened by another path of the same file.
func (p Piece) At(path string) Piece {
	p.Known, p.Path = p.String(), path
	return p
}

// String returns what errors call the piece.
func (p Piece) String() string { return cmp.Or(p.Known, p.Path) }

// Open opens the piece for reading, as File.Open does.
func (p Piece) Open() (ReaderAtCloser, error) { return openAt(p.Path, p.Data) }

// ReaderAtCloser reads a file.
type ReaderAtCloser interface {
	io.ReaderAt
	io.Closer
}

// openAt opens a file. It refuses a symbolic link, and does not wait for the other end of a pipe.
func openAt(path string, data io.ReaderAt) (ReaderAtCloser, error) {
	if data != nil {
		return unclosed{data}, nil
	}
	return os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
}

// unclosed is a reader that somebody else closes.
type unclosed struct{ io.ReaderAt }

func (unclosed) Close() error { return nil }

// at returns the index of the piece that holds an offset, or of the next piece.
func (l Location) at(offset uint64) int {
	return sort.Search(len(l), func(i int) bool { return offset < l[i].Offset+l[i].Bytes })
}

// arrange orders the pieces, refuses those that overlap, and cuts what is behind the area's end.
func (l Location) arrange(a *Area) error {
	slices.SortFunc(l, func(x, y Piece) int { return cmp.Compare(x.Offset, y.Offset) })
	var at uint64
	for i := range l {
		p := &l[i]
		if p.Offset%PieceAlign != 0 || p.Offset < at || p.Offset >= a.End() || p.Bytes == 0 {
			return fmt.Errorf("%w: %s is not a piece of %s: it has %d bytes at %d, the area ends at %d", ErrDamaged, p, a.File, p.Bytes, p.Offset, a.End())
		}
		p.Bytes = min(p.Bytes, a.End()-p.Offset)
		if p.Bytes%PageBytes != 0 {
			return fmt.Errorf("%w: %s is truncated: %d bytes are not whole pages", ErrDamaged, p, p.Bytes)
		}
		at = p.Offset + p.Bytes
	}
	return nil
}

// Extent is a part of an area whose bytes are in one file.
type Extent struct {
	Start, Bytes uint64 // address and length
	Path         string // opens the file, see Piece
	Offset       uint64 // in the file
}

// Extents returns the parts of the area that may be other than zero, in order; without digests all
// pieces. Memory that is zero, with each extent mapped at its address, has the area's bytes.
func (a *Area) Extents() (extents []Extent) {
	for _, p := range a.Location {
		from, to := max(p.Offset, a.Offset), min(p.Offset+p.Bytes, a.End())
		for at := from; at < to; {
			next := to
			if a.Digests != nil {
				block := (at - a.Offset) / BlockBytes
				next = min(a.Offset+(block+1)*BlockBytes, to)
				if IsZeroBlock(a.Digests[block]) {
					at = next
					continue
				}
			}
			if n := len(extents); n > 0 && at > from && extents[n-1].Start+extents[n-1].Bytes == a.Start+at-a.Offset {
				extents[n-1].Bytes += next - at
			} else {
				extents = append(extents, Extent{Start: a.Start + at - a.Offset, Bytes: next - at, Path: p.Path, Offset: at - p.Offset})
			}
			at = next
		}
	}
	return extents
}

// AreaReader reads the bytes of an area, by offsets as Area.Offset. Several goroutines may read.
type AreaReader struct {
	area *Area
	ctx  context.Context // ends the wait for bytes that are still arriving

	mu    sync.Mutex
	open  map[int]ReaderAtCloser
	views map[int]view
}

// Open returns a reader of the area's bytes. The caller must close it. The end of ctx ends
// its waits for bytes that are still arriving.
func (a *Area) Open(ctx context.Context) *AreaReader {
	return &AreaReader{area: a, ctx: ctx, open: make(map[int]ReaderAtCloser), views: make(map[int]view)}
}

// ReadAt fills p with the bytes at an offset, and waits for those that are still arriving. Those
// outside of the area's range or in no piece are zero. If a file ends early it is ErrDamaged.
func (r *AreaReader) ReadAt(p []byte, offset int64) (int, error) {
	at, whole, pieces := uint64(offset), len(p), r.area.Location
	zeros := func(to uint64) {
		n := min(uint64(len(p)), max(to, at)-at)
		clear(p[:n])
		p, at = p[n:], at+n
	}
	zeros(r.area.Offset) // bytes before the range mean nothing
	for i := pieces.at(at); len(p) > 0; i++ {
		if i == len(pieces) {
			clear(p)
			break
		}
		q := &pieces[i]
		zeros(q.Offset)
		n := min(uint64(len(p)), q.Offset+q.Bytes-at)
		if n == 0 {
			break
		}
		if q.Arrival != nil {
			if err := q.await(r.ctx, at, at+n); err != nil {
				return whole - len(p), err
			}
		}
		f, err := r.file(i)
		if err != nil {
			return whole - len(p), err
		}
		if m, err := f.ReadAt(p[:n], int64(at-q.Offset)); uint64(m) < n {
			if errors.Is(err, io.EOF) {
				return whole - len(p), fmt.Errorf("%w: %s is truncated", ErrDamaged, q)
			}
			return whole - len(p), fmt.Errorf("read %s at %d: %w", q, at-q.Offset, err)
		}
		p, at = p[n:], at+n
	}
	return whole, nil
}

func (r *AreaReader) file(i int) (io.ReaderAt, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if f, ok := r.open[i]; ok {
		return f, nil
	}
	f, err := r.area.Location[i].Open()
	if err != nil {
		return nil, fmt.Errorf("open a piece: %w", err)
	}
	r.open[i] = f
	return f, nil
}

// Close closes the files. Nobody may read a view then.
func (r *AreaReader) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var errs []error
	for _, f := range r.open {
		errs = append(errs, f.Close())
	}
	for _, v := range r.views {
		if v.mem != nil {
			v.unmap()
		}
	}
	clear(r.open)
	clear(r.views)
	return errors.Join(errs...)
}

// NextData returns the offset of the next byte, from an offset on, that may be other than zero; the
// end of the range if there is none. It goes by files' holes.
func (r *AreaReader) NextData(offset uint64) uint64 {
	pieces := r.area.Location
	for i := pieces.at(offset); i < len(pieces); i++ {
		q := &pieces[i]
		offset = max(offset, q.Offset)
		open, err := r.file(i)
		f, seeks := open.(io.Seeker)
		if err != nil || !seeks || q.Arrival != nil { // whose holes say nothing yet
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
	return r.area.End()
}
