// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/gpuckpt/gpuckpt/internal/criu/image"
)

// copyName is the link in the bundle by which runc finds the images that CRIU restores from.
const copyName = "gpuckpt-criu-images"

// CopyPath returns where the copy of a checkpoint's images will be, by a container's bundle.
func CopyPath(bundle string) string { return filepath.Join(bundle, copyName) }

// Copy is the images of one checkpoint, written again for one restore.
type Copy struct {
	*image.Dir
	link string
}

// Copy writes the images again, into a directory of their own at CopyPath of the bundle. What is
// not known is refused. edit, if it is not nil, may change or refuse an entry, see image.Set.Copy.
// The directory may take so many bytes of memory, 0 for the kernel's bound. Nothing changes it any
// more. Close must be called.
func (im *Images) Copy(ctx context.Context, bundle string, bytes uint64, edit func(*image.Entry) error) (_ *Copy, err error) {
	dir, err := image.NewDir(bytes)
	if err != nil {
		return nil, err
	}
	c := &Copy{Dir: dir, link: CopyPath(bundle)}
	defer func() {
		if err != nil {
			c.Close()
		}
	}()
	if err := im.Set.Copy(ctx, dir, edit); err != nil {
		return nil, err
	}
	if err := dir.Seal(); err != nil {
		return nil, err
	}
	if err := os.Remove(c.link); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("lend CRIU the images: %w", err)
	}
	if err := os.Symlink(dir.Path(), c.link); err != nil {
		return nil, fmt.Errorf("lend CRIU the images: %w", err)
	}
	return c, nil
}

// Close removes the copy. It can be called on nil.
func (c *Copy) Close() {
	if c == nil {
		return
	}
	os.Remove(c.link)
	c.Dir.Close()
}
