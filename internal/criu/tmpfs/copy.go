// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package tmpfs

import (
	"errors"
	"io"
	"os"
	"sync"
)

// buffer is what copyRange copies by: small enough for a processor's cache.
type buffer [256 << 10]byte

var buffers = sync.Pool{New: func() any { return new(buffer) }}

// copyRange copies n bytes from one file into another. What the source lacks at its end is not
// written.
func copyRange(to *os.File, toAt int64, from *os.File, fromAt, n int64, buf *buffer) error {
	for n > 0 {
		got, err := from.ReadAt(buf[:min(n, int64(len(buf)))], fromAt)
		if _, werr := to.WriteAt(buf[:got], toAt); werr != nil {
			return werr
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		n, fromAt, toAt = n-int64(got), fromAt+int64(got), toAt+int64(got)
	}
	return nil
}
