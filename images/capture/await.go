// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package capture

import (
	"context"
	"errors"
	"fmt"
	"path"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// awaitEvery is how often a container's file is looked for: what a checkpoint waits longer at most.
const awaitEvery = 50 * time.Millisecond

// awaitFile waits until WaitFor is there, as the container's first process sees it, or ctx or the container ends.
func (r *run) awaitFile(ctx context.Context) error {
	if !path.IsAbs(r.WaitFor) {
		return fmt.Errorf("wait for %q: it is no absolute path: %w", r.WaitFor, errdefs.ErrInvalidArgument)
	}
	process, err := unix.PidfdOpen(int(r.task.Pid()), 0)
	if err != nil {
		return fmt.Errorf("wait for %s: look at the container's first process from where it is not seen, or it has ended: %w", r.WaitFor, err)
	}
	defer unix.Close(process)
	// A directory of the process: the path is looked up in its mounts, and no link leads out of its root.
	root, err := unix.Open(fmt.Sprintf("/proc/%d/root", r.task.Pid()), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("wait for %s: open the container's root: %w", r.WaitFor, err)
	}
	defer unix.Close(root)
	tick := time.NewTicker(awaitEvery)
	defer tick.Stop()
	for {
		there, err := inRoot(root, r.WaitFor)
		if err != nil {
			return fmt.Errorf("wait for %s: %w", r.WaitFor, err)
		}
		r.began = time.Now()
		if there {
			return nil
		}
		if unix.PidfdSendSignal(process, 0, nil, 0) != nil {
			return fmt.Errorf("wait for %s: the container has ended: %w", r.WaitFor, errdefs.ErrFailedPrecondition)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w", r.WaitFor, context.Cause(ctx))
		case <-tick.C:
		}
	}
}

// inRoot reports whether something is at a path below a directory.
func inRoot(root int, name string) (bool, error) {
	fd, err := proc.Openat2(root, name, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS})
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.EAGAIN) { // EAGAIN: something was renamed meanwhile
		return false, nil
	}
	if err != nil {
		return false, err
	}
	unix.Close(fd)
	return true, nil
}
