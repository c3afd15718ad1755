// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package workloads

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/typeurl/v2"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// Checkpoints as files in a directory of the node: the quickest way there and back, and what a
// server that is to begin from its loaded state has lying ready.

// memoryDir mounts a tmpfs until the test ends, with huge pages as docs/operate.md advises.
func memoryDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=110g,huge=advise")
	if err != nil { // this kernel has no huge pages
		err = unix.Mount("tmpfs", dir, "tmpfs", 0, "size=110g")
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// checkpointInto has a container checkpointed into a directory, which makes its task end, and
// removes the task. It returns the bytes of GPU state.
func checkpointInto(ctx context.Context, t *testing.T, result *harness.TestResult, k *harness.Container, dir string) (state uint64) {
	t.Helper()
	opts, err := typeurl.MarshalAnyToProto(&options.CheckpointOptions{ImagePath: dir, Exit: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := untilTaken(ctx, t, result, func() error {
		_, err := shared.Client().TaskService().Checkpoint(ctx, &tasks.CheckpointTaskRequest{ContainerID: k.ID, Options: opts})
		return err
	}); err != nil {
		t.Fatalf("%v\n%s", err, tail(linesWith(shared.Log(), k.ID)))
	}
	m, err := images.ReadMetadata(dir)
	if errors.Is(err, images.ErrNoMetadata) { // a container without a GPU
		return 0
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range m.Processes {
		state += p.Bytes
	}
	return state
}

// endTask ends a container's task; the container and its files stay.
func endTask(ctx context.Context, t *testing.T, k *harness.Container) {
	t.Helper()
	if err := k.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := shared.Ctr(ctx, "tasks", "delete", k.ID); err != nil {
		t.Fatal(err)
	}
}

// restoreFrom makes a task of a container without one, from a checkpoint in a directory.
func restoreFrom(ctx context.Context, t *testing.T, k *harness.Container, dir string) {
	t.Helper()
	container, err := shared.Client().LoadContainer(ctx, k.ID)
	if err != nil {
		t.Fatal(err)
	}
	output := cio.LogFile(filepath.Join(shared.Dir(), "logs", k.ID+".log"))
	task, err := container.NewTask(ctx, output, client.WithRestoreImagePath(dir))
	if err == nil {
		err = task.Start(ctx)
	}
	if err != nil {
		t.Fatalf("restore %s: %v\n%s\n%s", k.ID, err, criuLog(err), tail(linesWith(shared.Log(), k.ID)))
	}
}

// criuLog is what the log of CRIU that an error names says of what the error says: the lines with its
// numbers, and the last ones.
func criuLog(err error) string {
	named := regexp.MustCompile(`its log: (\S+)`).FindStringSubmatch(err.Error())
	if named == nil {
		return "the error names no log of CRIU"
	}
	data, readErr := os.ReadFile(named[1])
	if readErr != nil {
		return readErr.Error()
	}
	text := tail(string(data))
	for _, number := range regexp.MustCompile(`\b\d{4,}\b`).FindAllString(err.Error(), -1) {
		text = tail(linesWith(string(data), number)) + text
	}
	return text
}

// bytesIn returns what the files of a directory occupy.
func bytesIn(t *testing.T, dir string) (n int64) {
	t.Helper()
	if err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			return err
		}
		n += st.Blocks * 512
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return n
}
