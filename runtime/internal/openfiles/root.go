// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package openfiles

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
)

// rootOf returns the mode and the owner of a root directory, which containerd has in no layer.
func rootOf(dir string) ([3]uint32, error) {
	var st unix.Stat_t
	err := unix.Stat(dir, &st)
	return [3]uint32{st.Mode & 0o7777, st.Uid, st.Gid}, err
}

func saveRoot(dir string, init int) error {
	is, err := rootOf(fmt.Sprintf("/proc/%d/root/", init))
	if err != nil || is == [3]uint32{0o755, 0, 0} {
		return err
	}
	return os.WriteFile(filepath.Join(dir, image.RootName), fmt.Appendf(nil, "%o %d %d\n", is[0], is[1], is[2]), 0o600)
}

// RestoreRoot sets the mode and the owner of a root directory that a dump has noted. CRIU compares the mode later.
func RestoreRoot(dumped *image.Set, dir string) error {
	_, err := image.ReadText(dumped, image.RootName, func(f io.Reader) (want [3]uint32, err error) {
		if _, err := fmt.Fscanf(f, "%o %d %d\n", &want[0], &want[1], &want[2]); err != nil {
			return want, fmt.Errorf("%w: %s", images.ErrDamaged, image.RootName)
		}
		if is, err := rootOf(dir); err != nil || is == want {
			return want, err
		}
		return want, cmp.Or(os.Chown(dir, int(want[1]), int(want[2])), unix.Chmod(dir, want[0])) // chown clears bits of the mode
	})
	return err
}
