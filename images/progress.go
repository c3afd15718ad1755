// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package images

import (
	"cmp"
	"context"
	"io"
	"sync"

	"github.com/gpuckpt/gpuckpt/internal/node/fault"
)

// Progress receives how far the steps of an operation are, one call at a time for each step. It may be nil.
type Progress func(Step)

// Step is how far one step is: the building of an image, a push.
type Step struct {
	Name string
	// Done and Total count bytes. Total is 0 while it is not known.
	Done, Total uint64
	// Note is for the user: why a blob is sent again, or, of a step that has Ended, what was done.
	Note  string
	Ended bool
}

// Meter counts the bytes of one step, from any number of goroutines. It may be nil.
type Meter struct {
	mu     sync.Mutex
	report Progress
	step   Step

	moves  sync.Once
	broken error // by a test
}

// Begin begins a step. total may be 0.
func (p Progress) Begin(name string, total uint64) *Meter {
	m := &Meter{report: p, step: Step{Name: name, Total: total}}
	m.broken = m.at(fault.Begin)
	m.update(func(*Step) {})
	return m
}

// at is where a test may stop, fail or hold the step. A step fails when it moves bytes.
func (m *Meter) at(moment string) error {
	return fault.At(fault.Point{Operation: "command", Step: m.step.Name, Moment: moment})
}

// Moving is called before bytes are moved otherwise than by a Reader or Writer. Its error, which only a
// test makes, is that of the move.
func (m *Meter) Moving() error {
	if m == nil {
		return nil
	}
	m.moves.Do(func() { m.broken = cmp.Or(m.broken, m.at(fault.Move)) })
	return m.broken
}

func (m *Meter) update(change func(*Step)) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	change(&m.step)
	if m.report != nil {
		m.report(m.step)
	}
	m.step.Note = ""
}

// Add adds to the bytes done.
func (m *Meter) Add(bytes int64) { m.update(func(s *Step) { s.Done += uint64(bytes) }) }

// Grow adds to the total.
func (m *Meter) Grow(bytes int64) { m.update(func(s *Step) { s.Total += uint64(bytes) }) }

// Note passes on a line for the user.
func (m *Meter) Note(text string) { m.update(func(s *Step) { s.Note = text }) }

// End ends the step; result says what was done, "copied" say.
func (m *Meter) End(result string) {
	m.update(func(s *Step) { s.Note, s.Ended = result, true })
	if m != nil {
		_ = m.at(fault.End) // it cannot fail any more
	}
}

// Reader returns a reader of r that counts, and that fails once ctx has ended.
func (m *Meter) Reader(ctx context.Context, r io.Reader) io.Reader {
	return metered(func(p []byte) (int, error) { return m.count(ctx, p, r.Read) })
}

// Writer returns a writer to w that counts, and that fails once ctx has ended.
func (m *Meter) Writer(ctx context.Context, w io.Writer) io.Writer {
	return metered(func(p []byte) (int, error) { return m.count(ctx, p, w.Write) })
}

func (m *Meter) count(ctx context.Context, p []byte, move func([]byte) (int, error)) (int, error) {
	if err := context.Cause(ctx); err != nil {
		return 0, err
	}
	if err := m.Moving(); err != nil {
		return 0, err
	}
	n, err := move(p)
	m.Add(int64(n))
	return n, err
}

// metered is a Read or a Write.
type metered func([]byte) (int, error)

func (f metered) Read(p []byte) (int, error)  { return f(p) }
func (f metered) Write(p []byte) (int, error) { return f(p) }
