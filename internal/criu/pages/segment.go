// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package pages

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"slices"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	ipcshm "github.com/checkpoint-restore/go-criu/v8/crit/images/ipc-shm"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/memfd"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mm"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/pagemap"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/vma"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// CRIU dumps a segment of shared memory (proc.IsSegment) once, by its inode, whoever has it mapped.

// mostSegments bounds the segments of one dump or restore that are copied here: each is a file that is
// open.
const mostSegments = 1024

// segments are those that processes have mapped.
type segments struct {
	least uint64 // what they must hold together to be chosen, in bytes; each leastPart of it
	holds uint64
	known map[uint64]bool // by their inodes
	found map[source]span // where one process has each
}

func newSegments(least uint64) *segments {
	return &segments{least: least, known: make(map[uint64]bool), found: make(map[source]span)}
}

// add adds the segment of a mapping, if it is of one.
func (s *segments) add(pid int, m *proc.Mapping) error {
	if s.known[m.Inode] || !m.IsSegment() || len(s.found) == mostSegments || m.Inode > math.MaxUint32 { // as CRIU counts
		return nil
	}
	var st unix.Stat_t
	if err := unix.Stat(m.File(pid), &st); errors.Is(err, unix.ENOENT) { // the driver has unmapped it
		return nil
	} else if err != nil {
		return fmt.Errorf("look at shared memory of process %s: %w", proc.Describe(pid), err)
	}
	if bytes := uint64(st.Blocks) * blockBytes; bytes >= s.least/leastPart && st.Ino == m.Inode {
		s.known[m.Inode] = true
		s.found[source{pid, true, m.Inode}] = span{m.Start, m.End}
		s.holds += bytes
	}
	return nil
}

// chosen returns those of which each and all hold enough.
func (s *segments) chosen() map[source]span {
	if s.holds < s.least {
		return nil
	}
	return s.found
}

// openSegment opens the file of a mapping, to be read. nil is that there is another mapping now, or none.
func openSegment(from source, s span) (*os.File, error) {
	f, err := os.Open((&proc.Mapping{Start: s.Start, End: s.End}).File(from.pid))
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			err = nil
		}
		return nil, err
	}
	device, err := proc.SegmentDevice()
	var st unix.Stat_t
	if err == nil {
		err = unix.Fstat(int(f.Fd()), &st)
	}
	if err != nil || st.Dev != device || st.Ino != from.inode {
		f.Close()
		return nil, err
	}
	return f, nil
}

func sizeOf(f *os.File) (uint64, error) {
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return uint64(info.Size()), nil
}

func roundUp(bytes uint64) uint64 { return (bytes + pageBytes - 1) / pageBytes * pageBytes }

// scanFile returns the runs of pages that a segment has, as CRIU looks for them.
func scanFile(f *os.File) (runs []span, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, err
	}
	size := roundUp(uint64(st.Size))
	if uint64(st.Blocks)*blockBytes >= size && size > 0 { // all of them: a look at each takes a second for 100 GiB
		return []span{{0, size}}, nil
	}
	for at := int64(0); ; {
		from, err := f.Seek(at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return runs, nil
		}
		if err == nil {
			at, err = f.Seek(from, unix.SEEK_HOLE)
		}
		if err != nil {
			return nil, fmt.Errorf("look for the pages of shared memory: %w", err)
		}
		runs = append(runs, span{uint64(from) / pageBytes * pageBytes, roundUp(uint64(at))})
	}
}

// reader reads memory: of a process from an address, of a segment from an offset.
type reader func(at uint64, buf []byte) error

func memoryOf(pid int) reader {
	return func(at uint64, buf []byte) error { return readMemory(pid, at, buf) }
}

// contentOf returns the reader of a segment of so many bytes, which has pages. Others may have it too, and
// cut it short meanwhile: it is read, not mapped, for a touch of what is not there any more is a signal.
func contentOf(f *os.File, size uint64) reader {
	return func(at uint64, buf []byte) error {
		has := min(uint64(len(buf)), size-min(at, size))
		clear(buf[has:]) // behind the end of the last page
		if _, err := f.ReadAt(buf[:has], int64(at)); errors.Is(err, io.EOF) {
			return errors.New("shared memory was cut short during the dump, by a process that is not frozen")
		} else if err != nil {
			return fmt.Errorf("read shared memory: %w", err)
		}
		return nil
	}
}

// place is where a process has a part of a segment mapped, to be read and written: the span are offsets.
type place struct {
	span
	at uint64
}

// chooseSegments chooses segments of which one process has all pages mapped, so that it can be written
// there: others stay with CRIU.
func (p *Plan) chooseSegments(names []string, least uint64) error {
	at, err := p.places(names)
	if err != nil {
		return err
	}
	chosen, total := make(map[string]*task), uint64(0)
	for segment, processes := range at {
		name := fmt.Sprintf("pagemap-shmem-%d.img", segment)
		if len(chosen) == mostSegments || !p.set.Has(name) {
			continue
		}
		t, runs, err := p.segmentTask(name)
		if err != nil {
			return err
		}
		if t == nil || t.bytes < least/leastPart || t.bytes/uint64(len(runs)) < leastRun {
			continue
		}
		for number, places := range processes {
			if t.place(places, runs) {
				t.pid = number
				chosen[name] = t
				total += t.bytes
				break
			}
		}
	}
	if total >= least {
		maps.Copy(p.tasks, chosen)
	}
	return nil
}

