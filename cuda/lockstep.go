// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/gpuckpt/gpuckpt/cuda/internal/wire"
)

const (
	// grace is how long the lock waits for one more process after it got the last one. A lock of an
	// idle process takes 15 ms (H200, driver 580).
	grace = 30 * time.Millisecond
	// maxSlice is the longest time for which locked processes are let go.
	maxSlice = time.Second
	// firstTry is the timeout of the first lock of a process. Each further one has twice as much.
	firstTry = 500 * time.Millisecond
)

// lockstep locks several processes whose work on their GPUs waits for each other's, such as the ranks
// of an all-reduce. Locked by itself, a process that has submitted less than another one keeps the
// other's work waiting for ever, and has to be let go until both have submitted as much.
//
//	free --ask--> asked --its work is done--> held --let go--> free
//
// An asked process submits nothing more. So the lock asks all at once, and lets those that it holds
// go for a slice of time, again and again, until the work of those that wait is done. Slices grow
// from nothing: a process that was let go must not get as far as its next step.
// If it does, the two have changed places. Then the lock goes on the other way round, and every
// second time it lets all go and asks them again at another moment.
type lockstep struct {
	// lock asks for process i and waits until its work is done; unlock lets processes go.
	lock   func(ctx context.Context, i int, timeout time.Duration) error
	unlock func(ctx context.Context, held []int) error

	until   time.Time
	members []member
	answers chan answer
	parting bool // nobody is asked again
	turns   int  // how often processes changed places
}

type member struct {
	state memberState
	try   time.Duration // timeout of its next lock
	err   error         // of a call, but NotReady; the process is lost to the lock
}

type memberState int

const (
	free memberState = iota
	asked
	held
)

type answer struct {
	i   int
	err error
}

// run locks n processes within timeout. On an error some may be locked, and no call is under way;
// errs has what went wrong by process, but for timeouts.
func (l *lockstep) run(ctx context.Context, n int, timeout time.Duration) (errs []error, err error) {
	l.until = time.Now().Add(timeout)
	l.members, l.answers = make([]member, n), make(chan answer, n)
	for i := range l.members {
		l.members[i].try = firstTry
	}
	if err = l.hold(ctx); err != nil {
		_ = l.part(ctx) // who is still locked is for the caller to see to
		if lost := l.lost(); lost != nil {
			err = lost
		}
	}
	for _, m := range l.members {
		errs = append(errs, m.err)
	}
	return errs, err
}

// hold is run, but for calls that may still be under way on an error.
func (l *lockstep) hold(ctx context.Context) error {
	var let []int // the processes of the last slice
	var slice time.Duration
	var last late // who waited when processes were last let go
	for {
		for _, i := range l.in(free) {
			l.ask(ctx, i)
		}
		l.await(ctx, func() <-chan time.Time {
			if len(l.in(held)) == 0 {
				return nil
			}
			return time.After(grace)
		})
		got := l.in(held)
		switch err := l.lost(); {
		case err != nil:
			return err
		case len(got) == len(l.members):
			return nil
		case l.left() <= 0:
			if last.waiting == nil {
				last = late{append(l.in(asked), l.in(free)...), got, 0}
			}
			last.turns = l.turns
			return &last
		}
		if l.passed(let) {
			slice = 0
			if l.turns++; l.turns%2 == 0 {
				if err := l.part(ctx); err != nil {
					return err
				}
				if err := l.lost(); err != nil {
					return err
				}
				time.Sleep(rand.N(20 * time.Millisecond)) //nolint:gosec // any other moment will do
				let = nil
				continue
			}
		}
		let, last = got, late{waiting: l.in(asked), held: got}
		if err := l.letGo(ctx, let); err != nil {
			return err
		}
		end := time.After(slice)
		l.await(ctx, func() <-chan time.Time { return end })
		slice = min(max(2*slice, time.Millisecond), maxSlice)
	}
}

// passed reports whether one of the processes that were let go has got so far that it waits now.
func (l *lockstep) passed(let []int) bool {
	return slices.ContainsFunc(let, func(i int) bool { return l.members[i].state != held })
}

// part lets all go, and waits until no call is under way: those that wait are done when all run. On an
// error some are still locked.
func (l *lockstep) part(ctx context.Context) (err error) {
	l.parting = true
	defer func() { l.parting = false }()
	for {
		if err == nil {
			err = l.letGo(ctx, l.in(held))
		}
		if len(l.in(asked)) == 0 {
			return err
		}
		l.take(ctx, <-l.answers)
	}
}

