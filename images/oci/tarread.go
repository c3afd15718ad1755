// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"

	"github.com/gpuckpt/gpuckpt/images"
)

// readLayer reads the archive of a checkpoint layer and calls file for each of
// its files, which may read as much of it as it likes. It refuses all that
// Build does not make: another directory, a link, a device, a name that is
// absolute, has "..", marks a removal or comes twice, extended attributes.
func readLayer(r io.Reader, file func(name string, size int64, r io.Reader) error) error {
	seen := make(map[string]bool)
	for t := tar.NewReader(r); ; {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("%w: archive: %w", images.ErrDamaged, err)
		}
		if err := plain(h); err != nil {
			return err
		}
		if h.Typeflag == tar.TypeDir && strings.TrimSuffix(h.Name, "/") == images.ImageDir {
			continue
		}
		dir, name := path.Split(h.Name)
		if dir != images.ImageDir+"/" || h.Typeflag != tar.TypeReg || name == "" || strings.HasPrefix(name, ".wh.") {
			return fmt.Errorf("%w: archive: %q is not a file in /%s", images.ErrDamaged, h.Name, images.ImageDir)
		}
		if seen[name] {
			return fmt.Errorf("%w: archive: %q is there twice", images.ErrDamaged, h.Name)
		}
		seen[name] = true
		if err := file(name, h.Size, t); err != nil {
			return err
		}
	}
}

// plain refuses what is neither a file nor a directory, or has a name that
// could lead elsewhere.
func plain(h *tar.Header) error {
	switch {
	case h.Typeflag != tar.TypeReg && h.Typeflag != tar.TypeDir:
		return fmt.Errorf("%w: archive: %q is neither a plain file nor a directory (type %q)", images.ErrDamaged, h.Name, h.Typeflag)
	case path.IsAbs(h.Name):
		return fmt.Errorf("%w: archive: %q is an absolute name", images.ErrDamaged, h.Name)
	}
	for part := range strings.SplitSeq(h.Name, "/") {
		if part == ".." {
			return fmt.Errorf("%w: archive: %q leads out of the archive", images.ErrDamaged, h.Name)
		}
	}
	for key := range h.PAXRecords {
		if strings.HasPrefix(key, "SCHILY.xattr.") || strings.HasPrefix(key, "GNU.sparse.") {
			return fmt.Errorf("%w: archive: %q has %s", images.ErrDamaged, h.Name, key)
		}
	}
	return nil
}