// segmentsOf returns the segments by what a mapping of them says in an image: a file's number for those that
// CRIU restores as memfds, which are all but those of shmget.
func (p *Plan) segmentsOf() (byFile, byID map[uint64]uint64, err error) {
	inodes := make(map[uint64]uint64)
	byFile, byID = make(map[uint64]uint64), make(map[uint64]uint64)
	for _, name := range []string{"memfd.img", "files.img"} { // in this order
		if err == nil && p.set.Has(name) {
			err = p.set.Each(name, func(e *image.Entry) error {
				switch m := e.Message.(type) {
				case *memfd.MemfdInodeEntry:
					inodes[m.GetInodeId()] = uint64(m.GetShmid())
				case *fdinfo.FileEntry:
					if inode, ok := inodes[uint64(m.GetMemfd().GetInodeId())]; ok && m.GetMemfd() != nil {
						byFile[uint64(m.GetId())] = inode
					}
				}
				return nil
			})
		}
	}
	if err == nil {
		err = image.EachOf(p.set, "ipcns-shm-*.img", func(m *ipcshm.IpcShmEntry) error {
			if m.GetHugetlbFlag() == 0 {
				id := uint64(m.GetDesc().GetId())
				byID[id] = id
			}
			return nil
		})
	}
	return byFile, byID, err
}

// places returns where processes have segments mapped, by the numbers of both.
func (p *Plan) places(names []string) (map[uint64]map[int][]place, error) {
	at := make(map[uint64]map[int][]place)
	byFile, byID, err := p.segmentsOf()
	if err != nil || len(byFile)+len(byID) == 0 {
		return at, err
	}
	for _, name := range names {
		number, ok := numberOf(name)
		if !ok {
			continue
		}
		err := image.EachOf(p.set, name, func(m *mm.MmEntry) error {
			for _, v := range m.GetVmas() {
				var segment uint64
				ok := false
				if isMapped(v, vmaFileShared|vmaMemfd, 0) {
					segment, ok = byFile[v.GetShmid()]
				} else if isMapped(v, vmaAnonShared|vmaSysV, unix.MAP_ANONYMOUS) {
					segment, ok = byID[v.GetShmid()]
				}
				if !ok {
					continue
				}
				if at[segment] == nil {
					at[segment] = make(map[int][]place)
				}
				from := v.GetPgoff()
				at[segment][number] = append(at[segment][number], place{span{from, from + v.GetEnd() - v.GetStart()}, v.GetStart()})
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return at, nil
}

// isMapped reports whether CRIU restores a mapping as one of a segment that a process can write to.
func isMapped(v *vma.VmaEntry, status, flags uint32) bool {
	const prot = unix.PROT_READ | unix.PROT_WRITE
	return v.GetStatus() == vmaRegular|status && v.GetProt()&prot == prot && v.GetFlags()&^unix.MAP_NORESERVE == unix.MAP_SHARED|flags &&
		v.GetStart() < v.GetEnd() && v.GetEnd() < 1<<62 && v.GetPgoff() < 1<<62
}

// segmentTask reads what a segment has. nil is one that CRIU is to restore.
func (p *Plan) segmentTask(name string) (*task, []span, error) {
	t, runs, plain := &task{shared: true}, []span(nil), true
	err := p.set.Each(name, func(e *image.Entry) error {
		switch m := e.Message.(type) {
		case *pagemap.PagemapHead:
			t.pages = fmt.Sprintf("pages-%d.img", m.GetPagesId())
		case *pagemap.PagemapEntry:
			s, ok := spanOf(m)
			if n := len(runs); n > 0 && s.Start < runs[n-1].End {
				ok = false
			}
			if plain = plain && ok; plain {
				runs = append(runs, s)
				t.bytes += s.End - s.Start
			}
		}
		return nil
	})
	if err != nil || !plain || len(runs) == 0 {
		return nil, nil, err
	}
	return t, runs, nil
}

// place reports whether places have all of the runs, and has the task write there then.
func (t *task) place(places []place, runs []span) bool {
	slices.SortFunc(places, func(a, b place) int { return cmp.Compare(a.Start, b.Start) })
	t.places, t.spans = nil, nil
	end := uint64(0)
	lacks := func(next uint64) bool { // something between here and there
		i := indexOf(runs, end)
		return next > end && i < len(runs) && runs[i].Start < next
	}
	for _, p := range places {
		if p.End <= end {
			continue
		}
		if lacks(p.Start) {
			return false
		}
		if p.Start < end { // mapped twice
			p.at, p.Start = p.at+end-p.Start, end
		}
		end = p.End
		t.places, t.spans = append(t.places, p), append(t.spans, p.span)
	}
	return !lacks(math.MaxUint64)
}
