// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package pages

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fown"
	ipcdesc "github.com/checkpoint-restore/go-criu/v8/crit/images/ipc-desc"
	ipcshm "github.com/checkpoint-restore/go-criu/v8/crit/images/ipc-shm"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/memfd"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/pagemap"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/vma"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/node/mmapfile"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// shmem makes a segment of so many bytes and maps so many pages of it, from the first on.
func shmem(t *testing.T, bytes int64, pages int) (f *os.File, inode uint64, mapped []byte) {
	t.Helper()
	fd, err := unix.MemfdCreate("segment", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	f = os.NewFile(uintptr(fd), "segment")
	t.Cleanup(func() { f.Close() })
	if err := f.Truncate(bytes); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		t.Fatal(err)
	}
	return f, st.Ino, mapMemory(t, pages, unix.MAP_SHARED, fd)
}

// found returns the segments that would be dumped past CRIU if all of a process's are looked at.
func found(t *testing.T, least uint64) map[source]span {
	t.Helper()
	s := newSegments(least)
	maps, err := proc.Maps(os.Getpid(), func(*proc.Mapping) bool { return true })
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range maps {
		if err := s.add(os.Getpid(), &m); err != nil {
			t.Fatal(err)
		}
	}
	return s.chosen()
}

// Segments are found once, whoever has them mapped and how often, if each holds enough and all do, whatever
// they could hold.
func TestSegments(t *testing.T) {
	const pages = 300
	f, inode, mapped := shmem(t, 1<<40, pages)
	for i := range pages {
		mapped[i*pageBytes] = 1
	}
	again := mapMemory(t, pages, unix.MAP_SHARED, int(f.Fd()))
	anonymous := mapMemory(t, pages, unix.MAP_SHARED|unix.MAP_ANONYMOUS, -1)
	for i := range pages {
		anonymous[i*pageBytes] = 1
	}
	_, _, small := shmem(t, pages*pageBytes, pages)
	small[0] = 1
	onDisk, err := os.Create(filepath.Join(memoryDir(t), "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer onDisk.Close()
	if _, err := onDisk.Write(make([]byte, pages*pageBytes)); err != nil {
		t.Fatal(err)
	}
	mapMemory(t, pages, unix.MAP_SHARED, int(onDisk.Fd()))
	chosen := found(t, 2*pages*pageBytes)
	at := chosen[source{os.Getpid(), true, inode}]
	if len(chosen) != 2 || at.Start != addressOf(mapped) && at.Start != addressOf(again) {
		t.Errorf("chosen are %v, want that at %#x and one more", chosen, addressOf(mapped))
	}
	if chosen := found(t, 3*pages*pageBytes); len(chosen) > 0 {
		t.Errorf("together they hold too little, and chosen are %v", chosen)
	}
	// A terabyte that could be there takes no time.
	d := newDumper()
	kept, err := d.scan(source{os.Getpid(), true, inode}, []span{at}, least)
	if want := []span{{0, pages * pageBytes}}; err != nil || !reflect.DeepEqual(kept, []span{{0, 1 << 40}}) || !reflect.DeepEqual(d.of[source{os.Getpid(), true, inode}].runs, want) {
		t.Errorf("kept %v of %v, %v", kept, d.of, err)
	}
	if kept, err := d.scan(source{os.Getpid(), true, inode}, []span{{addressOf(anonymous), addressOf(anonymous) + pages*pageBytes}}, least); err != nil || len(kept) > 0 {
		t.Errorf("another mapping is there now: kept %v, %v", kept, err)
	}
}

// dumpedSegment makes the images of a segment that CRIU has left out. Its size is no number of pages.
func dumpedSegment(t *testing.T, dir string) (d *dumper, from source, f *os.File, want []byte) {
	t.Helper()
	const pages, size = 300, 299*pageBytes + 100
	f, inode, content := shmem(t, size, pages)
	for i := range pages {
		if i%20 != 7 {
			content[i*pageBytes+7] = byte(i%250 + 1)
		}
	}
	d, from = newDumper(), source{os.Getpid(), true, inode}
	at := addressOf(content)
	if kept, err := d.scan(from, []span{{at, at + pages*pageBytes}}, least); err != nil || len(kept) != 1 {
		t.Fatalf("kept %v, %v", kept, err)
	}
	writeImage(t, dir, fmt.Sprintf("pagemap-shmem-%d.img", inode), "PAGEMAP", head(3))
	writePages(t, dir, "pages-3.img", 0)
	for i := range pages {
		if i%20 != 7 {
			want = append(want, content[i*pageBytes:(i+1)*pageBytes]...)
		}
	}
	return d, from, f, want
}

// A segment's images are as CRIU would have made them: the pages that there are, in order, the last one whole.
func TestMergeSegment(t *testing.T) {
	for _, dir := range []string{t.TempDir(), tmpfs(t, "huge=advise")} {
		d, from, _, want := dumpedSegment(t, dir)
		d.makeRoom(from, dir)
		done, err := d.merge(from, 0, dir, true)
		if err != nil || done.Bytes != uint64(len(want)) || done.Name != "pages-3.img" || len(done.Digests) != 1 {
			t.Fatalf("%+v, %v", done, err)
		}
		data, err := os.ReadFile(filepath.Join(dir, "pages-3.img"))
		if err != nil || !bytes.Equal(data, want) {
			t.Errorf("the image has %d bytes, or others, %v", len(data), err)
		}
		_, runs, err := readRuns(image.Open(dir), fmt.Sprintf("pagemap-shmem-%d.img", from.inode))
		if err != nil || len(runs) != 16 || runs[0].span != (span{0, 7 * pageBytes}) || runs[15].End != 300*pageBytes {
			t.Errorf("the pagemap has %v, %v", runs, err)
		}
		if len(d.of) > 0 {
			t.Errorf("the worker still has %v", d.of)
		}
	}
}

// A segment that another process cuts short meanwhile, which no freeze of the container keeps it from, is an
// error: no signal ends the worker, and CRIU's images stay as they were.
func TestSegmentCutShort(t *testing.T) {
	dir := t.TempDir()
	d, from, f, _ := dumpedSegment(t, dir)
	before := files(t, dir)
	if err := f.Truncate(50 * pageBytes); err != nil {
		t.Fatal(err)
	}
	if done, err := d.merge(from, 0, dir, true); err == nil || !strings.Contains(err.Error(), "cut short during the dump") {
		t.Errorf("%+v, %v", done, err)
	}
	if after := files(t, dir); after != before {
		t.Error("the images have changed")
	}
}

// sharedAt is a mapping of a memfd by its file's number, from a page of it on.
func sharedAt(from, pages, file, offset uint64, change ...func(*vma.VmaEntry)) *vma.VmaEntry {
	return mapping(from, pages, append([]func(*vma.VmaEntry){func(v *vma.VmaEntry) {
		v.Status, v.Flags = proto.Uint32(vmaRegular|vmaFileShared|vmaMemfd), proto.Uint32(unix.MAP_SHARED)
		v.Shmid, v.Pgoff = new(file), new(offset*pageBytes)
	}}, change...)...)
}

func memfdFile(id uint32, inode uint32) *fdinfo.FileEntry {
	return &fdinfo.FileEntry{Type: fdinfo.FdTypes_MEMFD.Enum(), Id: new(id), Memfd: &memfd.MemfdFileEntry{
		Id: new(id), Flags: proto.Uint32(2), Pos: proto.Uint64(0), InodeId: new(inode),
		Fown: &fown.FownEntry{Uid: proto.Uint32(0), Euid: proto.Uint32(0), Signum: proto.Uint32(0), PidType: proto.Uint32(0), Pid: proto.Uint32(0)},
	}}
}

func memfdInode(id uint64, shmid uint32) *memfd.MemfdInodeEntry {
	return &memfd.MemfdInodeEntry{
		InodeId: new(id), Shmid: new(shmid), Name: new("segment"), Size: proto.Uint64(100 * pageBytes),
		Uid: proto.Uint32(0), Gid: proto.Uint32(0), Seals: proto.Uint32(1), Mode: proto.Uint32(0o100777),
	}
}

// segmentImages makes the images of one segment of 100 pages, 1234, in file 5, for processes with such mappings.
func segmentImages(t testing.TB, dir string, vmas ...*vma.VmaEntry) {
	t.Helper()
	writeImage(t, dir, "files.img", "FILES", memfdFile(4, 1), memfdFile(5, 2))
	writeImage(t, dir, "memfd.img", "MEMFD_INODE", memfdInode(1, 77), memfdInode(2, 1234))
	for i, v := range vmas {
		writeImage(t, dir, fmt.Sprintf("mm-%d.img", 7+i), "MM", memory(v))
	}
	writeImage(t, dir, "pagemap-shmem-1234.img", "PAGEMAP", head(3), run(0, 50), run(60, 40))
	writePages(t, dir, "pages-3.img", 90)
}

// A segment is filled by one process that has all of its pages mapped, at whatever offsets, and CRIU gets none
// of them.
func TestPlanSegment(t *testing.T) {
	dir := t.TempDir()
	segmentImages(t, dir, sharedAt(500, 100, 5, 0, func(v *vma.VmaEntry) { v.Prot = proto.Uint32(unix.PROT_READ) }))
	// in three parts, out of order, and two of them overlap
	writeImage(t, dir, "mm-8.img", "MM", memory(sharedAt(1000, 40, 5, 60), sharedAt(2000, 40, 5, 0), sharedAt(3000, 30, 5, 20)))
	p := plan(t, dir)
	to := copyBy(t, dir, p)
	task := p.tasks["pagemap-shmem-1234.img"]
	if task == nil || task.pid != 8 || !task.shared {
		t.Fatalf("chosen is %+v", p.tasks)
	}
	want := []Piece{
		{2000 * pageBytes, 40 * pageBytes, 0}, {3020 * pageBytes, 10 * pageBytes, 40 * pageBytes}, {1000 * pageBytes, 40 * pageBytes, 50 * pageBytes},
	}
	if !slices.Equal(task.pieces, want) {
		t.Errorf("filled are %v, want %v", task.pieces, want)
	}
	left := 0
	err := image.Open(to).Each("pagemap-shmem-1234.img", func(e *image.Entry) error {
		if _, ok := e.Message.(*pagemap.PagemapEntry); ok {
			left++
		}
		return nil
	})
	if info, serr := os.Stat(filepath.Join(to, "pages-3.img")); err != nil || serr != nil || left > 0 || info.Size() > 0 {
		t.Errorf("CRIU restores %d runs of %v, %v, %v", left, info, err, serr)
	}
}

// What shmget has made is found by its number, which can be 0; not if it has huge pages of its own.
func TestPlanSysV(t *testing.T) {
	sysv := func(v *vma.VmaEntry) {
		v.Status, v.Flags = proto.Uint32(vmaRegular|vmaAnonShared|vmaSysV), proto.Uint32(unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	}
	for _, huge := range []uint32{0, unix.MAP_HUGETLB} {
		dir := t.TempDir()
		writeImage(t, dir, "mm-7.img", "MM", memory(mapping(1000, 100, sysv)))
		entry := &ipcshm.IpcShmEntry{Desc: &ipcdesc.IpcDescEntry{
			Key: proto.Uint32(0), Uid: proto.Uint32(0), Gid: proto.Uint32(0), Cuid: proto.Uint32(0), Cgid: proto.Uint32(0), Mode: proto.Uint32(0o600), Id: proto.Uint32(0),
		}, Size: proto.Uint64(100 * pageBytes), InPagemaps: new(true)}
		if huge > 0 {
			entry.HugetlbFlag = &huge
		}
		writeImage(t, dir, "ipcns-shm-11.img", "IPCNS_SHM", entry)
		writeImage(t, dir, "pagemap-shmem-0.img", "PAGEMAP", head(3), run(0, 100))
		writePages(t, dir, "pages-3.img", 100)
		if p := plan(t, dir); len(p.tasks) != 1-int(min(huge, 1)) {
			t.Errorf("with huge pages %#x: chosen are %v", huge, p.tasks)
		}
	}
}

// A segment that no process can be written to in stays with CRIU, and so do some that hold too little.
func TestPlanLeavesSegments(t *testing.T) {
	for name, v := range map[string]*vma.VmaEntry{
		"read-only":     sharedAt(1000, 100, 5, 0, func(v *vma.VmaEntry) { v.Prot = proto.Uint32(unix.PROT_READ) }),
		"a private one": sharedAt(1000, 100, 5, 0, func(v *vma.VmaEntry) { v.Flags = proto.Uint32(unix.MAP_PRIVATE) }),
		"huge pages":    sharedAt(1000, 100, 5, 0, func(v *vma.VmaEntry) { v.Flags = new(v.GetFlags() | unix.MAP_HUGETLB) }),
		"a part":        sharedAt(1000, 99, 5, 0),
		"another part":  sharedAt(1000, 100, 5, 1),
		"another file":  sharedAt(1000, 100, 4, 0),
		"no file":       sharedAt(1000, 100, 6, 0),
	} {
		dir := t.TempDir()
		segmentImages(t, dir, v)
		if p := plan(t, dir); len(p.tasks) > 0 {
			t.Errorf("%s: it is chosen", name)
		}
	}
	dir := t.TempDir()
	segmentImages(t, dir, sharedAt(1000, 100, 5, 0))
	p, err := NewPlan(image.Open(dir), 91*pageBytes)
	if err != nil || len(p.tasks) > 0 {
		t.Errorf("all hold too little: chosen are %v, %v", p.tasks, err)
	}
}

// Shared memory is written to by way of a process, where the order is for a segment, and nothing else then.
func TestFillShared(t *testing.T) {
	name := filepath.Join(t.TempDir(), "pages-1.img")
	if err := os.WriteFile(name, bytes.Repeat([]byte{1}, 8*pageBytes), 0o600); err != nil {
		t.Fatal(err)
	}
	disk, err := os.Create(filepath.Join(memoryDir(t), "mapped"))
	if err == nil {
		err = disk.Truncate(8 * pageBytes)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer disk.Close()
	f, _, mapped := shmem(t, 8*pageBytes, 8)
	for what, at := range map[string][]byte{
		"a file":         mapMemory(t, 8, unix.MAP_SHARED, int(disk.Fd())),
		"private memory": mapMemory(t, 8, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, -1),
		"a private copy": mapMemory(t, 8, unix.MAP_PRIVATE, int(f.Fd())),
	} {
		if n, err := fill(os.Getpid(), fileArea(t, name), []Piece{{addressOf(at), pageBytes, 0}}, true); err == nil {
			t.Errorf("%s: %d bytes are written", what, n)
		}
	}
	if n, err := fill(os.Getpid(), fileArea(t, name), []Piece{{addressOf(mapped), 8 * pageBytes, 0}}, true); err != nil || n != 8*pageBytes {
		t.Errorf("%d bytes, %v", n, err)
	}
	got := make([]byte, 8*pageBytes)
	if _, err := f.ReadAt(got, 0); err != nil || !bytes.Equal(got, mapped) || got[0] != 1 || got[len(got)-1] != 1 {
		t.Errorf("the segment has other bytes, %v", err)
	}
}

// What a segment has of whole huge pages is filled with such pages, whatever the kernel's setting is.
func TestFillSharedByHugePages(t *testing.T) {
	if setting, err := os.ReadFile("/sys/kernel/mm/transparent_hugepage/shmem_enabled"); err != nil || strings.Contains(string(setting), "[deny]") {
		t.Skipf("this kernel has no huge pages of shared memory: %s, %v", setting, err)
	}
	const size = 4 * mmapfile.HugePage
	name := filepath.Join(t.TempDir(), "pages-1.img")
	if err := os.WriteFile(name, bytes.Repeat([]byte{1}, size), 0o600); err != nil {
		t.Fatal(err)
	}
	f, _, _ := shmem(t, size, 1)
	mapped, unmap, err := mmapfile.File(f, size, unix.PROT_READ|unix.PROT_WRITE)
	if err != nil {
		t.Fatal(err)
	}
	defer unmap()
	at, short := addressOf(mapped), uint64(pageBytes) // which the last one lacks
	pieces := []Piece{{at, mmapfile.HugePage / 2, 0}, {at + mmapfile.HugePage/2, size - mmapfile.HugePage/2 - short, mmapfile.HugePage / 2}}
	if _, err := fill(os.Getpid(), fileArea(t, name), pieces, true); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(mapped[:size-short], bytes.Repeat([]byte{1}, int(size-short))) || mapped[size-1] != 0 {
		t.Error("the segment has other bytes")
	}
	smaps, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(smaps), fmt.Sprintf("\n%x-", at))
	_, rest, _ = strings.Cut(rest, "ShmemPmdMapped:")
	if kib := strings.Fields(rest)[0]; kib != strconv.Itoa(3*mmapfile.HugePage>>10) {
		t.Errorf("%s KiB are huge pages, want three of them", kib)
	}
}
