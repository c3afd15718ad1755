// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package sequence runs the steps of an operation on a container in order, remembers the way back,
// and keeps the times.
//
// The life of a Sequence: New, then Run with the steps, which undoes what was done if a step fails;
// then Save writes the timeline, and a line of the node's log of operations. An operation whose way
// back is also its end, a checkpoint that leaves the container running, calls RunBeside after Run.
// From Run on it holds file descriptors for the way back; Save must be called to close them.
package sequence

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

	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/fault"
	"github.com/gpuckpt/gpuckpt/internal/node/visible"
	"github.com/gpuckpt/gpuckpt/internal/operation/oplog"
)

// Step is one step of an operation. A Do that fails leaves things as before; Undo, which may be
// nil, is called only after Do has succeeded.
type Step struct {
	Name string
	Do   func(ctx context.Context) (bytes uint64, err error)
	// Back names the undo in the timeline.
	Back string
	Undo func(ctx context.Context) error
	// Completes says that the operation's results are good from here on. Later
	// steps are not given up with the context.
	Completes bool
	// UntilComplete says that Undo takes results away: it is not called once a step
	// has completed the operation.
	UntilComplete bool
}

// Journal is told of each step before it is taken, and of what undoes the steps before it.
type Journal interface {
	Note(ctx context.Context, step string, undo []string)
}

// Sequence runs the steps of one operation.
type Sequence struct {
	// Journal, if it is not nil, is told of the steps.
	Journal Journal
	// Stuck is the error of a way back that has failed.
	Stuck error

	operation string
	id        string
	began     time.Time
	back      []Step // those done that have an undo
	spare     spare  // until the way back, or the end

	mu     sync.Mutex // steps may run beside the way back
	phases []images.Phase
	failed string // the first step that failed
	why    error
}

// New returns the sequence of an operation ("checkpoint", "restore", "suspend", "resume") on the
// container of this id, which begins now.
func New(operation, id string) *Sequence {
	return &Sequence{operation: operation, id: id, began: time.Now()}
}

// Run takes the steps in order. When one fails, or the context has ended before it, Run goes back
// all the way and returns that error, joined by what went wrong on the way back.
func (q *Sequence) Run(ctx context.Context, steps ...Step) error {
	q.spare.take()
	for _, st := range steps {
		q.tell(ctx, st.Name)
		if err := q.take(ctx, st); err != nil {
			return Join(err, q.goBack(ctx))
		}
		if st.Undo != nil {
			q.back = append(q.back, st)
		}
		if st.Completes {
			q.back = slices.DeleteFunc(q.back, takesResults)
			ctx = context.WithoutCancel(ctx)
		}
		if err := q.at(st.Name, fault.End); err != nil {
			return Join(err, q.goBack(ctx))
		}
	}
	return nil
}

// RunBeside goes back all the way, except for what takes results away, and meanwhile takes steps
// that need no undo and complete the operation. When one of these fails, or the context has ended
// before it, err is that error, and the results are taken away. back is the error of the way back.
func (q *Sequence) RunBeside(ctx context.Context, steps ...Step) (back, err error) {
	results := slices.DeleteFunc(slices.Clone(q.back), func(st Step) bool { return !st.UntilComplete })
	q.back = slices.DeleteFunc(q.back, takesResults)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for _, st := range steps {
			if err = q.take(ctx, st); err == nil {
				err = q.at(st.Name, fault.End)
			}
			if err != nil {
				return
			}
		}
	}()
	back = q.goBack(ctx)
	<-done
	if err != nil {
		q.back = results
		err = Join(err, q.goBack(ctx))
	}
	return back, err
}

func takesResults(st Step) bool { return st.UntilComplete }

// Began returns when the operation began.
func (q *Sequence) Began() time.Time { return q.began }

// take takes a step, unless the context has ended.
func (q *Sequence) take(ctx context.Context, st Step) error {
	if err := ctx.Err(); err != nil {
		q.fail(st.Name, err)
		return fmt.Errorf("given up before %s: %w", st.Name, err)
	}
	if err := q.at(st.Name, fault.Begin); err != nil {
		return err
	}
	return q.time(ctx, st.Name, st.Do)
}

