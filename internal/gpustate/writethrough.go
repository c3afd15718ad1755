// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"context"

	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/internal/staging"
	"github.com/gpuckpt/gpuckpt/internal/steer"
)

// writeThrough has the driver fill the image's own file on a disk through a small
// buffer, where memory is too short for the whole. A process that cannot be
// steered is an error.
type writeThrough struct {
	steered
	window uint64 // bytes of each area that may be in memory at a time
}

func (p writeThrough) Save(ctx context.Context, job *Job, dir string, checkpoint func() error) ([]Area, error) {
	log.G(ctx).WithField("window", p.window).Info("memory is short: GPU state is written through to the disk")
	return p.save(ctx, job, steer.Target{Dir: dir, Window: p.window}, true, checkpoint)
}

// Store flushes and digests the files where they are, past the page cache. The
// disk has the only copy, also when the driver reads it again.
func (writeThrough) Store(_ context.Context, worker *staging.Digester, areas []Area, _ string, _ bool) ([][]string, error) {
	files := ranges(areas)
	for i := range files {
		files[i].Disk, files[i].Punch = true, true
	}
	return worker.Digest(files)
}
