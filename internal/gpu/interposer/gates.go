// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package interposer

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/containerd/log"
)

const (
	// grace is how long the others' work may take before those that are parked go on in turns: as long as the
	// driver's lock has in package cuda. Most processes that do not wait for each other are parked in it.
	grace = 30 * time.Millisecond
	// breath is how long the others have after each round of turns. An interposer sees the end of work within
	// 0.1 ms, unless the machine is busy.
	breath = 2 * time.Millisecond
	// longBreath is the longest time between two rounds in which no process had a call to make.
	longBreath = 5 * time.Millisecond
	// opening is how long an interposer may take to open its gate, which is a moment.
	opening = 10 * time.Second
	// shortestTry is how long processes wait at least before all gates are opened for their sake.
	shortestTry = 500 * time.Millisecond
	// mostTurns is how many turns a request has at most.
	mostTurns = passUnit - 1
	// passUnit is what milliseconds are multiplied by in the argument of an askPass: TURNS of worker.c.
	passUnit = 1 << 12
	// longestPass is what is left for them there.
	longestPass = (1<<20 - 1) * time.Millisecond
)

// gates parks processes whose work on their GPUs may wait for each other's, such as the ranks of an all-reduce.
// If a process is parked that has submitted less than another one, the other's work never ends. So it goes on in
// turns until that work is done:
//
//	free --park--> waiting --its work is done--> held --pass--> waiting
//
// In a turn each thread that waits at the gate makes one call, and the interposer waits for its work. So a process
// that gets ahead of the others stops by itself, at the first step that they do not take part in yet. A request
// has one turn at first, and twice as many each time that the others still wait: those of a long way do not lead
// past a place near its begin.
//
// If others wait now, for one that has had turns to wait as well, they have changed places. They may also just be
// busy, one after the other: so then there is a pause as long as the work of a turn has taken so far.
//
// Turns do not help processes that wait in a circle, or for a thread of their own. All are let go for these, and
// parked at another moment.
type gates struct {
	all []gate

	until   time.Time
	members []member
	longest time.Duration // the work of a turn, without pauses
	pauses  time.Duration // for those that were overtaken
	pausing time.Time     // zero: there is none now
	rounds  int           // of turns
	changes int           // how often processes changed places
	opened  int           // how often all were let go
}

// gate is a process's, as its interposer works it.
type gate interface {
	// park closes an open gate, and pass lets calls in at a closed one: both until their work is done. They
	// return at once. The gate opens by itself if calls do not end within limit, which is a millisecond or more.
	park(limit time.Duration) error
	pass(turns uint32, limit time.Duration) error
	// look reports whether the last of these is done, and the turns that had a call. If its error is ErrBusy the
	// gate is open.
	look() (done bool, turns uint32, err error)
	// cancel opens the gate of one that waits, which is done when its work is. open opens one that is held.
	cancel() error
	open() error
}

type member struct {
	state memberState
	since time.Time     // it waits
	turn  bool          // it waits for the work of a turn
	begun time.Duration // the pauses before that
	had   bool          // it had a turn after the others began to wait
}

type memberState int

const (
	free memberState = iota
	waiting
	held
)

// late is the error of gates that were not all closed in time.
type late struct{ waiting, held []int }

func (e *late) Error() string { return fmt.Sprintf("%v wait for %v", e.waiting, e.held) }

// close parks all within limit. On an error nobody is asked any more, but some may be held.
func (g *gates) close(ctx context.Context, limit time.Duration) error {
	g.until = time.Now().Add(limit)
	g.members = make([]member, len(g.all))
	err := g.hold(ctx)
	if err != nil {
		for _, i := range g.in(waiting) {
			_ = g.all[i].cancel() // of a process that has ended
		}
		g.until = time.Now().Add(time.Second)
		_ = g.await(context.WithoutCancel(ctx), g.settled)
	}
	return err
}

// hold is close, but for requests that may still be under way on an error.
func (g *gates) hold(ctx context.Context) error {
	patience, err := g.ask()
	if err != nil {
		return err
	}
	var others []int // who waited when turns began
	turns, quiet := uint32(1), grace
	for {
		// Who is held is so since now, or later.
		var since time.Time
		if err := g.await(ctx, func() bool {
			if since.IsZero() && len(g.in(held)) > 0 {
				since = time.Now()
			}
			return g.settled() || g.waited() > patience || (!since.IsZero() && time.Since(since) >= quiet)
		}); err != nil {
			return err
		}
		g.pauses, g.pausing = g.paused(), time.Time{}
		wait := g.in(waiting)
		switch {
		case len(g.in(held)) == len(g.all):
			return nil
		case time.Now().After(g.until) || len(g.in(free)) > 0:
			return &late{append(wait, g.in(free)...), g.in(held)}
		case g.waited() > patience:
			if patience, err = g.again(ctx); err != nil {
				return err
			}
			others, turns, quiet = nil, 1, grace
			continue
		}
		if others == nil {
			others = wait
		}
		if g.anyIn(held, others) {
			overtaken := false
			for i := range g.members {
				overtaken = overtaken || g.members[i].had && g.members[i].state == waiting
				g.members[i].had = false
			}
			others, turns = wait, 1
			if overtaken {
				g.changes++
				quiet, g.pausing = max(grace, g.longest*5/4), time.Now()
				continue
			}
		}
		moved, err := g.round(ctx, turns)
		if err != nil {
			return err
		}
		if quiet = min(2*quiet, longBreath); moved {
			quiet, turns = breath, min(2*turns, mostTurns)
		}
	}
}

