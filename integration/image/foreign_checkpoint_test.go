// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/convert"
	"github.com/gpuckpt/gpuckpt/images/oci"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// What ctr has made, an index of raw blobs, becomes an image that ctr runs.
func TestFromContainerdsCheckpoint(t *testing.T) {
	name, stock := "example.com/stock:image", "example.com/stock:checkpoint"
	k := start(t, shared, harness.RunSpec{}, "pattern", "--bytes", "40M")
	k.Expect(t, "verify", "bad=0")
	if err := k.Checkpoint(t.Context(), stock); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := shared.Ctr(context.WithoutCancel(t.Context()), "images", "delete", "--sync", stock); err != nil {
			t.Error(err)
		}
	})
	k.MustRemove(t)
	store := shared.Client().ContentStore()
	s, err := convert.OpenContainerd(t.Context(), store, target(t, shared, stock))
	if err != nil {
		t.Fatal(err)
	}
	config, spec, err := s.Record(t.Context())
	if err != nil || s.RW == nil || s.Base.Digest == "" || config.OCIRuntime == "" || !strings.Contains(string(spec), "ociVersion") {
		t.Errorf("found %+v, %+v, %s, %v", s, config, spec, err)
	}
	layout, _ := layoutWith(t, name, oci.Options{Checkpoint: s.Checkpoint, Base: s.Base, RW: s.RW, Provider: store})
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	importLayout(t, shared, layout, name)
	r := start(t, shared, harness.RunSpec{Image: name, Port: k.Port, Annotations: asked}, "pattern")
	r.Expect(t, "verify", "bad=0")
	r.Expect(t, "count", "101")
}

// A container without GPU state resumes as well.
func TestWithoutGPU(t *testing.T) {
	k := start(t, shared, harness.RunSpec{}, "plain")
	k.Expect(t, "count", "101")
	resumed(t, k, "example.com/plain:1")
}

// resumed ends a container that has counted to 101 without GPU state, and starts an image of it.
func resumed(t *testing.T, k *harness.Container, name string) *harness.Container {
	t.Helper()
	dir, rw := dump(t, shared, k)
	k.MustRemove(t)
	checkpoint, err := images.Open(dir, images.AllowWithoutGPU)
	if err != nil {
		t.Fatal(err)
	}
	layout, _ := layoutWith(t, name, oci.Options{Checkpoint: checkpoint, Base: target(t, shared, harness.WorkloadImage), Provider: shared.Client().ContentStore(), RW: &rw})
	importLayout(t, shared, layout, name)
	r := start(t, shared, harness.RunSpec{Image: name, Port: k.Port, Annotations: asked}, "plain")
	r.Expect(t, "count", "102")
	return r
}

// The root directory has the mode and the owner that the program gave it.
func TestRootDirectory(t *testing.T) {
	k := start(t, shared, harness.RunSpec{}, "plain")
	k.Expect(t, "count", "101")
	root := func(k *harness.Container) string { return fmt.Sprintf("/proc/%d/root/", k.MustPid(t)) }
	if err := errors.Join(os.Chown(root(k), 7, 8), unix.Chmod(root(k), 0o1711)); err != nil {
		t.Fatal(err)
	}
	r := resumed(t, k, "example.com/root:1")
	var st unix.Stat_t
	if err := unix.Stat(root(r), &st); err != nil || st.Mode&^unix.S_IFMT != 0o1711 || st.Uid != 7 || st.Gid != 8 {
		t.Errorf("the root directory has mode %o, owner %d:%d: %v", st.Mode, st.Uid, st.Gid, err)
	}
}
