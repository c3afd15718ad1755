// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package pages

import (
	"errors"
	"fmt"
	"os"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/node/worker"
)

// ErrWorkerGone says that the process that copies memory ended before it was asked to.
var ErrWorkerGone = errors.New("process that copies memory ended early")

var kind = worker.Kind{
	Name: "memory worker", Self: "gpuckpt-memory", MaxMessage: 256 << 20,
	Gone: ErrWorkerGone, Hung: ErrWorkerGone, Garbled: ErrWorkerGone,
}

// Worker is a process that copies memory, one call at a time.
type Worker struct{ *worker.Worker }

// Start starts a Worker.
type Start func() (*Worker, error)

// StartWorker starts a worker, in a cgroup if one is given: see worker.StartSelf.
func StartWorker(run worker.Run, cgroup *os.File) (*Worker, error) {
	w, err := worker.StartSelf(kind, run, cgroup)
	if err != nil {
		return nil, err
	}
	return &Worker{w}, nil
}

// IsWorker reports whether this process is such a worker: main then only calls Main.
func IsWorker() bool { return kind.IsSelf() }

// Main is a worker's whole life.
func Main() {
	d := newDumper()
	worker.Obey(kind, d.do)
}

// The operations of a worker.
const (
	opFill  = "fill"
	opScan  = "scan"
	opMerge = "merge"
)

// order is what a worker is asked for.
type order struct {
	Op  string `json:"op"`
	PID int    `json:"pid"`
	// Path of the directory of a scan and a merge, or what errors call the file of a fill.
	Path string `json:"path,omitempty"`
	// Bytes of that file, where they are, and its Pieces that are copied.
	Bytes    uint64          `json:"bytes,omitempty"`
	Location images.Location `json:"location,omitempty"`
	Pieces   []Piece         `json:"pieces,omitempty"`
	// Spans of a scan, and what they must hold together. Of a segment it is where the process has it mapped.
	Spans []span `json:"spans,omitempty"`
	Least uint64 `json:"least,omitempty"`
	// Shared is for a segment of shared memory, which a scan and a merge find by its Inode.
	Shared bool   `json:"shared,omitempty"`
	Inode  uint64 `json:"inode,omitempty"`
	// Number of the process in the images of a merge, and whether to return digests.
	Number int  `json:"number,omitempty"`
	Digest bool `json:"digest,omitempty"`
}

// answer is what a worker says to it.
type answer struct {
	Bytes uint64 `json:"bytes,omitempty"`
	Spans []span `json:"spans,omitempty"`
	// Digests of the blocks of the image that a merge has written, and its name.
	Digests []string `json:"digests,omitempty"`
	Name    string   `json:"name,omitempty"`
	// Ahead is how many bytes of the image's pages were made before the merge.
	Ahead uint64 `json:"ahead,omitempty"`
}

func (w *Worker) ask(doing string, o order) (answer, error) {
	return worker.Order[answer](w.Worker, doing, o, worker.LongOrder)
}

func (w *Worker) fill(pid int, from *images.Area, pieces []Piece, shared bool) (uint64, error) {
	a, err := w.ask("copy "+from.File, order{Op: opFill, PID: pid, Path: from.File, Bytes: from.Bytes, Location: from.Location, Pieces: pieces, Shared: shared})
	return a.Bytes, err
}

// scan returns those of the spans that together hold so much memory, and begins to make room for it in a directory.
func (w *Worker) scan(from source, spans []span, least uint64, dir string) ([]span, error) {
	a, err := w.ask("look for memory", order{Op: opScan, PID: from.pid, Shared: from.shared, Inode: from.inode, Spans: spans, Least: least, Path: dir})
	return a.Spans, err
}

// merge puts what scan has found into the images in a directory.
func (w *Worker) merge(from source, number int, dir string, digest bool) (answer, error) {
	return w.ask("copy into CRIU's images", order{Op: opMerge, PID: from.pid, Number: number, Shared: from.shared, Inode: from.inode, Path: dir, Digest: digest})
}

func (d *dumper) do(o order) (a answer, err error) {
	switch o.Op {
	case opFill:
		a.Bytes, err = fill(o.PID, &images.Area{File: o.Path, Bytes: o.Bytes, Location: o.Location}, o.Pieces, o.Shared)
	case opScan:
		if a.Spans, err = d.scan(o.source(), o.Spans, o.Least); err == nil {
			d.makeRoom(o.source(), o.Path)
		}
	case opMerge:
		a, err = d.merge(o.source(), o.Number, o.Path, o.Digest)
	default:
		err = fmt.Errorf("unknown order %q", o.Op)
	}
	return a, err
}

// Check refuses what is not in pages.
func (o *order) Check() error {
	if o.PID <= 0 {
		return fmt.Errorf("order: %d is no process", o.PID)
	}
	if o.Shared && o.Op == opScan && len(o.Spans) != 1 {
		return fmt.Errorf("order: a segment at %d places", len(o.Spans))
	}
	for _, p := range o.Pieces {
		if p.Bytes == 0 || (p.Start|p.Bytes|p.Offset)%pageBytes != 0 {
			return fmt.Errorf("order: %d bytes at %#x from offset %d are not in pages", p.Bytes, p.Start, p.Offset)
		}
	}
	return nil
}
