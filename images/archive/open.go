// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package archive

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strings"

	"github.com/gpuckpt/gpuckpt/images"
)

// maxDump bounds what is read of a file of JSON, in bytes.
const maxDump = 16 << 20

// Archive is an open archive.
type Archive struct {
	// Checkpoint reads its files where they lie; the files at the archive's
	// root that tell of the container are among them. Without GPU state its
	// Metadata is nil.
	Checkpoint *images.Checkpoint
	// Config is config.dump.
	Config Config

	rootfs  *io.SectionReader // nil without
	deleted []string
	file    io.Closer
}

// Open opens an archive. The errors are ErrMalformed, ErrUnsupported, those of
// images.OpenFiles (images.ErrSchema, images.ErrMalformed, images.ErrDamaged), or
// those of reading a file.
func Open(name string) (*Archive, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, fmt.Errorf("open the archive: %w", err)
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = errors.New("no regular file")
	}
	var a *Archive
	if err == nil {
		a, err = read(f, st.Size())
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", name, err), f.Close())
	}
	a.file = f
	return a, nil
}

// Close closes the archive, and with it the files of the checkpoint.
func (a *Archive) Close() error { return a.file.Close() }

// read opens an archive of that size.
func read(r io.ReaderAt, size int64) (*Archive, error) {
	if err := refuseCompressed(r); err != nil {
		return nil, err
	}
	list, err := entries(r, size)
	if err != nil {
		return nil, err
	}
	a := new(Archive)
	var files []images.File
	var config bool
	for _, e := range list {
		dir, base := path.Split(e.name)
		switch {
		case dir == checkpointIn+"/":
			files = append(files, file(base, e))
		case strings.HasPrefix(e.name, "volumes/"):
			return nil, fmt.Errorf("%w: %s would not be brought back", ErrUnsupported, e.name)
		case strings.HasSuffix(e.name, "devshm-checkpoint.tar"):
			if err := refuseContent(e); err != nil {
				return nil, err
			}
		case e.name == "pod.options", e.name == "pod.dump":
			return nil, fmt.Errorf("%w: it is one of a whole pod", ErrUnsupported)
		case e.name == rootfsName:
			a.rootfs = e.data
		case e.name == deletedName:
			if err := decode(e, &a.deleted); err != nil {
				return nil, err
			}
		case dir == "":
			if e.name == ConfigName {
				config = true
				if err := decode(e, &a.Config); err != nil {
					return nil, err
				}
			}
			if rootFile(e.name) {
				files = append(files, file(e.name, e))
			}
		}
	}
	if !config {
		return nil, fmt.Errorf("%w: it has no %s", ErrMalformed, ConfigName)
	}
	for _, name := range a.deleted {
		if _, err := cleanDeleted(name); err != nil {
			return nil, err
		}
	}
	// One name of the root may not take the place of one of the checkpoint's.
	seen := make(map[string]bool)
	for _, f := range files {
		if seen[f.Name] {
			return nil, fmt.Errorf("%w: %s is at the root and in %s/", ErrMalformed, f.Name, checkpointIn)
		}
		seen[f.Name] = true
	}
	if !seen["inventory.img"] {
		return nil, fmt.Errorf("%w: it has no %s/inventory.img", ErrMalformed, checkpointIn)
	}
	a.Checkpoint, err = images.OpenFiles(files, images.AllowWithoutGPU)
	if err != nil {
		return nil, err
	}
	return a, nil
}

// file is an entry as a file of a checkpoint.
func file(name string, e entry) images.File {
	return images.File{Name: name, Path: e.name + " in the archive", Bytes: uint64(e.data.Size()), Data: e.data}
}

// decode reads a file of JSON. Fields it does not know are left out: Podman and
// CRI-O write many more.
func decode(e entry, into any) error {
	if e.data.Size() > maxDump {
		return fmt.Errorf("%w: %s has more than %d bytes", ErrMalformed, e.name, maxDump)
	}
	data := make([]byte, e.data.Size())
	if _, err := io.ReadFull(e.data, data); err != nil {
		return fmt.Errorf("%w: %s: %w", ErrMalformed, e.name, err)
	}
	if err := json.Unmarshal(data, into); err != nil {
		return fmt.Errorf("%w: %s: %w", ErrMalformed, e.name, err)
	}
	return nil
}
