// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"context"
	"path/filepath"

	"github.com/gpuckpt/gpuckpt/internal/staging"
	"github.com/gpuckpt/gpuckpt/internal/steer"
)

// memoryFirst has the driver fill memory without a name, which goes to a disk
// later: partly behind the driver, while it fills, and the rest in Store. Without
// a directory the state stays in memory.
type memoryFirst struct{ steered }

func (p memoryFirst) Save(ctx context.Context, job *Job, dir string, checkpoint func() error) ([]Area, error) {
	return p.save(ctx, job, steer.Target{CopyTo: dir}, false, checkpoint)
}

func (memoryFirst) Store(_ context.Context, worker *staging.Digester, areas []Area, dir string, _ bool) ([][]string, error) {
	files := ranges(areas)
	for i, a := range areas {
		files[i].To, files[i].Written = filepath.Join(dir, a.File), a.Written
	}
	return worker.Copy(files)
}
