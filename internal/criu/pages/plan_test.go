// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package pages

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/mm"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/pagemap"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/vma"
	"github.com/checkpoint-restore/go-criu/v8/magic"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/node/mmapfile"
)

// least is what a mapping of the tests must hold: 64 pages.
const least = 64 * pageBytes

func writeImage(t testing.TB, dir, name, kind string, entries ...proto.Message) {
	t.Helper()
	magics := magic.LoadMagic().ByName
	b := binary.LittleEndian.AppendUint32(nil, uint32(magics["IMG_COMMON"]))
	b = binary.LittleEndian.AppendUint32(b, uint32(magics[kind]))
	for _, e := range entries {
		data, err := proto.Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		b = append(binary.LittleEndian.AppendUint32(b, uint32(len(data))), data...)
	}
	if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// mapping is one of CRIU's, of so many pages from a page on.
func mapping(from, pages uint64, change ...func(*vma.VmaEntry)) *vma.VmaEntry {
	v := &vma.VmaEntry{
		Start: new(from * pageBytes), End: new((from + pages) * pageBytes), Pgoff: proto.Uint64(0), Shmid: proto.Uint64(0),
		Prot: proto.Uint32(unix.PROT_READ | unix.PROT_WRITE), Flags: proto.Uint32(unix.MAP_PRIVATE | unix.MAP_ANONYMOUS),
		Status: proto.Uint32(vmaRegular | vmaAnonPrivate), Fd: proto.Int64(-1),
	}
	for _, do := range change {
		do(v)
	}
	return v
}

func memory(vmas ...*vma.VmaEntry) *mm.MmEntry {
	m := &mm.MmEntry{ExeFileId: proto.Uint32(1), Vmas: vmas}
	for _, at := range []**uint64{
		&m.MmStartCode, &m.MmEndCode, &m.MmStartData, &m.MmEndData, &m.MmStartStack, &m.MmStartBrk, &m.MmBrk,
		&m.MmArgStart, &m.MmArgEnd, &m.MmEnvStart, &m.MmEnvEnd,
	} {
		*at = proto.Uint64(0)
	}
	return m
}

func head(id uint32) *pagemap.PagemapHead { return &pagemap.PagemapHead{PagesId: new(id)} }

func run(from, pages uint64) *pagemap.PagemapEntry {
	return &pagemap.PagemapEntry{Vaddr: new(from * pageBytes), CompatNrPages: proto.Uint32(0), Flags: proto.Uint32(4), NrPages: new(pages)}
}

// writePages makes the memory of so many pages, each full of its number from 1 on.
func writePages(t testing.TB, dir, name string, pages int) {
	t.Helper()
	var b []byte
	for i := range pages {
		b = append(b, bytes.Repeat([]byte{byte(i + 1)}, pageBytes)...)
	}
	if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
		t.Fatal(err)
	}
}

