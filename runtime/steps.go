// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/images"
)

// step is one step of a checkpoint, restore, suspension or resume. Its undo, nil
// where there is nothing to undo, is called only after do has succeeded; a do that
// fails leaves things as they were before it.
type step struct {
	name string
	do   func(ctx context.Context) (bytes uint64, err error)
	// back names the undo in the timeline.
	back string
	undo func(ctx context.Context) error
	// completes says that the operation's results are good from here on. Later
	// steps are not given up with the context.
	completes bool
	// untilComplete says that undo takes results away: it is not called once a step
	// has completed the operation.
	untilComplete bool
}

// sequence runs steps, remembers the way back, and keeps the times.
type sequence struct {
	operation string // "checkpoint", "restore", "suspend" or "resume"
	id        string
	began     time.Time
	back      []step // those done that have an undo

	mu     sync.Mutex // steps may run beside the way back
	phases []images.Phase
}

func newSequence(operation, id string) *sequence {
	return &sequence{operation: operation, id: id, began: time.Now()}
}

// run takes the steps in order. When one fails, or the context has ended before
// it, run goes back all the way and returns that error, joined by what went
// wrong on the way back.
func (q *sequence) run(ctx context.Context, steps ...step) error {
	for _, st := range steps {
		if err := q.take(ctx, st); err != nil {
			return joinBack(err, q.goBack(ctx))
		}
		if st.undo != nil {
			q.back = append(q.back, st)
		}
		if st.completes {
			q.back = slices.DeleteFunc(q.back, func(st step) bool { return st.untilComplete })
			ctx = context.WithoutCancel(ctx)
		}
	}
	return nil
}

// runBeside goes back all the way, except for what takes results away, and
// meanwhile takes steps that need no undo and complete the operation. When one of
// these fails, or the context has ended before it, err is that error, and the
// results are taken away afterwards. back is the error of the way back.
func (q *sequence) runBeside(ctx context.Context, steps ...step) (back, err error) {
	var results, others []step
	for _, st := range q.back {
		if st.untilComplete {
			results = append(results, st)
		} else {
			others = append(others, st)
		}
	}
	q.back = others
	done := make(chan struct{})
	go func() {
		defer close(done)
		for _, st := range steps {
			if err = q.take(ctx, st); err != nil {
				return
			}
		}
	}()
	back = q.goBack(ctx)
	<-done
	if err != nil {
		q.back = results
		err = joinBack(err, q.goBack(ctx))
	}
	return back, err
}

// take takes a step, unless the context has ended.
func (q *sequence) take(ctx context.Context, st step) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("given up before %s: %w", st.name, err)
	}
	return q.time(ctx, st.name, st.do)
}

// goBack undoes the steps done, the last first, on a context that does not end
// with the client's. It undoes as many as it can.
func (q *sequence) goBack(ctx context.Context) error {
	ctx = context.WithoutCancel(ctx)
	var errs []error
	for len(q.back) > 0 {
		st := q.back[len(q.back)-1]
		q.back = q.back[:len(q.back)-1]
		errs = append(errs, q.time(ctx, st.back, func(ctx context.Context) (uint64, error) { return 0, st.undo(ctx) }))
	}
	return joinBack(nil, errs...)
}

// joinBack joins an error with those of the way back, in one line.
func joinBack(err error, back ...error) error {
	for _, b := range back {
		switch {
		case b == nil:
		case err == nil:
			err = b
		default:
			err = fmt.Errorf("%w; on the way back: %w", err, b)
		}
	}
	return err
}

// time runs one phase and logs it.
func (q *sequence) time(ctx context.Context, name string, do func(context.Context) (uint64, error)) error {
	start := time.Now()
	bytes, err := do(ctx)
	q.add(ctx, name, start, bytes, err)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

func (q *sequence) add(ctx context.Context, name string, start time.Time, bytes uint64, err error) {
	p := images.Phase{Name: name, Start: max(0, start.Sub(q.began)), Took: time.Since(start), Bytes: bytes}
	q.note(p)
	entry := log.G(ctx).WithFields(log.Fields{
		"id": q.id, "operation": q.operation, "phase": name, "took": p.Took, "bytes": bytes,
	})
	if err != nil {
		entry.WithError(err).Error("phase failed")
		return
	}
	entry.Info("phase")
}

// note adds a phase to the timeline.
func (q *sequence) note(p images.Phase) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.phases = append(q.phases, p)
}

// known returns the phases that are over, in the order they began.
func (q *sequence) known() []images.Phase {
	q.mu.Lock()
	defer q.mu.Unlock()
	phases := slices.Clone(q.phases)
	slices.SortStableFunc(phases, func(x, y images.Phase) int { return cmp.Compare(x.Start, y.Start) })
	return phases
}

// TimelineName is the file in a container's bundle that holds the phases of
// its last checkpoint or restore, for people and benchmarks.
const TimelineName = "gpuckpt-timeline.json"

// Timeline is the content of TimelineName.
type Timeline struct {
	Operation string         `json:"operation"` // "checkpoint", "restore", "suspend" or "resume"
	Phases    []images.Phase `json:"phases"`
	Took      time.Duration  `json:"tookNs"` // the whole, nanoseconds
}

// save writes the timeline into the bundle. It is a courtesy: that it cannot
// be written is logged and no more.
func (q *sequence) save(ctx context.Context, bundle string) {
	data, err := json.MarshalIndent(Timeline{Operation: q.operation, Phases: q.known(), Took: time.Since(q.began)}, "", "  ")
	if err == nil {
		err = os.WriteFile(filepath.Join(bundle, TimelineName), data, 0o600)
	}
	if err != nil {
		log.G(ctx).WithError(err).Warn("write the timeline")
	}
}
