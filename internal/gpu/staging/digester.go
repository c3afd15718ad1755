// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package staging

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/node/worker"
)

// ErrDigesterGone says that the digester ended before it was asked to.
var ErrDigesterGone = errors.New("process that digests GPU state ended early")

// kind is what all digesters have in common.
var kind = worker.Kind{
	Name: "digester", Self: "gpuckpt-digester", MaxMessage: 64 << 20,
	Gone: ErrDigesterGone, Hung: ErrDigesterGone, Garbled: ErrDigesterGone,
}

// Digester is a process that digests, copies and checks files of GPU state, one call at a time.
// After ErrDigesterGone only Close is left to do.
type Digester struct{ *worker.Worker }

// StartDigester starts a digester, in a cgroup if one is given: see worker.StartSelf.
func StartDigester(run worker.Run, cgroup *os.File) (*Digester, error) {
	w, err := worker.StartSelf(kind, run, cgroup)
	if err != nil {
		return nil, err
	}
	return &Digester{w}, nil
}

// Digest returns the digest of each block of each range (images.DigestBlock), in parallel.
func (d *Digester) Digest(files []FileRange) ([][]string, error) {
	return worker.Order[[][]string](d.Worker, "digest GPU state", request{Op: opDigest, Files: files}, worker.LongOrder)
}

// Copy copies ranges, which are memory, to the files To in parallel and flushes them, and returns
// their digests as Digest does. On an error a To may be there in part.
func (d *Digester) Copy(files []FileRange) ([][]string, error) {
	return worker.Order[[][]string](d.Worker, "copy GPU state", request{Op: opCopy, Files: files}, worker.LongOrder)
}

// Check compares each block's digest. The error names the first wrong blocks, and their files.
func (d *Digester) Check(areas []images.Area) error {
	q := request{Op: opCheck, Areas: areas}
	for _, a := range areas {
		q.Places = append(q.Places, a.Location)
	}
	_, err := worker.Order[[][]string](d.Worker, "check GPU state", q, worker.LongOrder)
	return err
}

// The operations of a digester.
const (
	opDigest = "digest"
	opCopy   = "copy"
	opCheck  = "check"
)

// request is what a digester is asked for. It answers the digests of each file, by block.
type request struct {
	Op string `json:"op"`
	// Files of a digest or a copy.
	Files []FileRange `json:"files,omitempty"`
	// Areas of a check, and where the bytes of each are.
	Areas  []images.Area     `json:"areas,omitempty"`
	Places []images.Location `json:"places,omitempty"`
}

// IsDigester reports whether this process is a digester: main then only calls DigesterMain.
func IsDigester() bool { return kind.IsSelf() }

// DigesterMain is a digester's whole life: it answers requests until its socket ends.
func DigesterMain() { worker.Obey(kind, request.do) }

func (q request) do() ([][]string, error) {
	switch q.Op {
	case opDigest:
		return digestAll(q.Files)
	case opCopy:
		return copyAll(q.Files)
	case opCheck:
		// CRIU and the driver are at work at the same time, and come first.
		if err := yieldToOthers(); err != nil {
			return nil, err
		}
		return nil, images.Check(context.Background(), q.Areas, runtime.NumCPU(), nil)
	default:
		return nil, fmt.Errorf("unknown request %q", q.Op)
	}
}

// yieldToOthers has all threads of this process run where no other process wants to: those
// that come later inherit it.
func yieldToOthers() error {
	threads, err := os.ReadDir("/proc/self/task")
	for _, t := range threads {
		if tid, aerr := strconv.Atoi(t.Name()); aerr == nil {
			_ = unix.Setpriority(unix.PRIO_PROCESS, tid, leastUrgent) // one may have ended
		}
	}
	return err
}

// Check refuses ranges that are not in pages.
func (q *request) Check() error {
	if len(q.Areas) != len(q.Places) {
		return fmt.Errorf("request: %d places of %d areas", len(q.Places), len(q.Areas))
	}
	for i := range q.Areas {
		q.Areas[i].Location = q.Places[i]
	}
	for _, f := range q.Files {
		if f.Bytes == 0 || f.Bytes%PageSize != 0 || f.Offset%PageSize != 0 || f.Offset >= HugePage || f.Offset+f.Bytes < f.Offset {
			return fmt.Errorf("request: %d bytes at %d of %s are not in pages", f.Bytes, f.Offset, f.Path)
		}
	}
	return nil
}
