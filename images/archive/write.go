// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package archive

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	metadata "github.com/checkpoint-restore/checkpointctl/lib"

	"github.com/gpuckpt/gpuckpt/images"
)

// Write writes an archive under that name. It appears when it is complete; on
// an error there is none, and one that was there is as it was. Beside it lies
// meanwhile a file with the container's writable files, whose size must be known
// before they are. progress receives the step "archive": the bytes written.
func Write(ctx context.Context, name string, c Contents, progress images.Progress) (err error) {
	out, err := os.CreateTemp(filepath.Dir(name), "."+filepath.Base(name)+".")
	if err != nil {
		return fmt.Errorf("write the archive: %w", err)
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("write the archive %s: %w", name, errors.Join(err, ignoreClosed(out.Close()), os.Remove(out.Name())))
		}
	}()
	w := writer{ctx: ctx, tar: tar.NewWriter(out), meter: progress.Begin("archive", 0)}
	if err := w.rootfs(c.Layers, filepath.Dir(name)); err != nil {
		return err
	}
	if err := w.dumps(c); err != nil {
		return err
	}
	if err := w.checkpoint(c.Checkpoint); err != nil {
		return err
	}
	if err := w.tar.Close(); err != nil {
		return err
	}
	if err := out.Sync(); err != nil {
		return err
	}
	if err := out.Close(); err != nil {
		return err
	}
	if err := os.Rename(out.Name(), name); err != nil {
		return err
	}
	w.meter.End("written")
	return nil
}

func ignoreClosed(err error) error {
	if errors.Is(err, os.ErrClosed) {
		return nil
	}
	return err
}

// writer writes one archive.
type writer struct {
	ctx   context.Context
	tar   *tar.Writer
	meter *images.Meter
}

// rootfs writes the writable files, by way of a temporary file in dir.
func (w *writer) rootfs(layers []Layer, dir string) (err error) {
	if len(layers) == 0 {
		return nil
	}
	spool, err := os.CreateTemp(dir, "."+metadata.RootFsDiffTar+".")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, spool.Close()) }()
	if err := os.Remove(spool.Name()); err != nil {
		return err
	}
	deleted, err := merge(w.ctx, spool, layers)
	if err != nil {
		return err
	}
	size, err := spool.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	if err := w.file(metadata.RootFsDiffTar, size, io.NewSectionReader(spool, 0, size)); err != nil {
		return err
	}
	if len(deleted) == 0 {
		return nil
	}
	data, err := encode(deleted)
	if err != nil {
		return err
	}
	return w.bytes(metadata.DeletedFilesFile, data)
}

// dumps writes the files that describe the container, unless the checkpoint has them.
func (w *writer) dumps(c Contents) error {
	there := make(map[string]bool)
	for _, f := range c.Checkpoint.Files {
		there[f.Name] = true
	}
	config, err := encode(c.Config)
	if err != nil {
		return err
	}
	network := []byte("{}")
	for _, f := range []struct {
		name string
		data []byte
	}{{metadata.ConfigDumpFile, config}, {metadata.SpecDumpFile, c.Spec}, {metadata.StatusDumpFile, c.Status}, {metadata.NetworkStatusFile, network}} {
		if there[f.name] || len(f.data) == 0 {
			continue
		}
		if err := w.bytes(f.name, f.data); err != nil {
			return err
		}
	}
	return nil
}

// checkpoint writes the files of the checkpoint, the areas whole.
func (w *writer) checkpoint(c *images.Checkpoint) error {
	for _, f := range c.Files {
		if rootFile(f.Name) {
			if err := w.copy(f.Name, f); err != nil {
				return err
			}
		}
	}
	if err := w.tar.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: metadata.CheckpointDirectory + "/", Mode: 0o700}); err != nil {
		return err
	}
	for _, f := range c.Files {
		if !rootFile(f.Name) && f.Name != images.MetadataName {
			if err := w.copy(metadata.CheckpointDirectory+"/"+f.Name, f); err != nil {
				return err
			}
		}
	}
	if c.Metadata != nil {
		for _, a := range c.Areas() {
			if err := w.area(a); err != nil {
				return err
			}
		}
		for _, f := range c.Files {
			if f.Name == images.MetadataName { // last, as at a dump
				return w.copy(metadata.CheckpointDirectory+"/"+f.Name, f)
			}
		}
	}
	return nil
}

// area writes an area as the one file that it is in a flat checkpoint.
func (w *writer) area(a images.Area) (err error) {
	r := a.Open()
	defer func() { err = errors.Join(err, r.Close()) }()
	size := int64(a.End())
	return w.file(metadata.CheckpointDirectory+"/"+a.File, size, io.NewSectionReader(r, 0, size))
}

func (w *writer) copy(name string, f images.File) (err error) {
	r, err := f.Open()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	return w.file(name, int64(f.Bytes), io.NewSectionReader(r, 0, int64(f.Bytes)))
}

func (w *writer) bytes(name string, data []byte) error {
	if err := w.tar.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o600, Size: int64(len(data))}); err != nil {
		return err
	}
	_, err := w.tar.Write(data)
	return err
}

// copyBytes is how much is copied at once, between looks at the context.
const copyBytes = 1 << 20

// file writes an entry of that size.
func (w *writer) file(name string, size int64, r io.Reader) error {
	if err := w.tar.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o600, Size: size}); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	for buf := make([]byte, copyBytes); size > 0; {
		if err := w.ctx.Err(); err != nil {
			return context.Cause(w.ctx)
		}
		part := buf[:min(size, copyBytes)]
		if _, err := io.ReadFull(r, part); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if _, err := w.tar.Write(part); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		size -= int64(len(part))
		w.meter.Add(int64(len(part)))
	}
	return nil
}
