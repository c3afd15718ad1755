// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package archive

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	metadata "github.com/checkpoint-restore/checkpointctl/lib"
	"github.com/containerd/containerd/v2/pkg/atomicfile"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/sign"
)

// Write writes an archive under that name. It appears when it is complete; on an error the name is
// as it was. A file beside it takes the writable files, whose size must be known before they are.
// progress receives the step "archive": the bytes written.
func Write(ctx context.Context, name string, c Contents, progress images.Progress) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("write the archive %s: %w", name, err)
		}
	}()
	out, err := atomicfile.New(name, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = out.Cancel() }() // nothing once it is closed
	w := writer{ctx: ctx, tar: tar.NewWriter(out), meter: progress.Begin("archive", 0), buf: make([]byte, 1<<20)}
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
	if err := out.Close(); err != nil {
		return err
	}
	w.meter.End("written")
	return nil
}

type writer struct {
	ctx   context.Context
	tar   *tar.Writer
	meter *images.Meter
	buf   []byte
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
	if err := w.file(metadata.RootFsDiffTar, size, spool); err != nil || len(deleted) == 0 {
		return err
	}
	return w.json(metadata.DeletedFilesFile, deleted)
}

// dumps writes the files that describe the container, unless the checkpoint has them.
func (w *writer) dumps(c Contents) error {
	for _, f := range []struct {
		name string
		data any
	}{{metadata.ConfigDumpFile, c.Config}, {metadata.SpecDumpFile, c.Spec}, {metadata.NetworkStatusFile, struct{}{}}} {
		raw, ok := f.data.(json.RawMessage)
		there := slices.ContainsFunc(c.Checkpoint.Files, func(had images.File) bool { return had.Name == f.name })
		if there || ok && len(raw) == 0 {
			continue
		}
		if err := w.json(f.name, f.data); err != nil {
			return err
		}
	}
	return nil
}

func (w *writer) checkpoint(c *images.Checkpoint) error {
	const dir = metadata.CheckpointDirectory + "/"
	files := func(in string, which func(name string) bool) error {
		for _, f := range c.Files {
			if !which(f.Name) {
				continue
			}
			r, err := f.Reader(w.ctx)
			if err != nil {
				return err
			}
			if err := errors.Join(w.file(in+f.Name, int64(f.Bytes), r), r.Close()); err != nil {
				return err
			}
		}
		return nil
	}
	if err := files("", sign.Describes); err != nil {
		return err
	}
	if err := w.tar.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir, Mode: 0o700}); err != nil {
		return err
	}
	if err := files(dir, func(name string) bool { return !sign.Describes(name) && name != images.MetadataName }); err != nil {
		return err
	}
	for _, a := range c.Areas() {
		r := a.Open(w.ctx)
		if err := errors.Join(w.file(dir+a.File, int64(a.End()), r), r.Close()); err != nil {
			return err
		}
	}
	return files(dir, func(name string) bool { return name == images.MetadataName }) // last, as at a dump
}

func (w *writer) json(name string, value any) error {
	data, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return w.file(name, int64(len(data)), bytes.NewReader(data))
}

func (w *writer) file(name string, size int64, r io.ReaderAt) error {
	err := w.tar.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o600, Size: size})
	if err == nil {
		var n int64
		if n, err = io.CopyBuffer(w.tar, w.meter.Reader(w.ctx, io.NewSectionReader(r, 0, size)), w.buf); err == nil && n < size {
			err = io.ErrUnexpectedEOF
		}
	}
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}
