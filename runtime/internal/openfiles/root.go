// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package openfiles

import (
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
)

// Root is what a container's root directory has. containerd has it in no layer, and gives each the usual.
type Root struct{ mode, uid, gid uint32 }

var usualRoot = Root{mode: 0o755}

func rootOf(dir string) (Root, error) {
	var st unix.Stat_t
	err := unix.Stat(dir, &st)
	return Root{st.Mode & 0o7777, st.Uid, st.Gid}, err
}

func saveRoot(dir string, init int) error {
	r, err := rootOf(fmt.Sprintf("/proc/%d/root/", init))
	if err != nil || r == usualRoot {
		return err
	}
	return os.WriteFile(filepath.Join(dir, image.RootName), fmt.Appendf(nil, "%o %d %d\n", r.mode, r.uid, r.gid), 0o600)
}

// ReadRoot reads the file of a dump; nil if there is none.
func ReadRoot(dumped *image.Set) (*Root, error) {
	return image.ReadText(dumped, image.RootName, func(f io.Reader) (*Root, error) {
		var r Root
		if _, err := fmt.Fscanf(f, "%o %d %d\n", &r.mode, &r.uid, &r.gid); err != nil || r.mode > 0o7777 {
			return nil, fmt.Errorf("%w: %s", images.ErrDamaged, image.RootName)
		}
		return &r, nil
	})
}

// Restore gives it to the root directory, before CRIU compares the mode.
func (r *Root) Restore(dir string) error {
	if r == nil {
		return nil
	}
	if is, err := rootOf(dir); err != nil || is == *r {
		return err
	}
	if err := os.Chown(dir, int(r.uid), int(r.gid)); err != nil {
		return err
	}
	return unix.Chmod(dir, r.mode)
}