func (l *lockstep) letGo(ctx context.Context, who []int) error {
	if len(who) == 0 {
		return nil
	}
	if err := l.unlock(ctx, who); err != nil {
		return err
	}
	for _, i := range who {
		l.members[i].state = free
	}
	return nil
}

// ask begins the lock of a process, unless the time is over.
func (l *lockstep) ask(ctx context.Context, i int) {
	m := &l.members[i]
	left := l.left()
	if m.err != nil || left <= 0 {
		return
	}
	try := min(m.try, left)
	if left-try < try { // the rest would be a shorter try
		try = left
	}
	m.state, m.try = asked, 2*m.try
	go func() { l.answers <- answer{i, l.lock(ctx, i, max(try, grace))} }()
}

// await takes answers until nobody is asked any more, a process is lost, or the time that limit
// returns after each answer is over.
func (l *lockstep) await(ctx context.Context, limit func() <-chan time.Time) {
	for len(l.in(asked)) > 0 && l.lost() == nil {
		select {
		case a := <-l.answers:
			l.take(ctx, a)
		case <-limit():
			return
		}
	}
}

// take notes an answer. A process whose work took too long is asked again at once: it may have
// submitted meanwhile what another one waits for.
func (l *lockstep) take(ctx context.Context, a answer) {
	m := &l.members[a.i]
	switch {
	case a.err == nil:
		m.state, m.try = held, firstTry
	case isRefusal(a.err, NotReady):
		m.state = free
		if !l.parting {
			time.Sleep(rand.N(2*time.Millisecond) + time.Millisecond) //nolint:gosec // not in step with the program
			l.ask(ctx, a.i)
		}
	default:
		m.state, m.err = free, a.err
	}
}

func (l *lockstep) in(state memberState) (who []int) {
	for i, m := range l.members {
		if m.state == state {
			who = append(who, i)
		}
	}
	return who
}

func (l *lockstep) lost() error {
	errs := make([]error, 0, len(l.members))
	for _, m := range l.members {
		errs = append(errs, m.err)
	}
	return sum(errs)
}

// left is the time that is left, 0 if it is too short for the driver, which counts milliseconds.
func (l *lockstep) left() time.Duration {
	return max(0, time.Until(l.until).Truncate(time.Millisecond))
}

// late is the error of a lockstep whose time was over.
type late struct {
	waiting, held []int
	turns         int
}

func (e *late) Error() string { return fmt.Sprintf("%v wait for %v", e.waiting, e.held) }

// lockAll locks several running processes, or brings all back to running.
func (g Group) lockAll(ctx context.Context, h *Helper, timeout time.Duration) error {
	l := &lockstep{
		lock: func(ctx context.Context, i int, timeout time.Duration) error {
			return h.Lock(ctx, h.number(g[i].PID), timeout)
		},
		unlock: func(ctx context.Context, held []int) error { return g.among(held).Unlock(ctx, h) },
	}
	errs, err := l.run(ctx, len(g), timeout)
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*late](err); ok {
		err = g.late(h, e, timeout)
	}
	return g.undone(ctx, h, err, errs, Running, timeout+h.opts.CallTimeout)
}

func (g Group) among(places []int) (some Group) {
	for _, i := range places {
		some = append(some, g[i])
	}
	return some
}

// late returns the driver's refusal of a process whose work did not end, and whom it waits for.
func (g Group) late(h *Helper, e *late, timeout time.Duration) error {
	numbers := func(places []int) (all []int) {
		for _, p := range g.among(places) {
			all = append(all, h.number(p.PID))
		}
		return all
	}
	waiting := numbers(e.waiting)
	refused := &Error{Op: wire.OpLock, PID: waiting[0], Result: NotReady, Hint: hint(wire.OpLock, NotReady)}
	if e.turns > 0 {
		refused.Hint = fmt.Sprintf("work was still running on the GPU when the timeout ended: processes %v and %v wait for each other there, and did not come to a stand together within %v, though they were let go and locked again in turn %d times; they run on: retry with a longer timeout, or in a quieter moment",
			waiting, numbers(e.held), timeout, e.turns)
	}
	return refused
}
