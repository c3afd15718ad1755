// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/gpu/interposer"
	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
	"github.com/gpuckpt/gpuckpt/runtime/internal/cudahelper"
	"github.com/gpuckpt/gpuckpt/runtime/internal/gpustate/internal/gpulist"
)

// keeping has the interposers keep GPU memory on the GPUs in a Save, and a mover copy it to areas: the first of each
// process that has some.
type keeping struct {
	s     *State
	dir   string // of the areas' files if that is memory; "" for memory without a name
	mover func() (*cuda.Mover, error)
	got   bool // the mover is the Kept's
	stop  context.CancelFunc

	mu    sync.Mutex
	areas []Area
}

// keep begins to start a mover, if there is something that could be kept. It comes up beside the rest of the Save.
func keep(ctx context.Context, s *State, helper *cuda.Helper, dir string, next interposer.Next) *keeping {
	k := &keeping{s: s}
	if next == interposer.Suspended || dir == "" || !s.parked.CanKeep() {
		s.parked.Keep(nil)
		return k
	}
	if staging.OnMemory(dir) { // where imageFile looks for them
		k.dir = dir
	}
	ctx, k.stop = context.WithCancel(context.WithoutCancel(ctx))
	used := slices.DeleteFunc(gpulist.UUIDs(s.had()), func(uuid string) bool { return s.locked.use.byGPU != nil && s.locked.use.byGPU[uuid] == 0 })
	use, calm := s.locked.use.byGPU, false
	k.mover = sync.OnceValues(func() (*cuda.Mover, error) {
		m, err := s.helpers.Mover(ctx, used, s.locked.use.total())
		calm = err == nil && next == interposer.GoesOn && cudahelper.RoomTwice(ctx, helper, use)
		return m, err
	})
	go func() { _, _ = k.mover() }()
	s.parked.Keep(&interposer.Keeper{
		Mover: func(context.Context) (interposer.Mover, error) {
			m, err := k.mover()
			if err != nil {
				return nil, err
			}
			k.got = true
			return cudahelper.Pace(m, calm), nil
		},
		File: k.file, Undo: k.remove,
	})
	return k
}

// end ends a mover that nobody has.
func (k *keeping) end() {
	if k.mover == nil {
		return
	}
	if !k.got {
		k.stop()
		go func() {
			if m, err := k.mover(); err == nil {
				m.Kill()
				m.Close()
			}
		}()
	}
	for i := range k.areas { // which taken has not taken
		k.areas[i].release()
	}
}

// file makes the file of a process's area. It has its size from the start on: it is mapped before it is full.
func (k *keeping) file(pid int, bytes uint64) (f *os.File, err error) {
	at := slices.IndexFunc(k.s.procs, func(p cuda.Process) bool { return p.PID.Host == pid })
	a := Area{Process: at, Area: images.Area{File: images.AreaFile(k.s.procs[at].PID.NS, 0), Bytes: bytes}}
	if k.dir == "" {
		f, err = staging.MemoryFile()
	} else {
		f, err = os.OpenFile(filepath.Join(k.dir, a.File), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	}
	if err != nil {
		return nil, err
	}
	a.hold(f)
	k.mu.Lock()
	defer k.mu.Unlock()
	k.areas = append(k.areas, a)
	return f, f.Truncate(int64(bytes)) //nolint:gosec // no file is as large
}

// remove removes the files: the memory is not kept.
func (k *keeping) remove() {
	for i := range k.areas {
		if k.dir != "" {
			_ = os.Remove(filepath.Join(k.dir, k.areas[i].File))
		}
		k.areas[i].release()
	}
	k.areas = nil
}

// taken returns the areas of what is kept, by process.
func (k *keeping) taken() []Area {
	areas := k.areas
	k.areas = nil
	for i := range areas {
		areas[i].keeper = k.s.procs[areas[i].Process].PID.Host
		areas[i].Start, _ = k.s.parked.Kept().Place(areas[i].keeper)
	}
	slices.SortFunc(areas, func(a, b Area) int { return a.Process - b.Process })
	return areas
}
