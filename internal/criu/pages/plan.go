// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package pages

import (
	"errors"
	"fmt"
	"slices"
	"sort"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/mm"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/pagemap"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/vma"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
)

// pageBytes is the size of the pages that CRIU counts.
const pageBytes = 4096

// leastRun is the average size, in bytes, of a mapping's runs of pages, from which on the mapping is
// chosen. Each run takes two system calls.
const leastRun = 16 << 10

// leastPart is the part of the least memory that a mapping, or a segment, holds for it to be chosen, if
// all of them together hold as much as the least. A program has many of some MiB: its threads' heaps, a
// segment for each tensor.
const leastPart = 64

// span is a range of addresses.
type span struct {
	Start uint64 `json:"start"`
	End   uint64 `json:"end"`
}

// Piece is a run of memory of a process, and where it is in its file.
type Piece struct {
	Start  uint64 `json:"start"`
	Bytes  uint64 `json:"bytes"`
	Offset uint64 `json:"offset"`
}

// Plan is what of a dump's memory CRIU does not restore. The zero Plan leaves all of it to CRIU.
type Plan struct {
	set   *image.Set
	tasks map[string]*task // by the names of their pagemap images
}

// task is one process of a Plan, or one segment of shared memory.
type task struct {
	pid    int     // that is written to, as it counts itself
	shared bool    // of a segment
	places []place // where it is mapped
	spans  []span  // what is filled here, ascending: addresses, of a segment offsets
	full   []span  // the mappings that are filled with huge pages
	pages  string  // the image that has the memory
	bytes  uint64  // that the image must have
	from   *images.Area
	at     uint64 // where the next entry's memory is in it
	pieces []Piece
	rest   []image.Part
}

// NewPlan chooses mappings of a process that together hold at least so many bytes; 0 chooses none.
func NewPlan(set *image.Set, least uint64) (*Plan, error) {
	p := &Plan{set: set, tasks: make(map[string]*task)}
	if least == 0 {
		return p, nil
	}
	names, err := set.Names()
	if err != nil {
		return nil, err
	}
	maps, known, err := mappings(set, names)
	if err != nil {
		return nil, err
	}
	for number, all := range maps {
		all = slices.DeleteFunc(all, func(s span) bool { return known[s] > 1 })
		if name := fmt.Sprintf("pagemap-%d.img", number); len(all) > 0 && set.Has(name) {
			if err := p.choose(name, number, all, least); err != nil {
				return nil, err
			}
		}
	}
	if err := p.chooseSegments(names, least); err != nil {
		return nil, err
	}
	return p, p.find()
}

// Chosen returns the names of the files in a directory whose memory, of at least so many bytes, goes past CRIU for the most
// part, where nothing says otherwise. Memory that forked processes have in common is not among it: CRIU shares it out again.
func Chosen(dir string, least uint64) (names []string, err error) {
	p, err := NewPlan(image.Open(dir), least)
	if err != nil {
		return nil, err
	}
	for _, t := range p.tasks {
		names = append(names, t.pages)
	}
	return names, nil
}

// mappings returns the mappings that may be chosen, by the number of their process, and how many
// processes have a private mapping at each place.
func mappings(set *image.Set, names []string) (may map[int][]span, known map[span]int, err error) {
	may, known = make(map[int][]span), make(map[span]int)
	for _, name := range names {
		number, ok := numberOf(name)
		if !ok {
			continue
		}
		err := image.EachOf(set, name, func(m *mm.MmEntry) error {
			for _, v := range m.GetVmas() {
				s := span{v.GetStart(), v.GetEnd()}
				known[s]++
				if fillable(v) {
					may[number] = append(may[number], s)
				}
			}
			return nil
		})
		if err != nil {
			return nil, nil, err
		}
	}
	return may, known, nil
}

// Kinds of mappings, as CRIU has them (criu/include/image.h).
const (
	vmaRegular     = 1 << 0
	vmaHeap        = 1 << 5
	vmaFileShared  = 1 << 7
	vmaAnonShared  = 1 << 8
	vmaAnonPrivate = 1 << 9
	vmaSysV        = 1 << 10
	vmaMemfd       = 1 << 14
)

// fillable reports whether CRIU restores a mapping as plain memory that a process can write to.
func fillable(v *vma.VmaEntry) bool {
	const prot = unix.PROT_READ | unix.PROT_WRITE
	const flags = unix.MAP_PRIVATE | unix.MAP_ANONYMOUS
	return v.GetStatus()&^vmaHeap == vmaRegular|vmaAnonPrivate && v.GetProt()&prot == prot &&
		v.GetFlags()&^unix.MAP_NORESERVE&^unix.MAP_STACK == flags && v.GetStart() < v.GetEnd()
}

// choose chooses those of a process's mappings that together hold enough memory: none if the process has
// much beside them.
func (p *Plan) choose(name string, pid int, may []span, least uint64) error {
	bytes, runs := make([]uint64, len(may)), make([]uint64, len(may))
	total, chosen := uint64(0), uint64(0)
	t := &task{pid: pid}
	plain := true
	err := p.set.Each(name, func(e *image.Entry) error {
		switch m := e.Message.(type) {
		case *pagemap.PagemapHead:
			t.pages = fmt.Sprintf("pages-%d.img", m.GetPagesId())
		case *pagemap.PagemapEntry:
			s, ok := spanOf(m)
			if plain = plain && ok; !ok {
				return nil
			}
			if total += s.End - s.Start; total >= 1<<62 { // no file has as much
				plain = false
				return nil
			}
			for i := indexOf(may, s.Start); i < len(may) && may[i].Start < s.End; i++ {
				bytes[i] += min(s.End, may[i].End) - max(s.Start, may[i].Start)
				runs[i]++
			}
		}
		return nil
	})
	if err != nil || !plain {
		return err
	}
	for i, s := range may {
		if runs[i] > 0 && bytes[i] >= least/leastPart && bytes[i]/runs[i] >= leastRun {
			t.spans = append(t.spans, s)
			chosen += bytes[i]
			if isFull(s, bytes[i]) {
				t.full = append(t.full, s)
			}
		}
	}
	t.bytes = total
	// What is left is copied once more, for CRIU: that takes time and memory too.
	if len(t.spans) > 0 && chosen >= least && total-chosen <= chosen/2 {
		p.tasks[name] = t
	}
	return nil
}