// goBack undoes as many of the steps done as it can, the last first, whether or not ctx ends.
func (q *Sequence) goBack(ctx context.Context) error {
	q.spare.release()
	ctx = context.WithoutCancel(ctx)
	var errs []error
	for len(q.back) > 0 {
		st := q.back[len(q.back)-1]
		q.tell(ctx, st.Back)
		q.back = q.back[:len(q.back)-1]
		err := q.at(st.Back, fault.Begin)
		if err == nil {
			err = q.time(ctx, st.Back, func(ctx context.Context) (uint64, error) { return 0, st.Undo(ctx) })
			err = Join(err, q.at(st.Back, fault.End))
		}
		errs = append(errs, err)
	}
	err := Join(nil, errs...)
	q.Stuck = Join(q.Stuck, err)
	return err
}

// tell tells the log of operations of a step, or of an undo, which is then the first of those that are left.
func (q *Sequence) tell(ctx context.Context, name string) {
	if q.Journal == nil {
		return
	}
	var undo []string
	for _, st := range slices.Backward(q.back) {
		undo = append(undo, st.Back)
	}
	q.Journal.Note(ctx, name, undo)
}

// at is where a test may stop, fail or hold a step or an undo.
func (q *Sequence) at(name, moment string) error {
	err := fault.At(fault.Point{Operation: q.operation, Step: name, Moment: moment, Container: q.id})
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// Join joins an error with those of the way back, in one line.
func Join(err error, back ...error) error {
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

func (q *Sequence) time(ctx context.Context, name string, do func(context.Context) (uint64, error)) error {
	start := time.Now()
	bytes, err := do(ctx)
	p := images.Phase{Name: name, Start: max(0, start.Sub(q.began)), Took: time.Since(start), Bytes: bytes}
	q.Note(p)
	entry := log.G(ctx).WithFields(log.Fields{
		"id": q.id, "operation": q.operation, "phase": name, "took": p.Took, "bytes": bytes,
	})
	if err != nil {
		q.fail(name, err)
		entry.WithError(err).Error("phase failed")
		return fmt.Errorf("%s: %w", name, err)
	}
	entry.Info("phase")
	return nil
}

// fail remembers the first failure.
func (q *Sequence) fail(step string, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.why == nil {
		q.failed, q.why = step, err
	}
}

// Note adds a phase to the timeline.
func (q *Sequence) Note(p images.Phase) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.phases = append(q.phases, p)
}

// Phases returns the phases that are over, in the order they began.
func (q *Sequence) Phases() []images.Phase {
	q.mu.Lock()
	defer q.mu.Unlock()
	phases := slices.Clone(q.phases)
	slices.SortStableFunc(phases, func(x, y images.Phase) int { return cmp.Compare(x.Start, y.Start) })
	return phases
}

// TimelineName is the file in a container's bundle that holds its last operation, an oplog.Entry.
const TimelineName = "gpuckpt-timeline.json"

// Save writes the timeline into the bundle, and a line into the node's log of operations. That they cannot be
// written is logged and no more.
func (q *Sequence) Save(ctx context.Context, bundle string) {
	q.spare.release()
	e := q.entry(ctx)
	data, err := json.MarshalIndent(e, "", "  ")
	if err == nil {
		err = os.WriteFile(filepath.Join(bundle, TimelineName), data, 0o600)
	}
	if err != nil {
		log.G(ctx).WithError(err).Warn("write the timeline")
	}
	node, err := config.Load()
	if err == nil {
		err = oplog.Append(node.LogDir, e)
	}
	if err != nil {
		log.G(ctx).WithError(err).Warn("note the operation")
	}
	_ = q.at(fault.Over, fault.End)
}

// entry is the operation as a line of the log of operations.
func (q *Sequence) entry(ctx context.Context) oplog.Entry {
	e := oplog.Entry{Operation: q.operation, Container: q.id, Began: q.began.UTC(), Took: time.Since(q.began), Phases: q.Phases()}
	e.Namespace, _ = namespaces.Namespace(ctx)
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.why != nil {
		e.Failed, e.Error = q.failed, visible.Text(q.why.Error())
	}
	return e
}
