// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package pages

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/go-runc"
	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/internal/proc"
)

// Dump is what CRIU leaves out of one dump. The zero Dump leaves out nothing.
type Dump struct {
	ctx     context.Context // its logger
	dir     string
	list    string // the file that names what is left out
	library string
	worker  *Worker
	digest  bool
	taken   map[int]int // processes of which something is left out: as this process counts, and as they do
}

// Dumping says what is dumped.
type Dumping struct {
	// Images is the directory that CRIU writes to.
	Images string
	// List is a file to make for CRIU, and Library what makes CRIU heed it (leave_out.c).
	List, Library string
	// Least is the memory that a mapping holds for it to be chosen, in bytes; 0 chooses none.
	Least uint64
	// Digest has Complete return digests.
	Digest bool
	// Init is the container's first process, Pids returns all.
	Init  int
	Pids  func() ([]int, error)
	Start Start
}

// BeginDump chooses mappings before CRIU dumps the processes. They must be frozen, from here on until
// Complete has returned. If it fails, CRIU dumps all, and the log says so. Close must be called.
func BeginDump(ctx context.Context, of Dumping) *Dump {
	d := &Dump{ctx: ctx, dir: of.Images, list: of.List, library: of.Library, digest: of.Digest, taken: make(map[int]int)}
	if of.Least == 0 {
		return d
	}
	if err := d.begin(of); err != nil {
		log.G(ctx).WithError(err).Warn("CRIU dumps all memory")
		d.Close()
		clear(d.taken)
	}
	return d
}

func (d *Dump) begin(of Dumping) error {
	if strings.ContainsAny(of.Library, ": ") { // which LD_PRELOAD takes for the end of a name
		return fmt.Errorf("the path %q has a colon or a space", of.Library)
	}
	pids, err := of.Pids()
	if err != nil {
		return err
	}
	inside, err := proc.Inside(pids, of.Init)
	if err != nil {
		return err
	}
	may, known := make(map[int][]span), make(map[span]int)
	for _, pid := range pids {
		status, err := proc.StatusOf(pid)
		if err != nil {
			return err
		}
		maps, err := proc.Maps(pid)
		if err != nil {
			return err
		}
		holds := ownMemory(status)
		for _, m := range maps {
			s := span{m.Start, m.End}
			known[s]++
			if holds >= of.Least && isPlain(m) && s.End-s.Start >= of.Least {
				may[pid] = append(may[pid], s)
			}
		}
	}
	var list strings.Builder
	for number, pid := range inside {
		spans := slices.DeleteFunc(may[pid], func(s span) bool { return known[s] > 1 })
		if len(spans) == 0 {
			continue
		}
		if d.worker == nil {
			if d.worker, err = of.Start(); err != nil {
				return err
			}
		}
		if spans, err = d.worker.scan(pid, spans, of.Least); err != nil {
			return err
		}
		for _, s := range spans {
			d.taken[pid] = number
			fmt.Fprintf(&list, "%d %x %x\n", pid, s.Start, s.End)
		}
	}
	if list.Len() == 0 {
		return nil
	}
	return os.WriteFile(d.list, []byte(list.String()), 0o600)
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
	if len(d.taken) == 0 {
		return ctx
	}
	return runc.WithExtraEnv(ctx, "LD_PRELOAD="+d.library, "GPUCKPT_LEFT_OUT="+d.list)
}

// Complete puts into CRIU's images what CRIU has left out. On an error they are of no use. It returns
// the digests of the images that it has written, by name (images.DigestBlock of each block), if the
// Dumping asks for them.
func (d *Dump) Complete() (digests map[string][]string, err error) {
	digests = make(map[string][]string)
	for pid, number := range d.taken {
		done, err := d.worker.merge(pid, number, d.dir, d.digest)
		if err != nil {
			return nil, fmt.Errorf("save the memory of process %s: %w", proc.Describe(pid), err)
		}
		if d.digest && done.Bytes > 0 {
			digests[done.Name] = done.Digests
		}
		entry := log.G(d.ctx).WithField("bytes", done.Bytes)
		if done.Bytes == 0 {
			entry.Warnf("CRIU has dumped the memory of process %s by itself: it does not ask for pages as CRIU 4.2 does", proc.Describe(pid))
		} else {
			entry.Infof("the memory of process %s went past CRIU", proc.Describe(pid))
		}
	}
	return digests, nil
}

// Close ends the dump. It can be called again.
func (d *Dump) Close() {
	if d.worker != nil {
		d.worker.Close()
		d.worker = nil
	}
	if err := os.Remove(d.list); len(d.taken) > 0 && err != nil && !errors.Is(err, os.ErrNotExist) {
		log.G(d.ctx).WithError(err).Warnf("remove %s", filepath.Base(d.list))
	}
}
