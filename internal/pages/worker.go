// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package pages

import (
	"errors"
	"fmt"
	"os"

	"github.com/gpuckpt/gpuckpt/internal/worker"
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
func Main() { worker.Obey(kind, order.do) }

// The operations of a worker.
const opFill = "fill"

// order is what a worker is asked for. It answers bytes.
type order struct {
	Op     string  `json:"op"`
	PID    int     `json:"pid"`
	Path   string  `json:"path"`
	Pieces []Piece `json:"pieces"`
}

func (w *Worker) fill(pid int, f *os.File, pieces []Piece) (uint64, error) {
	path := fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), f.Fd())
	return worker.Order[uint64](w.Worker, "copy "+f.Name(), order{Op: opFill, PID: pid, Path: path, Pieces: pieces})
}

func (o order) do() (uint64, error) {
	switch o.Op {
	case opFill:
		return fill(o.PID, o.Path, o.Pieces)
	default:
		return 0, fmt.Errorf("unknown order %q", o.Op)
	}
}

// Check refuses what is not in pages.
func (o *order) Check() error {
	if o.PID <= 0 {
		return fmt.Errorf("order: %d is no process", o.PID)
	}
	for _, p := range o.Pieces {
		if p.Bytes == 0 || (p.Start|p.Bytes|p.Offset)%pageBytes != 0 {
			return fmt.Errorf("order: %d bytes at %#x from offset %d are not in pages", p.Bytes, p.Start, p.Offset)
		}
	}
	return nil
}
