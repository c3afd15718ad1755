// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package customstorage puts the files of a checkpoint together with the driver's custom storage (package cuda, Storage):
// New makes files for GPU memory that leaves processes, and Open gives those of a checkpoint to processes that are to have
// it back.
package customstorage

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/prefill"
	"github.com/gpuckpt/gpuckpt/internal/staging"
)

// Files are the files that GPU memory goes to, one for each process and GPU.
type Files struct {
	dir string // on a tmpfs; "" for memory without a name

	mu   sync.Mutex
	made map[cuda.PID][]*os.File
}

// New returns a Storage that saves the GPU memory of processes to files in memory: those of the images in dir if that is
// on a tmpfs, else without a name. use is how much GPU memory each process has, by its pid on the host.
func New(procs cuda.Group, dir string, use map[int]uint64) (*cuda.Storage, *Files) {
	f := &Files{made: make(map[cuda.PID][]*os.File)}
	if dir != "" && staging.OnMemory(dir) {
		f.dir = dir
	}
	s := cuda.NewStorage(procs)
	s.File, s.Room = f.make, func(p cuda.PID) uint64 { return use[p.Host] }
	return s, f
}

func (f *Files) make(p cuda.PID, number int) (file *os.File, err error) {
	if f.dir == "" {
		file, err = staging.MemoryFile()
	} else {
		file, err = os.OpenFile(f.path(p, number), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	}
	if err != nil {
		return nil, fmt.Errorf("make a file for GPU memory: %w", err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.made[p] = append(f.made[p], file)
	return file, nil
}

func (f *Files) path(p cuda.PID, number int) string {
	return filepath.Join(f.dir, images.AreaFile(p.NS, number))
}

// Areas returns the areas of a process's memory, and their files, which are the caller's.
func (f *Files) Areas(p cuda.PID, stored []cuda.Stored) (areas []images.Area, files []*os.File) {
	f.mu.Lock()
	defer f.mu.Unlock()
	files = f.made[p][:len(stored)]
	f.made[p] = slices.Clone(f.made[p])
	for i, s := range stored {
		areas = append(areas, images.Area{File: images.AreaFile(p.NS, i), GPU: s.GPU, Bytes: s.Pages()})
		f.made[p][i] = nil
	}
	return areas, files
}

// Close closes and removes the files that Areas has not returned.
func (f *Files) Close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for p, files := range f.made {
		for i, file := range files {
			if file == nil {
				continue
			}
			file.Close()
			if f.dir != "" {
				_ = os.Remove(f.path(p, i))
			}
		}
	}
	f.made = nil
}

// Saved is an area, and whether this process has its file open: what opens it then is a link in /proc.
type Saved struct {
	images.Area
	Held bool
}

// Open returns a Storage that restores processes from their areas. done ends it, and can be called again.
func Open(procs cuda.Group, areasOf func(place int) []Saved) (s *cuda.Storage, done func(context.Context), err error) {
	s = cuda.NewStorage(procs)
	var files []*os.File
	for i, p := range procs {
		if p.State == cuda.Checkpointed {
			continue
		}
		stored := []cuda.Stored{}
		for _, a := range areasOf(i) {
			open := prefill.Open
			if a.Held {
				open = os.Open
			}
			spans, serr := prefill.Spans(&a.Area, open)
			for _, span := range spans {
				if span.File != nil && !slices.Contains(files, span.File) {
					files = append(files, span.File)
				}
			}
			err = errors.Join(err, serr)
			stored = append(stored, cuda.Stored{GPU: a.GPU, Bytes: a.Bytes, Spans: spans})
		}
		s.Put(p.PID, stored)
	}
	end := sync.OnceFunc(func() {
		for _, f := range files {
			f.Close()
		}
		go s.Close() // the driver takes 0.1 s to give up its contexts
	})
	done = func(context.Context) { end() }
	if err != nil {
		end()
		return nil, nil, fmt.Errorf("open GPU memory that is in files: %w", err)
	}
	return s, done, nil
}
