// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"os"
	"testing"
)

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
		{"system.slice:nerdctl:id", "/sys/fs/cgroup/system.slice:nerdctl:id", true},
		{"system.slice:nerdctl:id", "/sys/fs/cgroup/system.slice:nerdctl:id2", false},
		{"", "/id", true},
		{"", "/", false},
	} {
		if is := (&Cgroup{dir: test.path}).IsNamed(test.asked, "id"); is != test.is {
			t.Errorf("%q asked for, %q: %t", test.asked, test.path, is)
		}
	}
}

func TestIsSystemdPath(t *testing.T) {
	for path, is := range map[string]bool{
		"system.slice:nerdctl:id": true, "kubepods-pod1.slice:cri-containerd:id": true, "user.slice::id": true,
		"": false, "/default/id": false, "/a.slice/id": false, "::id": false, "a:b:c": false, "a.slice:b": false, "a.slice:b:c:d": false,
	} {
		if got := IsSystemdPath(path); got != is {
			t.Errorf("%q: %t", path, got)
		}
	}
}

func TestCgroupPath(t *testing.T) {
	if _, err := CgroupPath(os.Getpid(), "no-such"); err == nil {
		t.Error("no error for a controller that is none")
	}
	_, v2 := CgroupPath(os.Getpid(), "")
	_, v1 := CgroupPath(os.Getpid(), "memory")
	if v1 != nil && v2 != nil {
		t.Errorf("no cgroup of either version: %v, %v", v1, v2)
	}
}