func plan(t testing.TB, dir string) *Plan {
	t.Helper()
	p, err := NewPlan(image.Open(dir), least)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// copyBy copies the images by a plan, and returns where CRIU would read them.
func copyBy(t testing.TB, dir string, p *Plan) string {
	t.Helper()
	to, err := image.NewDir(0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(to.Close)
	p.set.Parts = p.Parts
	if err := p.set.Copy(t.Context(), to, p.Edit); err != nil {
		t.Fatal(err)
	}
	if err := to.Seal(); err != nil {
		t.Fatal(err)
	}
	return to.Path()
}

// CRIU gets all but the runs that lie in large mappings; what it gets is where its pagemap says.
func TestPlan(t *testing.T) {
	dir := t.TempDir()
	writeImage(t, dir, "mm-7.img", "MM", memory(
		mapping(10, 20),  // too little in a run
		mapping(100, 80), // chosen, with two runs
		mapping(180, 70), // chosen; its first run begins in the one before
		mapping(250, 100, func(v *vma.VmaEntry) { v.Flags = proto.Uint32(unix.MAP_PRIVATE | unix.MAP_ANONYMOUS | unix.MAP_LOCKED) }),
	))
	writeImage(t, dir, "pagemap-7.img", "PAGEMAP", head(3), run(10, 3), run(100, 30), run(140, 60), run(205, 45), run(250, 60))
	writePages(t, dir, "pages-3.img", 3+30+60+45+60)
	if chosen, err := Chosen(dir, least); err != nil || !slices.Equal(chosen, []string{"pages-3.img"}) {
		t.Errorf("chosen are %v, %v", chosen, err)
	}
	p := plan(t, dir)
	to := copyBy(t, dir, p)

	var left []span
	err := image.Open(to).Each("pagemap-7.img", func(e *image.Entry) error {
		if m, ok := e.Message.(*pagemap.PagemapEntry); ok {
			s, _ := spanOf(m)
			left = append(left, span{s.Start / pageBytes, s.End / pageBytes})
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if want := []span{{10, 13}, {250, 310}}; !reflect.DeepEqual(left, want) {
		t.Errorf("CRIU restores %v, want %v", left, want)
	}
	rest, err := os.ReadFile(filepath.Join(to, "pages-3.img"))
	if err != nil {
		t.Fatal(err)
	}
	if len(rest) != 63*pageBytes || rest[0] != 1 || rest[3*pageBytes] != 3+30+60+45+1 {
		t.Errorf("CRIU gets %d bytes, page 3 of them %d", len(rest), rest[3*pageBytes])
	}
	want := []Piece{
		{100 * pageBytes, 30 * pageBytes, 3 * pageBytes}, {140 * pageBytes, 60 * pageBytes, 33 * pageBytes}, {205 * pageBytes, 45 * pageBytes, 93 * pageBytes},
	}
	if got := p.tasks["pagemap-7.img"].pieces; !reflect.DeepEqual(got, want) {
		t.Errorf("filled are %v, want %v", got, want)
	}
}

// What is not plain memory of one process alone stays with CRIU, and so does what is in many small
// runs.
func TestPlanLeaves(t *testing.T) {
	for name, change := range map[string]func(*vma.VmaEntry){
		"a file":         func(v *vma.VmaEntry) { v.Status = proto.Uint32(vmaRegular | 1<<6) },
		"shared memory":  func(v *vma.VmaEntry) { v.Status = proto.Uint32(vmaRegular | 1<<8) },
		"read-only":      func(v *vma.VmaEntry) { v.Prot = proto.Uint32(unix.PROT_READ) },
		"a stack":        func(v *vma.VmaEntry) { v.Flags = new(v.GetFlags() | unix.MAP_GROWSDOWN) },
		"locked":         func(v *vma.VmaEntry) { v.Flags = new(v.GetFlags() | unix.MAP_LOCKED) },
		"huge pages":     func(v *vma.VmaEntry) { v.Flags = new(v.GetFlags() | unix.MAP_HUGETLB) },
		"a shadow stack": func(v *vma.VmaEntry) { v.Status = new(v.GetStatus() | 1<<15) },
	} {
		dir := t.TempDir()
		writeImage(t, dir, "mm-7.img", "MM", memory(mapping(100, 80, change)))
		writeImage(t, dir, "pagemap-7.img", "PAGEMAP", head(3), run(100, 80))
		writePages(t, dir, "pages-3.img", 80)
		if p := plan(t, dir); len(p.tasks) > 0 {
			t.Errorf("%s: it is chosen", name)
		}
	}
	dir := t.TempDir()
	writeImage(t, dir, "mm-7.img", "MM", memory(mapping(100, 80), mapping(300, 300)))
	writeImage(t, dir, "mm-8.img", "MM", memory(mapping(100, 80)))
	small := []proto.Message{head(3), run(100, 80)}
	for at := uint64(300); at < 600; at += 3 {
		small = append(small, run(at, 2))
	}
	writeImage(t, dir, "pagemap-7.img", "PAGEMAP", small...)
	writeImage(t, dir, "pagemap-8.img", "PAGEMAP", head(4), run(100, 80))
	writePages(t, dir, "pages-3.img", 280)
	writePages(t, dir, "pages-4.img", 80)
	if p := plan(t, dir); len(p.tasks) > 0 {
		t.Errorf("a mapping of two processes, or one in small runs, is chosen: %v", p.tasks)
	}
	writeImage(t, dir, "mm-8.img", "MM", memory(mapping(1000, 80)))
	writeImage(t, dir, "pagemap-7.img", "PAGEMAP", head(3), run(100, 80))
	writeImage(t, dir, "pagemap-8.img", "PAGEMAP", head(3), run(1000, 80))
	if p := plan(t, dir); len(p.tasks) > 0 {
		t.Errorf("two processes have their memory in one file, and it is chosen: %v", p.tasks)
	}
}

// What CRIU restores is copied for it: a process with much of that stays with CRIU.
func TestPlanMuchBeside(t *testing.T) {
	for beside, chosen := range map[uint64]int{40: 1, 41: 0} {
		dir := t.TempDir()
		locked := mapping(500, 50, func(v *vma.VmaEntry) { v.Flags = new(v.GetFlags() | unix.MAP_LOCKED) })
		writeImage(t, dir, "mm-7.img", "MM", memory(mapping(100, 80), locked))
		writeImage(t, dir, "pagemap-7.img", "PAGEMAP", head(3), run(100, 80), run(500, beside))
		writePages(t, dir, "pages-3.img", 80+int(beside))
		if p := plan(t, dir); len(p.tasks) != chosen {
			t.Errorf("with %d pages beside 80, %d processes are chosen", beside, len(p.tasks))
		}
	}
}

// Mappings of some size count together: a program has many of them.
func TestPlanOfParts(t *testing.T) {
	for parts, chosen := range map[uint64]int{least / pageBytes / 16: 1, least/pageBytes/16 - 1: 0} {
		dir := t.TempDir()
		var mappings []*vma.VmaEntry
		pages := []proto.Message{head(3)}
		for i := range parts {
			mappings = append(mappings, mapping(100+20*i, 20))
			pages = append(pages, run(100+20*i, 16))
		}
		writeImage(t, dir, "mm-7.img", "MM", memory(mappings...))
		writeImage(t, dir, "pagemap-7.img", "PAGEMAP", pages...)
		writePages(t, dir, "pages-3.img", int(16*parts))
		if p := plan(t, dir); len(p.tasks) != chosen {
			t.Errorf("of %d mappings with 16 pages each, %d processes are chosen", parts, len(p.tasks))
		}
	}
}

// A mapping without pages is not chosen, however little is asked for.
func TestPlanOfNothing(t *testing.T) {
	dir := t.TempDir()
	writeImage(t, dir, "mm-7.img", "MM", memory(mapping(100, 80), mapping(300, 80)))
	writeImage(t, dir, "pagemap-7.img", "PAGEMAP", head(3), run(300, 80))
	writePages(t, dir, "pages-3.img", 80)
	p, err := NewPlan(image.Open(dir), 1)
	if err != nil {
		t.Fatal(err)
	}
	if got := p.tasks["pagemap-7.img"].spans; len(got) != 1 {
		t.Errorf("chosen are %v", got)
	}
}

// Memory that lies in pieces elsewhere is planned, copied for CRIU, and filled as that of one file.
func TestPlanInPieces(t *testing.T) {
	const pieces, pages = 3, 2*images.PieceAlign/pageBytes + 8
	mapped := mapMemory(t, pages, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, -1)
	want := make([]byte, pages*pageBytes)
	for i := range want {
		want[i] = byte(i/pageBytes*7 + i%13 + 1)
	}
	dir, blobs := t.TempDir(), t.TempDir()
	first := addressOf(mapped) / pageBytes
	writeImage(t, dir, "mm-7.img", "MM", memory(mapping(first, pages)))
	writeImage(t, dir, "pagemap-7.img", "PAGEMAP", head(3), run(1, 4), run(first, pages)) // the first four are CRIU's
	file := slices.Concat(bytes.Repeat([]byte{9}, 4*pageBytes), want)
	var location images.Location
	for i := range pieces {
		from := i * images.PieceAlign
		part := file[from:min(from+images.PieceAlign, len(file))]
		name := filepath.Join(blobs, fmt.Sprint(i))
		if err := os.WriteFile(name, part, 0o600); err != nil {
			t.Fatal(err)
		}
		location = append(location, images.Piece{Path: name, Offset: uint64(from), Bytes: uint64(len(part))})
	}
	f := images.File{Name: "pages-3.img", Bytes: uint64(len(file)), Pieces: location}
	set := image.Open(dir, f)
	if names, err := set.Names(); err != nil || !slices.Contains(names, "pages-3.img") || !set.Has("pages-3.img") {
		t.Errorf("the images are %v, %v", names, err)
	}
	p, err := NewPlan(set, least)
	if err != nil {
		t.Fatal(err)
	}
	to := copyBy(t, dir, p)
	if got, err := os.ReadFile(filepath.Join(to, "pages-3.img")); err != nil || !bytes.Equal(got, file[:4*pageBytes]) {
		t.Errorf("CRIU gets %d bytes, %v", len(got), err)
	}
	task := p.tasks["pagemap-7.img"]
	if n, err := fill(os.Getpid(), task.from, task.pieces, false); err != nil || n != uint64(len(want)) {
		t.Fatalf("%d bytes, %v", n, err)
	}
	if !bytes.Equal(mapped, want) {
		t.Error("the memory is not what the pieces have")
	}
	p, err = NewPlan(image.Open(dir, f), 0)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(copyBy(t, dir, p), "pages-3.img")); err != nil || !bytes.Equal(got, file) {
		t.Errorf("a CRIU that restores all memory gets %d bytes, %v", len(got), err)
	}
	if p, err = NewPlan(image.Open(dir, images.File{Name: f.Name, Bytes: f.Bytes - pageBytes, Pieces: f.Pieces}), least); !errors.Is(err, images.ErrDamaged) {
		t.Errorf("of memory that is too short: %v, %v", p, err)
	}
}

// Images that were exchanged after they were looked at are refused.
func TestPlanChanged(t *testing.T) {
	dir := t.TempDir()
	writeImage(t, dir, "mm-7.img", "MM", memory(mapping(100, 80)))
	writeImage(t, dir, "pagemap-7.img", "PAGEMAP", head(3), run(100, 80))
	writePages(t, dir, "pages-3.img", 80)
	p := plan(t, dir)
	writeImage(t, dir, "pagemap-7.img", "PAGEMAP", head(4), run(100, 80))
	to, err := image.NewDir(0)
	if err != nil {
		t.Fatal(err)
	}
	defer to.Close()
	if err := p.set.Copy(t.Context(), to, p.Edit); !errors.Is(err, images.ErrDamaged) {
		t.Errorf("got %v, want %v", err, images.ErrDamaged)
	}
}

// CRIU advises huge pages for a mapping that is filled here, has next to all of its pages, and is large
// enough; and for no other, nor against the program's own advice.
func TestPlanHugePages(t *testing.T) {
	dir := t.TempDir()
	const size = mmapfile.HugePage / pageBytes
	against := func(v *vma.VmaEntry) { v.Madv = proto.Uint64(1 << unix.MADV_NOHUGEPAGE) }
	merge := func(v *vma.VmaEntry) { v.Madv = proto.Uint64(1 << unix.MADV_MERGEABLE) }
	writeImage(t, dir, "mm-7.img", "MM", memory(
		mapping(size, size, merge), // full but for some
		mapping(3*size, size),      // not full
		mapping(5*size, size, against),
		mapping(7*size, 100), // full, and small
		mapping(9*size, size, func(v *vma.VmaEntry) { v.Prot = proto.Uint32(unix.PROT_READ) }),
	))
	const few = size / 20
	writeImage(t, dir, "pagemap-7.img", "PAGEMAP", head(3), run(size, size-few), run(3*size, size-size/8), run(5*size, size), run(7*size, 100), run(9*size, size))
	writePages(t, dir, "pages-3.img", size-few+size-size/8+size+100+size)
	p := plan(t, dir)
	to := copyBy(t, dir, p)
	var advice []uint64
	err := image.Open(to).Each("mm-7.img", func(e *image.Entry) error {
		for _, v := range e.Message.(*mm.MmEntry).GetVmas() {
			advice = append(advice, v.GetMadv())
		}
		return nil
	})
	want := []uint64{1<<unix.MADV_MERGEABLE | 1<<unix.MADV_HUGEPAGE, 0, 1 << unix.MADV_NOHUGEPAGE, 0, 0}
	if err != nil || !reflect.DeepEqual(advice, want) {
		t.Errorf("CRIU advises %b, %v; want %b", advice, err, want)
	}
}
