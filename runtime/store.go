// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/trace"
)

// storing makes the saved areas files among the images, and digests them, while
// CRIU dumps the rest and while the state goes back to the GPU: it has a tracer
// and descriptors of its own, so it outlives the areas. Where there are several
// processes it begins with those that the driver is done with, see storeEarly.
type storing struct {
	tracer *trace.Session
	work   sync.WaitGroup // the tracer's, one part after the other

	// mu is held while a part is added.
	mu    sync.Mutex
	areas []*storedArea
	err   error // of the parts that are over
}

// storedArea is an area that is being stored.
type storedArea struct {
	savedArea          // a copy, whose file is a duplicate
	digests   []string // of its blocks, once the work is over
}

// storeEarly begins to store what the driver has left of a process in files
// among the images, while it is still busy with other processes. It does not
// wait. The files stay the process's until collect.
func (g *gpuState) storeEarly(ctx context.Context, pid int) {
	log.G(ctx).WithField("pid", pid).Debug("the driver is done with a process, its GPU state is stored")
	tracer := g.tracer
	g.finding.Go(func() {
		areas, err := tracer.Areas(pid)
		if err == nil {
			saved := make([]savedArea, len(areas))
			for i, a := range areas {
				saved[i].Area = a
			}
			err = g.early.add(ctx, g, "", saved)
		}
		if err != nil { // it is stored with the others then
			log.G(ctx).WithError(err).Debug("store GPU state early")
		}
	})
}

// startStoring begins to store the areas in dir, those that storeEarly has not
// begun with. end must be called; until then the directory's area files may be
// incomplete.
func (g *gpuState) startStoring(ctx context.Context, dir string) (*storing, error) {
	s := g.takeEarly()
	early := len(s.areas)
	var rest []savedArea
	for _, a := range g.areas {
		if !s.has(a) {
			rest = append(rest, a)
		}
	}
	if len(g.areas) != early+len(rest) {
		s.end()
		return nil, errors.New("the driver has changed a staging area after it was done with it")
	}
	if err := s.add(ctx, g, dir, rest); err != nil {
		s.end()
		return nil, err
	}
	return s, nil
}

// takeEarly gives what storeEarly has begun.
func (g *gpuState) takeEarly() *storing {
	g.finding.Wait()
	s := g.early
	g.early = &storing{}
	return s
}

// has says whether an area is being stored, and tells what is known of it now.
func (s *storing) has(a savedArea) bool {
	for _, b := range s.areas {
		if b.PID == a.PID && b.Start == a.Start && b.Bytes == a.Bytes {
			b.proc, b.name = a.proc, a.name
			return true
		}
	}
	return false
}

// add begins to store areas, after those that were added before.
func (s *storing) add(ctx context.Context, g *gpuState, dir string, areas []savedArea) (err error) {
	if len(areas) == 0 {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var part []*storedArea
	defer func() {
		if err != nil {
			for _, a := range part {
				a.drop()
			}
		}
	}()
	var files []trace.FileRange
	for _, saved := range areas {
		a := &storedArea{savedArea: saved}
		if a.file, err = os.OpenFile(a.path(), os.O_RDWR, 0); err != nil {
			return fmt.Errorf("keep the GPU state's file: %w", err)
		}
		part = append(part, a)
		r := trace.FileRange{Path: a.path(), Offset: a.Offset, Bytes: a.Bytes, Punch: g.inImages, Disk: g.window > 0}
		if !g.inImages {
			r.To, r.Written = filepath.Join(dir, a.name), a.Written
		}
		files = append(files, r)
	}
	if s.tracer == nil {
		if s.tracer, err = startTracer(ctx, g.config); err != nil {
			return err
		}
	}
	s.areas = append(s.areas, part...)
	store := s.tracer.Copy
	if g.inImages {
		store = s.tracer.Digest
	}
	s.work.Go(func() {
		digests, err := store(files)
		s.mu.Lock()
		defer s.mu.Unlock()
		s.err = errors.Join(s.err, err)
		for i := range digests {
			part[i].digests = digests[i]
		}
	})
	return nil
}

// wait waits for the end of the storing. On an error some of the files may be
// there in part.
func (s *storing) wait() error {
	s.work.Wait()
	return s.err
}

// end gives the storing up, if it is not over, and all that it has open.
func (s *storing) end() {
	if s == nil {
		return
	}
	if s.tracer != nil {
		s.tracer.Kill()
	}
	s.work.Wait()
	if s.tracer != nil {
		s.tracer.Close()
	}
	for _, a := range s.areas {
		a.drop()
	}
}

// bytes is the size of the areas.
func (s *storing) bytes() (bytes uint64) {
	for _, a := range s.areas {
		bytes += a.Bytes
	}
	return bytes
}

// describe adds the areas to the metadata, once the storing is over.
func (s *storing) describe(m *images.Metadata) {
	for _, a := range s.areas {
		p := &m.Processes[a.proc]
		p.Areas = append(p.Areas, images.Area{File: a.name, Start: a.Start, Bytes: a.Bytes, Offset: a.Offset, Digests: a.digests})
	}
}

// removeAreaFiles removes the area files of a checkpoint that has failed.
func removeAreaFiles(ctx context.Context, dir string, procs []cuda.Process) {
	for _, p := range procs {
		files, err := filepath.Glob(filepath.Join(dir, images.AreaPrefix(p.NSPID)+"*"))
		for _, f := range files {
			err = joinBack(err, os.Remove(f))
		}
		if err != nil {
			log.G(ctx).WithError(err).Warn("remove the files of a failed checkpoint")
		}
	}
}
