// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package hooks

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
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

// hookID is the id of the process that a hook is, hookOutput the pipe in the bundle for what it
// writes. A container has one hook at a time.
const (
	hookID     = "gpuckpt-hook"
	hookOutput = "gpuckpt-hook.out"
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
	outputEnd, err := tailOf(to)
	if err != nil {
		return 0, "", fmt.Errorf("make a pipe for the hook's output: %w", err)
	}
	defer func() { output = outputEnd() }()
	if _, err := c.Task.Exec(ctx, &taskAPI.ExecProcessRequest{
		ID: c.ID, ExecID: hookID, Spec: &anypb.Any{TypeUrl: specType, Value: spec}, Stdout: to, Stderr: to,
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
	return int(ended.GetExitStatus()), "", errgrpc.ToNative(err)
}

// hookTail is how much of a hook's output its error has, in bytes.
const hookTail = 400

// drainTime bounds the wait for a writer that has not closed the pipe when the hook has ended.
const drainTime = time.Second

// tailOf makes a pipe at a path and reads it. A hook may write any amount, so only the last hookTail
// bytes are kept, and nothing of it reaches a disk or the node's memory. end removes the pipe and
// returns these bytes. After an error there is no pipe.
func tailOf(path string) (end func() string, err error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) { // of a shim that has crashed
		return nil, err
	}
	if err := unix.Mkfifo(path, 0o600); err != nil {
		return nil, err
	}
	r, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, errors.Join(err, os.Remove(path))
	}
	w, err := os.OpenFile(path, os.O_WRONLY|unix.O_NONBLOCK, 0) // without a writer it is at its end
	if err != nil {
		return nil, errors.Join(err, r.Close(), os.Remove(path))
	}
	read := make(chan string)
	go func() {
		var tail []byte
		buf := make([]byte, 32<<10)
		for {
			n, err := r.Read(buf)
			tail = append(tail, buf[:n]...)
			tail = append(tail[:0], tail[max(0, len(tail)-hookTail):]...)
			if err != nil {
				read <- string(tail)
				return
			}
		}
	}()
	return func() string {
		_ = w.Close()
		_ = r.SetReadDeadline(time.Now().Add(drainTime))
		text := <-read
		_, _ = r.Close(), os.Remove(path) // or the next hook says why not
		return text
	}, nil
}

// Signal is that of Program.
func (c Container) Signal(ctx context.Context, signal unix.Signal) error {
	_, err := c.Task.Kill(ctx, &taskAPI.KillRequest{ID: c.ID, Signal: uint32(signal)})
	return errgrpc.ToNative(err)
}
