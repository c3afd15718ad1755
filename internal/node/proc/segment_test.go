// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// Only a memfd that is both sealed against writing and mapped shared is found.
func TestMapsSealed(t *testing.T) {
	sealed := func(seals, flags int) bool {
		t.Helper()
		fd, err := unix.MemfdCreate("sealed", unix.MFD_ALLOW_SEALING|unix.MFD_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		if err := unix.Ftruncate(fd, 4096); err != nil {
			t.Fatal(err)
		}
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
			t.Fatal(err)
		}
		memory, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ, flags)
		if err != nil {
			t.Skipf("this kernel does not map it: %v", err)
		}
		defer unix.Munmap(memory) //nolint:errcheck // of a test
		found, err := MapsSealed(os.Getpid())
		if err != nil {
			t.Fatal(err)
		}
		return found
	}
	if sealed(unix.F_SEAL_SHRINK|unix.F_SEAL_GROW, unix.MAP_SHARED) || sealed(unix.F_SEAL_WRITE, unix.MAP_PRIVATE) {
		t.Error("found where there is none")
	}
	if !sealed(unix.F_SEAL_WRITE, unix.MAP_SHARED) {
		t.Error("not found")
	}
}
