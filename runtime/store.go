// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/containerd/log"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/staging"
)

// storing makes the saved areas files among the images, and digests them, while
// CRIU dumps the rest and while the state goes back to the GPU: it has a digester
// and descriptors of its own, so it outlives the areas.
type storing struct {
	areas    []savedArea // copies, whose file is a duplicate
	digester *staging.Digester
	done     chan struct{} // closed at the end; what follows is then set

	digests [][]string
	err     error
}

// startStoring begins to store the areas in dir. end must be called; until then
// the directory's area files may be incomplete. stays says that the state is to
// go back to the GPU from the files: then those in memory get no holes, which the
// driver, reading there, would fill at the container's expense.
func (g *gpuState) startStoring(ctx context.Context, dir string, stays bool) (_ *storing, err error) {
	s := &storing{done: make(chan struct{})}
	if len(g.areas) == 0 {
		close(s.done)
		return s, nil
	}
	defer func() {
		if err != nil {
			s.drop()
		}
	}()
	var files []staging.FileRange
	for _, a := range g.areas {
		if a.file != nil {
			fd, err := unix.FcntlInt(a.file.Fd(), unix.F_DUPFD_CLOEXEC, 0)
			if err != nil {
				return nil, fmt.Errorf("keep the GPU state's file: %w", err)
			}
			a.file = os.NewFile(uintptr(fd), a.name)
		}
		s.areas = append(s.areas, a)
		r := staging.FileRange{Path: a.path(), Offset: a.Offset, Bytes: a.Bytes, Punch: g.inImages && (!stays || g.window > 0), Disk: g.window > 0}
		if !g.inImages {
			r.To, r.Written = filepath.Join(dir, a.name), a.Written
		}
		files = append(files, r)
	}
	if s.digester, err = startDigester(ctx, g.config); err != nil {
		return nil, err
	}
	store := s.digester.Copy
	if g.inImages {
		store = s.digester.Digest
	}
	go func() {
		s.digests, s.err = store(files)
		close(s.done)
	}()
	return s, nil
}

// wait waits for the end of the storing. On an error some of the files may be
// there in part.
func (s *storing) wait() error {
	<-s.done
	return s.err
}

// end gives the storing up, if it is not over, and all that it has open.
func (s *storing) end() {
	if s == nil {
		return
	}
	if s.digester != nil {
		s.digester.Kill()
	}
	<-s.done
	s.drop()
}

func (s *storing) drop() {
	if s.digester != nil {
		s.digester.Close()
	}
	for i := range s.areas {
		s.areas[i].drop()
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
	for i, a := range s.areas {
		p := &m.Processes[a.proc]
		p.Areas = append(p.Areas, images.Area{File: a.name, Start: a.Start, Bytes: a.Bytes, Offset: a.Offset, Digests: s.digests[i]})
	}
}

// removeAreaFiles removes the area files of a checkpoint that has failed.
func removeAreaFiles(ctx context.Context, dir string, procs []cuda.Process) {
	for _, p := range procs {
		files, err := filepath.Glob(filepath.Join(dir, images.AreaPrefix(p.PID.NS)+"*"))
		for _, f := range files {
			err = joinBack(err, os.Remove(f))
		}
		if err != nil {
			log.G(ctx).WithError(err).Warn("remove the files of a failed checkpoint")
		}
	}
}
