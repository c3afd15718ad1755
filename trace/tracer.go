// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"

	"github.com/gpuckpt/gpuckpt/images"
)

// tracer is the state of a tracer process.
type tracer struct {
	hold  *hold
	steer []*steering
	quick []quickened
	// kept are the files of collected areas, open for those who know them by
	// this process's descriptors.
	kept []*os.File
}

// checkers is how many blocks are checked at a time: beside it CRIU and the driver
// are at work.
var checkers = (3*runtime.NumCPU() + 3) / 4

// step is called after everything a tracer does to a thread. A test replaces it
// to end the tracer there.
var step = func(string) {}

// ptrace belongs to a thread: each hold and each steering has one of its own, whose
// end lets go of what it traced. The first thread is kept out of that, because it
// does not end before the process. Go promises that the first goroutine is on it
// until main begins, no longer.
func init() {
	if IsTracer() {
		runtime.LockOSThread()
	}
}

// Main is a tracer's whole life: it carries out orders one after the other
// until its standard input ends.
func Main() {
	var t tracer
	in := bufio.NewReader(os.Stdin)
	out := json.NewEncoder(os.Stdout)
	for {
		line, err := in.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			os.Exit(0)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		var r reply
		o, err := parseOrder(line)
		if err == nil {
			r, err = t.do(o)
		}
		if err != nil {
			r.Error = err.Error()
		}
		if err := out.Encode(r); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}

func (t *tracer) do(o order) (r reply, err error) {
	switch o.Op {
	case opHold:
		if t.hold != nil {
			return r, errors.New("threads are held already")
		}
		t.hold, err = holdThreads(o.Processes, o.Except)
	case opRelease:
		if t.hold == nil {
			return r, errors.New("no threads are held")
		}
		t.hold.release()
		t.hold = nil
	case opSteer:
		var s *steering
		if s, err = steer(o.Target); err == nil {
			t.steer = append(t.steer, s)
		}
	case opSettle:
		r.Areas, err = settle(t.steer)
	case opCollect:
		r, t.kept, err = collect(t.steer, t.kept)
		t.steer = nil
	case opAbandon:
		err = abandon(t.steer)
		t.steer = nil
	case opMap:
		err = mapAll(o.Mappings)
	case opQuicken:
		var quick []quickened
		quick, r.Notes = quickenAll(o.Threads, o.Copiers)
		t.quick = append(t.quick, quick...)
	case opCalm:
		r.Notes, err = calmAll(t.quick)
		t.quick = nil
	case opDigest:
		r.Digests, err = digestAll(o.Files)
	case opCopy:
		r.Digests, err = copyAll(o.Files)
	case opCheck:
		for i := range o.Areas {
			o.Areas[i].Location = o.Places[i]
		}
		err = images.Check(context.Background(), o.Areas, checkers, nil)
	default:
		err = fmt.Errorf("unknown order %q", o.Op)
	}
	return r, err
}
