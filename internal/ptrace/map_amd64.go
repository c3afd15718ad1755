// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package ptrace

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// MapFile maps a file over an area of the process, at the address given, with the
// flags of mmap(2).
func (t *Thread) MapFile(f *os.File, start, length, offset uint64, flags uint64) error {
	fd, err := t.sendFD(f)
	if err != nil {
		return err
	}
	if err = t.mapFixed(start, length, flags, fd, offset); err == nil {
		t.PreferHuge(start, length)
	}
	if _, cerr := t.Syscall(unix.SYS_CLOSE, fd); err == nil && cerr != nil {
		err = fmt.Errorf("close the file: %w", cerr)
	}
	if err != nil {
		return fmt.Errorf("map the file over the area: %w", err)
	}
	return nil
}

// PreferHuge asks the kernel for huge pages in an area. If it has none, nothing
// changes.
func (t *Thread) PreferHuge(start, length uint64) {
	_, _ = t.Syscall(unix.SYS_MADVISE, start, length, unix.MADV_HUGEPAGE)
}

// MapEmpty replaces an area by an empty one.
func (t *Thread) MapEmpty(start, length uint64) error {
	if err := t.mapFixed(start, length, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE, ^uint64(0), 0); err != nil {
		return fmt.Errorf("map an empty area: %w", err)
	}
	return nil
}

func (t *Thread) mapFixed(start, length, flags, fd, offset uint64) error {
	at, err := t.Syscall(unix.SYS_MMAP, start, length, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_FIXED|flags, fd, offset)
	if err == nil && at != start {
		err = fmt.Errorf("mapped at %#x, not %#x", at, start)
	}
	return err
}
