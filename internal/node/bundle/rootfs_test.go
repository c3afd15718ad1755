// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package bundle

import (
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/api/types"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

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
		found, err := images.OpenImage("", roots...)
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

// Of the names of a layer, which may be any number, two are read.
func TestLayerOfManyNames(t *testing.T) {
	dir := t.TempDir()
	for i := range 2000 {
		if err := os.WriteFile(filepath.Join(dir, strconv.Itoa(i)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if n := testing.AllocsPerRun(1, func() { onlyCheckpoint(dir) }); n > 100 {
		t.Errorf("%v allocations", n)
	}
}

// Layers of a checkpoint alone are left out, and nothing else of a root file system.
func TestWithoutCheckpoint(t *testing.T) {
	layers := t.TempDir()
	layer := func(name string, paths ...string) string {
		dir := filepath.Join(layers, name)
		for _, p := range append(paths, ".") {
			if err := os.MkdirAll(filepath.Join(dir, p), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		return dir
	}
	criu, gpu, base := layer("criu", ".gpuckpt"), layer("gpu", ".gpuckpt"), layer("base", "usr")
	mixed, empty, beside := layer("mixed", ".gpuckpt", "etc"), layer("empty"), layer("beside", ".gpuckptx")
	file := layer("file")
	if err := os.WriteFile(filepath.Join(file, ".gpuckpt"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	overlay := func(options ...string) []*types.Mount {
		return []*types.Mount{{Type: "overlay", Source: "overlay", Options: options}}
	}
	lower := func(dirs ...string) string { return "lowerdir=" + strings.Join(dirs, ":") }
	for name, c := range map[string]struct{ mounts, want []*types.Mount }{
		"a checkpoint image": {
			overlay("index=off", "workdir=/w", "upperdir=/u", lower(criu, gpu, base)), overlay("index=off", "workdir=/w", "upperdir=/u", lower(base)),
		},
		"a later one":         {overlay("upperdir=/u", lower(criu, empty, gpu, base)), overlay("upperdir=/u", lower(empty, base))},
		"read-only":           {overlay(lower(criu, mixed, base)), overlay(lower(mixed, base))},
		"read-only, one left": {overlay(lower(criu, base)), []*types.Mount{{Type: "bind", Source: base, Options: []string{"ro", "rbind"}}}},
		"no base":             {overlay("upperdir=/u", lower(criu, gpu)), nil},
		"another image":       {overlay("upperdir=/u", lower(mixed, empty, beside, file, base)), nil},
		"another form":        {overlay("upperdir=/u", `lowerdir=/a\:b:`+criu), nil},
		"several":             {append(overlay(lower(criu, base)), &types.Mount{Type: "tmpfs"}), nil},
		"a bind mount":        {[]*types.Mount{{Type: "bind", Source: mixed}}, nil},
		"none":                {nil, nil},
	} {
		if c.want == nil {
			c.want = c.mounts
		}
		if got := WithoutCheckpoint(c.mounts); !slices.EqualFunc(got, c.want, func(a, b *types.Mount) bool { return proto.Equal(a, b) }) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}
