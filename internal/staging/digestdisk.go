// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package staging

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
)

// diskReaders bounds how many blocks are read at once, each by way of 2 MiB of
// memory: where files are digested on a disk there is little of it.
const diskReaders = 8

// syncAll flushes the files that are not nil.
func syncAll(files []*os.File) error {
	for _, f := range files {
		if f == nil {
			continue
		}
		if err := f.Sync(); err != nil {
			return fmt.Errorf("flush %s: %w", f.Name(), err)
		}
	}
	return nil
}

// digestBlockOf reads a block by parts that end where huge pages do, and makes
// holes of those huge pages that are zero.
func digestBlockOf(f *os.File, b block, holes bool) (string, error) {
	// Memory from mmap is aligned as O_DIRECT wants it.
	buf, err := unix.Mmap(-1, 0, HugePage, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return "", fmt.Errorf("get memory to read with: %w", err)
	}
	defer func() { _ = unix.Munmap(buf) }()
	h := images.NewBlockHash()
	for at := b.from; at < b.to; {
		to := min(at&^(HugePage-1)+HugePage, b.to)
		part := buf[:to-at]
		if _, err := f.ReadAt(part, int64(at)); err != nil {
			return "", fmt.Errorf("read %s at %d: %w", f.Name(), at, err)
		}
		h.Write(part)
		if holes && len(part) == HugePage && zero(part) {
			if err := punch(f, at, to); err != nil {
				return "", err
			}
		}
		at = to
	}
	// Where there is no O_DIRECT, the block was read by way of the page cache.
	_ = unix.Fadvise(int(f.Fd()), int64(b.from), int64(b.to-b.from), unix.FADV_DONTNEED)
	return h.Digest(), nil
}
