// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package images

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Once there is a gpuckpt.json what it speaks of is on the disk.
func TestFilesAreOnTheDiskFirst(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can see which pages are on the disk")
	}
	dir := t.TempDir()
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		t.Fatal(err)
	}
	if fs.Type == unix.TMPFS_MAGIC {
		t.Skip("temporary files are memory here")
	}
	name := filepath.Join(dir, "pages-1.img")
	if err := os.WriteFile(name, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	if dirtyPages(t, name) == 0 {
		t.Skip("the system has written the pages already")
	}
	if err := WriteMetadata(dir, &Metadata{SchemaVersion: SchemaVersion, Created: time.Unix(1, 0)}); err != nil {
		t.Fatal(err)
	}
	if n := dirtyPages(t, name); n > 0 {
		t.Errorf("%d pages of CRIU's images are not on the disk", n)
	}
}

// dirtyPages counts a file's pages that are not on the disk: see
// Documentation/admin-guide/mm/pagemap.rst.
func dirtyPages(t *testing.T, name string) (dirty int) {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, int(st.Size()), unix.PROT_READ, unix.MAP_SHARED|unix.MAP_POPULATE)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(mem) }()
	number := func(file string, at uint64) uint64 {
		f, err := os.Open(file)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		var b [8]byte
		if _, err := f.ReadAt(b[:], int64(at*8)); err != nil {
			t.Fatal(err)
		}
		return binary.LittleEndian.Uint64(b[:])
	}
	const kpfDirty = 1 << 4
	for at := 0; at < len(mem); at += PageBytes {
		page := number("/proc/self/pagemap", uint64(uintptr(unsafe.Pointer(&mem[at])))/PageBytes)
		if page>>63 == 1 && number("/proc/kpageflags", page&(1<<55-1))&kpfDirty != 0 {
			dirty++
		}
	}
	return dirty
}