// find finds the images that have the memory. One that two images refer to stays with CRIU.
func (p *Plan) find() (err error) {
	users := make(map[string]int)
	err = image.EachOf(p.set, "pagemap-*.img", func(m *pagemap.PagemapHead) error {
		users[fmt.Sprintf("pages-%d.img", m.GetPagesId())]++
		return nil
	})
	if err != nil {
		return err
	}
	for name, t := range p.tasks {
		if users[t.pages] > 1 {
			delete(p.tasks, name)
			continue
		}
		if t.from, err = p.set.Memory(t.pages); err == nil && t.from.Bytes < t.bytes {
			err = fmt.Errorf("%w: %s has %d bytes of memory of %d", images.ErrDamaged, t.pages, t.from.Bytes, t.bytes)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// spanOf returns the addresses of an entry. ok is false for one whose memory is not in the image, and
// for one that is no range of addresses.
func spanOf(m *pagemap.PagemapEntry) (s span, ok bool) {
	const present = 1 << 2
	n := m.GetNrPages()
	if m.NrPages == nil {
		n = uint64(m.GetCompatNrPages())
	}
	s = span{m.GetVaddr(), m.GetVaddr() + n*pageBytes}
	return s, m.Flags != nil && m.GetFlags()&present != 0 && !m.GetInParent() && n > 0 && n < 1<<40 && s.Start < s.End && s.Start%pageBytes == 0
}

func (s span) end() uint64 { return s.End }

// indexOf returns the index of the first of some spans, ascending, that ends behind an address.
func indexOf[S interface{ end() uint64 }](spans []S, at uint64) int {
	return sort.Search(len(spans), func(i int) bool { return spans[i].end() > at })
}

// covers reports whether spans, ascending, have all of the addresses.
func covers(spans []span, s span) bool {
	for i := indexOf(spans, s.Start); i < len(spans) && spans[i].Start <= s.Start; i++ {
		if s.Start = spans[i].End; s.Start >= s.End {
			return true
		}
	}
	return false
}

// errChanged says that the images are not those that the Plan was made of.
var errChanged = fmt.Errorf("%w: CRIU's images have changed while they were read", images.ErrDamaged)

// Edit is an edit of the images for image.Set.Copy: it leaves out the memory of the chosen mappings, and
// has CRIU advise huge pages for those that are full.
func (p *Plan) Edit(e *image.Entry) error {
	if m, ok := e.Message.(*mm.MmEntry); ok {
		number, ok := numberOf(e.File)
		for _, t := range p.tasks {
			if ok && t.pid == number {
				t.advise(m)
			}
		}
		return nil
	}
	t := p.tasks[e.File]
	if t == nil {
		return nil
	}
	switch m := e.Message.(type) {
	case *pagemap.PagemapHead:
		if t.pages != fmt.Sprintf("pages-%d.img", m.GetPagesId()) {
			return errChanged
		}
	case *pagemap.PagemapEntry:
		s, ok := spanOf(m)
		if !ok {
			return errChanged
		}
		bytes, at := s.End-s.Start, t.at
		t.at += bytes
		if !covers(t.spans, s) {
			t.rest = addPart(t.rest, image.Part{Offset: at, Bytes: bytes})
			return nil
		}
		if !t.shared {
			t.add(Piece{Start: s.Start, Bytes: bytes, Offset: at})
		}
		for i := indexOf(t.spans, s.Start); t.shared && i < len(t.places) && t.places[i].Start < s.End; i++ {
			p := t.places[i]
			from, to := max(s.Start, p.Start), min(s.End, p.End)
			t.add(Piece{Start: p.at + from - p.Start, Bytes: to - from, Offset: at + from - s.Start})
		}
		return image.ErrOmit
	}
	return nil
}

func (t *task) add(p Piece) {
	if n := len(t.pieces) - 1; n >= 0 && t.pieces[n].Start+t.pieces[n].Bytes == p.Start && t.pieces[n].Offset+t.pieces[n].Bytes == p.Offset {
		t.pieces[n].Bytes += p.Bytes
	} else {
		t.pieces = append(t.pieces, p)
	}
}

func addPart(parts []image.Part, next image.Part) []image.Part {
	if n := len(parts) - 1; n >= 0 && parts[n].Offset+parts[n].Bytes == next.Offset {
		parts[n].Bytes += next.Bytes
		return parts
	}
	return append(parts, next)
}

// Parts returns what CRIU gets of an image with memory, for image.Set.Parts. The pagemap image, which
// comes before it, must have gone through Edit.
func (p *Plan) Parts(name string) (parts []image.Part, some bool) {
	for _, t := range p.tasks {
		if t.pages == name {
			return t.rest, true
		}
	}
	return nil, false
}

// numberOf returns the number of the process whose mappings an image has.
func numberOf(name string) (number int, ok bool) {
	n, err := fmt.Sscanf(name, "mm-%d.img", &number)
	return number, n == 1 && err == nil && name == fmt.Sprintf("mm-%d.img", number)
}

var errNoProcess = errors.New("CRIU has restored no such process")