// ask has those that are free parked, and returns how long they may wait for each other.
func (g *gates) ask() (patience time.Duration, err error) {
	for _, i := range g.in(free) {
		if err := g.all[i].park(g.left()); err != nil {
			return 0, err
		}
		g.members[i] = member{state: waiting, since: time.Now()}
	}
	left := time.Until(g.until)
	if patience = max(left/2, shortestTry); len(g.all) == 1 || left-patience < shortestTry {
		patience = math.MaxInt64 // the next try would be too short
	}
	return patience, nil
}

// again lets all go, and asks them when the work is done for which some have waited.
func (g *gates) again(ctx context.Context) (patience time.Duration, err error) {
	g.opened++
	for _, i := range g.in(held) {
		if err := g.all[i].open(); err != nil {
			return 0, err
		}
		g.members[i].state = free
	}
	for _, i := range g.in(waiting) {
		if err := g.all[i].cancel(); err != nil {
			return 0, err
		}
	}
	if err := g.await(ctx, g.settled); err != nil {
		return 0, err
	}
	if wait := g.in(waiting); len(wait) > 0 {
		return 0, &late{wait, g.in(held)}
	}
	time.Sleep(rand.N(20 * time.Millisecond)) //nolint:gosec // any other moment will do
	return g.ask()                            // and those that were done before they were cancelled stay held
}

// round has those that are held go on for so many turns, and waits for them as long as grace. It reports whether
// there was a call.
func (g *gates) round(ctx context.Context, turns uint32) (moved bool, err error) {
	g.rounds++
	var who []int
	for _, i := range g.in(held) {
		if err := g.all[i].pass(turns, g.left()); err != nil {
			return false, err
		}
		g.members[i] = member{state: waiting, since: time.Now(), turn: true, begun: g.pauses, had: true}
		who = append(who, i)
	}
	end := time.Now().Add(grace)
	err = g.await(ctx, func() bool { return !g.anyIn(waiting, who) || time.Now().After(end) })
	for _, i := range who {
		m := &g.members[i]
		_, n, lerr := g.all[i].look()
		moved = moved || m.state == waiting || (lerr == nil && n > 0)
	}
	return moved, err
}

// await looks at those that wait until something is so.
func (g *gates) await(ctx context.Context, so func() bool) error {
	for nap := 100 * time.Microsecond; ; nap = min(2*nap, breath) {
		for _, i := range g.in(waiting) {
			m := &g.members[i]
			done, _, err := g.all[i].look()
			switch {
			case errors.Is(err, ErrBusy):
				m.state = free
			case err != nil:
				m.state = free
				return err
			case done:
				m.state = held
				if m.turn {
					g.longest = max(g.longest, time.Since(m.since)-(g.paused()-m.begun))
				}
			}
		}
		if so() {
			return nil
		}
		select {
		case <-time.After(nap):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// left is how long a request may take: it is never nothing, and an interposer knows of no less.
func (g *gates) left() time.Duration { return max(time.Until(g.until), time.Millisecond) }

// settled reports whether nobody waits, or the time is over.
func (g *gates) settled() bool { return len(g.in(waiting)) == 0 || time.Now().After(g.until) }

// paused is the sum of all pauses so far.
func (g *gates) paused() time.Duration {
	if g.pausing.IsZero() {
		return g.pauses
	}
	return g.pauses + time.Since(g.pausing)
}

// waited is the longest time that one of those that wait has waited for.
func (g *gates) waited() (longest time.Duration) {
	for _, i := range g.in(waiting) {
		longest = max(longest, time.Since(g.members[i].since))
	}
	return longest
}

func (g *gates) in(state memberState) (who []int) {
	for i, m := range g.members {
		if m.state == state {
			who = append(who, i)
		}
	}
	return who
}

func (g *gates) anyIn(state memberState, who []int) bool {
	return slices.ContainsFunc(who, func(i int) bool { return g.members[i].state == state })
}

// closeGates parks the programs of interposers within limit. On an error those that are not parked are open, or a
// interposer has not answered in a second more.
func closeGates(ctx context.Context, all []*Interposer, limit time.Duration) error {
	g := &gates{}
	for _, c := range all {
		g.all = append(g.all, &own{c: c})
	}
	began := time.Now()
	err := g.close(ctx, limit)
	pids := func(places []int) (pids []int) {
		for _, i := range places {
			pids = append(pids, all[i].PID)
		}
		return pids
	}
	if e, ok := errors.AsType[*late](err); ok && len(all) == 1 {
		err = fmt.Errorf("park process %d: %w", all[0].PID, ErrBusy)
	} else if ok {
		err = fmt.Errorf("park processes %v within %v, while %v were parked (%d rounds of turns, %d times anew): %w", pids(e.waiting), limit, pids(e.held), g.rounds, g.opened, ErrBusy)
	}
	if err == nil && g.rounds > 0 {
		log.G(ctx).WithFields(log.Fields{"rounds": g.rounds, "changes": g.changes, "anew": g.opened, "took": time.Since(began)}).
			Info("processes whose GPU work waits for each other's are parked: they went on in turns")
	}
	return err
}

// own is the gate of an interposer.
type own struct {
	c       *Interposer
	request uint32 // the last one
}

func (o *own) park(limit time.Duration) (err error) {
	o.request, err = o.c.begin(askPark, within(limit))
	return err
}

func (o *own) pass(turns uint32, limit time.Duration) (err error) {
	o.request, err = o.c.begin(askPass, argument(turns)+passUnit*within(min(limit, longestPass)))
	return err
}

func (o *own) look() (done bool, turns uint32, err error) {
	now, done, err := o.c.answer("park", o.request)
	return done, now.count, err
}

func (o *own) cancel() error { return o.c.write(offCancelled, o.request) }

func (o *own) open() error {
	_, err := o.c.ask(context.Background(), "let go on", askOpen, 0, opening)
	return err
}
