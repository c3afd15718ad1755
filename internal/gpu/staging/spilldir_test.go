// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package staging

import (
	"errors"
	"testing"

	"github.com/containerd/errdefs"
)

// A directory is one container's.
func TestSpillDirOfAnother(t *testing.T) {
	parent := t.TempDir()
	dir, err := MakeSpillDir(parent, "ns-job")
	if err != nil || !IsSpillDir(dir) {
		t.Fatalf("%s, %v", dir, err)
	}
	if _, err := MakeSpillDir(parent, "ns-job"); !errors.Is(err, errdefs.ErrAlreadyExists) {
		t.Errorf("a second of the name: error %v", err)
	}
}
