// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/api/services/tasks/v1"
	cimages "github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/images/oci"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// A container that ctr run was told much of is restored by the same words: what replaces a default mount,
// its capabilities, a read-only root, its memory, a label; or all that --privileged is.
func TestRestoreAsCtrRuns(t *testing.T) {
	dir := t.TempDir()
	shm := specs.Mount{Type: "bind", Source: dir, Destination: "/dev/shm", Options: []string{"rbind", "rw"}}
	for name, test := range map[string]struct {
		of   harness.RunSpec
		same []string
		says string // without them
	}{
		"granted": {
			harness.RunSpec{Mounts: []specs.Mount{shm}, CtrFlags: []string{"--cap-add", "CAP_SYS_PTRACE", "--cap-drop", "CAP_KILL", "--read-only", "--user", "0:0", "--label", "team=job", "--memory-limit", "1073741824"}},
			[]string{"--mount", "type=bind,src=" + dir + ",dst=/dev/shm,options=rbind:rw", "--cap-add", "CAP_SYS_PTRACE", "--cap-drop", "CAP_KILL", "--read-only", "--user", "0:0", "--label", "team=job", "--memory-limit", "1GiB"},
			"does not fit the container's spec",
		},
		"privileged": {harness.RunSpec{CtrFlags: []string{"--privileged"}}, []string{"--privileged"}, "does not fit the container's spec"},
	} {
		t.Run(name, func(t *testing.T) {
			test.of.ID = "as-ctr-" + name
			k := shared.Work(t, test.of, "plain", "--shared", "/dev/shm/shared")
			k.Expect(t, "count", "101")
			ref := "gpuckpt.test/" + name + ":1"
			gpuckpt(t, shared, "checkpoint", k.ID, "--image", ref)
			k.MustRemove(t)
			args := []string{"restore", ref, "--name", k.ID, "--net-host", "--snapshotter", shared.Snapshotter()}
			fails(t, shared, nil, []string{test.says}, args...)
			gpuckpt(t, shared, append(args, test.same...)...)
			r := adopt(t, shared, k.ID, k.Port)
			r.Expect(t, "count", "102")
			if name == "granted" {
				container, err := shared.Client().LoadContainer(t.Context(), k.ID)
				if err != nil {
					t.Fatal(err)
				}
				labels, err := container.Labels(t.Context())
				if err != nil || labels["team"] != "job" {
					t.Errorf("the labels are %v, %v", labels, err)
				}
				spec, err := container.Spec(t.Context())
				if err != nil || spec.Linux.Resources.Memory == nil || *spec.Linux.Resources.Memory.Limit != 1<<30 || !spec.Root.Readonly {
					t.Errorf("the spec has %+v, %v", spec.Linux.Resources.Memory, err)
				}
				if _, err := os.Stat(filepath.Join(dir, "shared")); err != nil {
					t.Error(err)
				}
			}
			r.MustRemove(t)
			fails(t, shared, nil, []string{"no size"}, append(args, "--memory-limit", "much")...)
			fails(t, shared, nil, []string{"NAME=VALUE"}, append(args, "--label", "team")...)
		})
	}
}

// A restore that is given up says so and no more, and leaves no container.
func TestInterruptedRestore(t *testing.T) {
	if gpu.Kind != harness.SoftwareGPU {
		t.Skip("only the software GPU can be slow on demand")
	}
	c := session.Own(t, harness.Options{})
	k := start(t, c, harness.RunSpec{}, "pattern", "--bytes", "50331648", "--seed", "7")
	const ref = "gpuckpt.test/job:1"
	gpuckpt(t, c, "checkpoint", k.ID, "--image", ref)
	k.MustRemove(t)
	cdi := t.TempDir()
	if err := errors.Join(c.WriteCDISpec(cdi), c.SetSoftwareGPU("restore_delay_ms=3000")); err != nil {
		t.Fatal(err)
	}
	var errs strings.Builder
	cmd := command(t.Context(), t, c, nil, "restore", ref, "--name", "given-up", "--net-host", "--gpus", "0", "--cdi-spec-dirs", cdi, "--snapshotter", c.Snapshotter())
	cmd.Stderr = &errs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	restoring := func() bool {
		r, err := c.Client().TaskService().Get(t.Context(), &tasks.GetRequest{ContainerID: "given-up"})
		return err == nil && r.Process.Pid > 0
	}
	for deadline := time.Now().Add(time.Minute); !restoring(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the restore has never begun")
		}
	}
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil || strings.TrimSpace(errs.String()) != "gpuckpt: restore "+ref+": interrupted" {
		t.Errorf("gpuckpt ended with %v and %s", err, errs.String())
	}
	if _, err := c.Client().LoadContainer(t.Context(), "given-up"); !errdefs.IsNotFound(err) {
		t.Errorf("the container: %v", err)
	}
}

