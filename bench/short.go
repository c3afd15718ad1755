// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// shortResult is what it costs to have too little memory for GPU state, with
// images on a disk.
type shortResult struct {
	Size uint64 `json:"sizeBytes"`
	// Buffer is the shim's, in bytes.
	Buffer uint64     `json:"bufferBytes"`
	Pairs  []shortRun `json:"runs"`
}

// shortRun is one run each way, in turns.
type shortRun struct {
	Usual   run `json:"usual"`
	Through run `json:"through"`
}

// shortCase measures checkpoints to a disk with memory enough and without.
func (b *bench) shortCase(ctx context.Context, size, buffer uint64) (s *shortResult, err error) {
	s = &shortResult{Size: size, Buffer: buffer}
	defer func() { b.staging = "" }()
	defer func() { err = errors.Join(err, b.c.SetShimConfig(shimConfig(b.c, "staging", b.settings))) }()
	for round := range b.rounds {
		if ctx.Err() != nil {
			return s, nil
		}
		var pair shortRun
		for _, way := range []struct {
			name, settings string
			run            *run
		}{
			{"usual", "", &pair.Usual},
			// The limit leaves room for the tracers and what the kernel has about pages.
			{"through", fmt.Sprintf("memory_limit = %d\nbuffer = %d\nwhen_short = \"write-through\"\n", 2*buffer+64<<20, buffer), &pair.Through},
		} {
			cgroup := fmt.Sprintf("%s-%d", way.name, round)
			if err := b.c.SetShimConfig(shimConfig(b.c, cgroup, way.settings)); err != nil {
				return s, err
			}
			sh := shape{Content: contentPattern, Size: size, Procs: 1, GPUs: 1, Media: onDisk, Mode: modeExit}
			b.staging = stagingDir(b.c, cgroup)
			*way.run = b.once(ctx, sh, ours, round, 0)
			if way.run.Error != "" {
				b.logf("short memory, %s: FAILED: %s", way.name, way.run.Error)
				continue
			}
			b.logf("short memory, %s: checkpoint %s, restore %s, verified, staging memory of the checkpoint %s", way.name,
				seconds(way.run.Checkpoint.Seconds), seconds(way.run.Restore.Seconds), roundSize(float64(way.run.Checkpoint.StagingPeak)))
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

// shortText tells of GPU state that went through a buffer.
func (r *results) shortText() string {
	s := r.Short
	if s == nil {
		return ""
	}
	var b strings.Builder
	fmt.Fprintf(&b, "\n## Memory too short for GPU state\n\n%s of GPU memory to a disk: usually, and written through a buffer of %s. "+
		"Medians of verified runs; memory is the most that the cgroup for GPU state was charged with in a checkpoint.\n\n| | n | checkpoint | restore | memory |\n|---|---|---|---|---|\n",
		formatSize(s.Size), formatSize(s.Buffer))
	row := func(name string, of func(shortRun) run) {
		var checkpoints, restores []float64
		most := uint64(0)
		for _, p := range s.Pairs {
			if m := of(p); m.Verified {
				checkpoints, restores, most = append(checkpoints, m.Checkpoint.Seconds), append(restores, m.Restore.Seconds), max(most, m.Checkpoint.StagingPeak)
			}
		}
		fmt.Fprintf(&b, "| %s | %d | %s | %s | %s |\n", name, len(checkpoints),
			seconds(spreadOf(checkpoints).Median), seconds(spreadOf(restores).Median), roundSize(float64(most)))
	}
	row("usual", func(p shortRun) run { return p.Usual })
	row("written through", func(p shortRun) run { return p.Through })
	return b.String()
}
