// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"cmp"
	"path/filepath"
)

// RuncState returns where runc keeps the state of a container. root is of runc's options;
// without one it is containerd's (pkg/process.RuncRoot).
func RuncState(root, namespace, id string) string {
	return filepath.Join(cmp.Or(root, "/run/containerd/runc"), namespace, id)
}
