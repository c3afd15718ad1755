// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package capture

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// notePrefix begins the name of the note that lies beside the directory of a dump, and ends with the
// directory's own.
const notePrefix = "paused-for-"

// Left is a container that a killed program had paused for a checkpoint.
type Left struct {
	Namespace string `json:"namespace"`
	Container string `json:"container"`
	Pid       uint32 `json:"pid"` // of its task
	// Resumed reports whether it was paused still.
	Resumed bool `json:"-"`
}

// note notes that the container is paused for this checkpoint.
func (r *run) note(ctx context.Context) error {
	namespace, err := namespaces.NamespaceRequired(ctx)
	if err != nil {
		return err
	}
	data, err := json.Marshal(Left{Namespace: namespace, Container: r.task.ID(), Pid: r.task.Pid()})
	if err == nil {
		err = os.WriteFile(noteOf(r.dumpDir), data, 0o600)
	}
	if err != nil {
		return fmt.Errorf("note that it is paused: %w", err)
	}
	return nil
}

func noteOf(dumpDir string) string {
	return filepath.Join(filepath.Dir(dumpDir), notePrefix+filepath.Base(dumpDir))
}

// Recover resumes the containers that programs had paused for dumps in a directory and that were
// killed since, and removes those dumps. It connects to containerd only if there are any. It goes on
// after an error; what could not be done is left for the next call. An empty dir is DefaultDir.
func Recover(ctx context.Context, dial func() (*client.Client, error), dir string) (all []Left, err error) {
	notes, err := filepath.Glob(filepath.Join(cmp.Or(dir, DefaultDir), notePrefix+"*"))
	for _, note := range notes {
		left, rerr := recoverNote(ctx, dial, note)
		if rerr != nil {
			err = errors.Join(err, fmt.Errorf("recover from %s: %w", note, rerr))
		} else if left != nil {
			all = append(all, *left)
		}
	}
	return all, err
}

// recoverNote returns nil for the note of a program that lives.
func recoverNote(ctx context.Context, dial func() (*client.Client, error), note string) (*Left, error) {
	dumpDir := filepath.Join(filepath.Dir(note), strings.TrimPrefix(filepath.Base(note), notePrefix))
	lock, err := os.OpenFile(dumpDir, unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil, ignoreNotExist(os.Remove(note)) // its program has just ended
	}
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	if unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
		return nil, nil
	}
	data, err := os.ReadFile(note)
	if err != nil {
		return nil, ignoreNotExist(err) // another call was quicker
	}
	var left Left
	if err := json.Unmarshal(data, &left); err != nil || left.Namespace == "" {
		left = Left{} // it was killed while it wrote, before it paused
	} else if err := left.resume(ctx, dial); err != nil && !errdefs.IsNotFound(err) {
		return nil, err
	}
	return &left, errors.Join(removeDump(dumpDir), os.Remove(note))
}

func (l *Left) resume(ctx context.Context, dial func() (*client.Client, error)) error {
	c, err := dial()
	if err != nil {
		return err
	}
	ctx = namespaces.WithNamespace(ctx, l.Namespace)
	container, err := c.LoadContainer(ctx, l.Container)
	if err != nil {
		return err
	}
	task, err := container.Task(ctx, nil)
	if err != nil || task.Pid() != l.Pid {
		return err
	}
	status, err := task.Status(ctx)
	if err != nil || status.Status != client.Paused {
		return err
	}
	l.Resumed = true
	return task.Resume(ctx)
}

func ignoreNotExist(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}
