// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package image tests checkpoint images end to end: a container's checkpoint is
// built into an image, an unmodified ctr imports and runs that, and the program
// goes on. On a real GPU where there is one, on the software GPU elsewhere.
package image

import (
	"archive/tar"
	"context"
	"io"
	"os"
	"path/filepath"
	"testing"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/pkg/rootfs"
	"github.com/containerd/typeurl/v2"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/layout"
	"github.com/gpuckpt/gpuckpt/images/oci"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

var (
	session *harness.Session
	shared  *harness.Containerd
	gpu     harness.GPU
)

func TestMain(m *testing.M) {
	harness.MainShared(m.Run, func(s *harness.Session, c *harness.Containerd) {
		session, shared, gpu = s, c, s.GPU
	}, nil)
}

// start runs a workload on GPU 0, removed when the test ends.
func start(t *testing.T, c *harness.Containerd, spec harness.RunSpec, args ...string) *harness.Container {
	t.Helper()
	spec.GPUs = []int{0}
	return c.Work(t, spec, args...)
}

// tryStart is start of what may be refused.
func tryStart(t *testing.T, spec harness.RunSpec, args ...string) (*harness.Container, error) {
	t.Helper()
	spec.GPUs = []int{0}
	return shared.TryWork(t, spec, args...)
}

func ctr(t *testing.T, c *harness.Containerd, args ...string) string {
	t.Helper()
	out, err := c.Ctr(t.Context(), args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// dump ends a container with a checkpoint and gives its directory and its
// writable files as a layer in containerd's store.
func dump(t *testing.T, c *harness.Containerd, k *harness.Container) (dir string, rw ocispec.Descriptor) {
	t.Helper()
	dir = t.TempDir()
	opts, err := typeurl.MarshalAnyToProto(&options.CheckpointOptions{ImagePath: dir, Exit: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Client().TaskService().Checkpoint(t.Context(), &tasks.CheckpointTaskRequest{ContainerID: k.ID, Options: opts}); err != nil {
		t.Fatalf("%v\n%s", err, c.LogTail(3000))
	}
	info, err := c.Client().ContainerService().Get(t.Context(), k.ID)
	if err != nil {
		t.Fatal(err)
	}
	ctx, done, err := c.Client().WithLease(t.Context()) // nothing else holds the layer
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := done(context.WithoutCancel(ctx)); err != nil {
			t.Error(err)
		}
	})
	rw, err = rootfs.CreateDiff(ctx, info.SnapshotKey, c.Client().SnapshotService(info.Snapshotter), c.Client().DiffService())
	if err != nil {
		t.Fatal(err)
	}
	return dir, rw
}

// target gives the manifest of an image of containerd's.
func target(t *testing.T, c *harness.Containerd, name string) ocispec.Descriptor {
	t.Helper()
	img, err := c.Client().ImageService().Get(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	return img.Target
}

// layoutOf builds the image of a checkpoint in an OCI layout, on the image named.
func layoutOf(t *testing.T, c *harness.Containerd, dir string, rw ocispec.Descriptor, base, name string) (string, *oci.Result) {
	t.Helper()
	checkpoint, err := images.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	return layoutWith(t, name, oci.Options{
		Checkpoint: checkpoint, Base: target(t, c, base), BaseName: base, Provider: c.Client().ContentStore(), RW: &rw,
	})
}

// layoutWith builds an image in an OCI layout and verifies it.
func layoutWith(t *testing.T, name string, o oci.Options) (string, *oci.Result) {
	t.Helper()
	to := filepath.Join(t.TempDir(), "layout")
	l, err := layout.Open(to)
	if err != nil {
		t.Fatal(err)
	}
	r, err := oci.Build(t.Context(), l, o)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := oci.Verify(t.Context(), l, r.Manifest, nil); err != nil {
		t.Fatal(err)
	}
	if err := l.Tag(t.Context(), name, r.Manifest); err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	return to, r
}

// importLayout packs a layout and has ctr import it.
func importLayout(t *testing.T, c *harness.Containerd, dir, name string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image.tar")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	w := tar.NewWriter(f)
	if err := w.AddFS(os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	ctr(t, c, "images", "import", "--local", "--snapshotter", c.Snapshotter(), path)
	t.Cleanup(func() {
		if _, err := c.Ctr(context.WithoutCancel(t.Context()), "images", "delete", "--sync", name); err != nil {
			t.Error(err)
		}
	})
}

// files gives the content of all files below a directory by their path, to see
// whether any of it was changed.
func files(t *testing.T, dirs ...string) map[string]string {
	t.Helper()
	found := make(map[string]string)
	for _, dir := range dirs {
		err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			f, err := os.Open(path)
			if err != nil {
				return err
			}
			defer f.Close()
			data, err := io.ReadAll(f)
			found[path] = string(data)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return found
}

// checkpointDirs are the directories of unpacked checkpoint layers.
func checkpointDirs(t *testing.T, c *harness.Containerd) []string {
	t.Helper()
	dirs, err := filepath.Glob(filepath.Join(c.Dir(), "root", "io.containerd.snapshotter.v1."+c.Snapshotter(), "snapshots", "*", "fs", images.ImageDir))
	if err != nil {
		t.Fatal(err)
	}
	return dirs
}
