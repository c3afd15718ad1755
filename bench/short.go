// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/gpuckpt/gpuckpt/bench/report"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// shortCase measures checkpoints to a disk with memory enough and without.
func (b *bench) shortCase(ctx context.Context, size, buffer uint64) (s *report.ShortResult, err error) {
	s = &report.ShortResult{Size: size, Buffer: buffer}
	defer func() { b.staging = "" }()
	defer func() { err = errors.Join(err, b.c.SetShimConfig(shimConfig(b.c, "staging", b.settings))) }()
	for round := range b.rounds {
		if ctx.Err() != nil {
			return s, nil
		}
		var pair report.ShortRun
		for _, way := range []struct {
			name, settings string
			run            *report.Run
		}{
			{"usual", "", &pair.Usual},
			// The buffer is a quarter of the limit.
			{"through", fmt.Sprintf("memory_limit = %d\nwhen_short = \"write-through\"\n", 4*buffer), &pair.Through},
		} {
			cgroup := fmt.Sprintf("%s-%d", way.name, round)
			if err := b.c.SetShimConfig(shimConfig(b.c, cgroup, way.settings)); err != nil {
				return s, err
			}
			sh := report.Shape{Content: report.ContentPattern, Size: size, Procs: 1, GPUs: 1, Media: report.OnDisk, Mode: report.ModeExit}
			b.staging = stagingDir(b.c, cgroup)
			*way.run = b.once(ctx, sh, report.Ours, round, 0)
			if way.run.Error != "" {
				b.logf("short memory, %s: FAILED: %s", way.name, way.run.Error)
				continue
			}
			b.logf("short memory, %s: checkpoint %s, restore %s, verified, staging memory of the checkpoint %s", way.name,
				report.Seconds(way.run.Checkpoint.Seconds), report.Seconds(way.run.Restore.Seconds), report.RoundSize(float64(way.run.Checkpoint.StagingPeak)))
		}
		s.Pairs = append(s.Pairs, pair)
	}
	return s, nil
}

// stagingDir is the cgroup of that name in the containerd's.
func stagingDir(c *harness.Containerd, name string) cgroupDir {
	root := "/sys/fs/cgroup"
	if harness.CgroupVersion() == 1 {
		root = "/sys/fs/cgroup/memory"
	}
	return cgroupDir(filepath.Join(root, c.Namespace(), name))
}
