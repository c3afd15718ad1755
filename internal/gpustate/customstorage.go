// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"context"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/customstorage"
	"github.com/gpuckpt/gpuckpt/internal/staging"
)

// customStorage has the driver map GPU memory into a mover, which copies it to files and back (CUDA 13.4). Nothing of the
// state is ever in memory of the processes, and their threads need not be stopped for it: it works without steering.
// An area is the memory of one process on one GPU.
type customStorage struct{}

// Save has each process's memory copied to files in memory. A process that could not be brought back has its areas.
func (customStorage) Save(_ context.Context, job *Job, dir string, checkpoint func() error) (areas []Area, err error) {
	storage, files := customstorage.New(job.Processes, dir, job.Use)
	defer files.Close()
	job.Storage, storage.Start, storage.GPUs = storage, job.Mover, job.GPUs
	err = checkpoint()
	go storage.Close() // the driver takes 0.1 s to give up its contexts
	out := storage.Out()
	for i, p := range job.Processes {
		stored, ok := out[p.PID]
		if !ok {
			continue
		}
		made, held := files.Areas(p.PID, stored)
		for n, a := range made {
			area := Area{Process: i, Area: a, Computed: images.DigestsOfParts(a.Bytes, stored[n].Parts)}
			area.hold(held[n])
			areas = append(areas, area)
		}
	}
	return areas, err
}

// Store is memoryFirst's or imageFile's, by where the files are.
func (customStorage) Store(ctx context.Context, worker *staging.Digester, areas []Area, dir string, stays bool) ([][]string, error) {
	if staging.OnMemory(dir) {
		return imageFile{}.Store(ctx, worker, areas, dir, stays)
	}
	return memoryFirst{}.Store(ctx, worker, areas, dir, stays)
}

// Restore has the driver's restore of the processes, which follows, go by the areas' files.
func (customStorage) Restore(_ context.Context, job *Job, areas []Area) (done func(context.Context), err error) {
	job.Storage, done, err = customstorage.Open(job.Processes, func(process int) (all []customstorage.Saved) {
		for _, a := range areas {
			if a.Process == process {
				all = append(all, customstorage.Saved{Area: a.Area, Held: a.held != nil})
			}
		}
		return all
	})
	return done, err
}

// Abort has nothing to end: the processes have their memory, and the files are gone.
func (customStorage) Abort(*Job) error { return nil }
