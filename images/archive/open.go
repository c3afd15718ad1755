// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package archive

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"

	metadata "github.com/checkpoint-restore/checkpointctl/lib"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/sign"
)

// maxDump bounds what is read of a file of JSON, in bytes.
const maxDump = 16 << 20

// Archive is an open archive.
type Archive struct {
	// Checkpoint reads its files where they lie, those at the archive's root that tell of the
	// container among them. Without GPU state its Metadata is nil.
	Checkpoint *images.Checkpoint
	// Config is config.dump.
	Config Config

	rootfs  *images.File // nil without
	deleted []string
	file    io.Closer
}

// Open opens an archive. The errors are ErrMalformed, ErrUnsupported, or those of images.OpenFiles.
func Open(ctx context.Context, name string) (*Archive, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, fmt.Errorf("open the archive: %w", err)
	}
	var a *Archive
	st, err := f.Stat()
	switch {
	case err != nil:
	case !st.Mode().IsRegular():
		err = errors.New("no regular file")
	default:
		a, err = read(ctx, f, st.Size())
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", name, err), f.Close())
	}
	a.file = f
	return a, nil
}

// Close closes the archive, and with it the files of the checkpoint.
func (a *Archive) Close() error { return a.file.Close() }

func read(ctx context.Context, r io.ReaderAt, size int64) (*Archive, error) {
	if err := refuseCompressed(r); err != nil {
		return nil, err
	}
	list, err := images.TarFiles(r, size)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	a := new(Archive)
	var files []images.File
	for _, e := range list {
		dir, base := path.Split(e.Name)
		switch {
		case dir == metadata.CheckpointDirectory+"/":
			e.Name = base
			files = append(files, e)
		case strings.HasPrefix(e.Name, metadata.CheckpointVolumesDirectory+"/"):
			return nil, fmt.Errorf("%w: %s would not be brought back", ErrUnsupported, e.Name)
		case strings.HasSuffix(e.Name, metadata.DevShmCheckpointTar):
			if err := refuseContent(ctx, e); err != nil {
				return nil, err
			}
		case e.Name == metadata.PodOptionsFile, e.Name == metadata.PodDumpFile:
			return nil, fmt.Errorf("%w: it is one of a whole pod", ErrUnsupported)
		case e.Name == metadata.RootFsDiffTar:
			a.rootfs = &e
		case e.Name == metadata.DeletedFilesFile:
			if err := decode(e, &a.deleted); err != nil {
				return nil, err
			}
		case dir == "":
			if sign.Describes(e.Name) { // it stays with the checkpoint in an image
				files = append(files, e)
			}
		}
	}
	config := slices.IndexFunc(list, func(f images.File) bool { return f.Name == metadata.ConfigDumpFile })
	if config < 0 {
		return nil, fmt.Errorf("%w: it has no %s", ErrMalformed, metadata.ConfigDumpFile)
	}
	if err := decode(list[config], &a.Config); err != nil {
		return nil, err
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
			return nil, fmt.Errorf("%w: %s is at the root and in %s/", ErrMalformed, f.Name, metadata.CheckpointDirectory)
		}
		seen[f.Name] = true
	}
	if !seen["inventory.img"] {
		return nil, fmt.Errorf("%w: it has no %s/inventory.img", ErrMalformed, metadata.CheckpointDirectory)
	}
	a.Checkpoint, err = images.OpenFiles(files, images.AllowWithoutGPU)
	if err != nil {
		return nil, err
	}
	return a, nil
}

// decode reads a file of JSON. Fields it does not know are left out: others write many more.
func decode(e images.File, into any) error {
	if e.Bytes > maxDump {
		return fmt.Errorf("%w: %s has more than %d bytes", ErrMalformed, e.Name, maxDump)
	}
	data := make([]byte, e.Bytes)
	_, err := e.Data.ReadAt(data, 0)
	if err == nil {
		err = json.Unmarshal(data, into)
	}
	if err != nil {
		return fmt.Errorf("%w: %s: %w", ErrMalformed, e.Name, err)
	}
	return nil
}

// refuseCompressed explains archives that are compressed as a whole, as Podman's are.
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

// refuseContent refuses an archive in an archive that has more than a directory's own entry. Podman
// puts /dev/shm into one, also where it is empty.
func refuseContent(ctx context.Context, e images.File) error {
	inner := io.NewSectionReader(e.Data, 0, int64(e.Bytes))
	err := entries(ctx, inner, ErrMalformed, func(name string, h *tar.Header, _ io.Reader) error {
		if h.Typeflag != tar.TypeDir || name != "." {
			return fmt.Errorf("%w: %s would not be brought back", ErrUnsupported, name)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("%s: %w", e.Name, err)
	}
	return nil
}
