// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"fmt"
	"slices"

	"github.com/gpuckpt/gpuckpt/internal/gpu/ptrace"
	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
)

// The operations of a tracer.
const (
	opHold      = "hold"
	opRelease   = "release"
	opBreathe   = "breathe"
	opSteer     = "steer"
	opStop      = "stop"
	opCommit    = "commit"
	opAbort     = "abort"
	opMap       = "map"
	opStartCopy = "start-copy"
	opStopCopy  = "stop-copy"
)

// order is a request to a tracer, which answers it with a reply.
type order struct {
	Op string `json:"op"`
	// Processes whose threads are held, but for those in Except.
	Processes []int `json:"processes,omitempty"`
	Except    []int `json:"except,omitempty"`
	// Target of a steer; of a breathe, the thread that waits.
	Target Target `json:"target,omitzero"`
	// Mappings of a map.
	Mappings []Mapping `json:"mappings,omitempty"`
	// Threads of a start-copy, one of each process, and the threads that copy in each.
	Threads     []Thread `json:"threads,omitempty"`
	CopyThreads int      `json:"copyThreads,omitempty"`
}

// reply is a tracer's answer. A commit or an abort that fails has Areas and Notes as well.
type reply struct {
	// Areas of a stop, a commit or an abort.
	Areas []Area `json:"areas,omitempty"`
	// Notes are for the log: what was not recognised and left alone.
	Notes []string `json:"notes,omitempty"`
}

// Target is a thread of the driver's that will map a staging area.
type Target struct {
	// PID and TID, as the tracer counts.
	PID int `json:"pid"`
	TID int `json:"tid"`
	// Dir has the areas' files, called Name and a number. An empty Dir is memory without a name.
	Dir  string `json:"dir"`
	Name string `json:"name"`
	// First is the number of the first area: of how many another thread of the process has areas.
	First int `json:"first,omitempty"`
	// CopyTo is a directory on a disk, for memory without a name: while the driver is at
	// work a write-behind begins files of these names there. Empty: it does not.
	CopyTo string `json:"copyTo,omitempty"`
	// Window is the memory, in bytes, that an area may take if Dir is on a disk:
	// the driver's state is written through to it. At least staging.MinWindow; 0 for a Dir that is memory.
	Window uint64 `json:"window,omitempty"`
	// Reserve is the space in Dir, in bytes, that is reserved before the driver is asked
	// for anything. With a Window only.
	Reserve uint64 `json:"reserve,omitempty"`
	// Most is how many bytes the thread's areas may have in all: what the driver has said that the
	// process uses. A larger one is left to the thread, and refused with a Window. 0: not known.
	Most uint64 `json:"most,omitempty"`
	// CopyThreads is the number of threads that copy, the driver's own among them, see
	// StartCopyThreads; 0 leaves it to the driver. None with a Window: they would get too far ahead
	// of what bounds it.
	CopyThreads int `json:"copyThreads,omitempty"`
	// Sweep closes first what a tracer that died has left open in the process.
	Sweep bool `json:"sweep,omitempty"`
}

// MaxCopyThreads is the highest number of threads that can copy in a process.
const MaxCopyThreads = config.MaxCopyThreads

// Thread names a thread of a process.
type Thread = ptrace.ThreadID

// Area is a staging area and the file that backs it.
type Area struct {
	PID int `json:"pid"`
	// Number is that of the area's file, see Target.First.
	Number int `json:"number,omitempty"`
	// Start and Bytes are the area's place in the process.
	Start uint64 `json:"start"`
	Bytes uint64 `json:"bytes"`
	// Path names the file by one of the tracer's own descriptors, /proc/PID/fd/N. It
	// is valid while the tracer lives, even if the directory is removed.
	Path string `json:"path"`
	// Offset is where the area begins in the file, below 2 MiB, aligned alike in huge pages.
	Offset uint64 `json:"offset"`
	// Written is what is known of the blocks that are digested, and in CopyTo's file if
	// there is one; empty for the others.
	Written []staging.Known `json:"written,omitempty"`
}

// Mapping maps a file over an area of a process. A Mapping without a file asks for huge
// pages in an area that is empty: the kernel then reads all of it from one huge page of
// zeros, instead of making an entry for each 4 KiB.
type Mapping struct {
	// PID and TID are the process, and its thread that makes the system call.
	PID int `json:"pid"`
	TID int `json:"tid"`
	// The area and the file, as in Area.
	Start  uint64 `json:"start"`
	Bytes  uint64 `json:"bytes"`
	Path   string `json:"path,omitempty"`
	Offset uint64 `json:"offset"`
}

// Check is strict about what could hurt a process that is no target.
func (o *order) Check() error {
	ids := slices.Concat(o.Processes, o.Except)
	if o.Op == opSteer {
		ids = append(ids, o.Target.PID, o.Target.TID)
		if w := o.Target.Window; w > 0 && (w < staging.MinWindow || o.Target.Dir == "" || o.Target.CopyTo != "") || w == 0 && o.Target.Reserve > 0 {
			return fmt.Errorf("order: a window of %d bytes, with %q and %q", w, o.Target.Dir, o.Target.CopyTo)
		}
	}
	for _, m := range o.Mappings {
		ids = append(ids, m.PID, m.TID)
		if m.Start%staging.PageSize != 0 || m.Bytes == 0 || m.Bytes%staging.PageSize != 0 || m.Offset%staging.PageSize != 0 || m.Start+m.Bytes < m.Start {
			return fmt.Errorf("order: mapping of %d bytes at %#x from offset %d is not in pages", m.Bytes, m.Start, m.Offset)
		}
	}
	for _, t := range o.Threads {
		ids = append(ids, t.PID, t.TID)
	}
	if o.CopyThreads < 0 || o.CopyThreads > MaxCopyThreads || o.Target.CopyThreads < 0 || o.Target.CopyThreads > MaxCopyThreads || o.Target.CopyThreads > 0 && o.Target.Window > 0 {
		return fmt.Errorf("order: %d and %d copy threads", o.CopyThreads, o.Target.CopyThreads)
	}
	for _, id := range ids {
		if id <= 0 {
			return fmt.Errorf("order: %d is no process or thread", id)
		}
	}
	return nil
}
