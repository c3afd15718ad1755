// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	taskAPI "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/go-runc"

	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// runcDump has runc and CRIU dump a container, and CRIU leave its processes. It goes past runc's service,
// which would answer no State, Kill or Delete of the container meanwhile: a program can have CRIU wait for
// minutes. A container without processes is left to the service, which refuses it.
func (s *Service) runcDump(ctx context.Context, c *container, images string, opts *options.CheckpointOptions) error {
	if status, err := proc.StatusOf(c.pid); proc.Ended(err) || status.Ended() {
		_, err := s.TTRPCTaskService.Checkpoint(ctx, &taskAPI.CheckpointTaskRequest{ID: c.id, Path: images})
		return errgrpc.ToNative(err)
	}
	work := cmp.Or(opts.WorkPath, filepath.Join(c.bundle, "criu-work"))
	if opts.WorkPath == "" {
		defer os.RemoveAll(work)
	}
	err := c.runc.Checkpoint(ctx, c.id, &runc.CheckpointOpts{
		ImagePath: images, WorkDir: work, ParentPath: opts.ParentPath,
		AllowOpenTCP: opts.OpenTcp, AllowExternalUnixSockets: opts.ExternalUnixSockets, AllowTerminal: opts.Terminal,
		FileLocks: opts.FileLocks, EmptyNamespaces: opts.EmptyNamespaces,
	}, runc.LeaveRunning)
	if err == nil {
		return nil
	}
	criu.KeepDumpLog(c.bundle, work)
	line, _, _ := strings.Cut(err.Error(), "\n") // the rest is runc's log, which says it again
	return fmt.Errorf("%s", strings.TrimSpace(line))
}
