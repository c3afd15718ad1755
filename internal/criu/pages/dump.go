// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package pages

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/go-runc"
	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// Dump is what CRIU leaves out of one dump. A nil Dump leaves out nothing.
type Dump struct {
	ctx    context.Context // its logger
	of     Dumping
	worker *Worker
	ahead  chan struct{} // closed when MakeRoom is done; nil without
	taken  []taken

	digests map[string][]string
}

// taken is a source of which something is left out, and the process's number as it counts itself.
type taken struct {
	source
	number int
}

// chosen is what is copied past CRIU: mappings of processes, and of segments one mapping each.
type chosen struct {
	mappings map[int][]span
	segments map[source]span
}

// Dumping says what is dumped.
type Dumping struct {
	// Images is the directory that CRIU writes to.
	Images string
	// List is a file to make for CRIU, and Library what makes CRIU heed it (leave_out.c).
	List, Library string
	// Least is the memory, in bytes, that a process's mappings, or all segments, hold for them to be
	// chosen; 0 chooses none.
	Least uint64
	// Digest asks for Digests.
	Digest bool
	// Init is the container's first process, Pids returns all.
	Init  int
	Pids  func() ([]int, error)
	Start Start
}

// NewDump returns a Dump. Close must be called.
func NewDump(ctx context.Context, of Dumping) *Dump {
	return &Dump{ctx: ctx, of: of, digests: make(map[string][]string)}
}

// MakeRoom begins to make the pages of the images, where these are in memory, while the processes still
// work: no thread of the program may run, threads of the driver may. Without the room, or with too
// little, Complete makes what lacks. It does not wait.
func (d *Dump) MakeRoom() {
	if d.of.Least == 0 {
		return
	}
	d.ahead = make(chan struct{})
	go func() {
		defer close(d.ahead)
		if _, err := d.choose(); err != nil {
			d.endWorker()
			log.G(d.ctx).WithError(err).Warn("no memory is made ready for what the processes hold")
		}
	}()
}

// Begin chooses mappings before CRIU dumps the processes. They must be frozen, from here on until
// Complete has returned. If it fails, CRIU dumps all, and the log says so.
func (d *Dump) Begin() {
	if d == nil || d.of.Least == 0 {
		return
	}
	d.wait()
	if err := d.begin(); err != nil {
		log.G(d.ctx).WithError(err).Warn("CRIU dumps all memory")
		d.Close()
		d.taken = nil
	}
}

// wait waits for the end of MakeRoom's look at the processes.
func (d *Dump) wait() {
	if d.ahead != nil {
		<-d.ahead
	}
}

func (d *Dump) begin() error {
	if strings.ContainsAny(d.of.Library, ": ") { // which LD_PRELOAD takes for the end of a name
		return fmt.Errorf("the path %q has a colon or a space", d.of.Library)
	}
	chosen, err := d.choose()
	if err != nil {
		return err
	}
	pids := func() ([]int, error) { return slices.Collect(maps.Keys(chosen.mappings)), nil }
	inside, err := proc.Inside(pids, d.of.Init)
	if err != nil {
		return err
	}
	var list strings.Builder
	for number, pid := range inside {
		d.taken = append(d.taken, taken{source{pid: pid}, number})
		for _, s := range chosen.mappings[pid] {
			fmt.Fprintf(&list, "%d %x %x\n", pid, s.Start, s.End)
		}
	}
	if len(chosen.segments) > 0 {
		device, err := proc.SegmentDevice()
		if err != nil {
			return err
		}
		for from := range chosen.segments {
			d.taken = append(d.taken, taken{source: from})
			fmt.Fprintf(&list, "0 %x %x\n", device, from.inode)
		}
	}
	if list.Len() == 0 {
		return nil
	}
	return os.WriteFile(d.of.List, []byte(list.String()), 0o600)
}

