// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package imagedir is the directory that a checkpoint writes its files to.
//
// A client names it, or containerd makes it for one checkpoint and removes it when the client has
// what it wants, or has given up. Prepare refuses one that holds a checkpoint, Leave takes away what
// a checkpoint that failed has written.
package imagedir

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/operation/sequence"
)

// temporaryPrefix begins the names of the directories that containerd makes for
// the images of one checkpoint, and for unpacking a checkpoint image for one
// restore (plugins/services/tasks). containerd never removes those for a restore.
const temporaryPrefix = "ctrd-checkpoint"

// IsTemporary reports whether containerd made a directory for a single checkpoint or
// restore, by its name: containerd makes it with MkdirTemp.
func IsTemporary(dir string) bool {
	return strings.HasPrefix(filepath.Base(filepath.Clean(dir)), temporaryPrefix)
}

// unpackedName is the file in a bundle that names a directory that containerd has unpacked for a
// restore, for the case that the shim dies before it removes it.
const unpackedName = "gpuckpt-restore-dir"

// NoteUnpacked notes in a bundle that containerd has unpacked a directory for its restore.
func NoteUnpacked(bundle, dir string) error {
	if err := os.WriteFile(filepath.Join(bundle, unpackedName), []byte(dir), 0o600); err != nil {
		return fmt.Errorf("remember the restore directory: %w", err)
	}
	return nil
}

// large is the size of files whose room takes the kernel more than a moment to free.
const large = 64 << 20

// Removed are large files that have no name any more. They take their room until they are closed, or this
// process ends.
type Removed []*os.File

// Free frees the room, and calls then. Nobody waits for it: 8 GB in memory take a second.
func (r Removed) Free(then func()) {
	if len(r) == 0 {
		then()
		return
	}
	go func() {
		for _, f := range r {
			f.Close()
		}
		then()
	}()
}

// RemoveUnpacked removes the directory that a bundle notes, if there is one, and the note.
func RemoveUnpacked(bundle string) (removed Removed, err error) {
	note := filepath.Join(bundle, unpackedName)
	dir, err := os.ReadFile(note)
	if err != nil || !IsTemporary(string(dir)) {
		return nil, nil
	}
	entries, _ := os.ReadDir(string(dir)) // what is not found is freed at once
	for _, e := range entries {
		if info, err := e.Info(); err != nil || !info.Mode().IsRegular() || info.Size() < large {
			continue
		}
		if f, err := os.Open(filepath.Join(string(dir), e.Name())); err == nil {
			removed = append(removed, f)
		}
	}
	if err := os.RemoveAll(string(dir)); err != nil {
		return removed, err
	}
	_ = os.Remove(note) // it goes with the bundle
	return removed, nil
}

// Dir is the directory that a checkpoint writes its images to.
type Dir struct {
	// Path is where it is, or will be.
	Path string `json:"path"`
	// Made says that the checkpoint makes it, Had what was in it before.
	Made bool     `json:"made"`
	Had  []string `json:"had,omitempty"`
}

// Look returns a directory as it is before a checkpoint writes to it.
func Look(path string) Dir {
	d := Dir{Path: path}
	entries, err := os.ReadDir(path)
	for _, e := range entries {
		d.Had = append(d.Had, e.Name())
	}
	d.Made = errors.Is(err, os.ErrNotExist) && !IsTemporary(path)
	return d
}

// Prepare refuses a directory that RequireEmpty refuses. It makes the directory if
// there is none, as runc does when it gets to it, unless the directory's maker has
// taken it away (ClientWaits). On an error the directory is as it was.
func (d *Dir) Prepare() error {
	if err := RequireEmpty(d.Path); err != nil {
		return err
	}
	if *d = Look(d.Path); !d.Made {
		return nil
	}
	if err := os.MkdirAll(d.Path, 0o755); err != nil {
		return fmt.Errorf("make the directory for the images: %w", err)
	}
	return nil
}

// Leave leaves the directory as Prepare found it. In a directory that was not empty
// only new area files are known to be the checkpoint's: those are removed.
func (d *Dir) Leave(context.Context) error {
	var entries []os.DirEntry
	var err error
	if d.Made {
		err = os.RemoveAll(d.Path)
	} else if entries, err = os.ReadDir(d.Path); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		if !slices.Contains(d.Had, e.Name()) && (d.Had == nil || images.IsAreaFile(e.Name())) {
			err = sequence.Join(err, os.RemoveAll(filepath.Join(d.Path, e.Name())))
		}
	}
	if err != nil {
		return fmt.Errorf("remove the images of a failed checkpoint: %w", err)
	}
	return nil
}

// Complete reports whether the directory holds a checkpoint that is complete.
func (d *Dir) Complete() bool {
	_, err := os.Lstat(filepath.Join(d.Path, images.MetadataName))
	return err == nil
}

// IsOfCheckpoint reports whether a checkpoint writes files of a name: CRIU's, runc's and this project's.
func IsOfCheckpoint(name string) bool {
	name = strings.TrimPrefix(name, ".tmp-") // what is written and then renamed
	return images.IsAreaFile(name) || strings.HasSuffix(name, ".img") || strings.HasPrefix(name, "gpuckpt.") ||
		strings.HasPrefix(name, "gpuckpt-") && (strings.HasSuffix(name, ".txt") || strings.HasSuffix(name, ".json")) ||
		slices.Contains([]string{"descriptors.json", "stats-dump", "dump.log"}, name)
}

// RequireEmpty refuses a directory that holds a GPU checkpoint, which another dump
// would spoil, or GPU state of a checkpoint that was cut short, by a shim that was
// killed, say. Beside that state a new checkpoint would be complete and could not be
// restored: its gpuckpt.json knows nothing of those files. A checkpoint without GPU state may be
// overwritten, as runc does it: see BeginDump.
func RequireEmpty(dir string) error {
	if m, err := images.ReadMetadata(dir); !errors.Is(err, images.ErrNoMetadata) && (err != nil || len(m.Processes) > 0) {
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

// BeginDump makes a checkpoint that is about to be overwritten incomplete, until the new one is
// complete: there is no way back for it from here on.
func BeginDump(dir string) error {
	if err := os.Remove(filepath.Join(dir, images.MetadataName)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("replace the checkpoint in the directory for the images: %w", err)
	}
	return nil
}

// ClientWaits returns an error if nobody waits for the checkpoint any more. ttrpc
// does not tell of a client that has given up, but containerd then removes the
// directory that it made for the images, and runc would make it again for nobody.
func ClientWaits(path string) error {
	if _, err := os.Stat(path); IsTemporary(path) && errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("the client has given up, %s is gone: %w", path, context.Canceled)
	}
	return nil
}

// Size returns the bytes of the files in a flat directory.
func Size(dir string) (bytes uint64, err error) {
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
