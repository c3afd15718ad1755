// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/criu/image"
)

const (
	// imagesName is the link in the bundle by which runc finds the images that CRIU restores from.
	imagesName = "gpuckpt-criu-images"
	// holdName and noImages are a file and an empty directory beside the plugin, for the first see plugin/hold.c.
	holdName = "gpuckpt.hold"
	noImages = "no-images"
)

// ImagesPath returns where runc finds the images that CRIU restores a container from, by the container's bundle.
func ImagesPath(bundle string) string { return filepath.Join(bundle, imagesName) }

// Hold has runc begin with a restore (WithPlugin) while there are no images for CRIU yet. Until Release
// there are none where runc looks for them, and CRIU waits before its first step. Close, or the end of this
// process, ends a CRIU that still waits.
type Hold struct {
	link string
	file *os.File
}

// NewHold begins to hold CRIU. The container's settings must be written. Close must be called.
func NewHold(bundle string) (*Hold, error) {
	dir := Settings{Bundle: bundle}.PluginDir()
	f, err := os.OpenFile(filepath.Join(dir, holdName), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, fmt.Errorf("hold CRIU: %w", err)
	}
	h := &Hold{link: ImagesPath(bundle), file: f}
	none := filepath.Join(dir, noImages)
	if err := errors.Join(unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB), os.Mkdir(none, 0o700), h.lead(none)); err != nil {
		h.Close()
		return nil, fmt.Errorf("hold CRIU: %w", err)
	}
	return h, nil
}

// lead has the link lead to a directory.
func (h *Hold) lead(dir string) error {
	next := h.link + ".new"
	return errors.Join(os.RemoveAll(next), os.Symlink(dir, next), os.Rename(next, h.link))
}

// Release has runc and CRIU find the images, and lets CRIU go on. ended are processes that have ended, as
// Ended says it, and free are addresses that need not be there, each between spaces.
func (h *Hold) Release(images *image.Dir, ended, free string) error {
	err := h.lead(images.Path())
	if err == nil {
		_, err = fmt.Fprintf(h.file, "GPUCKPT_ENDED=%s \nGPUCKPT_FREE=%s \ngo\n", ended, free)
	}
	if err == nil {
		err = unix.Flock(int(h.file.Fd()), unix.LOCK_UN)
	}
	if err != nil {
		return fmt.Errorf("let CRIU go on: %w", err)
	}
	return nil
}

// Close ends the hold. It can be called again.
func (h *Hold) Close() {
	_ = unix.Flock(int(h.file.Fd()), unix.LOCK_UN) // which a program that is being started has for a moment more
	h.file.Close()
	os.Remove(h.link)
}
