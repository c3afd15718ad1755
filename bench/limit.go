// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	eventstypes "github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/typeurl/v2"

	"github.com/gpuckpt/gpuckpt/bench/report"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// limitCase checkpoints containers with a memory limit, ours and the stock way.
func (b *bench) limitCase(ctx context.Context, size, limit uint64) (*report.LimitResult, error) {
	if b.c.GPU().Kind == harness.SoftwareGPU {
		limit += size
	}
	l := &report.LimitResult{Size: size, Limit: limit}
	sh := report.Shape{Content: report.ContentPattern, Size: size, Procs: 1, GPUs: 1, Media: report.OnTmpfs, Mode: report.ModeLeave}
	b.logf("memory limit: %s of GPU memory in a container of %s", report.FormatSize(size), report.FormatSize(limit))
	l.Ours = b.once(ctx, sh, report.Ours, 0, limit)
	if l.Ours.Error != "" {
		b.logf("memory limit, ours: FAILED: %s", l.Ours.Error)
	} else {
		b.logf("memory limit, ours: checkpoint %s, restore %s, verified, cgroup peak %s",
			report.Seconds(l.Ours.Checkpoint.Seconds), report.Seconds(l.Ours.Restore.Seconds), report.FormatSize(l.Ours.Checkpoint.CgroupPeak))
	}
	var err error
	if l.Stock, err = b.stockLimit(ctx, sh, limit); err != nil {
		return l, fmt.Errorf("memory limit, stock: %w", err)
	}
	b.logf("memory limit, stock: OOM event %t, exit code %d, the checkpoint answered: %s", l.Stock.OOM, l.Stock.ExitCode, l.Stock.Error)
	return l, nil
}

// stockLimit tries the stock way and watches the container.
func (b *bench) stockLimit(ctx context.Context, sh report.Shape, limit uint64) (l report.LimitStock, err error) {
	ctx, cancel := context.WithTimeout(ctx, runLimit)
	defer cancel()
	w, err := newWorkload(sh)
	if err != nil {
		return l, err
	}
	dir, err := os.MkdirTemp(b.dirs[sh.Media], "images")
	if err != nil {
		return l, fmt.Errorf("make a directory for the images: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	b.serial++
	s, err := startContainer(ctx, b.c, report.Stock, fmt.Sprintf("limit-%d", b.serial), dir, w, limit)
	if err != nil {
		return l, err
	}
	defer func() { err = errors.Join(err, s.remove(context.WithoutCancel(ctx))) }()
	if err := w.verify(ctx, 101); err != nil {
		return l, fmt.Errorf("before the checkpoint: %w", err)
	}
	task, err := s.load(ctx)
	if err != nil {
		return l, err
	}
	exit, err := task.Wait(ctx)
	if err != nil {
		return l, fmt.Errorf("wait for the container: %w", err)
	}
	oom, oomErr := b.awaitOOM(ctx, s.k.ID)
	if _, err := s.checkpoint(ctx, true); err != nil {
		l.Error = err.Error()
	}
	l.ExitCode = -1
	// What is going to happen has happened when the checkpoint has answered,
	// but for the news of it.
	news := time.After(5 * time.Second)
	for range 2 {
		select {
		case status := <-exit:
			l.ExitCode, exit = exitCode(status), nil
		case <-oom:
			l.OOM, oom = true, nil
		case err := <-oomErr:
			return l, fmt.Errorf("wait for an OOM event: %w", err)
		case <-news:
			return l, nil
		}
	}
	return l, nil
}

func exitCode(status client.ExitStatus) int {
	code, _, err := status.Result()
	if err != nil {
		return -1
	}
	return int(code)
}

// awaitOOM closes a channel at the first news of a container's process that was
// killed for its memory limit.
func (b *bench) awaitOOM(ctx context.Context, id string) (<-chan struct{}, <-chan error) {
	events, failed := b.c.Client().Subscribe(ctx, `topic=="/tasks/oom"`)
	seen, errs := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			select {
			case envelope := <-events:
				event, err := typeurl.UnmarshalAny(envelope.Event)
				if err != nil {
					errs <- err
					return
				}
				if e, ok := event.(*eventstypes.TaskOOM); ok && e.ContainerID == id {
					close(seen)
					return
				}
			case err := <-failed:
				if err != nil && ctx.Err() == nil {
					errs <- err
				}
				return
			}
		}
	}()
	return seen, errs
}
