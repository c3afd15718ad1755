// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package devnode

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

func TestRefresh(t *testing.T) {
	spec := new(specs.Spec)
	const text = `{"linux": {
		"devices": [{"path": "/dev/nvidia0", "type": "c", "major": 195}, {"path": "/dev/nvidia-uvm", "type": "c", "major": 511, "minor": 0}, {"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229}],
		"resources": {"devices": [{"allow": false, "access": "rwm"}, {"allow": true, "type": "c", "major": 195, "minor": 0}, {"allow": true, "type": "c", "major": 511, "minor": 0}, {"allow": true, "type": "c", "major": 511, "minor": 1}]}}}`
	if err := json.Unmarshal([]byte(text), spec); err != nil {
		t.Fatal(err)
	}
	if err := refresh(spec, func(path string) (device, error) {
		if path != "/dev/nvidia-uvm" {
			t.Errorf("asked for %s, whose numbers are the same everywhere", path)
		}
		return device{major: 235, minor: 0}, nil
	}); err != nil {
		t.Fatal(err)
	}
	got := ""
	for _, d := range spec.Linux.Devices {
		got += fmt.Sprintf("%s %d:%d ", d.Path, d.Major, d.Minor)
	}
	for _, rule := range spec.Linux.Resources.Devices[1:] {
		got += fmt.Sprintf("allow %d:%d ", *rule.Major, *rule.Minor)
	}
	if want := "/dev/nvidia0 195:0 /dev/nvidia-uvm 235:0 /dev/fuse 10:229 allow 195:0 allow 235:0 allow 511:1 "; got != want {
		t.Errorf("got %s\nwant %s", got, want)
	}
	err := refresh(spec, func(path string) (device, error) { return device{}, fmt.Errorf("%s: %w", path, os.ErrNotExist) })
	if err == nil || !strings.Contains(err.Error(), "/dev/nvidia-uvm") || !strings.Contains(err.Error(), "nvidia-modprobe") {
		t.Errorf("a node that this machine has not: %v", err)
	}
}

// A container may have a /dev with any number of names, and nodes: none are read without end.
func TestListMuch(t *testing.T) {
	dir, fd := devDir(t)
	for _, path := range []string{"/dev/nvidia0", "/dev/nvidiactl", "/dev/null"} {
		if err := makeNode(fd, nullNode(path)); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 3000 {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("some-%d", i)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	nodes, err := listBeneath(fd, ".", 4000)
	if slices.Sort(nodes); err != nil || !slices.Equal(nodes, []string{"nvidia0", "nvidiactl"}) {
		t.Errorf("%v, %v", nodes, err)
	}
	if nodes, err := listBeneath(fd, ".", 1000); !errors.Is(err, proc.ErrTooMuch) {
		t.Errorf("of more than 1,000 names: %v, %v", nodes, err)
	}
	if found, err := list(fd); err != nil || len(found) != 2 {
		t.Errorf("%v, %v", found, err)
	}
	for i := range mostNodes {
		if err := makeNode(fd, nullNode(fmt.Sprintf("/dev/nvidia%d", i))); err != nil {
			t.Fatal(err)
		}
	}
	if found, err := list(fd); !errors.Is(err, proc.ErrTooMuch) {
		t.Errorf("%d nodes, %v", len(found), err)
	}
}

func TestVerify(t *testing.T) {
	const null, zero, full = 1<<8 | 3, 1<<8 | 5, 1<<8 | 7
	here := []specs.LinuxDevice{{Path: "/dev/nvidia0", Major: 1, Minor: 3}, {Path: "/dev/nvidiactl", Major: 1, Minor: 5}}
	for _, c := range []struct {
		what, name string
		make       func(at string) error
		good       bool
	}{
		{"the node", "nvidia0", func(at string) error { return unix.Mknod(at, unix.S_IFCHR, null) }, true},
		{"another's name", "nvidia0", func(at string) error { return unix.Mknod(at, unix.S_IFCHR, zero) }, true},
		{"another device", "nvidia0", func(at string) error { return unix.Mknod(at, unix.S_IFCHR, full) }, false},
		{"a block device", "nvidia0", func(at string) error { return unix.Mknod(at, unix.S_IFBLK, null) }, false},
		{"a FIFO", "nvidiactl", func(at string) error { return unix.Mknod(at, unix.S_IFIFO, 0) }, false},
		{"a link", "nvidiactl", func(at string) error { return os.Symlink("/dev/zero", at) }, false},
		{"a GPU that is not here", "nvidia7", func(at string) error { return unix.Mknod(at, unix.S_IFCHR, full) }, true},
	} {
		dir, fd := devDir(t)
		if err := c.make(filepath.Join(dir, c.name)); err != nil {
			t.Fatal(err)
		}
		if err := verify(fd, here); (err == nil) != c.good || err != nil && !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s: %v", c.what, err)
		}
	}
}
