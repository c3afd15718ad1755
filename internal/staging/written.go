// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package staging

import (
	"bytes"
	"errors"
	"fmt"
	"io"

	"golang.org/x/sys/unix"
)

// WrittenBeyond reports whether the area has anything but zeros from a point of its
// file on.
func (b *File) WrittenBeyond(from uint64) (bool, error) {
	buf, zeros := make([]byte, 1<<20), make([]byte, 1<<20)
	for end := b.Offset + b.Length; from < end; {
		at, err := b.Handle.Seek(int64(from), unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) || err == nil && uint64(at) >= end {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("look at what is written of an area: %w", err)
		}
		n, err := b.Handle.ReadAt(buf[:min(uint64(len(buf)), end-uint64(at))], at)
		if err != nil && !errors.Is(err, io.EOF) {
			return false, fmt.Errorf("look at what is written of an area: %w", err)
		}
		if !bytes.Equal(buf[:n], zeros[:n]) {
			return true, nil
		}
		from = uint64(at) + uint64(n)
	}
	return false, nil
}
