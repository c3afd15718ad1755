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

// DefaultNodes are the devices that runc puts into every container (AllowedDevices of its
// libcontainer/specconv). In a user namespace, whose users make no nodes, it binds the host's.
var DefaultNodes = []string{"/dev/null", "/dev/zero", "/dev/full", "/dev/tty", "/dev/random", "/dev/urandom"}