// choose returns what is copied past CRIU, and has the worker make room for it that it does not have yet.
func (d *Dump) choose() (chosen, error) {
	none := chosen{}
	pids, err := d.of.Pids()
	if err != nil {
		return none, err
	}
	may, known := make(map[int][]span), make(map[span]int)
	segments := newSegments(d.of.Least)
	for _, pid := range pids {
		status, err := proc.StatusOf(pid)
		if err != nil {
			return none, err
		}
		maps, err := proc.Maps(pid, func(m *proc.Mapping) bool {
			return m.End-m.Start >= d.of.Least/leastPart
		})
		if err != nil {
			return none, err
		}
		// Programs map far more than they use, and only the worker, whose start takes time, looks at each page.
		holds := status.Bytes("RssAnon") + status.Bytes("VmSwap")
		for _, m := range maps {
			s := span{m.Start, m.End}
			known[s]++
			if holds >= d.of.Least && isPlain(&m) {
				may[pid] = append(may[pid], s)
			}
			if err := segments.add(pid, &m); err != nil {
				return none, err
			}
		}
	}
	all := chosen{make(map[int][]span), make(map[source]span)}
	for pid, spans := range may {
		spans = slices.DeleteFunc(spans, func(s span) bool { return known[s] > 1 })
		if len(spans) == 0 {
			continue
		}
		if spans, err = d.scan(source{pid: pid}, spans, d.of.Least); err != nil {
			return none, err
		}
		if len(spans) > 0 {
			all.mappings[pid] = spans
		}
	}
	for from, s := range segments.chosen() {
		kept, err := d.scan(from, []span{s}, 0) // all of them hold enough
		if err != nil {
			return none, err
		}
		if len(kept) > 0 {
			all.segments[from] = s
		}
	}
	return all, nil
}

// scan has the worker, which is started when it is needed, look for memory.
func (d *Dump) scan(from source, spans []span, least uint64) (_ []span, err error) {
	if d.worker == nil {
		if d.worker, err = d.of.Start(); err != nil {
			return nil, err
		}
	}
	return d.worker.scan(from, spans, least, d.of.Images)
}

// Environment returns a context with which CRIU leaves out what was chosen.
func (d *Dump) Environment(ctx context.Context) context.Context {
	if d == nil || len(d.taken) == 0 {
		return ctx
	}
	return runc.WithExtraEnv(ctx, "LD_PRELOAD="+d.of.Library, "GPUCKPT_LEFT_OUT="+d.of.List)
}

// Complete puts into CRIU's images what CRIU has left out. On an error they are of no use.
func (d *Dump) Complete() error {
	if d == nil {
		return nil
	}
	shared, of := answer{}, 0
	for _, t := range d.taken {
		done, err := d.worker.merge(t.source, t.number, d.of.Images, d.of.Digest)
		if err != nil {
			return fmt.Errorf("save %s: %w", t, err)
		}
		if d.of.Digest && done.Bytes > 0 {
			d.digests[done.Name] = done.Digests
		}
		if done.Bytes == 0 {
			log.G(d.ctx).Warnf("CRIU has dumped %s by itself: it does not ask for pages as CRIU 4.2 does", t)
		} else if !t.shared {
			log.G(d.ctx).WithField("bytes", done.Bytes).WithField("ahead", done.Ahead).Infof("%s went past CRIU", t)
		} else {
			of, shared.Bytes, shared.Ahead = of+1, shared.Bytes+done.Bytes, shared.Ahead+done.Ahead
		}
	}
	if of > 0 {
		log.G(d.ctx).WithField("bytes", shared.Bytes).WithField("ahead", shared.Ahead).WithField("segments", of).Info("shared memory went past CRIU")
	}
	return nil
}

func (t taken) String() string {
	if t.shared {
		return fmt.Sprintf("shared memory %d of process %s", t.inode, proc.Describe(t.pid))
	}
	return "the memory of process " + proc.Describe(t.pid)
}

// Digests returns the digests of the images that Complete has written, by name (images.DigestBlock of each
// block), if the Dumping asks for them.
func (d *Dump) Digests() map[string][]string {
	if d == nil {
		return nil
	}
	return d.digests
}

// Close ends the dump. It can be called again, and for nil.
func (d *Dump) Close() {
	if d == nil {
		return
	}
	d.wait()
	d.endWorker()
	if err := os.Remove(d.of.List); len(d.taken) > 0 && err != nil && !errors.Is(err, os.ErrNotExist) {
		log.G(d.ctx).WithError(err).Warnf("remove %s", filepath.Base(d.of.List))
	}
}

func (d *Dump) endWorker() {
	if d.worker != nil {
		d.worker.Close()
		d.worker = nil
	}
}
