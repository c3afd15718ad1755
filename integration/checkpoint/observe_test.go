// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	ctdimages "github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/pkg/cio"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// patience bounds the wait for something that takes milliseconds as a rule.
const patience = 30 * time.Second

// manifest finds the part of a checkpoint image with a media type.
func manifest(t *testing.T, c *harness.Containerd, ref, mediaType string) ocispec.Descriptor {
	t.Helper()
	image, err := c.Client().GetImage(t.Context(), ref)
	if err != nil {
		t.Fatal(err)
	}
	data, err := content.ReadBlob(t.Context(), c.Client().ContentStore(), image.Target())
	if err != nil {
		t.Fatal(err)
	}
	var index ocispec.Index
	if err := json.Unmarshal(data, &index); err != nil {
		t.Fatal(err)
	}
	for _, m := range index.Manifests {
		if m.MediaType == mediaType {
			return m
		}
	}
	t.Fatalf("the checkpoint image %s has no %s: %s", ref, mediaType, data)
	return ocispec.Descriptor{}
}

// blobFile reads one file out of a tar archive in the content store; nil when
// it is not in there.
func blobFile(t *testing.T, c *harness.Containerd, d ocispec.Descriptor, name string) []byte {
	t.Helper()
	ra, err := c.Client().ContentStore().ReaderAt(t.Context(), d)
	if err != nil {
		t.Fatal(err)
	}
	defer ra.Close()
	r := content.NewReader(ra)
	if strings.HasSuffix(d.MediaType, "gzip") {
		if r, err = gzip.NewReader(r); err != nil {
			t.Fatal(err)
		}
	}
	archive := tar.NewReader(r)
	for {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			t.Fatal(err)
		}
		if filepath.Clean("/"+header.Name) != filepath.Clean("/"+name) {
			continue
		}
		data, err := io.ReadAll(archive)
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
}

// metadataOf reads gpuckpt.json out of a checkpoint image; nil when the
// checkpoint has no GPU state.
func metadataOf(t *testing.T, c *harness.Containerd, ref string) *images.Metadata {
	t.Helper()
	data := blobFile(t, c, manifest(t, c, ref, ctdimages.MediaTypeContainerd1Checkpoint), images.MetadataName)
	if data == nil {
		return nil
	}
	m, err := images.ParseMetadata(data)
	if err != nil {
		t.Fatalf("%v\n%s", err, data)
	}
	return m
}

// shimOfID is the shim of a container that was not started by start.
func shimOfID(t *testing.T, c *harness.Containerd, id string) int {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(c.Bundle(id), "init.pid"))
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(string(text))
	if err != nil {
		t.Fatal(err)
	}
	shim, err := harness.Parent(pid)
	if err != nil {
		t.Fatal(err)
	}
	return shim
}

// shimOf is the container's shim: what its first process is a child of.
func shimOf(t *testing.T, k *harness.Container) int {
	t.Helper()
	parent, err := harness.Parent(k.MustPid(t))
	if err != nil {
		t.Fatal(err)
	}
	return parent
}

// commandLine is a process's, its words joined by spaces; empty when it is gone.
func commandLine(pid int) string {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(strings.ReplaceAll(string(data), "\x00", " "))
}

// childrenOf are the children of a process with a part of their command line, in
// the order in which they were started.
func childrenOf(pid int, name string) []int {
	children, err := harness.Children(pid)
	if err != nil {
		return nil
	}
	slices.Sort(children)
	return slices.DeleteFunc(children, func(child int) bool { return !strings.Contains(commandLine(child), name) })
}

// childOf is the first of them; 0 for none.
func childOf(pid int, name string) int {
	if children := childrenOf(pid, name); len(children) > 0 {
		return children[0]
	}
	return 0
}

