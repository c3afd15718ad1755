// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	coci "github.com/containerd/containerd/v2/pkg/oci"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/internal/node/bundle"
)

// zoo is a dump of a container whose program has one of everything, and the files that the container
// had then.
type zoo struct {
	c     *harness.Containerd
	dir   string // the images
	files string // the container's writable layer
	spec  *specs.Spec
}

// inZoo is how the container is run: with what a hardened pod has.
func inZoo(id string) harness.RunSpec {
	return harness.RunSpec{
		ID: id, Args: []string{"gpuwork", "zoo"}, OwnNetwork: true, CtrFlags: []string{"--seccomp"}, MemoryLimit: 256 << 20,
		Mounts: []specs.Mount{{Type: "bind", Source: outside, Destination: "/zoo", Options: []string{"rbind", "ro"}}},
		Amend:  []coci.SpecOpts{coci.WithCapabilities(nil), coci.WithNoNewPrivileges},
	}
}

func newZoo(t *testing.T, c *harness.Containerd) *zoo {
	t.Helper()
	k, err := c.Run(t.Context(), inZoo(harness.Name(t)+"-zoo"))
	if err != nil {
		t.Fatalf("%v\n%s", err, c.LogTail(3000))
	}
	k.RemoveAtEnd(t)
	harness.Within(t, "the program has one of everything", func() bool {
		if text := k.Logs(); text != "" && !strings.Contains(text, "ready") {
			t.Fatal(text)
		}
		return k.Logs() != ""
	})
	z := &zoo{c: c, dir: t.TempDir(), files: t.TempDir()}
	file, err := bundle.Read(c.Bundle(k.ID))
	if err != nil {
		t.Fatal(err)
	}
	z.spec = file.Spec
	opts, err := typeurl.MarshalAnyToProto(&options.CheckpointOptions{ImagePath: z.dir, Exit: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Client().TaskService().Checkpoint(t.Context(), &tasks.CheckpointTaskRequest{ContainerID: k.ID, Options: opts}); err != nil {
		t.Fatalf("%v\n%s", err, c.LogTail(5000))
	}
	copyFiles(t, upper(t, c, k.ID), z.files)
	return z
}

// copyFiles makes the files of a directory those of another one.
func copyFiles(t *testing.T, from, to string) {
	t.Helper()
	if out, err := exec.Command("sh", "-c", `find "$2" -mindepth 1 -maxdepth 1 -exec rm -rf {} + && cp -a "$1"/. "$2"`, "sh", from, to).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// upper returns the writable layer of a container.
func upper(t *testing.T, c *harness.Containerd, id string) string {
	t.Helper()
	container, err := c.Client().LoadContainer(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	info, err := container.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	mounts, err := c.Client().SnapshotService(info.Snapshotter).Mounts(t.Context(), info.SnapshotKey)
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range mounts[0].Options {
		if dir, ok := strings.CutPrefix(o, "upperdir="); ok {
			return dir
		}
	}
	t.Skip("the container's files are in no overlay here") // GPUCKPT_TEST_DIR on one
	return ""
}

// cage is a container that dumps are restored into, one after the other.
type cage struct {
	*zoo
	id        string
	container client.Container
	upper     string
	images    string
	log       string
}

func (z *zoo) newCage(t *testing.T, n int) *cage {
	t.Helper()
	id := fmt.Sprintf("%s-%d", harness.Name(t), n)
	k, err := z.c.Create(t.Context(), inZoo(id))
	if err != nil {
		t.Fatal(err)
	}
	k.RemoveAtEnd(t)
	container, err := z.c.Client().LoadContainer(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return &cage{zoo: z, id: id, container: container, upper: upper(t, z.c, id), images: t.TempDir(), log: filepath.Join(t.TempDir(), "log")}
}

// hangs bounds one restore and its end, on a machine with whatever load. CRIU has some seconds of it.
const hangs = 10 * time.Minute

// settles is how long what ends may take, such as a process that was killed.
const settles = 2 * time.Minute

// Restore restores the dump, with an image of it changed; "" changes none. It returns what is
// wrong with how it ended, and why it failed.
func (g *cage) Restore(t *testing.T, image string, data []byte) (wrong []string, failed error) {
	copyFiles(t, g.files, g.upper)
	if out, err := exec.Command("sh", "-c", `rm -rf "$2" && cp -al "$1" "$2"`, "sh", g.dir, g.images).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if image != "" {
		at := filepath.Join(g.images, image)
		if err := os.Remove(at); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
		if err := os.WriteFile(at, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), hangs)
	defer cancel()
	task, failed := g.container.NewTask(ctx, cio.LogFile(g.log), client.WithRestoreImagePath(g.images))
	if failed == nil {
		failed = task.Start(ctx)
		if failed == nil {
			// A program with other registers ends by itself.
			if err := task.Kill(ctx, syscall.SIGKILL); err != nil && !errdefs.IsNotFound(err) {
				wrong = append(wrong, fmt.Sprintf("kill what was restored: %v", err))
			}
		}
		if _, err := task.Delete(ctx, client.WithProcessKill); err != nil {
			wrong = append(wrong, fmt.Sprintf("delete the task: %v", err))
		}
	}
	if ctx.Err() != nil {
		wrong = append(wrong, fmt.Sprintf("it hangs: not within %v", hangs))
	}
	left := g.Left()
	for deadline := time.Now().Add(settles); len(left) > 0 && time.Now().Before(deadline); left = g.Left() {
		time.Sleep(100 * time.Millisecond)
	}
	return append(wrong, left...), failed
}

// Left returns what a restore has left behind.
func (g *cage) Left() (left []string) {
	cgroups, err := harness.CgroupsOf("/" + g.c.Namespace() + "/" + g.id)
	if err != nil || len(cgroups) > 0 {
		left = append(left, fmt.Sprintf("cgroups %v, %v", cgroups, err))
	}
	if _, err := os.Stat(g.c.Bundle(g.id)); !errors.Is(err, fs.ErrNotExist) {
		left = append(left, fmt.Sprintf("its bundle, %v", err))
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, "/"+g.id+"/") {
			left = append(left, "the mount "+line)
		}
	}
	if err != nil {
		left = append(left, err.Error())
	}
	// Its processes have its layer mounted, wherever they are.
	processes, _ := filepath.Glob("/proc/[0-9]*/mountinfo")
	for _, path := range processes {
		if data, err := os.ReadFile(path); err == nil && strings.Contains(string(data), g.upper) {
			pid, _ := strconv.Atoi(strings.Split(path, "/")[2])
			name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
			left = append(left, fmt.Sprintf("process %d (%s)", pid, strings.TrimSpace(string(name))))
		}
	}
	if out, err := exec.Command("grep", "-rlF", secret, g.upper).CombinedOutput(); len(out) > 0 {
		left = append(left, fmt.Sprintf("the host's file in %s (%v)", out, err))
	}
	return left
}
