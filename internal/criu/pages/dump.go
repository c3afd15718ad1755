// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package pages

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
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
	taken  map[int]int   // processes of which something is left out: as this process counts, and as they do

	digests map[string][]string
}

// Dumping says what is dumped.
type Dumping struct {
	// Images is the directory that CRIU writes to.
	Images string
	// List is a file to make for CRIU, and Library what makes CRIU heed it (leave_out.c).
	List, Library string
	// Least is the memory that a mapping holds for it to be chosen, in bytes; 0 chooses none.
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
	return &Dump{ctx: ctx, of: of, taken: make(map[int]int), digests: make(map[string][]string)}
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
		clear(d.taken)
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
	pids := slices.Collect(maps.Keys(chosen))
	inside, err := proc.Inside(pids, d.of.Init)
	if err != nil {
		return err
	}
	var list strings.Builder
	for number, pid := range inside {
		for _, s := range chosen[pid] {
			d.taken[pid] = number
			fmt.Fprintf(&list, "%d %x %x\n", pid, s.Start, s.End)
		}
	}
	if list.Len() == 0 {
		return nil
	}
	return os.WriteFile(d.of.List, []byte(list.String()), 0o600)
}

// choose returns the mappings that are copied past CRIU, by process, and has the worker make room for
// them that it does not have yet.
func (d *Dump) choose() (chosen map[int][]span, err error) {
	pids, err := d.of.Pids()
	if err != nil {
		return nil, err
	}
	may, known := make(map[int][]span), make(map[span]int)
	for _, pid := range pids {
		status, err := proc.StatusOf(pid)
		if err != nil {
			return nil, err
		}
		maps, err := proc.Maps(pid, func(m *proc.Mapping) bool { return m.End-m.Start >= d.of.Least })
		if err != nil {
			return nil, err
		}
		holds := ownMemory(status)
		for _, m := range maps {
			s := span{m.Start, m.End}
			known[s]++
			if holds >= d.of.Least && isPlain(&m) {
				may[pid] = append(may[pid], s)
			}
		}
	}
	chosen = make(map[int][]span)
	for pid, spans := range may {
		spans = slices.DeleteFunc(spans, func(s span) bool { return known[s] > 1 })
		if len(spans) == 0 {
			continue
		}
		if d.worker == nil {
			if d.worker, err = d.of.Start(); err != nil {
				return nil, err
			}
		}
		if chosen[pid], err = d.worker.scan(pid, spans, d.of.Least, d.of.Images); err != nil {
			return nil, err
		}
	}
	return chosen, nil
}

// ownMemory returns how much memory the private mappings of a process hold at most, in bytes. Programs
// map far more than they use, and only the worker, whose start takes time, looks at each page.
func ownMemory(status proc.Status) (bytes uint64) {
	for _, name := range []string{"RssAnon", "VmSwap"} {
		text := status.Field(name) // "1234 kB"
		n, err := strconv.ParseUint(strings.TrimSuffix(text, " kB"), 10, 64)
		if text == "" || err != nil {
			return math.MaxUint64
		}
		bytes += n << 10
	}
	return bytes
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
	for pid, number := range d.taken {
		done, err := d.worker.merge(pid, number, d.of.Images, d.of.Digest)
		if err != nil {
			return fmt.Errorf("save the memory of process %s: %w", proc.Describe(pid), err)
		}
		if d.of.Digest && done.Bytes > 0 {
			d.digests[done.Name] = done.Digests
		}
		entry := log.G(d.ctx).WithField("bytes", done.Bytes).WithField("ahead", done.Ahead)
		if done.Bytes == 0 {
			entry.Warnf("CRIU has dumped the memory of process %s by itself: it does not ask for pages as CRIU 4.2 does", proc.Describe(pid))
		} else {
			entry.Infof("the memory of process %s went past CRIU", proc.Describe(pid))
		}
	}
	return nil
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
