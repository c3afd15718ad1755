// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"context"

	"github.com/gpuckpt/gpuckpt/internal/staging"
	"github.com/gpuckpt/gpuckpt/internal/steer"
)

// imageFile has the driver fill the image's own file, in a directory on a tmpfs:
// that file is memory already.
type imageFile struct{ steered }

func (p imageFile) Save(ctx context.Context, job *Job, dir string, checkpoint func() error) ([]Area, error) {
	return p.save(ctx, job, steer.Target{Dir: dir}, false, checkpoint)
}

// Store digests the files where they are. It makes holes of what is zero, unless
// the driver is going to read there: it would fill them, at the container's expense.
func (imageFile) Store(_ context.Context, worker *staging.Digester, areas []Area, _ string, stays bool) ([][]string, error) {
	files := ranges(areas)
	for i := range files {
		files[i].Punch = !stays
	}
	return worker.Digest(files)
}
