// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package staging

import (
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// A process that has kept a descriptor of memory that it was lent makes nothing of it: it has all of
// its pages, and no more.
func TestMemoryFileDoesNotGrow(t *testing.T) {
	const size = 2 * HugePage
	for name, options := range map[string][][2]string{"usual": {{"huge", "advise"}}, "without huge pages": nil} {
		f, err := memoryFile(size, options...)
		if err != nil {
			t.Fatal(name, err)
		}
		defer f.Close()
		if err := unix.Fallocate(int(f.Fd()), 0, 0, size); err != nil {
			t.Errorf("%s: the pages of its size: %v", name, err)
		}
		if err := unix.Fallocate(int(f.Fd()), 0, size, PageSize); err == nil {
			t.Errorf("%s: it has a page more", name)
		}
		if err := f.Truncate(size + PageSize); err == nil {
			if _, err := f.WriteAt([]byte{1}, size); err == nil {
				t.Errorf("%s: a byte behind its end was written", name)
			}
		}
		if err := f.Truncate(0); err != nil {
			t.Errorf("%s: it cannot be given up: %v", name, err)
		}
	}
}

// A file that is given up has nothing in it for a process that has kept it.
func TestRemovedFileIsEmpty(t *testing.T) {
	for name, path := range map[string]string{"memory": "", "a file": filepath.Join(t.TempDir(), "area")} {
		b, err := NewFiller().NewFile(path, 0, HugePage)
		if err != nil {
			t.Fatal(name, err)
		}
		kept, err := unix.Dup(int(b.Handle.Fd()))
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(kept)
		if err := b.Wait(); err != nil {
			t.Fatal(name, err)
		}
		b.Remove()
		var st unix.Stat_t
		if err := unix.Fstat(kept, &st); err != nil || st.Blocks > 0 || st.Nlink > 0 {
			t.Errorf("%s: %d blocks and %d names are left, %v", name, st.Blocks, st.Nlink, err)
		}
	}
}

// What the driver has written beyond what is filled is not thrown away; what filling
// itself has left there is zeros.
func TestWrittenBeyond(t *testing.T) {
	const offset, length, from = 64 << 10, 8 << 20, 4 << 20
	f, err := MemoryFile(length + HugePage)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := &File{Handle: f, Offset: offset, Length: length}
	for _, w := range []struct {
		what string
		at   int64
		data []byte
		want bool
	}{
		{"nothing", 0, nil, false},
		{"before", from - 1, []byte{1}, false},
		{"behind the area", offset + length, []byte{1}, false},
		{"zeros", from + 2<<20, make([]byte, 3*PageSize), false},
		{"the last byte", offset + length - 1, []byte{1}, true},
		{"the first byte", from, []byte{1}, true},
	} {
		if _, err := f.WriteAt(w.data, w.at); err != nil {
			t.Fatal(err)
		}
		if got, err := b.WrittenBeyond(from); got != w.want || err != nil {
			t.Errorf("%s: %v, %v", w.what, got, err)
		}
	}
}