// A container that had a terminal gets another with --tty.
func TestRestoreTerminal(t *testing.T) {
	port, err := harness.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	k, err := shared.Create(t.Context(), harness.RunSpec{ID: "terminal", Port: port, CtrFlags: []string{"--tty"}, Args: []string{"gpuwork", "plain", "--port", strconv.Itoa(port)}})
	if err != nil {
		t.Fatal(err)
	}
	k.RemoveAtEnd(t)
	container, err := shared.Client().LoadContainer(t.Context(), k.ID)
	if err != nil {
		t.Fatal(err)
	}
	task, err := container.NewTask(t.Context(), cio.NewCreator(cio.WithStreams(new(bytes.Buffer), io.Discard, nil), cio.WithTerminal))
	if err == nil {
		err = task.Start(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	k.Expect(t, "count", "101")
	gpuckpt(t, shared, "checkpoint", k.ID, "--image", "gpuckpt.test/terminal:1")
	k.MustRemove(t)
	log := filepath.Join(t.TempDir(), "log")
	args := []string{"restore", "gpuckpt.test/terminal:1", "--name", k.ID, "--net-host", "--snapshotter", shared.Snapshotter(), "--log-file", log}
	fails(t, shared, nil, []string{"run it with one (--tty)"}, args...)
	gpuckpt(t, shared, append(args, "--tty")...)
	r := adopt(t, shared, k.ID, k.Port)
	r.Expect(t, "count", "102")
	r.MustRemove(t)
	if text, err := os.ReadFile(log); err != nil || !strings.Contains(string(text), "102") {
		t.Errorf("the terminal's log is %q, %v", text, err)
	}
}

// An image that is not unpacked is restored while it is: by two at once. One of which a layer, or a blob, is missing
// leaves nothing.
func TestRestoreUnpacks(t *testing.T) {
	results.Add(t)
	c := session.Own(t, harness.Options{})
	k := c.Work(t, harness.RunSpec{OwnNetwork: true, GPUs: []int{0}}, "pattern", "--bytes", "104857600", "--seed", "7")
	harness.Within(t, "it answers", func() bool {
		_, err := k.Exec(t.Context(), "gpuwork", "send", fmt.Sprint("127.0.0.1:", k.Port), "info")
		return err == nil
	})
	const ref = "gpuckpt.test/unpacks:1"
	gpuckpt(t, c, "checkpoint", k.ID, "--image", ref)
	k.MustRemove(t)
	image, err := c.Client().GetImage(t.Context(), ref)
	if err != nil {
		t.Fatal(err)
	}
	unpacked := func(want bool) {
		t.Helper()
		if is, err := image.IsUnpacked(t.Context(), c.Snapshotter()); is != want || err != nil {
			t.Errorf("the image is unpacked: %t, %v", is, err)
		}
	}
	args := func(name string) []string {
		return []string{"restore", ref, "--name", name, "--gpus", "0", "--cdi-spec-dirs", cdiSpec(t, c), "--snapshotter", c.Snapshotter()}
	}
	m, err := cimages.Manifest(t.Context(), c.Client().ContentStore(), image.Target(), platforms.Default())
	if err != nil {
		t.Fatal(err)
	}
	missing := func(kind string) {
		t.Helper()
		of := slices.IndexFunc(m.Layers, func(l ocispec.Descriptor) bool { return l.Annotations[annotations.Layer] == kind })
		layer := blobPath(c, m.Layers[of].Digest.String())
		if err := os.Rename(layer, layer+".gone"); err != nil {
			t.Fatal(err)
		}
		fails(t, c, nil, []string{"restore " + ref, filepath.Base(layer)}, args("missing")...)
		if _, err := c.Client().LoadContainer(t.Context(), "missing"); !errdefs.IsNotFound(err) {
			t.Errorf("of the container is left: %v", err)
		}
		if err := os.Rename(layer+".gone", layer); err != nil {
			t.Fatal(err)
		}
	}
	missing(oci.LayerCRIU)
	unpacked(false)

	var said [2]strings.Builder
	var both []*exec.Cmd
	for i := range said {
		cmd := command(t.Context(), t, c, nil, args(strconv.Itoa(i))...)
		cmd.Stderr = &said[i]
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		both = append(both, cmd)
	}
	for i, cmd := range both {
		if err := cmd.Wait(); err != nil {
			t.Errorf("restore %d: %v: %s", i, err, said[i].String())
			continue
		}
		adopt(t, c, strconv.Itoa(i), 0).MustRemove(t)
	}
	unpacked(true)
	missing(oci.LayerGPU)
}