// killTracer kills the tracer of a shim, which must be there.
func killTracer(t *testing.T, shim int) {
	t.Helper()
	tracer := childOf(shim, "gpuckpt-tracer")
	if tracer == 0 { // kill(2) takes that for all of our own group
		t.Fatal("the shim has no tracer")
	}
	if err := unix.Kill(tracer, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

// isPaused checks the container's state in containerd's eyes and in the
// kernel's.
func isPaused(t *testing.T, k *harness.Container, want bool) {
	t.Helper()
	status, err := k.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	frozen, err := harness.Frozen(k.MustPid(t))
	if err != nil {
		t.Fatal(err)
	}
	words := map[bool]string{true: "paused", false: "running"}
	if string(status) != words[want] || frozen != want {
		t.Fatalf("%s is %s, frozen: %v; want it %s", k.ID, status, frozen, words[want])
	}
}

// ctr runs ctr and wants it to succeed.
func ctr(t *testing.T, c *harness.Containerd, args ...string) string {
	t.Helper()
	out, err := c.Ctr(t.Context(), args...)
	if err != nil {
		t.Fatalf("%v\n%s", err, c.LogTail(3000))
	}
	return out
}

// takeCheckpoint makes a checkpoint image of the test's own name, removed when
// the test ends.
func takeCheckpoint(t *testing.T, c *harness.Containerd, k *harness.Container, ref string) string {
	t.Helper()
	ref = "checkpoint.test/" + harness.Name(t) + ":" + ref
	if err := k.Checkpoint(t.Context(), ref); err != nil {
		t.Fatalf("%v\n%s", err, c.LogTail(4000))
	}
	removeImageAtEnd(t, c, ref)
	return ref
}

// removeImageAtEnd removes an image and what only it needs, which on a real GPU
// is the better part of a GiB at least.
func removeImageAtEnd(t *testing.T, c *harness.Containerd, ref string) {
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if _, err := c.Ctr(ctx, "images", "rm", "--sync", ref); err != nil {
			t.Error(err)
		}
	})
}

// taskOf loads a container's task with the Go client, for what ctr cannot ask.
func taskOf(t *testing.T, c *harness.Containerd, k *harness.Container) client.Task {
	t.Helper()
	container, err := c.Client().LoadContainer(t.Context(), k.ID)
	if err != nil {
		t.Fatal(err)
	}
	task, err := container.Task(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	return task
}

// endTask ends a container's task; the container and its files stay.
func endTask(t *testing.T, c *harness.Containerd, k *harness.Container) {
	t.Helper()
	if err := k.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctr(t, c, "tasks", "delete", k.ID)
}

// restoreTask makes a task of a container go on from CRIU's files in a
// directory, which ctr has no flag for.
func restoreTask(t *testing.T, c *harness.Containerd, k *harness.Container, dir string) error {
	t.Helper()
	container, err := c.Client().LoadContainer(t.Context(), k.ID)
	if err != nil {
		t.Fatal(err)
	}
	output := cio.LogFile(filepath.Join(c.Dir(), "logs", k.ID+".log"))
	task, err := container.NewTask(t.Context(), output, client.WithRestoreImagePath(dir))
	if err != nil {
		return err
	}
	return task.Start(t.Context())
}

// checkpointTask takes a checkpoint of a container's task into a directory. It
// asks containerd itself: of "ctr tasks checkpoint --image-path" a useless
// image is left, named by the second.
func checkpointTask(t *testing.T, c *harness.Containerd, k *harness.Container, dir string) error {
	_, err := c.Client().TaskService().Checkpoint(t.Context(), &tasks.CheckpointTaskRequest{
		ContainerID: k.ID, Options: imagePath(t, dir),
	})
	return err
}

// checkpointInto is checkpointTask where it must succeed.
func checkpointInto(t *testing.T, c *harness.Containerd, k *harness.Container, dir string) {
	t.Helper()
	if err := checkpointTask(t, c, k, dir); err != nil {
		t.Fatalf("%v\n%s", err, c.LogTail(3000))
	}
	if _, err := images.ReadMetadata(dir); err != nil {
		t.Fatal(err)
	}
}
