// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"time"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
)

// Checkpoint takes a checkpoint of the running container as an image of that
// name: "ctr containers checkpoint --rw --image --task". ctr pauses the
// container, takes the difference of its files, has the shim dump it, and
// resumes it: it runs on. On error too, and no image is made.
func (k *Container) Checkpoint(ctx context.Context, ref string) error {
	if _, err := k.c.Ctr(ctx, "containers", "checkpoint", "--rw", "--image", "--task", k.ID, ref); err != nil {
		return fmt.Errorf("checkpoint %s: %w", k.ID, err)
	}
	return nil
}

// TaskCheckpoint says how "ctr tasks checkpoint" is run, which does not pause.
type TaskCheckpoint struct {
	// Exit ends the container with the dump.
	Exit bool
	// ImagePath is a directory of the host for CRIU's files; empty makes an
	// image of containerd's.
	ImagePath string
	// WorkPath is a directory of the host for CRIU's log; empty is the shim's
	// choice.
	WorkPath string
}

// CheckpointTask takes a checkpoint of the task alone, without its files, and
// returns the name of the image, or nothing with ImagePath.
func (k *Container) CheckpointTask(ctx context.Context, opts TaskCheckpoint) (string, error) {
	args := []string{"tasks", "checkpoint"}
	if opts.Exit {
		args = append(args, "--exit")
	}
	if opts.ImagePath != "" {
		args = append(args, "--image-path", opts.ImagePath)
	}
	if opts.WorkPath != "" {
		args = append(args, "--work-path", opts.WorkPath)
	}
	out, err := k.c.Ctr(ctx, append(args, k.ID)...)
	if err != nil {
		return "", fmt.Errorf("checkpoint the task of %s: %w", k.ID, err)
	}
	return strings.TrimSpace(out), nil
}

// Restore makes a container of a checkpoint image and has its processes go on:
// "ctr containers restore --rw --live". There must be no container of that id.
// port is where the program listens, for Ask.
//
// ctr gives a restored task FIFOs in /run/containerd/fifo and cannot be told
// otherwise; they are read into the container's log and go with its removal.
//
// On error ctr may leave a container behind, for a look; Containerd.Remove
// takes it away.
func (c *Containerd) Restore(ctx context.Context, id, ref string, port int) (*Container, error) {
	args := []string{"containers", "restore", "--rw", "--live", id, ref}
	began := time.Now()
	out, err := c.runCtr(ctx, nil, args)
	if err == nil && out.ExitCode != 0 {
		err = &CtrError{Args: args, ExitCode: out.ExitCode, Output: out.Stdout + out.Stderr}
	}
	if err != nil {
		removeDeadFIFOs(id, began)
		return nil, fmt.Errorf("restore %s: %w", id, err)
	}
	k := &Container{ID: id, Port: port, c: c}
	if err := k.follow(ctx, out.Stdout+out.Stderr); err != nil {
		return nil, errors.Join(fmt.Errorf("restore %s: %w", id, err), k.Remove(context.WithoutCancel(ctx)))
	}
	return k, nil
}

// Remove kills and removes the container of that id, if there is one.
func (c *Containerd) Remove(ctx context.Context, id string) error {
	return (&Container{ID: id, c: c}).Remove(ctx)
}

// follow copies the output of a restored container from its FIFOs into its log,
// after what ctr itself has already read of it. Unread, they would fill up and
// block the program. It ends with the container.
func (k *Container) follow(ctx context.Context, first string) error {
	response, err := k.c.client.TaskService().Get(ctx, &tasks.GetRequest{ContainerID: k.ID})
	if err != nil {
		return fmt.Errorf("find the output of %s: %w", k.ID, err)
	}
	log, err := os.OpenFile(k.log(), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("open the log of %s: %w", k.ID, err)
	}
	defer log.Close()
	if _, err := log.WriteString(first); err != nil {
		return fmt.Errorf("write the log of %s: %w", k.ID, err)
	}
	for _, path := range []string{response.GetProcess().GetStdout(), response.GetProcess().GetStderr()} {
		fifo, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
		if err != nil {
			return fmt.Errorf("open the output of %s: %w", k.ID, err)
		}
		log, err := os.OpenFile(k.log(), os.O_WRONLY|os.O_APPEND, 0)
		if err != nil {
			return errors.Join(fmt.Errorf("open the log of %s: %w", k.ID, err), fifo.Close())
		}
		k.mu.Lock()
		k.streams = append(k.streams, fifo)
		k.mu.Unlock()
		go func() {
			defer log.Close()
			_, _ = io.Copy(log, fifo) // ends when the shim or closeStreams closes it
		}()
	}
	return nil
}

// closeStreams ends the copying that follow began.
func (k *Container) closeStreams() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, stream := range k.streams {
		_ = stream.Close()
	}
	k.streams = nil
}
