// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package staging

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"time"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/worker"
)

// DigesterName is the name (argv[0]) under which an executable is a digester.
const DigesterName = "gpuckpt-digester"

// ErrDigesterGone says that the digester ended before it was asked to.
var ErrDigesterGone = errors.New("process that digests GPU state ended early")

// kind is what all digesters have in common.
var kind = worker.Kind{Name: "digester", Gone: ErrDigesterGone, Hung: ErrDigesterGone, Garbled: ErrDigesterGone, MaxMessage: 64 << 20}

// callTimeout bounds one call. The longest copies or digests all GPU state:
// 30 minutes is 64 GiB at 40 MB/s.
const callTimeout = 30 * time.Minute

// Digester is a process that digests, copies and checks files of GPU state. Its
// calls take turns. After ErrDigesterGone only Close is left to do.
type Digester struct{ *worker.Worker }

// StartDigester starts a digester, in a cgroup if one is given: see worker.StartSelf.
func StartDigester(run worker.Run, cgroup *os.File) (*Digester, error) {
	w, err := worker.StartSelf(kind, DigesterName, run, cgroup)
	if err != nil {
		return nil, err
	}
	return &Digester{w}, nil
}

// Digest returns the digest of each block of each range (images.DigestBlock). It
// works in parallel over all of them.
func (d *Digester) Digest(files []FileRange) ([][]string, error) {
	r, err := d.call("digest GPU state", request{Op: opDigest, Files: files})
	return r.Digests, err
}

// Copy copies ranges to the files To in parallel and flushes them, and returns
// their digests as Digest does. The ranges are memory. On an error a To may be
// there in part.
func (d *Digester) Copy(files []FileRange) ([][]string, error) {
	r, err := d.call("copy GPU state", request{Op: opCopy, Files: files})
	return r.Digests, err
}

// Check reads the areas from their files and compares each block's digest. The
// error names the first blocks that are wrong, and their files.
func (d *Digester) Check(areas []images.Area) error {
	q := request{Op: opCheck, Areas: areas}
	for _, a := range areas {
		q.Places = append(q.Places, a.Location)
	}
	_, err := d.call("check GPU state", q)
	return err
}

// call is bounded by callTimeout, and ends when the digester is closed.
//
//nolint:contextcheck // see above
func (d *Digester) call(doing string, q request) (answer, error) {
	var a answer
	if err := d.Call(context.Background(), doing, q, &a, callTimeout); err != nil {
		return answer{}, err
	}
	if a.Error != "" {
		return answer{}, fmt.Errorf("%s: %s", doing, a.Error)
	}
	return a, nil
}

// The operations of a digester.
const (
	opDigest = "digest"
	opCopy   = "copy"
	opCheck  = "check"
)

// request is what a digester is asked for.
type request struct {
	Op string `json:"op"`
	// Files of a digest or a copy.
	Files []FileRange `json:"files,omitempty"`
	// Areas of a check, and where the bytes of each are.
	Areas  []images.Area     `json:"areas,omitempty"`
	Places []images.Location `json:"places,omitempty"`
}

// answer is a digester's answer.
type answer struct {
	// Error is what went wrong; Digests is then empty.
	Error string `json:"error,omitempty"`
	// Digests of each file, by block.
	Digests [][]string `json:"digests,omitempty"`
}

// IsDigester reports whether this process was started to be a digester: main then
// calls DigesterMain and nothing else.
func IsDigester() bool { return worker.Is(DigesterName) }

// DigesterMain is a digester's whole life: it answers requests until its standard
// input ends.
func DigesterMain() {
	worker.Serve(kind.MaxMessage, func(line []byte) any {
		var a answer
		q, err := parseRequest(line)
		if err == nil {
			a.Digests, err = q.do()
		}
		if err != nil {
			return answer{Error: err.Error()}
		}
		return a
	})
}

func (q request) do() ([][]string, error) {
	switch q.Op {
	case opDigest:
		return digestAll(q.Files)
	case opCopy:
		return copyAll(q.Files)
	case opCheck:
		// CRIU and the driver are at work at the same time: some cores are left to them.
		return nil, images.Check(context.Background(), q.Areas, (3*runtime.NumCPU()+3)/4, nil)
	default:
		return nil, fmt.Errorf("unknown request %q", q.Op)
	}
}

// parseRequest refuses ranges that are not in pages, and fields that are unknown.
func parseRequest(line []byte) (request, error) {
	var q request
	if err := worker.Decode(line, &q); err != nil {
		return request{}, fmt.Errorf("request: %w", err)
	}
	if len(q.Areas) != len(q.Places) {
		return request{}, fmt.Errorf("request: %d places of %d areas", len(q.Places), len(q.Areas))
	}
	for i := range q.Areas {
		q.Areas[i].Location = q.Places[i]
	}
	for _, f := range q.Files {
		if f.Bytes == 0 || f.Bytes%PageSize != 0 || f.Offset%PageSize != 0 || f.Offset >= HugePage || f.Offset+f.Bytes < f.Offset {
			return request{}, fmt.Errorf("request: %d bytes at %d of %s are not in pages", f.Bytes, f.Offset, f.Path)
		}
	}
	return q, nil
}
