// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package images

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/mmapfile"
)

// view is a piece on a tmpfs, mapped: its bytes need not be copied to be digested.
type view struct {
	mem   []byte // nil if the piece is elsewhere
	unmap func()
	holes bool // a read of a hole by way of a mapping fills it with memory
}

// view returns n bytes at an offset where they are in memory, once they have arrived, until the reader is
// closed; nil if they must be read, or never arrive. They may be gone at any time, see useView.
func (r *AreaReader) view(offset, n uint64) []byte {
	i := r.area.Location.at(offset)
	if i == len(r.area.Location) {
		return nil
	}
	q := &r.area.Location[i]
	if offset < r.area.Offset { // bytes before the range mean nothing
		return nil
	}
	if q.Data != nil || offset < q.Offset || offset+n > q.Offset+q.Bytes {
		return nil
	}
	if q.Arrival != nil && q.await(r.ctx, offset, offset+n) != nil {
		return nil
	}
	open, err := r.file(i)
	f, ok := open.(*os.File)
	if err != nil || !ok {
		return nil
	}
	r.mu.Lock()
	v, ok := r.views[i]
	if !ok {
		v = mapView(f, q.Bytes)
		r.views[i] = v
	}
	r.mu.Unlock()
	if v.mem == nil {
		return nil
	}
	mem := v.mem[offset-q.Offset:][:n]
	if v.holes && !resident(mem) {
		return nil
	}
	return mem
}

// mapView maps a file of a tmpfs at an address that huge pages can be used at. Without a mapping the
// file is read, and an error shows then.
func mapView(f *os.File, size uint64) (v view) {
	var st unix.Stat_t
	if !mmapfile.InMemory(f) || unix.Fstat(int(f.Fd()), &st) != nil {
		return v
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || uint64(st.Size) < size {
		return v
	}
	mem, unmap, err := mmapfile.File(f, size, unix.PROT_READ)
	if err != nil {
		return v
	}
	return view{mem: mem, unmap: unmap, holes: uint64(st.Blocks)*512 < uint64(st.Size)}
}

// resident reports whether memory has all pages of a part of a mapping.
func resident(mem []byte) bool {
	from := uintptr(unsafe.Pointer(unsafe.SliceData(mem)))
	if from%PageBytes != 0 {
		return false
	}
	pages := make([]byte, (len(mem)+PageBytes-1)/PageBytes)
	_, _, errno := unix.Syscall(unix.SYS_MINCORE, from, uintptr(len(mem)), uintptr(unsafe.Pointer(unsafe.SliceData(pages))))
	return errno == 0 && bytes.IndexByte(pages, 0) < 0 // nothing but the lowest bit is used
}

// WriteRange writes the bytes of a range, as ReadAt reads them, by way of buf. What is in memory is written from there.
func (r *AreaReader) WriteRange(w io.Writer, from, to uint64, buf []byte) error {
	for from < to {
		n := min(to-from, uint64(len(buf)))
		write := func(b []byte) error {
			_, err := w.Write(b)
			return err
		}
		var err error
		if view := r.view(from, n); view != nil {
			if err = useView(view, write); errors.Is(err, errCutShort) {
				err = fmt.Errorf("%s: %w", &r.area.Location[r.area.Location.at(from)], err)
			}
		} else if _, err = r.ReadAt(buf[:n], int64(from)); err == nil {
			err = write(buf[:n])
		}
		if err != nil {
			return err
		}
		from += n
	}
	return nil
}

var errCutShort = fmt.Errorf("%w: a file of memory or GPU state was cut short while it was read", ErrDamaged)

// useView calls use with a view. It is ErrDamaged if the file has become shorter.
func useView(view []byte, use func([]byte) error) (err error) {
	// The goroutine panics in the place of a fatal signal.
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		switch fault := recover().(type) {
		case nil:
		case interface{ Addr() uintptr }:
			err = errCutShort
		default:
			panic(fault)
		}
	}()
	if err := use(view); !errors.Is(err, unix.EFAULT) { // of a system call that had the view
		return err
	}
	return errCutShort
}
