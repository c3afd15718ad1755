// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/typeurl/v2"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// plainCheckpoint asks for a checkpoint without any options, as the kubelet and
// nerdctl do.
func plainCheckpoint(t *testing.T, c *harness.Containerd, k *harness.Container) error {
	t.Helper()
	_, err := c.Client().TaskService().Checkpoint(t.Context(), &tasks.CheckpointTaskRequest{ContainerID: k.ID})
	return err
}

// A client that sends no options leaves the choice between going on and ending
// to the container's annotation.
func TestNilOptions(t *testing.T) {
	const annotation = "dev.gpuckpt.on-checkpoint"
	for _, test := range []struct {
		name        string
		annotations map[string]string
		want        client.ProcessStatus
		refused     []string
	}{
		{name: "none", want: client.Running},
		{name: "keep", annotations: map[string]string{annotation: "keep"}, want: client.Running},
		{name: "stop", annotations: map[string]string{annotation: "stop"}, want: client.Stopped},
		{
			name: "invalid", annotations: map[string]string{annotation: "freeze"}, want: client.Running,
			refused: []string{annotation, `"freeze"`, `"keep"`, `"stop"`, "InvalidArgument"},
		},
	} {
		for _, workload := range []string{"counter", "plain"} {
			t.Run(test.name+"/"+workload, func(t *testing.T) {
				results.Add(t)
				spec := harness.RunSpec{Annotations: test.annotations}
				if workload == "counter" {
					spec.GPUs = []int{0}
				}
				k := shared.Work(t, spec, workload)
				k.Expect(t, "count", "101")
				err := plainCheckpoint(t, shared, k)
				if test.refused != nil {
					harness.Says(t, err, test.refused...)
				} else if err != nil {
					t.Fatalf("%v\n%s", err, shared.LogTail(3000))
				}
				if status, err := k.Status(t.Context()); err != nil || status != test.want {
					t.Errorf("afterwards it is %q, error %v; want %q", status, err, test.want)
				}
				if test.want == client.Running {
					k.Expect(t, "count", "102")
				}
			})
		}
	}
}

// runc's options reach runc, though clients that do not know this runtime's
// name send them as a file.
func TestRuntimeOptions(t *testing.T) {
	results.Add(t)
	runc, err := bins.Path("runc")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	calls, wrapper, config := filepath.Join(dir, "calls"), filepath.Join(dir, "wrapped-runc"), filepath.Join(dir, "options.toml")
	write(t, wrapper, fmt.Sprintf("#!/bin/sh\necho called >>%s\nexec %s \"$@\"\n", calls, runc), 0o755)
	write(t, config, fmt.Sprintf("BinaryName = %q\n", wrapper), 0o644)

	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}, CtrFlags: []string{"--runtime-config-path", config}}, "counter")
	k.Expect(t, "count", "101")
	if info, err := os.Stat(calls); err != nil || info.Size() == 0 {
		t.Errorf("BinaryName was not run: %v", err)
	}
	ref := takeCheckpoint(t, shared, k, "1")
	k.MustRemove(t)
	r := restore(t, shared, k.ID, ref, k.Port)
	r.Expect(t, "count", "102")
}

func TestUnknownRuntimeOption(t *testing.T) {
	results.Add(t)
	config := filepath.Join(t.TempDir(), "options.toml")
	write(t, config, "BinaryNane = \"runc\"\n", 0o644)
	k, err := shared.Create(t.Context(), harness.RunSpec{
		ID: harness.Name(t), Args: []string{"gpuwork", "sleep"}, CtrFlags: []string{"--runtime-config-path", config},
	})
	if err != nil {
		t.Fatal(err)
	}
	k.RemoveAtEnd(t)
	harness.Says(t, k.Start(t.Context()), "runtime options", "BinaryNane")
}

// write makes a file.
func write(t *testing.T, path, text string, mode os.FileMode) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
}

// imagePath are options that ask for the images in a directory.
func imagePath(t *testing.T, dir string) *anypb.Any {
	t.Helper()
	opts, err := typeurl.MarshalAnyToProto(&options.CheckpointOptions{ImagePath: dir})
	if err != nil {
		t.Fatal(err)
	}
	return opts
}
