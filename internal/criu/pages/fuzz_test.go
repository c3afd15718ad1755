// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package pages

import (
	"cmp"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/mm"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/pagemap"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/vma"
	"google.golang.org/protobuf/proto"

	"github.com/gpuckpt/gpuckpt/internal/criu/image"
)

// The images of a stranger's checkpoint are split between CRIU and this package, or refused. Each
// page that the pagemap has goes one way, and is in the file at the place that it is taken from.
func FuzzPlan(f *testing.F) {
	seed := func(entries ...proto.Message) {
		dir := f.TempDir()
		writeImage(f, dir, "mm-7.img", "MM", memory(mapping(10, 20), mapping(100, 200), mapping(400, 100)))
		writeImage(f, dir, "pagemap-7.img", "PAGEMAP", append([]proto.Message{head(3)}, entries...)...)
		var parts [2][]byte
		for i, name := range []string{"mm-7.img", "pagemap-7.img"} {
			var err error
			if parts[i], err = os.ReadFile(filepath.Join(dir, name)); err != nil {
				f.Fatal(err)
			}
		}
		f.Add(parts[0], parts[1], uint16(300))
	}
	seed(run(10, 5), run(100, 200), run(400, 64))
	seed(run(100, 100), run(150, 100), run(100, 200))
	seed(run(100, 1<<39), run(1<<50, 1<<39), run(400, 100))
	seed(run(100, 70), &pagemap.PagemapEntry{Vaddr: new(uint64(400 * pageBytes)), CompatNrPages: new(uint32(64))})
	f.Fuzz(func(t *testing.T, memory, pagemap []byte, have uint16) {
		dir := t.TempDir()
		for name, data := range map[string][]byte{"mm-7.img": memory, "pagemap-7.img": pagemap} {
			if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		sparse(t, dir, have)
		set := image.Open(dir)
		p, err := NewPlan(set, least)
		if err != nil {
			return
		}
		var total uint64
		err = set.Each("pagemap-7.img", func(e *image.Entry) error {
			if err := p.Edit(e); err != nil && err != image.ErrOmit { //nolint:errorlint // it is returned as it is
				return err
			}
			return nil
		})
		task := p.tasks["pagemap-7.img"]
		if err != nil || task == nil {
			return
		}
		if task.at > uint64(have)*pageBytes {
			t.Fatalf("%d bytes are to be taken of %d", task.at, int(have)*pageBytes)
		}
		for _, piece := range task.pieces {
			if !covers(task.spans, span{piece.Start, piece.Start + piece.Bytes}) {
				t.Fatalf("%+v is in no mapping that was chosen, %+v", piece, task.spans)
			}
			total += piece.Bytes
		}
		for _, part := range task.rest {
			total += part.Bytes
		}
		if total != task.at {
			t.Fatalf("%d of %d bytes go one way", total, task.at)
		}
	})
}

// sparse makes a file of so many pages, without one in it.
func sparse(t *testing.T, dir string, pages uint16) {
	t.Helper()
	f, err := os.Create(filepath.Join(dir, "pages-3.img"))
	if err == nil {
		err = errors.Join(f.Truncate(int64(pages)*pageBytes), f.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
}

// What is filled of segments of shared memory is memory that the process has mapped so, and CRIU has no use
// for; each page is filled once, from the place that it has in the file.
func FuzzSegments(f *testing.F) {
	names := []string{"memfd.img", "files.img", "mm-7.img", "pagemap-shmem-1234.img"}
	for _, vmas := range [][]*vma.VmaEntry{
		{sharedAt(1000, 100, 5, 0)},
		{sharedAt(1000, 40, 5, 60), sharedAt(2000, 40, 5, 0), sharedAt(3000, 30, 5, 20), sharedAt(4000, 100, 4, 0)},
		{sharedAt(1000, 100, 5, 0), sharedAt(2000, 100, 5, 0)},
		{sharedAt(1000, 1<<49, 5, 1<<49)},
	} {
		dir := f.TempDir()
		segmentImages(f, dir)
		writeImage(f, dir, "mm-7.img", "MM", memory(vmas...))
		var parts [4][]byte
		for i, name := range names {
			var err error
			if parts[i], err = os.ReadFile(filepath.Join(dir, name)); err != nil {
				f.Fatal(err)
			}
		}
		f.Add(parts[0], parts[1], parts[2], parts[3], uint16(90))
	}
	f.Fuzz(func(t *testing.T, memfds, fds, memory, pagemap []byte, have uint16) {
		dir := t.TempDir()
		for i, data := range [][]byte{memfds, fds, memory, pagemap} {
			if err := os.WriteFile(filepath.Join(dir, names[i]), data, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		sparse(t, dir, have)
		set := image.Open(dir)
		p, err := NewPlan(set, least)
		if err != nil {
			return
		}
		task := p.tasks[names[3]]
		if task == nil {
			return
		}
		err = set.Each(names[3], func(e *image.Entry) error {
			if err := p.Edit(e); err != nil && err != image.ErrOmit { //nolint:errorlint // it is returned as it is
				return err
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		var mapped []span
		err = set.Each("mm-7.img", func(e *image.Entry) error {
			for _, v := range e.Message.(*mm.MmEntry).GetVmas() {
				if isMapped(v, vmaFileShared|vmaMemfd, 0) {
					mapped = append(mapped, span{v.GetStart(), v.GetEnd()})
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		next := uint64(0) // in the file
		for _, piece := range task.pieces {
			if !adjoin(mapped, piece) {
				t.Fatalf("%+v is in no such mapping, %+v", piece, mapped)
			}
			if piece.Offset != next || piece.Bytes == 0 {
				t.Fatalf("%+v is not behind %d", piece, next)
			}
			next += piece.Bytes
		}
		if len(task.rest) > 0 || next != task.at || next > uint64(have)*pageBytes {
			t.Fatalf("%d of %d bytes are filled, of %d that there are; CRIU gets %v", next, task.at, int(have)*pageBytes, task.rest)
		}
	})
}

// adjoin reports whether a mapping, or some that follow each other, have all of a piece.
func adjoin(mapped []span, p Piece) bool {
	mapped = slices.Clone(mapped)
	slices.SortFunc(mapped, func(a, b span) int { return cmp.Compare(a.Start, b.Start) })
	for _, s := range mapped {
		if s.Start <= p.Start && p.Start < s.End {
			n := min(p.Bytes, s.End-p.Start)
			p.Start, p.Bytes = p.Start+n, p.Bytes-n
		}
	}
	return p.Bytes == 0
}
