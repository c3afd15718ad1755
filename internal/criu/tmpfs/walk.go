// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package tmpfs

import (
	"archive/tar"
	"bufio"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/gpuckpt/gpuckpt/internal/node/tarname"
)

// Walk calls do for each name in an image that Load would read: its mode, as in struct stat, and its
// owner. A second name of a file has the mode 0. It stops at the first error of do. An image that no
// tmpfs can have made is tarname.ErrDamaged.
func Walk(image *os.File, do func(name string, mode, uid, gid uint32) error) error {
	st, err := image.Stat()
	if err != nil {
		return fmt.Errorf("look into a tmpfs: %w", err)
	}
	each := func(e *entry) error {
		if e.Same != nil {
			return do(string(e.Name), 0, 0, 0)
		}
		return do(string(e.Name), e.Mode, e.UID, e.GID)
	}
	if err = readTable(image, st.Size(), each); errors.Is(err, errNotOurs) {
		err = eachInArchive(io.NewSectionReader(image, 0, st.Size()), func(e *entry, _ io.Reader) error { return each(e) })
	}
	return err
}

// eachInArchive calls do for each entry of a tar archive as CRIU has it made, with its data.
func eachInArchive(image io.Reader, do func(e *entry, data io.Reader) error) error {
	plain, err := gzip.NewReader(bufio.NewReaderSize(image, 1<<20))
	if err != nil {
		return fmt.Errorf("%w: it is neither an image of gpuckpt's nor a compressed archive: %w", tarname.ErrDamaged, err)
	}
	in := tar.NewReader(plain)
	for n := 0; ; n++ {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("%w: archive: %w", tarname.ErrDamaged, err)
		}
		if n >= maxEntries {
			return fmt.Errorf("%w: archive: more than %d entries", tarname.ErrDamaged, maxEntries)
		}
		e, err := fromTar(h)
		if err != nil {
			return err
		}
		if err := do(e, in); err != nil {
			return err
		}
	}
}
