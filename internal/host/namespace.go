// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"os"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// OwnsNamespace reports whether a spec's namespace is the host's own, by its path:
// CRI writes that of a pod with the host's network into the specs of its containers.
func OwnsNamespace(ns specs.LinuxNamespace) bool {
	file := string(ns.Type)
	switch ns.Type {
	case specs.NetworkNamespace:
		file = "net"
	case specs.MountNamespace:
		file = "mnt"
	}
	given, err := os.Stat(ns.Path)
	if ns.Path == "" || err != nil {
		return false
	}
	own, err := os.Stat("/proc/self/ns/" + file)
	return err == nil && os.SameFile(given, own)
}

// HasFile reports whether there is something at a path.
func HasFile(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
