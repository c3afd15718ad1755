// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package tarname checks the names in an archive of a stranger's. Package images has the same under
// names of its own. It is a leaf, so that a program that starts often imports nothing else.
package tarname

import (
	"errors"
	"fmt"
	"path"
	"strings"
)

// ErrDamaged is images.ErrDamaged.
var ErrDamaged = errors.New("damaged checkpoint")

// Clean returns an entry's name without "./" and without a slash at the end. A name that is empty,
// absolute, has a NUL or a ".." is ErrDamaged.
func Clean(name string) (string, error) {
	if name == "" || strings.ContainsRune(name, 0) || path.IsAbs(name) {
		return "", fmt.Errorf("%w: archive: the name %q is empty, absolute or not text", ErrDamaged, name)
	}
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." {
			return "", fmt.Errorf("%w: archive: %q leads out of the archive", ErrDamaged, name)
		}
	}
	return path.Clean(name), nil
}
