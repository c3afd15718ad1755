// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package pages

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
)

// mapMemory maps memory of this process's own, with a mapping of no rights on both sides.
func mapMemory(t *testing.T, pages, flags, fd int) []byte {
	t.Helper()
	at, err := unix.MmapPtr(-1, 0, nil, uintptr(pages+2)*pageBytes, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.MunmapPtr(at, uintptr(pages+2)*pageBytes) })
	inner := unsafe.Add(at, pageBytes)
	if _, err := unix.MmapPtr(fd, 0, inner, uintptr(pages)*pageBytes, unix.PROT_READ|unix.PROT_WRITE, flags|unix.MAP_FIXED); err != nil {
		t.Fatal(err)
	}
	return unsafe.Slice((*byte)(inner), pages*pageBytes)
}

func addressOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

// resident reports which pages of memory are there.
func resident(t *testing.T, b []byte) []bool {
	t.Helper()
	f, err := os.Open("/proc/self/pagemap")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	entries := make([]byte, len(b)/pageBytes*8)
	if _, err := f.ReadAt(entries, int64(addressOf(b)/pageBytes*8)); err != nil {
		t.Fatal(err)
	}
	var there []bool
	for at := 7; at < len(entries); at += 8 {
		there = append(there, entries[at]>>6 != 0)
	}
	return there
}

// Memory is filled from anywhere in the file, across chunks; pages of zeros stay empty, and holes of the file too. It is
// so from a disk, from memory, and from memory without holes, which is mapped.
func TestFill(t *testing.T) {
	t.Run("disk", func(t *testing.T) { testFill(t, t.TempDir(), true) })
	t.Run("memory", func(t *testing.T) { testFill(t, memoryDir(t), true) })
	t.Run("whole", func(t *testing.T) { testFill(t, memoryDir(t), false) })
}

func memoryDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "fill")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func blocksOf(t *testing.T, f *os.File) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks
}

func testFill(t *testing.T, dir string, holes bool) {
	t.Helper()
	const pages = 2*chunkBytes/pageBytes + 100
	isZero := func(i int) bool { return i%3 == 1 && i > 300 } // the first chunk has none
	want := make([]byte, pages*pageBytes)
	for i := range pages {
		if !isZero(i) {
			copy(want[i*pageBytes:], bytes.Repeat([]byte{byte(i%250 + 1)}, pageBytes))
		}
	}
	name := filepath.Join(dir, "pages-1.img")
	file, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if !holes {
		if _, err := file.Write(make([]byte, 3*pageBytes)); err != nil {
			t.Fatal(err)
		}
	}
	for i := range pages {
		if page := want[i*pageBytes : (i+1)*pageBytes]; page[0] != 0 || !holes {
			if _, err := file.WriteAt(page, int64(i+3)*pageBytes); err != nil {
				t.Fatal(err)
			}
		}
	}
	err = file.Truncate((3 + pages) * pageBytes)
	if err == nil {
		err = file.Sync() // blocks of a disk's file
	}
	if err != nil {
		t.Fatal(err)
	}
	blocks := blocksOf(t, file)
	memory := mapMemory(t, pages, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, -1)
	at := addressOf(memory)
	const half = pages / 2 * pageBytes
	pieces := []Piece{{at, half, 3 * pageBytes}, {at + half, pages*pageBytes - half, half + 3*pageBytes}}
	n, err := fill(os.Getpid(), fileArea(t, name), pieces, false)
	if err != nil || n != pages*pageBytes {
		t.Fatalf("%d bytes, %v", n, err)
	}
	for i, there := range resident(t, memory) {
		if there == isZero(i) {
			t.Fatalf("page %d is there: %t", i, there)
		}
	}
	if !bytes.Equal(memory, want) {
		t.Error("the memory is not what the file has")
	}
	if now := blocksOf(t, file); now != blocks {
		t.Errorf("the file has %d blocks, and had %d", now, blocks)
	}
	if n, err := fill(os.Getpid(), fileArea(t, name), []Piece{{at, pageBytes, (pages + 3) * pageBytes}}, false); !errors.Is(err, images.ErrDamaged) {
		t.Errorf("past the file's end: %d bytes, %v", n, err)
	}
}

// fileArea returns a whole file as what a fill reads.
func fileArea(t *testing.T, name string) *images.Area {
	t.Helper()
	st, err := os.Stat(name)
	if err != nil {
		t.Fatal(err)
	}
	return images.File{Name: filepath.Base(name), Path: name, Bytes: uint64(st.Size())}.Area()
}

// Nothing but plain memory of the process is written to.
func TestFillRefuses(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "mapped"))
	if err == nil {
		_, err = f.Write(make([]byte, 8*pageBytes))
	}
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	name := filepath.Join(t.TempDir(), "pages-1.img")
	if err := os.WriteFile(name, bytes.Repeat([]byte{1}, 16*pageBytes), 0o600); err != nil {
		t.Fatal(err)
	}
	plain := addressOf(mapMemory(t, 8, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, -1))
	for what, p := range map[string]Piece{
		"a shared file":   {addressOf(mapMemory(t, 8, unix.MAP_SHARED, int(f.Fd()))), pageBytes, 0},
		"a private file":  {addressOf(mapMemory(t, 8, unix.MAP_PRIVATE, int(f.Fd()))), pageBytes, 0},
		"shared memory":   {addressOf(mapMemory(t, 8, unix.MAP_SHARED|unix.MAP_ANONYMOUS, -1)), pageBytes, 0},
		"past its end":    {plain, 9 * pageBytes, 0},
		"before it":       {plain - pageBytes, 2 * pageBytes, 0},
		"round the world": {plain, 1<<64 - pageBytes, 0},
	} {
		if _, err := fill(os.Getpid(), fileArea(t, name), []Piece{p}, false); !errors.Is(err, images.ErrDamaged) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := fill(os.Getpid(), fileArea(t, name), []Piece{{plain, 8 * pageBytes, 0}}, false); err != nil {
		t.Error(err)
	}
}
