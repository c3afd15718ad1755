// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"fmt"
	"os"
)

// sizeOf gives the bytes of the files in a flat directory.
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
