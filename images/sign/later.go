// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package sign

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
)

// Later is what CheckNow has left: files whose names and sizes are right, and whose bytes are not
// compared yet. Each block is compared once, by whoever needs it first. nil has nothing left.
type Later struct {
	cancel context.CancelFunc
	names  []string
	blocks map[string][]func() error // by file; the first call compares, and all return its result
	ended  chan struct{}             // closed when Begin's threads have ended; err is their result
	err    error
}

// niceness of Begin's threads: they come after CRIU and the driver's threads, and before the digests
// of GPU state, which are needed last.
const niceness = 10

// CheckNow is Check without the bytes of some files: they are for the Later, which is nil if there
// are no such files. Whoever has one calls Begin.
func (m *Manifest) CheckNow(ctx context.Context, files []images.File, later func(images.File) bool) (*Later, error) {
	actual := list(files)
	if err := m.compare(actual.Files, false); err != nil {
		return nil, err
	}
	l := &Later{blocks: make(map[string][]func() error), ended: make(chan struct{})}
	beside, cancel := context.WithCancel(context.WithoutCancel(ctx))
	l.cancel = cancel
	var now []images.File
	for _, f := range files {
		at, found := m.find(f.Name)
		if !found || !later(f) {
			now = append(now, f)
			continue
		}
		l.add(beside, f, m.Files[at].Digests)
		have, _ := actual.find(f.Name)
		actual.Files[have].Digests = m.Files[at].Digests
	}
	err := actual.digest(ctx, now)
	if err == nil {
		err = m.compare(actual.Files, true)
	}
	if err != nil || len(l.names) == 0 {
		l.cancel()
		return nil, err
	}
	return l, nil
}

func (l *Later) add(ctx context.Context, f images.File, digests []string) {
	l.names = append(l.names, f.Name)
	for i, want := range digests {
		l.blocks[f.Name] = append(l.blocks[f.Name], sync.OnceValue(func() error {
			got, err := digestBlock(ctx, f, i, 1)
			if err == nil && got != want {
				err = fmt.Errorf("%w: %s has other bytes", ErrChanged, f.Name)
			}
			return err
		}))
	}
}

// Names returns the names of the files.
func (l *Later) Names() []string {
	if l == nil {
		return nil
	}
	return l.names
}

// Begin begins to compare all blocks, on a thread for each processor. When they are compared, or one
// is wrong, it calls over. It is called once, before Wait and Close.
func (l *Later) Begin(over func(error)) {
	var all []func() error
	for _, name := range l.names {
		all = append(all, l.blocks[name]...)
	}
	var group errgroup.Group
	var next atomic.Int64
	for range min(runtime.NumCPU(), len(all)) {
		group.Go(func() error {
			runtime.LockOSThread() // for good: the thread ends with its niceness
			_ = unix.Setpriority(unix.PRIO_PROCESS, 0, niceness)
			for {
				i := int(next.Add(1)) - 1
				if i >= len(all) {
					return nil
				}
				if err := all[i](); err != nil {
					next.Store(int64(len(all)))
					return err
				}
			}
		})
	}
	go func() {
		l.err = group.Wait()
		close(l.ended)
		over(l.err)
	}()
}

// Need compares the blocks with the bytes from an offset to another of a file, unless they are
// compared already, on all processors. The error is ErrChanged, or that of reading. For ctx see Wait.
func (l *Later) Need(ctx context.Context, name string, from, to uint64) error {
	if l == nil {
		return nil
	}
	defer context.AfterFunc(ctx, l.cancel)()
	var group errgroup.Group
	group.SetLimit(runtime.NumCPU())
	for i, compare := range l.blocks[name] {
		if start := uint64(i) * images.BlockBytes; start < to && from < start+images.BlockBytes {
			group.Go(compare)
		}
	}
	return group.Wait()
}

// Wait returns when all blocks are compared, or one is wrong: ErrChanged, or the error of reading. The end of ctx ends the
// comparison for good.
func (l *Later) Wait(ctx context.Context) error {
	if l == nil {
		return nil
	}
	defer context.AfterFunc(ctx, l.cancel)()
	<-l.ended
	return l.err
}

// Close ends what Begin has begun, and waits for it. It can be called on nil, and again.
func (l *Later) Close() {
	if l == nil {
		return
	}
	l.cancel()
	<-l.ended
}
