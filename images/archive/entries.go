// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package archive

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
)

// maxEntries bounds the table of an archive: CRIU writes some ten files for each
// process and as many again for what it has open.
const maxEntries = 1 << 20

// entry is a plain file in a tar archive.
type entry struct {
	name string // without "./"
	data *io.SectionReader
}

// entries lists the plain files of an uncompressed tar archive, in order. All
// else but directories is refused, and so are names that lead out of the archive,
// appear twice, or lie where the archive ends.
func entries(r io.ReaderAt, size int64) ([]entry, error) {
	whole := io.NewSectionReader(r, 0, size)
	var found []entry
	seen := make(map[string]bool)
	for t := tar.NewReader(whole); ; {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			return found, nil
		}
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
		}
		name, err := cleanName(h.Name)
		if err != nil {
			return nil, err
		}
		switch h.Typeflag {
		case tar.TypeDir:
			continue
		case tar.TypeReg:
		default:
			return nil, fmt.Errorf("%w: %q is neither a plain file nor a directory (tar type %q)", ErrMalformed, h.Name, h.Typeflag)
		}
		for key := range h.PAXRecords {
			if strings.HasPrefix(key, "GNU.sparse.") {
				return nil, fmt.Errorf("%w: %q is a sparse file", ErrMalformed, h.Name)
			}
		}
		// The tar reader reads headers alone ahead, in whole blocks: the
		// position is the begin of the file's data.
		at, err := whole.Seek(0, io.SeekCurrent)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
		}
		switch {
		case name == ".":
			return nil, fmt.Errorf("%w: a file without a name", ErrMalformed)
		case seen[name]:
			return nil, fmt.Errorf("%w: %q is there twice", ErrMalformed, name)
		case h.Size < 0 || h.Size > size-at:
			return nil, fmt.Errorf("%w: it ends within %q", ErrMalformed, name)
		case len(found) == maxEntries:
			return nil, fmt.Errorf("%w: more than %d files", ErrMalformed, maxEntries)
		}
		seen[name] = true
		found = append(found, entry{name, io.NewSectionReader(r, at, h.Size)})
	}
}

// cleanName gives an entry's name without "./" and a slash at the end.
func cleanName(name string) (string, error) {
	if name == "" || strings.ContainsRune(name, 0) || path.IsAbs(name) {
		return "", fmt.Errorf("%w: the name %q", ErrMalformed, name)
	}
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." {
			return "", fmt.Errorf("%w: the name %q leads out of the archive", ErrMalformed, name)
		}
	}
	return path.Clean(name), nil
}

// refuseCompressed explains archives that are compressed as a whole, Podman's
// by default.
func refuseCompressed(r io.ReaderAt) error {
	var magic [6]byte
	if _, err := r.ReadAt(magic[:], 0); err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("read the archive: %w", err)
	}
	for tool, begin := range map[string]string{"zstd": "\x28\xb5\x2f\xfd", "gzip": "\x1f\x8b", "xz": "\xfd7zXZ\x00", "bzip2": "BZh"} {
		if strings.HasPrefix(string(magic[:]), begin) {
			return fmt.Errorf("%w: it is compressed; take the compression off first, with `%s -d`", ErrUnsupported, tool)
		}
	}
	return nil
}
