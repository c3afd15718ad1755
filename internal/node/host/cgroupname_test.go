// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import "testing"

func TestIsNamed(t *testing.T) {
	for _, test := range []struct {
		asked, path string
		is          bool
	}{
		{"/default/id", "/sys/fs/cgroup/freezer/default/id", true},
		{"/default/id", "/default/id-2", false},
		{"/default/id", "/id/default", false},
		{"kubepods-pod1.slice:cri-containerd:id", "/kubepods.slice/kubepods-pod1.slice/cri-containerd-id.scope", true},
		{"kubepods-pod1.slice:cri-containerd:id", "/kubepods.slice/kubepods-pod1.slice/cri-containerd-id2.scope", false},
		{"system.slice::id", "/system.slice/id.scope", true},
		{"", "/id", true},
		{"", "/", false},
	} {
		if is := (&Cgroup{dir: test.path}).IsNamed(test.asked, "id"); is != test.is {
			t.Errorf("%q asked for, %q: %t", test.asked, test.path, is)
		}
	}
}
