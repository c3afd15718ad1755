// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

func TestOwnsNamespace(t *testing.T) {
	for _, test := range []struct {
		kind specs.LinuxNamespaceType
		path string
		want bool
	}{
		{specs.UTSNamespace, "/proc/self/ns/uts", true},
		{specs.NetworkNamespace, "/proc/self/ns/net", true},
		{specs.MountNamespace, "/proc/self/ns/mnt", true},
		{specs.UTSNamespace, "/proc/self/ns/mnt", false},
		{specs.UTSNamespace, "", false},
		{specs.NetworkNamespace, "/run/netns/none", false},
	} {
		if got := OwnsNamespace(specs.LinuxNamespace{Type: test.kind, Path: test.path}); got != test.want {
			t.Errorf("%s at %q: %t", test.kind, test.path, got)
		}
	}
}
