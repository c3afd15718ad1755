// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/gpustate"
	"github.com/gpuckpt/gpuckpt/internal/sequence"
)

// requireLock refuses a container whose CUDA processes are not locked. It notes
// in the sequence how long the lock took.
func (c *container) requireLock(q *sequence.Sequence) error {
	if c.lockErr != nil {
		return fmt.Errorf("the container's CUDA processes could not be locked when it was paused: %w", c.lockErr)
	}
	if c.gpu.Phase() == gpustate.Unlocked {
		return fmt.Errorf("the container began to use CUDA while it was being paused; resume it and try again: %w", errdefs.ErrFailedPrecondition)
	}
	q.Note(images.Phase{Name: "lock", Took: c.gpu.Facts().LockTook})
	return nil
}

// imageDir is the directory that a checkpoint writes its images to.
type imageDir struct {
	path string
	made bool     // the checkpoint made it
	had  []string // what was in it before
}

// prepare refuses a directory that requireEmptyDir refuses. It makes the directory if
// there is none, as runc does when it gets to it, unless the directory's maker has
// taken it away (clientWaits). On an error the directory is as it was.
func (d *imageDir) prepare() error {
	if err := requireEmptyDir(d.path); err != nil {
		return err
	}
	entries, err := os.ReadDir(d.path)
	for _, e := range entries {
		d.had = append(d.had, e.Name())
	}
	if !errors.Is(err, os.ErrNotExist) || isTemporary(d.path) {
		return nil
	}
	if err := os.MkdirAll(d.path, 0o755); err != nil {
		return fmt.Errorf("make the directory for the images: %w", err)
	}
	d.made = true
	return nil
}

// leave leaves the directory as prepare found it. In a directory that was not empty
// only new area files are known to be the checkpoint's: those are removed.
func (d *imageDir) leave(context.Context) error {
	var entries []os.DirEntry
	var err error
	if d.made {
		err = os.RemoveAll(d.path)
	} else if entries, err = os.ReadDir(d.path); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		if !slices.Contains(d.had, e.Name()) && (d.had == nil || images.IsAreaFile(e.Name())) {
			err = sequence.Join(err, os.RemoveAll(filepath.Join(d.path, e.Name())))
		}
	}
	if err != nil {
		return fmt.Errorf("remove the images of a failed checkpoint: %w", err)
	}
	return nil
}

// requireEmptyDir refuses a directory that holds a GPU checkpoint, which another dump
// would spoil, or GPU state of a checkpoint that was cut short, by a shim that was
// killed, say. Beside that state a new checkpoint would be complete and could not be
// restored: its gpuckpt.json knows nothing of those files.
func requireEmptyDir(dir string) error {
	if _, err := os.Stat(filepath.Join(dir, images.MetadataName)); !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("%s holds a GPU checkpoint already: choose an empty directory: %w", dir, errdefs.ErrAlreadyExists)
	}
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look into the directory for the images: %w", err)
	}
	for _, e := range entries {
		if images.IsAreaFile(e.Name()) {
			return fmt.Errorf("%s is GPU state of a checkpoint that was cut short: choose an empty directory, or remove what is in %s: %w",
				filepath.Join(dir, e.Name()), dir, errdefs.ErrAlreadyExists)
		}
	}
	return nil
}

// clientWaits returns an error if nobody waits for the checkpoint any more. ttrpc
// does not tell of a client that has given up, but containerd then removes the
// directory that it made for the images, and runc would make it again for nobody.
func clientWaits(path string) error {
	if _, err := os.Stat(path); isTemporary(path) && errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("the client has given up, %s is gone: %w", path, context.Canceled)
	}
	return nil
}

// sizeOf returns the bytes of the files in a flat directory.
func sizeOf(dir string) (bytes uint64, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0, fmt.Errorf("measure the images: %w", err)
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			return 0, fmt.Errorf("measure the images: %w", err)
		}
		if info.Mode().IsRegular() {
			bytes += uint64(info.Size())
		}
	}
	return bytes, nil
}
