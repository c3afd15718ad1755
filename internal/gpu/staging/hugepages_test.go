// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package staging

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/mmapfile"
)

// A tmpfs that is mounted without huge pages gives them all the same.
func TestHugePagesWithoutTheMountOption(t *testing.T) {
	if setting, err := os.ReadFile("/sys/kernel/mm/transparent_hugepage/shmem_enabled"); err != nil || strings.Contains(string(setting), "[deny]") {
		t.Skipf("this kernel has no huge pages of shared memory: %s, %v", setting, err)
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "huge=never"); err != nil {
		t.Fatalf("mount a tmpfs (the tests need root): %v", err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	const size = 64 << 20
	b, err := NewFiller().NewFile(filepath.Join(dir, "area"), 0x200000, size)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Remove()
	if err := b.Wait(); err != nil {
		t.Fatal(err)
	}
	mem, unmap, err := mmapfile.File(b.Handle, size, unix.PROT_READ)
	if err != nil {
		t.Fatal(err)
	}
	defer unmap()
	for at := 0; at < size; at += HugePage {
		if mem[at] != 0 {
			t.Fatal("the file is not empty")
		}
	}
	if kib := mappedHuge(t, fmt.Sprintf("%x-", uintptr(unsafe.Pointer(&mem[0])))); kib != size>>10 {
		t.Errorf("%d KiB are huge pages, want %d", kib, size>>10)
	}
}

// mappedHuge gives ShmemPmdMapped, in KiB, of this process's mapping whose line
// in smaps begins so; see proc_pid_smaps(5).
func mappedHuge(t *testing.T, begin string) (kib uint64) {
	t.Helper()
	smaps, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
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
