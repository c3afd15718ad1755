// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package bundle

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/api/types"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
)

// A root file system that cannot be looked at by its directories is mounted for
// the look, without its writable layer, and is gone after it.
func TestVisitByMount(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounting takes root")
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil { // an overlay needs a file system of its own here and there
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	for _, name := range []string{"a:b/" + images.ImageDir, "lower", "upper", "work"} {
		if err := os.MkdirAll(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	checkpoint := filepath.Join(dir, "a:b", images.ImageDir)
	if err := images.WriteMetadata(checkpoint, &images.Metadata{SchemaVersion: images.SchemaVersion, Created: time.Now().UTC()}); err != nil {
		t.Fatal(err)
	}
	look := RootfsOf(dir, []*types.Mount{{Type: "overlay", Source: "overlay", Options: []string{
		"workdir=" + filepath.Join(dir, "work"), "upperdir=" + filepath.Join(dir, "upper"),
		"lowerdir=" + filepath.Join(dir, `a\:b`) + ":" + filepath.Join(dir, "lower"),
	}}}, new(specs.Spec))
	if !look.NeedsMount() {
		t.Fatalf("looked at directly: %v", look.roots)
	}
	var root string
	err := look.Visit(t.Context(), func(roots []string) error {
		root = roots[0]
		found, err := images.OpenImage(roots...)
		if err == nil && !strings.HasPrefix(found.Dir, root) {
			t.Errorf("found in %s", found.Dir)
		}
		if err := os.WriteFile(filepath.Join(root, "x"), nil, 0o600); err == nil {
			t.Error("it is writable")
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(root); !os.IsNotExist(err) {
		t.Errorf("%s is left: %v", root, err)
	}
}

func TestRootfsOf(t *testing.T) {
	overlay := func(options ...string) *types.Mount { return &types.Mount{Type: "overlay", Options: options} }
	for name, c := range map[string]struct {
		mounts []*types.Mount
		want   []string
	}{
		"overlay":         {[]*types.Mount{overlay("index=off", "workdir=/s/3/work", "upperdir=/s/3/fs", "lowerdir=/s/2/fs:/s/1/fs")}, []string{"/s/2/fs", "/s/1/fs"}},
		"bind":            {[]*types.Mount{{Type: "bind", Source: "/s/1", Options: []string{"rbind"}}}, []string{"/s/1"}},
		"none":            {nil, []string{"/bundle/rootfs"}},
		"a block device":  {[]*types.Mount{{Type: "ext4", Source: "/dev/mapper/x"}}, nil},
		"two mounts":      {[]*types.Mount{{Type: "erofs"}, overlay("lowerdir=/a")}, nil},
		"escaped":         {[]*types.Mount{overlay(`lowerdir=/a\:b`)}, nil},
		"data only":       {[]*types.Mount{overlay("lowerdir=/a::/b")}, nil},
		"one by one":      {[]*types.Mount{overlay("lowerdir+=/a", "lowerdir+=/b")}, nil},
		"relative":        {[]*types.Mount{overlay("lowerdir=a:b")}, nil},
		"no lower":        {[]*types.Mount{overlay("upperdir=/a")}, nil},
		"several options": {[]*types.Mount{overlay("lowerdir=/a", "lowerdir=/b")}, []string{"/a", "/b"}},
	} {
		got := RootfsOf("/bundle", c.mounts, &specs.Spec{Root: &specs.Root{Path: "rootfs"}})
		if !reflect.DeepEqual(got.roots, c.want) || len(c.mounts) > 0 && c.want == nil && len(got.mounts) != len(c.mounts) {
			t.Errorf("%s: got %+v", name, got)
		}
	}
}
