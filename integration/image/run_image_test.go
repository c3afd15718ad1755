// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package image

import (
	"context"
	"fmt"
	"os"
	"reflect"
	"slices"
	"testing"

	cimages "github.com/containerd/containerd/v2/core/images"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/oci"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

var asked = map[string]string{"dev.gpuckpt.restore": "true"}

// A container is checkpointed and removed; its image is moved as an archive and
// run by ctr; the program goes on where it was. So it does each time the task is
// started anew, and the image stays as it is. Of the container that went on
// another image is made, on top of the same base.
func TestRunResumes(t *testing.T) {
	name := "example.com/resumes:1"
	k := start(t, shared, harness.RunSpec{}, "pattern", "--bytes", "40M")
	k.Expect(t, "verify", "bad=0")
	k.Expect(t, "write 1000", "wrote 1000")
	dir, rw := dump(t, shared, k)
	k.MustRemove(t)
	layout, first := layoutOf(t, shared, dir, rw, harness.WorkloadImage, name)
	if first.GPULayers == 0 || first.GPUBytes < 40<<20 {
		t.Errorf("built %+v", first)
	}
	importLayout(t, shared, layout, name)

	r := start(t, shared, harness.RunSpec{Image: name, Port: k.Port, Annotations: asked}, "pattern")
	before := files(t, checkpointDirs(t, shared)...)
	if len(before) == 0 {
		t.Fatal("no unpacked checkpoint was found")
	}
	hidden(t, r)
	r.Expect(t, "verify", "bad=0")
	r.Expect(t, "count", "101")
	r.Expect(t, "write 500", "wrote 500")
	r.Expect(t, "verify", "bad=0")

	if err := r.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctr(t, shared, "tasks", "delete", r.ID)
	if err := r.Start(t.Context()); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(3000))
	}
	hidden(t, r)
	r.Expect(t, "verify", "bad=0")
	r.Expect(t, "count", "101")
	if after := files(t, checkpointDirs(t, shared)...); !reflect.DeepEqual(before, after) {
		t.Error("the image's layers were changed")
	}

	// Straight into containerd's store this time.
	dir, rw = dump(t, shared, r)
	r.MustRemove(t)
	second := "example.com/resumes:2"
	ctx, done, err := shared.Client().WithLease(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	checkpoint, err := images.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	base := target(t, shared, name)
	built, err := oci.Build(ctx, shared.Client().ContentStore(), oci.Options{Checkpoint: checkpoint, Base: base, Previous: &base, RW: &rw})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := shared.Client().ImageService().Create(ctx, cimages.Image{Name: second, Target: built.Manifest}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := shared.Ctr(context.WithoutCancel(t.Context()), "images", "delete", "--sync", second); err != nil {
			t.Error(err)
		}
	})
	if err := done(ctx); err != nil {
		t.Fatal(err)
	}
	img, err := shared.Client().GetImage(t.Context(), second)
	if err != nil {
		t.Fatal(err)
	}
	if err := img.Unpack(t.Context(), shared.Snapshotter()); err != nil {
		t.Fatal(err)
	}
	was, err := oci.Inspect(t.Context(), shared.Client().ContentStore(), base)
	if err != nil {
		t.Fatal(err)
	}
	now, err := oci.Inspect(t.Context(), shared.Client().ContentStore(), built.Manifest)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(now.Layers) - len(was.Layers); n != 1 { // another layer of writable files, and nothing else
		t.Errorf("the image of a resumed container has %d layers more", n)
	}
	r2 := start(t, shared, harness.RunSpec{ID: harness.Name(t) + "-2", Image: second, Port: k.Port, Annotations: asked}, "pattern")
	hidden(t, r2)
	r2.Expect(t, "verify", "bad=0")
	r2.Expect(t, "count", "102")
}

