// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package image tests checkpoint images end to end: a container's checkpoint is
// built into an image, an unmodified ctr imports and runs that, and the program
// goes on. On a real GPU where there is one, on the software GPU elsewhere.
package image

import (
	"archive/tar"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/pkg/rootfs"
	"github.com/containerd/typeurl/v2"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/oci"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

var (
	shared  *harness.Containerd
	session context.Context // ends when the tests are interrupted
	bins    harness.Bins
	gpu     harness.GPU
)

func TestMain(m *testing.M) {
	os.Exit(harness.Interruptible(func(ctx context.Context) int { return run(ctx, m) }))
}

func run(ctx context.Context, m *testing.M) (code int) {
	var err error
	session = ctx
	if bins, err = harness.FindBins(); err != nil {
		fmt.Fprintf(os.Stderr, "%v; run `make test`\n", err)
		return 1
	}
	if gpu, err = harness.DetectGPU(bins); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if shared, err = newContainerd(harness.Options{}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code = m.Run()
	if err := shared.Stop(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	return code
}

// newContainerd starts one with the workload's image in it.
func newContainerd(opts harness.Options) (*harness.Containerd, error) {
	opts.Bins, opts.GPU, opts.Dir = bins, gpu, os.Getenv("GPUCKPT_TEST_DIR")
	c, err := harness.Start(session, opts)
	if err != nil {
		return nil, err
	}
	if err := c.ImportWorkload(session); err != nil {
		return nil, err
	}
	return c, configure(c, "")
}

// configure sets the shim's configuration; what a shim leaves on the machine is
// to go with the containerd.
func configure(c *harness.Containerd, restore string) error {
	return c.SetShimConfig(fmt.Sprintf("log_dir = %q\n[staging]\ncgroup = %q\n[restore]\n%s\n",
		filepath.Join(c.Dir(), "criu-logs"), filepath.Join(c.Namespace(), "staging"), restore))
}

// policy sets the section [restore] until the test ends.
func policy(t *testing.T, restore string) {
	t.Helper()
	if err := configure(shared, restore); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := configure(shared, ""); err != nil {
			t.Error(err)
		}
	})
}

// id makes a container's name of the test's.
func id(t *testing.T) string {
	return strings.NewReplacer("/", "-", "_", "-", " ", "-").Replace(strings.ToLower(t.Name()))
}

// start runs a workload, removed when the test ends.
func start(t *testing.T, c *harness.Containerd, spec harness.RunSpec, args ...string) *harness.Container {
	t.Helper()
	k, err := tryStart(t, c, spec, args...)
	if err != nil {
		t.Fatalf("%v\n%s", err, c.LogTail(3000))
	}
	return k
}

func tryStart(t *testing.T, c *harness.Containerd, spec harness.RunSpec, args ...string) (*harness.Container, error) {
	t.Helper()
	if spec.Port == 0 {
		port, err := harness.FreePort()
		if err != nil {
			t.Fatal(err)
		}
		spec.Port = port
	}
	if spec.ID == "" {
		spec.ID = id(t)
	}
	spec.GPUs = []int{0}
	spec.Args = append(append([]string{"gpuwork"}, args...), "--port", strconv.Itoa(spec.Port))
	k, err := c.Run(t.Context(), spec)
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { remove(t, k) })
	return k, nil
}

func remove(t *testing.T, k *harness.Container) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
	defer cancel()
	if err := k.Remove(ctx); err != nil {
		t.Error(err)
	}
}

func ctr(t *testing.T, c *harness.Containerd, args ...string) string {
	t.Helper()
	out, err := c.Ctr(t.Context(), args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func expect(t *testing.T, k *harness.Container, question, want string) {
	t.Helper()
	got, err := k.Ask(t.Context(), question)
	if err != nil {
		t.Fatalf("%v\nits output: %s", err, k.Logs())
	}
	if got != want {
		t.Fatalf("%q: got %q, want %q", question, got, want)
	}
}

// says fails the test unless an error has all of the words.
func says(t *testing.T, err error, words ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("it succeeded; want an error that says %q", words)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("the error does not say %q: %v", w, err)
		}
	}
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
	l, err := oci.OpenLayout(to)
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
