// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package mmapfile

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// withoutHugePages makes a file in a tmpfs that is mounted without huge pages.
func withoutHugePages(t *testing.T) *os.File {
	t.Helper()
	if setting, err := os.ReadFile("/sys/kernel/mm/transparent_hugepage/shmem_enabled"); err != nil || strings.Contains(string(setting), "[deny]") {
		t.Skipf("this kernel has no huge pages of shared memory: %s, %v", setting, err)
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "huge=never"); err != nil {
		t.Fatalf("mount a tmpfs (the tests need root): %v", err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	f, err := os.Create(filepath.Join(dir, "file"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// A tmpfs that is mounted without huge pages gives them all the same, in the place of whole ones.
func TestHugePagesWithoutTheMountOption(t *testing.T) {
	f := withoutHugePages(t)
	const size = 8 * HugePage
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	mem, unmap, err := File(f, size, unix.PROT_READ|unix.PROT_WRITE)
	if err != nil {
		t.Fatal(err)
	}
	defer unmap()
	if err := Populate(mem[HugePage/2 : size-HugePage/2]); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(mem, make([]byte, size)) {
		t.Error("the file is not empty")
	}
	if kib := mappedHuge(t, mem); kib != (size-2*HugePage)>>10 {
		t.Errorf("%d KiB are huge pages, want all but the first and the last", kib)
	}
}

// A file has what was written, in huge pages but for the first, and its size is that of the bytes, or what it was.
func TestWriter(t *testing.T) {
	data := make([]byte, windowBytes+3*HugePage+4711)
	rand.New(rand.NewSource(1)).Read(data)
	for _, size := range []int64{0, int64(len(data)), windowBytes * 3} {
		f := withoutHugePages(t)
		if err := f.Truncate(size); err != nil {
			t.Fatal(err)
		}
		w := NewWriter(f, size)
		for at := 0; at < len(data); {
			n, err := w.Write(data[at:min(at+100_000, len(data))])
			if err != nil {
				t.Fatal(err)
			}
			at += n
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		info, err := f.Stat()
		if want := max(size, int64(len(data))); err != nil || info.Size() != want {
			t.Fatalf("the file has %d bytes, %v; want %d", info.Size(), err, want)
		}
		mem, unmap, err := File(f, uint64(len(data)), unix.PROT_READ)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(mem, data) {
			t.Errorf("of size %d, it has other bytes", size)
		}
		if kib, least := mappedHuge(t, mem), (len(data)/HugePage-1)*HugePage>>10; kib < uint64(least) {
			t.Errorf("of size %d, %d KiB are huge pages, want %d", size, kib, least)
		}
		unmap()
	}
}

// A small file takes no more memory than it has bytes.
func TestWriterOfLittle(t *testing.T) {
	f := withoutHugePages(t)
	w := NewWriter(f, 0)
	if _, err := w.Write(make([]byte, 3<<10)); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil || st.Size != 3<<10 || st.Blocks*512 > 4<<10 {
		t.Errorf("the file has %d bytes in %d blocks, %v", st.Size, st.Blocks, err)
	}
}

// A full file system is an error of the write that it has no room for. The file ends where the bytes do.
func TestWriterNoRoom(t *testing.T) {
	f := small(t, 0)
	w := NewWriter(f, 0)
	n, err := w.Write(make([]byte, 3*HugePage))
	if err == nil || n > HugePage {
		t.Errorf("%d bytes were written to a file system of %d, %v", n, HugePage, err)
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
	if info, err := f.Stat(); err != nil || info.Size() != int64(n) {
		t.Errorf("the file has %d bytes of %d, %v", info.Size(), n, err)
	}
}

// A copy has what the reader has, in huge pages. A reader that ends early is an error, and so is a file system without
// room.
func TestCopy(t *testing.T) {
	data := make([]byte, 2*windowBytes+3*HugePage+4711)
	rand.New(rand.NewSource(1)).Read(data)
	f := withoutHugePages(t)
	if err := Copy(f, io.NewSectionReader(bytes.NewReader(data), 0, int64(len(data)))); err != nil {
		t.Fatal(err)
	}
	mem, unmap, err := File(f, uint64(len(data)), unix.PROT_READ)
	if err != nil {
		t.Fatal(err)
	}
	defer unmap()
	info, err := f.Stat()
	if err != nil || info.Size() != int64(len(data)) || !bytes.Equal(mem, data) {
		t.Errorf("it has other bytes, of %d, %v", info.Size(), err)
	}
	if kib, want := mappedHuge(t, mem), (len(data)/HugePage)*HugePage>>10; kib != uint64(want) {
		t.Errorf("%d KiB are huge pages, want %d", kib, want)
	}
	if err := Copy(withoutHugePages(t), io.NewSectionReader(bytes.NewReader(data), 0, int64(len(data))+1)); !errors.Is(err, io.EOF) {
		t.Errorf("a reader that ends early: %v", err)
	}
	if err := Copy(small(t, 0), io.NewSectionReader(bytes.NewReader(data), 0, int64(len(data)))); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("without room: %v", err)
	}
}

// mappedHuge returns ShmemPmdMapped, in KiB, of a mapping of this process; see proc_pid_smaps(5).
func mappedHuge(t *testing.T, mem []byte) (kib uint64) {
	t.Helper()
	smaps, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	begin := fmt.Sprintf("%x-", uintptr(unsafe.Pointer(unsafe.SliceData(mem))))
	_, rest, found := strings.Cut(string(smaps), "\n"+begin)
	if !found {
		t.Fatalf("no mapping at %s", begin)
	}
	_, rest, found = strings.Cut(rest, "ShmemPmdMapped:")
	if _, err := fmt.Sscan(rest, &kib); !found || err != nil {
		t.Fatalf("the mapping at %s has no ShmemPmdMapped: %v", begin, err)
	}
	return kib
}
