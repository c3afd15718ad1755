// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package hooks

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"time"

	taskAPI "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/gpuckpt/gpuckpt/internal/node/bundle"
)

// Container is the Program of a container.
type Container struct {
	// Task is runc's service, past the gate of exec'd processes.
	Task       taskAPI.TTRPCTaskService
	ID, Bundle string
}

// hookID is the id of the process that a hook is, hookOutput the file in the bundle for what it
// writes. A container has one hook at a time.
const (
	hookID     = "gpuckpt-hook"
	hookOutput = "gpuckpt-hook.log"
)

// specType is how containerd's clients name the type of an exec'd process.
const specType = "types.containerd.io/opencontainers/runtime-spec/1/Process"

// killTimeout bounds the wait for a hook that was killed: SIGKILL needs no more than the kernel's
// time.
const killTimeout = 30 * time.Second

// Run is that of Program. The command runs as the container's first process would.
func (c Container) Run(ctx context.Context, command []string) (status int, output string, err error) {
	file, err := bundle.Read(c.Bundle)
	if err != nil {
		return 0, "", err
	}
	process := *file.Spec.Process
	process.Args, process.Terminal, process.ConsoleSize = command, false, nil
	spec, err := json.Marshal(process)
	if err != nil {
		return 0, "", err
	}
	to := filepath.Join(c.Bundle, hookOutput)
	defer os.Remove(to)
	if _, err := c.Task.Exec(ctx, &taskAPI.ExecProcessRequest{
		ID: c.ID, ExecID: hookID, Spec: &anypb.Any{TypeUrl: specType, Value: spec}, Stdout: "file://" + to, Stderr: "file://" + to,
	}); err != nil {
		return 0, "", errgrpc.ToNative(err)
	}
	// What was begun is ended, whoever still waits.
	wait := &taskAPI.WaitRequest{ID: c.ID, ExecID: hookID}
	_, err = c.Task.Start(context.WithoutCancel(ctx), &taskAPI.StartRequest{ID: c.ID, ExecID: hookID})
	var late error
	if err == nil {
		_, late = c.Task.Wait(ctx, wait)
	}
	ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTimeout)
	defer cancel()
	if late != nil {
		_, _ = c.Task.Kill(ending, &taskAPI.KillRequest{ID: c.ID, ExecID: hookID, Signal: uint32(unix.SIGKILL)}) // or it has ended
		_, err = c.Task.Wait(ending, wait)
	}
	ended, derr := c.Task.Delete(ending, &taskAPI.DeleteRequest{ID: c.ID, ExecID: hookID})
	if err == nil {
		err = derr
	}
	text, _ := os.ReadFile(to) // without it the error says less
	return int(ended.GetExitStatus()), string(text[max(0, len(text)-hookTail):]), errgrpc.ToNative(err)
}

// hookTail is how much of a hook's output its error has, in bytes.
const hookTail = 400

// Signal is that of Program.
func (c Container) Signal(ctx context.Context, signal unix.Signal) error {
	_, err := c.Task.Kill(ctx, &taskAPI.KillRequest{ID: c.ID, Signal: uint32(signal)})
	return errgrpc.ToNative(err)
}
