// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package images

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"

	"github.com/gpuckpt/gpuckpt/internal/node/tarname"
)

// maxTarEntries bounds the table of an archive. CRIU writes some twenty files a process.
const maxTarEntries = 1 << 20

// maxTarNames bounds the names in that table, in bytes: each may be as long as a megabyte.
const maxTarNames = 64 << 20

// ReadTar reads a tar archive that nobody trusts. It calls entry for each file and directory, in
// order, with the cleaned name; entry may read as much of data as it likes. ReadTar returns the
// first error of entry, or ErrDamaged for
//
//   - an entry that is neither a plain file nor a directory, or is a sparse file;
//   - a name that CleanTarName refuses, a file without a name, a whiteout (".wh.");
//   - a file whose name was there before;
//   - extended attributes;
//   - more than a million entries, names of more than 64 MiB, or an archive that ends too early.
func ReadTar(r io.Reader, entry func(name string, h *tar.Header, data io.Reader) error) error {
	seen, names := make(map[string]byte), 0
	for t := tar.NewReader(r); ; {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("%w: archive: %w", ErrDamaged, err)
		}
		name, err := checkTarEntry(h)
		if err != nil {
			return err
		}
		if before, ok := seen[name]; ok && (before != tar.TypeDir || h.Typeflag != tar.TypeDir) {
			return fmt.Errorf("%w: archive: %q is there twice", ErrDamaged, h.Name)
		}
		seen[name] = h.Typeflag
		if names += len(name); len(seen) > maxTarEntries || names > maxTarNames {
			return fmt.Errorf("%w: archive: more than %d entries, or %d bytes of names", ErrDamaged, maxTarEntries, maxTarNames)
		}
		if err := entry(name, h, t); err != nil {
			return err
		}
	}
}

// checkTarEntry applies the rules of ReadTar that concern one entry alone.
func checkTarEntry(h *tar.Header) (name string, err error) {
	if name, err = CleanTarName(h.Name); err != nil {
		return "", err
	}
	switch {
	case h.Typeflag != tar.TypeReg && h.Typeflag != tar.TypeDir:
		return "", fmt.Errorf("%w: archive: %q is neither a plain file nor a directory (type %q)", ErrDamaged, h.Name, h.Typeflag)
	case h.Typeflag == tar.TypeReg && name == ".":
		return "", fmt.Errorf("%w: archive: %q is a file without a name", ErrDamaged, h.Name)
	case strings.HasPrefix(path.Base(name), ".wh."):
		return "", fmt.Errorf("%w: archive: %q marks a removal", ErrDamaged, h.Name)
	}
	for key := range h.PAXRecords {
		if strings.HasPrefix(key, "SCHILY.xattr.") || strings.HasPrefix(key, "GNU.sparse.") {
			return "", fmt.Errorf("%w: archive: %q has %s", ErrDamaged, h.Name, key)
		}
	}
	return name, nil
}

// CleanTarName returns an entry's name without "./" and without a slash at the end.
// A name that is empty, absolute, has a NUL or a ".." is ErrDamaged.
func CleanTarName(name string) (string, error) { return tarname.Clean(name) }

// TarFiles returns the files of an uncompressed tar archive, by the rules of ReadTar and with their
// whole paths for names. Nothing is copied: each reads its own part of the archive.
func TarFiles(archive io.ReaderAt, size int64) (files []File, err error) {
	whole := io.NewSectionReader(archive, 0, size)
	err = ReadTar(whole, func(name string, h *tar.Header, _ io.Reader) error {
		if h.Typeflag == tar.TypeDir {
			return nil
		}
		f, err := fileHere(whole, name, h.Size)
		files = append(files, f)
		return err
	})
	return files, err
}

// LayerFiles is TarFiles by the rules of ReadLayer, and with names as that has them.
func LayerFiles(archive io.ReaderAt, size int64) (files []File, err error) {
	whole := io.NewSectionReader(archive, 0, size)
	err = ReadLayer(whole, func(name string, bytes int64, _ io.Reader) error {
		f, err := fileHere(whole, name, bytes)
		files = append(files, f)
		return err
	})
	return files, err
}

// fileHere returns a file of an archive whose header has just been read.
func fileHere(whole *io.SectionReader, name string, bytes int64) (File, error) {
	// The tar reader reads whole blocks of headers and no further: the file's data begins here.
	at, err := whole.Seek(0, io.SeekCurrent)
	if err == nil && bytes > whole.Size()-at {
		err = fmt.Errorf("%w: archive: %q is truncated", ErrDamaged, name)
	}
	return File{Name: name, Path: name + " in the archive", Bytes: uint64(bytes), Data: io.NewSectionReader(whole, at, bytes)}, err
}

// ReadLayer reads the archive of a layer that a checkpoint adds to an image, and calls file for
// each of its files. It is ReadTar that refuses all but files directly in ImageDir, named in full.
func ReadLayer(r io.Reader, file func(name string, size int64, data io.Reader) error) error {
	return ReadTar(r, func(name string, h *tar.Header, data io.Reader) error {
		switch plain := strings.TrimSuffix(h.Name, "/") == name; {
		case plain && h.Typeflag == tar.TypeDir && name == ImageDir:
			return nil
		case plain && h.Typeflag == tar.TypeReg && path.Dir(name) == ImageDir:
			return file(path.Base(name), h.Size, data)
		}
		return fmt.Errorf("%w: archive: %q is not a file in /%s", ErrDamaged, h.Name, ImageDir)
	})
}