// hidden lists / as the program of a restored container sees it: the checkpoint is not there.
func hidden(t *testing.T, k *harness.Container) {
	t.Helper()
	if shared.Snapshotter() != "overlayfs" {
		t.Logf("the snapshotter %s makes one directory of all layers: the checkpoint is visible in it", shared.Snapshotter())
		return
	}
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/root", k.MustPid(t)))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if slices.Contains(names, images.ImageDir) || !slices.Contains(names, "dev") {
		t.Errorf("the program has in its root directory %q", names)
	}
}

// The image of TestRunResumes' kind under other circumstances.
func built(t *testing.T, c *harness.Containerd, name string, spec harness.RunSpec, args ...string) (port int) {
	t.Helper()
	k := start(t, c, spec, args...)
	k.Expect(t, "count", "101")
	dir, rw := dump(t, c, k)
	k.MustRemove(t)
	layout, _ := layoutOf(t, c, dir, rw, harness.WorkloadImage, name)
	importLayout(t, c, layout, name)
	return k.Port
}

func TestPolicy(t *testing.T) {
	name := "example.com/policy:1"
	port := built(t, shared, name, harness.RunSpec{}, "counter")
	for _, c := range []struct {
		name, config string
		annotation   string
		count        string // 101 afresh, 102 resumed
		refused      string
	}{
		{name: "not asked", count: "101"},
		{name: "asked", annotation: "true", count: "102"},
		{name: "asked not to", config: `policy = "always"`, annotation: "false", count: "101"},
		{name: "always", config: `policy = "always"`, count: "102"},
		{name: "never", config: `policy = "never"`, count: "101"},
		{name: "never and asked", config: `policy = "never"`, annotation: "true", refused: "this node allows none"},
		{name: "preferred", annotation: "prefer", count: "102"},
		{name: "never and preferred", config: `policy = "never"`, annotation: "prefer", count: "101"},
		{name: "not listed and preferred", config: `images = ["example.com/*"]`, annotation: "prefer", count: "101"},
		{name: "misspelt", annotation: "yes", refused: `must be "true", "prefer" or "false"`},
		{name: "listed", config: `images = ["example.com/*"]`, annotation: "true", refused: "does not say which image"},
	} {
		t.Run(c.name, func(t *testing.T) {
			shared.Configured(t, "[restore]\n"+c.config)
			spec := harness.RunSpec{Image: name, Port: port}
			if c.annotation != "" {
				spec.Annotations = map[string]string{"dev.gpuckpt.restore": c.annotation}
			}
			k, err := tryStart(t, spec, "counter")
			if c.refused != "" {
				harness.Says(t, err, c.refused)
				return
			}
			if err != nil {
				t.Fatalf("%v\n%s", err, shared.LogTail(3000))
			}
			k.Expect(t, "count", c.count)
		})
	}
	t.Run("listed by name", func(t *testing.T) {
		shared.Configured(t, "[restore]\n"+`images = ["example.com/policy:*"]`)
		for image, refused := range map[string]string{name: "", "example.com/other:1": "not among those"} {
			spec := harness.RunSpec{Image: name, Port: port, Annotations: map[string]string{"dev.gpuckpt.restore": "true", "io.kubernetes.cri.image-name": image}}
			k, err := tryStart(t, spec, "counter")
			if refused != "" {
				harness.Says(t, err, refused)
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			k.Expect(t, "count", "102")
			k.MustRemove(t)
		}
	})
}

// Runc's own shim knows nothing of checkpoints.
func TestUnderRuncItStartsAfresh(t *testing.T) {
	name := "example.com/afresh:1"
	port := built(t, shared, name, harness.RunSpec{}, "counter")
	k := start(t, shared, harness.RunSpec{Image: name, Port: port, Runtime: harness.RuncRuntime, Annotations: asked}, "counter")
	k.Expect(t, "count", "101")
}

// Without an overlay the image is looked at where it is mounted from.
func TestNativeSnapshotter(t *testing.T) {
	c := session.Own(t, harness.Options{Snapshotter: "native"})
	name := "example.com/native:1"
	port := built(t, c, name, harness.RunSpec{}, "counter")
	k := start(t, c, harness.RunSpec{Image: name, Port: port, Annotations: asked}, "counter")
	k.Expect(t, "count", "102")
}
