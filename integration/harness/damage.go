// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"fmt"
	"os"
)

// FlipBit turns one bit in the middle of a file. A second time it is as before.
func FlipBit(t T, path string) {
	t.Helper()
	if err := flipBit(path); err != nil {
		t.Fatal(fmt.Errorf("flip a bit: %w", err))
	}
}

func flipBit(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	b := make([]byte, 1)
	if _, err := f.ReadAt(b, info.Size()/2); err != nil {
		return err
	}
	b[0] ^= 1
	_, err = f.WriteAt(b, info.Size()/2)
	return err
}
