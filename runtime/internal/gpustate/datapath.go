// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"context"
	"fmt"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
	"github.com/gpuckpt/gpuckpt/internal/gpu/steer"
	"github.com/gpuckpt/gpuckpt/runtime/internal/cudahelper"
)

// DataPath is a way for GPU state to leave processes and to come back. The driver moves the state
// between the GPUs and the memory of each process; a data path decides what that memory is, and
// where its bytes go.
//
// To add one: implement DataPath in a file of its own, and return it from choosePath. A data path
// keeps nothing between calls that an Area can carry.
type DataPath interface {
	// Save takes the state of job's processes out of them. The container is frozen when Save is
	// called, and every thread but drivers' is held. Save prepares the processes, calls thaw, which
	// thaws the container, and checkpoint, which has the driver checkpoint all processes, each once,
	// and takes the areas. dir is the directory that Store will write to; "" for none. An area that
	// Save leaves in a process needs no entry: the driver finds it there, and CRIU dumps it.
	//
	// On an error with no areas the bytes are still in the processes, and the State calls Abort if
	// the container is thawed. On an error with areas the processes may lack these, and the State
	// calls Restore with them.
	Save(ctx context.Context, job *Job, dir string, thaw, checkpoint func() error) ([]Area, error)

	// Store makes each area a complete file in dir, called Area.File, with the bytes of the area
	// from Area.Offset, and returns the digests of each area's blocks (images.DigestBlock). It runs
	// beside CRIU and beside Restore: it must change neither the areas' bytes nor the processes.
	// worker is a process that can be killed and is charged for the memory; it traces nothing.
	// stays says that Restore will read the areas after Store, or meanwhile.
	//
	// On an error, and when ctx ends, files may be there in part.
	Store(ctx context.Context, worker *staging.Digester, areas []Area, dir string, stays bool) (digests [][]string, err error)

	// Restore puts the areas' bytes to where the driver will read them. The processes are
	// checkpointed. The container is thawed, and held as in Save, or newly restored by CRIU with
	// all of its threads running. done ends what Restore has started for the driver's sake; it is
	// called after the driver has restored the processes, or has failed to.
	//
	// On an error some areas may be in place. Restore can be called again.
	Restore(ctx context.Context, job *Job, areas []Area) (done func(context.Context), err error)

	// Abort ends a Save that has failed and has returned no areas: the processes keep all bytes. It
	// returns the files that these are in, which must have them until the processes are unlocked.
	// The container is thawed.
	Abort(job *Job) ([]*Lent, error)
}

// driverAlone leaves the state in memory of the processes, which CRIU dumps. There are no areas.
type driverAlone struct{}

func (driverAlone) Save(_ context.Context, _ *Job, _ string, thaw, checkpoint func() error) ([]Area, error) {
	if err := thaw(); err != nil {
		return nil, err
	}
	return nil, checkpoint()
}

func (driverAlone) Store(context.Context, *staging.Digester, []Area, string, bool) ([][]string, error) {
	return nil, nil
}

func (driverAlone) Restore(context.Context, *Job, []Area) (func(context.Context), error) {
	return func(context.Context) {}, nil
}

func (driverAlone) Abort(*Job) ([]*Lent, error) { return nil, nil }

// Job is what a DataPath works on.
type Job struct {
	// Processes are the container's CUDA processes by their pid in it. One with the
	// State cuda.Checkpointed is somebody else's: it must not be touched.
	Processes cuda.Group
	// Helpers call the driver, as the node's configuration has it.
	Helpers *cudahelper.Helpers
	// Tracer can stop the driver's threads and call the kernel in them.
	Tracer *steer.Session
	// Savers are threads that map an area each before the driver's thread does, by the pids of their processes.
	Savers map[int]int
	// Next is what follows a Save.
	Next Next
	// GPUs are those that the processes have open, and Use the memory that they use there.
	GPUs []cuda.GPU
	Use  usage
	// CopyThreads is how many threads may copy in each process, see copyThreads.
	CopyThreads int
	// Sweep says that an earlier tracer died: something of it may be open in the processes.
	Sweep bool
}

// Next is what becomes of processes when their state is saved.
type Next int

// What becomes of them.
const (
	Suspended   Next = iota // the state is to leave the GPUs
	StaysFrozen             // they end, or wait for their client
	Resumes                 // they run again as soon as they can
)

// Area is GPU state of one process, and where it is. Digests are nil while they are not known.
type Area struct {
	images.Area
	// Process is the process's place in Job.Processes.
	Process int
	// Written is what is known of the blocks that are digested, and in the file among
	// the images if there is one; empty for the others.
	Written []staging.Known

	// Computed are the digests of its blocks as a GPU has computed them, nil if none has.
	Computed []string

	// filling is what its bytes still come from, which is not the driver; nil for an area that Save has filled.
	filling *filling
	// held keeps the bytes if the tracer dies, or if the file's directory goes
	// because the client does. nil for an area that a name is enough for.
	held *Lent
	// inProcess says that the process has the bytes again.
	inProcess bool
}

// Lent is an open file that a process has, or had, mapped. Its owners share it.
type Lent struct {
	file   *os.File
	owners atomic.Int32
}

func lend(f *os.File) *Lent {
	l := &Lent{file: f}
	l.owners.Store(1)
	return l
}

// release gives the file up for one owner. When the last one does, and no name leads to the file, it has
// no content any more: a program may have kept a mapping or a descriptor of it, for which nobody pays.
func (l *Lent) release() {
	if l == nil || l.owners.Add(-1) > 0 {
		return
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(l.file.Fd()), &st); err == nil && st.Nlink == 0 {
		_ = l.file.Truncate(0)
	}
	l.file.Close()
}

// hold makes an open file the area's Location.
func (a *Area) hold(f *os.File) {
	a.held = lend(f)
	a.Area = a.In(fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), f.Fd()))
}

// share returns the area for one more owner of its file, which is to be full.
func (a *Area) share() Area {
	if a.filling != nil {
		a.filling.Want()
	}
	if a.held != nil {
		a.held.owners.Add(1)
	}
	return *a
}

// release gives up the area's file. Neither the process nor its driver needs what is in it.
func (a *Area) release() {
	a.held.release()
	a.held = nil
}

func bytesOf(areas []Area) (bytes uint64) {
	for _, a := range areas {
		bytes += a.Bytes
	}
	return bytes
}
