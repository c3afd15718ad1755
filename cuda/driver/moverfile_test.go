// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A file on a tmpfs has huge pages, with the mount option and without.
func TestHugePages(t *testing.T) {
	if setting, err := os.ReadFile("/sys/kernel/mm/transparent_hugepage/shmem_enabled"); err != nil || strings.Contains(string(setting), "[deny]") {
		t.Skipf("this kernel has no huge pages of shared memory: %s, %v", setting, err)
	}
	for _, option := range []string{"huge=never", "huge=advise"} {
		dir := t.TempDir()
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, option); err != nil {
			t.Fatalf("mount a tmpfs (the tests need root): %v", err)
		}
		t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
		f, err := os.Create(filepath.Join(dir, "file"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		const size, offset = 32 << 20, 2 << 20
		to, err := openTarget(f, offset, size)
		if err != nil {
			t.Fatal(err)
		}
		defer to.close()
		data := bytes.Repeat([]byte("gpuckpt!"), size/8)
		for at := 0; at < size; at += chunkBytes {
			if err := to.write(data[at:at+chunkBytes], uint64(at)); err != nil {
				t.Fatal(err)
			}
		}
		if kib := mappedHuge(t, fmt.Sprintf("%x-", uintptr(unsafe.Pointer(&to.view[0])))); kib != size>>10 {
			t.Errorf("%s: %d KiB are huge pages, want %d", option, kib, size>>10)
		}
		got, err := os.ReadFile(f.Name())
		if err != nil || !bytes.Equal(got[offset:], data) {
			t.Errorf("%s: the file is wrong: %v", option, err)
		}
	}
}

// mappedHuge returns ShmemPmdMapped, in KiB, of this process's mapping whose line in smaps begins so; see
// proc_pid_smaps(5).
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
