// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
)

// plainFile is a data path of this test alone, and the example of a new one: it lets
// the driver fill memory of its own, copies that into a plain file, wipes it, and
// copies it back. It is slow, and needs neither a tracer nor a digester.
type plainFile struct{}

func (plainFile) Save(_ context.Context, job *Job, dir string, thaw, checkpoint func() error) ([]Area, error) {
	before := make([][]cuda.Range, len(job.Processes))
	for i, p := range job.Processes {
		var err error
		if before[i], err = cuda.AnonymousRanges(p.PID.Host); err != nil {
			return nil, err
		}
	}
	if err := thaw(); err != nil {
		return nil, err
	}
	if err := checkpoint(); err != nil {
		return nil, err
	}
	areas := []Area{} // from here on Restore is called after an error
	for i, p := range job.Processes {
		after, err := cuda.AnonymousRanges(p.PID.Host)
		if err != nil {
			return areas, err
		}
		for n, r := range cuda.NewRanges(before[i], after) {
			a := Area{Process: i, Area: images.Area{File: images.AreaFile(p.PID.NS, n), Start: r.Start, Bytes: r.Bytes()}}
			a.Area = a.In(filepath.Join(dir, a.File))
			buf := make([]byte, a.Bytes)
			if err := memoryOf(p, func(f *os.File) error { _, err := f.ReadAt(buf, int64(a.Start)); return err }); err != nil {
				return areas, err
			}
			if err := os.WriteFile(a.Location[0].Path, buf, 0o600); err != nil {
				return areas, err
			}
			areas = append(areas, a)
			clear(buf)
			if err := memoryOf(p, func(f *os.File) error { _, err := f.WriteAt(buf, int64(a.Start)); return err }); err != nil {
				return areas, err
			}
		}
	}
	return areas, nil
}

func (plainFile) Store(ctx context.Context, _ *staging.Digester, areas []Area, dir string, _ bool) (digests [][]string, err error) {
	for _, a := range areas {
		data, err := os.ReadFile(filepath.Join(dir, a.File))
		if err != nil {
			return nil, err
		}
		var blocks []string
		for len(data) > 0 && ctx.Err() == nil {
			n := min(images.BlockBytes, len(data))
			blocks = append(blocks, images.DigestBlock(data[:n]))
			data = data[n:]
		}
		digests = append(digests, blocks)
	}
	return digests, ctx.Err()
}

func (plainFile) Restore(_ context.Context, job *Job, areas []Area) (func(context.Context), error) {
	for _, a := range areas {
		data, err := os.ReadFile(a.Location[0].Path)
		if err != nil {
			return nil, err
		}
		if err := memoryOf(job.Processes[a.Process], func(f *os.File) error { _, err := f.WriteAt(data, int64(a.Start)); return err }); err != nil {
			return nil, err
		}
	}
	return func(context.Context) {}, nil
}

func (plainFile) Abort(*Job) ([]*Lent, error) { return nil, nil }

// memoryOf calls do with the memory of a process.
func memoryOf(p cuda.Process, do func(*os.File) error) error {
	f, err := os.OpenFile(fmt.Sprintf("/proc/%d/mem", p.PID.Host), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	return do(f)
}
