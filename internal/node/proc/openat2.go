// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"errors"

	"golang.org/x/sys/unix"
)

// Openat2 is openat2(2). With RESOLVE_IN_ROOT or RESOLVE_BENEATH the kernel returns EAGAIN if anything on the machine was
// renamed or mounted while it followed a "..": it is asked again then, often enough for a machine that renames all the time.
func Openat2(dir int, path string, how *unix.OpenHow) (fd int, err error) {
	for range 1000 {
		if fd, err = unix.Openat2(dir, path, how); !errors.Is(err, unix.EAGAIN) {
			break
		}
	}
	return fd, err
}
