// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package pages

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/mm"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/pagemap"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/node/mmapfile"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// maxRun bounds an entry of a pagemap, in bytes.
const maxRun = 64 << 20

// temporary begins the name of an image until it is complete.
const temporary = ".tmp-"

// run is a run of pages of a pagemap.
type memoryRun struct {
	span
	entry *pagemap.PagemapEntry // CRIU's; nil for one that CRIU has left out
	from  uint64                // where CRIU's memory is in CRIU's file
}

// merge puts into the images of a source what CRIU has left out, and returns its bytes. 0 is that
// CRIU has left out nothing. CRIU's files stay as they were until the new ones take their place. The
// digests, if they are asked for, are those of the image with the name.
func (d *dumper) merge(from source, number int, dir string, digest bool) (a answer, err error) {
	h := d.of[from]
	if h == nil {
		return a, fmt.Errorf("process %d: its memory was not looked for", from.pid)
	}
	delete(d.of, from)
	defer h.close()
	name := fmt.Sprintf("pagemap-%d.img", number)
	set := image.Open(dir)
	if from.shared {
		name = fmt.Sprintf("pagemap-shmem-%d.img", from.inode)
	} else if err := h.mapped(set, number); err != nil {
		return a, err
	}
	pages, runs, err := readRuns(set, name)
	if err != nil {
		return a, err
	}
	left, total := h.leftOut(runs)
	if len(left) == 0 {
		return a, nil
	}
	runs = append(runs, left...)
	slices.SortStableFunc(runs, func(a, b memoryRun) int { return cmp.Compare(a.Start, b.Start) })
	old, err := set.OpenFile(pages)
	if err != nil {
		return a, err
	}
	defer old.Close()
	if a.Digests, err = writePagesOf(filepath.Join(dir, pages), old, h.read, runs, h.room, digest); err != nil {
		return a, err
	}
	a.Bytes, a.Name, a.Ahead = total, pages, h.room.made()
	return a, writePagemap(dir, name, runs)
}

