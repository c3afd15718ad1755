// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package archive

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"

	"github.com/gpuckpt/gpuckpt/images"
)

// refuseContent refuses an archive in an archive that has anything but a directory's
// own entry. Podman puts what is in /dev/shm into one, apart from the container's
// other files, and writes it for a container with an empty /dev/shm as well.
func refuseContent(e images.File) error {
	inner := tar.NewReader(io.NewSectionReader(e.Data, 0, int64(e.Bytes)))
	for {
		header, err := inner.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("%w: %s: %w", ErrMalformed, e.Name, err)
		}
		name, err := cleanName(header.Name)
		if err != nil {
			return fmt.Errorf("%s: %w", e.Name, err)
		}
		if header.Typeflag != tar.TypeDir || name != "." {
			return fmt.Errorf("%w: %s in %s would not be brought back", ErrUnsupported, name, e.Name)
		}
	}
}