// mapped refuses a dump that lacks a mapping of which something was left out. It may be one that CRIU is to fill at a
// restore, such as locked memory.
func (h *held) mapped(set *image.Set, number int) error {
	var all []span
	err := image.EachOf(set, fmt.Sprintf("mm-%d.img", number), func(m *mm.MmEntry) error {
		for _, v := range m.GetVmas() {
			if v.GetStatus()&vmaAnonPrivate != 0 {
				all = append(all, span{v.GetStart(), v.GetEnd()})
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, s := range h.kept {
		if !covers(all, s) {
			return fmt.Errorf("CRIU has dumped no mapping of memory from %#x to %#x: the program has changed it meanwhile", s.Start, s.End)
		}
	}
	return nil
}

// readRuns reads a pagemap of CRIU's.
func readRuns(set *image.Set, name string) (pages string, runs []memoryRun, err error) {
	at := uint64(0)
	err = set.Each(name, func(e *image.Entry) error {
		switch m := e.Message.(type) {
		case *pagemap.PagemapHead:
			pages = fmt.Sprintf("pages-%d.img", m.GetPagesId())
		case *pagemap.PagemapEntry:
			s, ok := spanOf(m)
			if !ok {
				return e.Errorf("its memory is not in the image")
			}
			runs = append(runs, memoryRun{s, proto.CloneOf(m), at})
			at += s.End - s.Start
		}
		return nil
	})
	return pages, runs, err
}

// leftOut returns the memory that CRIU has left out, and its bytes. What CRIU has dumped all the same
// is not among it, so each page is there once, whatever CRIU heeded.
func (h *held) leftOut(criu []memoryRun) (left []memoryRun, total uint64) {
	add := func(start, end uint64) {
		for ; start < end; start += maxRun {
			s := span{start, min(start+maxRun, end)}
			left = append(left, memoryRun{span: s})
			total += s.End - s.Start
		}
	}
	for _, r := range h.runs {
		for i := indexOf(criu, r.Start); i < len(criu) && criu[i].Start < r.End; i++ {
			add(r.Start, min(criu[i].Start, r.End))
			r.Start = max(r.Start, criu[i].End)
		}
		add(r.Start, r.End)
	}
	return left, total
}

// writePagesOf writes the memory of all runs in the place of CRIU's file, and returns the digests of
// its blocks if they are asked for. Pages of zeros become holes. The room becomes the file, if there is one.
func writePagesOf(path string, old *os.File, read reader, runs []memoryRun, room *room, digest bool) (digests []string, err error) {
	info, err := old.Stat()
	if err != nil {
		return nil, err
	}
	image := newImage{old: old, memory: read, runs: runs, offsets: make([]uint64, len(runs)+1)}
	for i, r := range runs {
		image.offsets[i+1] = image.offsets[i] + r.End - r.Start
	}
	return digests, replace(path, info.Mode().Perm(), room.take(), func(f *os.File) error {
		bytes := image.offsets[len(runs)]
		to, err := newPagesFile(f, bytes, mmapfile.InMemory(f))
		if err != nil {
			return err
		}
		defer to.close()
		digests, err = image.write(to, bytes, digest)
		return err
	})
}

// newImage is what a new image of memory is made of.
type newImage struct {
	old     *os.File // CRIU's image
	memory  reader
	runs    []memoryRun
	offsets []uint64 // where each run is in the new image, and the end
}

// write copies the image's bytes, on all processors. With the digests a thread computes those of what
// it copies while its processor's cache has the bytes: nobody reads the image again.
func (m *newImage) write(to *pagesFile, bytes uint64, digest bool) ([]string, error) {
	copyTo := func(buf []byte, at uint64) error {
		if err := m.read(buf, at); err != nil {
			return err
		}
		return to.write(buf, at)
	}
	if !digest {
		return nil, eachChunk([]Piece{{Bytes: bytes}}, func(p Piece, buf []byte) error { return copyTo(buf, p.Start) })
	}
	digests := make([]string, (bytes+images.BlockBytes-1)/images.BlockBytes)
	group, ctx := errgroup.WithContext(context.Background())
	group.SetLimit(runtime.NumCPU())
	for i := range digests {
		from := uint64(i) * images.BlockBytes
		group.Go(func() (err error) {
			digests[i], err = images.DigestRead(min(images.BlockBytes, bytes-from), runtime.NumCPU()/len(digests), func(buf []byte, at uint64) error {
				if ctx.Err() != nil {
					return context.Cause(ctx)
				}
				return copyTo(buf, from+at)
			})
			return err
		})
	}
	return digests, group.Wait()
}

// read reads bytes of the image at an offset, each from CRIU's image or from the memory.
func (m *newImage) read(buf []byte, at uint64) error {
	i, found := slices.BinarySearch(m.offsets, at)
	if !found {
		i--
	}
	for ; len(buf) > 0; i++ {
		r, skip := m.runs[i], at-m.offsets[i]
		part := buf[:min(uint64(len(buf)), m.offsets[i+1]-at)]
		if r.entry == nil {
			if err := m.memory(r.Start+skip, part); err != nil {
				return err
			}
		} else if _, err := m.old.ReadAt(part, int64(r.from+skip)); err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return fmt.Errorf("read %s: %w", m.old.Name(), err)
		}
		buf, at = buf[len(part):], at+uint64(len(part))
	}
	return nil
}

// replace writes a file anew. It writes into unnamed, an empty file without a name that it closes, or makes
// one if that is nil. On an error the file is as it was, and nothing lies beside it.
func replace(path string, perm os.FileMode, unnamed *os.File, write func(*os.File) error) error {
	name := filepath.Join(filepath.Dir(path), temporary+filepath.Base(path))
	_ = os.Remove(name) // of a worker that was killed
	f, err := unnamed, error(nil)
	if f != nil {
		err = f.Chmod(perm)
	} else if f, err = os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, perm); err != nil { // to be mapped
		return err
	}
	if err == nil {
		err = write(f)
	}
	if err == nil && unnamed != nil {
		err = unix.Linkat(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", f.Fd()), unix.AT_FDCWD, name, unix.AT_SYMLINK_FOLLOW)
	}
	if err = cmp.Or(err, f.Close()); err == nil {
		err = os.Rename(name, path)
	}
	if err != nil {
		_ = os.Remove(name)
	}
	return err
}

func readMemory(pid int, start uint64, buf []byte) error {
	local := []unix.Iovec{{Base: &buf[0]}}
	local[0].SetLen(len(buf))
	n, err := unix.ProcessVMReadv(pid, local, []unix.RemoteIovec{{Base: uintptr(start), Len: len(buf)}}, 0)
	if err == nil && n != len(buf) {
		err = fmt.Errorf("the kernel has read %d", n)
	}
	if err != nil {
		return fmt.Errorf("read %d bytes at %#x of process %s: %w", len(buf), start, proc.Describe(pid), err)
	}
	return nil
}

// writePagemap writes a pagemap anew, with the head that it has.
func writePagemap(dir, name string, runs []memoryRun) error {
	path := filepath.Join(dir, name)
	old, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	const magics = 8
	if len(old) < magics+4 {
		return io.ErrUnexpectedEOF
	}
	end := magics + 4 + int(binary.LittleEndian.Uint32(old[magics:]))
	if end > len(old) {
		return io.ErrUnexpectedEOF
	}
	var b bytes.Buffer
	b.Write(old[:end])
	const present = 1 << 2
	for _, r := range runs {
		entry := r.entry
		if entry == nil {
			entry = &pagemap.PagemapEntry{Vaddr: &r.Start, CompatNrPages: new(uint32(0)), Flags: new(uint32(present)), NrPages: new((r.End - r.Start) / pageBytes)}
		}
		data, err := proto.Marshal(entry)
		if err != nil {
			return err
		}
		b.Write(binary.LittleEndian.AppendUint32(nil, uint32(len(data))))
		b.Write(data)
	}
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	return replace(path, info.Mode().Perm(), nil, func(f *os.File) error {
		_, err := f.Write(b.Bytes())
		return err
	})
}
