// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package interposer

import (
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// job is ranks whose kernels wait for each other's, with an interposer each, in the time of a synctest bubble. A rank
// is a thread that makes calls, and a GPU that runs what these submit, in their order.
type job struct {
	// next is a rank's next call, and how long the rank computes on its processor before it.
	next func(rank int) (call, time.Duration)

	mu      sync.Mutex
	changed *sync.Cond
	ranks   []*modelRank
	ended   bool
	wrong   string // what a real interposer would never do
}

// call is a kernel, or without any of these a wait for all of them.
type call struct {
	takes   time.Duration
	with    []int // it waits for the next kernel of each of these ranks that waits for this one
	send    bool  // it waits until the other of two ranks has called receive once more
	receive bool
}

// ahead is how many kernels a rank can submit before the first has run.
const ahead = 1000

type modelRank struct {
	job   *job
	index int

	closed, cancelled, asked, gone bool
	inside, outside                int
	turn, passed                   uint32
	err                            error // of the last request
	calls                          int

	queue          []call
	ran            int
	sent, received int
	met            map[int]int // how often with each other rank
}

func newJob(n int, next func(rank int) (call, time.Duration)) *job {
	j := &job{next: next}
	j.changed = sync.NewCond(&j.mu)
	for i := range n {
		j.ranks = append(j.ranks, &modelRank{job: j, index: i, met: make(map[int]int)})
	}
	return j
}

func (j *job) gates() *gates {
	g := &gates{}
	for _, r := range j.ranks {
		g.all = append(g.all, r)
	}
	return g
}

// start lets the ranks run; the function that it returns ends them.
func (j *job) start() (end func()) {
	var group sync.WaitGroup
	for _, r := range j.ranks {
		group.Go(r.program)
		group.Go(r.gpu)
	}
	return func() {
		j.mu.Lock()
		j.ended = true
		j.changed.Broadcast()
		j.mu.Unlock()
		group.Wait()
	}
}

// wait waits until something is so, or the job ends. The mutex is held.
func (j *job) wait(so func() bool) {
	for !so() && !j.ended {
		j.changed.Wait()
	}
}

func (r *modelRank) program() {
	j := r.job
	j.mu.Lock()
	defer j.mu.Unlock()
	for !j.ended {
		j.mu.Unlock()
		what, before := j.next(r.index)
		time.Sleep(before + time.Microsecond) // the latter is the call itself
		j.mu.Lock()
		if r.closed {
			mine := r.turn
			r.outside++
			j.changed.Broadcast()
			j.wait(func() bool { return !r.closed || r.turn != mine })
			r.outside--
		}
		r.inside++
		r.calls++
		if what.receive {
			r.received++
			j.changed.Broadcast()
		} else if what.takes > 0 || what.with != nil || what.send {
			j.wait(func() bool { return len(r.queue) < ahead })
			r.queue = append(r.queue, what)
			j.changed.Broadcast()
		} else {
			j.wait(func() bool { return len(r.queue) == 0 })
		}
		r.inside--
		j.changed.Broadcast()
	}
}

func (r *modelRank) gpu() {
	j := r.job
	j.mu.Lock()
	defer j.mu.Unlock()
	for !j.ended {
		if j.wait(func() bool { return len(r.queue) > 0 }); j.ended {
			return
		}
		now := r.queue[0]
		j.mu.Unlock()
		time.Sleep(now.takes)
		j.mu.Lock()
		for _, other := range now.with {
			r.met[other]++
			j.changed.Broadcast()
			j.wait(func() bool { return j.ranks[other].met[r.index] >= r.met[other] })
		}
		if now.send {
			r.sent++
			j.wait(func() bool { return j.ranks[1-r.index].received >= r.sent })
		}
		r.queue = r.queue[1:]
		r.ran++
		j.changed.Broadcast()
	}
}

// drained reports whether nothing is under way. The mutex is held.
func (r *modelRank) drained() bool { return r.inside == 0 && len(r.queue) == 0 }

// drain waits for that, or for the end of what is under way once it is cancelled.
func (r *modelRank) drain() error {
	j := r.job
	j.wait(func() bool { return r.drained() || r.cancelled })
	if !r.cancelled {
		return nil
	}
	r.closed = false
	j.changed.Broadcast()
	until := r.ran + len(r.queue)
	j.wait(func() bool { return r.ran >= until })
	return ErrBusy
}

func (r *modelRank) ask(closed bool, do func()) error {
	j := r.job
	j.mu.Lock()
	defer j.mu.Unlock()
	if r.asked || r.closed != closed {
		j.wrong = "asked in the wrong state"
	}
	r.asked, r.cancelled, r.err = true, false, nil
	go func() {
		time.Sleep(rand.N(100 * time.Microsecond))
		j.mu.Lock()
		defer j.mu.Unlock()
		r.closed = true
		do()
		r.asked = false
		j.changed.Broadcast()
	}()
	return nil
}

func (r *modelRank) park(time.Duration) error {
	return r.ask(false, func() { r.err = r.drain() })
}

func (r *modelRank) pass(turns uint32, _ time.Duration) error {
	return r.ask(true, func() {
		for r.passed = 0; r.passed < turns && r.err == nil; r.passed++ {
			if r.outside == 0 && r.passed > 0 {
				r.job.mu.Unlock()
				time.Sleep(time.Millisecond)
				r.job.mu.Lock()
			}
			if r.outside == 0 {
				return
			}
			r.turn++
			let := r.calls + r.outside
			r.job.changed.Broadcast()
			r.job.wait(func() bool { return r.calls == let })
			began := time.Now()
			if r.err = r.drain(); time.Since(began) > 5*time.Millisecond {
				return
			}
		}
	})
}

func (r *modelRank) look() (bool, uint32, error) {
	r.job.mu.Lock()
	defer r.job.mu.Unlock()
	return !r.asked, r.passed, r.err
}

func (r *modelRank) cancel() error {
	r.job.mu.Lock()
	defer r.job.mu.Unlock()
	r.cancelled = true
	r.job.changed.Broadcast()
	return nil
}

func (r *modelRank) open() error {
	r.job.mu.Lock()
	defer r.job.mu.Unlock()
	if r.asked || !r.closed {
		r.job.wrong = "opened in the wrong state"
	}
	r.closed = false
	r.job.changed.Broadcast()
	return nil
}

// states returns how many are closed, and how many are not drained, some time later.
func (j *job) states() (closed, busy int) {
	time.Sleep(100 * time.Millisecond)
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, r := range j.ranks {
		if r.closed && !r.gone {
			closed++
		}
		if !r.drained() {
			busy++
		}
	}
	return closed, busy
}

func (j *job) open() {
	for _, r := range j.ranks {
		_ = r.open()
	}
}

// sequence has each rank make calls in turn, for ever.
func sequence(n int, calls ...func(rank int) (call, time.Duration)) func(rank int) (call, time.Duration) {
	at := make([]int, n)
	return func(rank int) (call, time.Duration) {
		at[rank]++
		return calls[(at[rank]-1)%len(calls)](rank)
	}
}

func others(n, rank int) (all []int) {
	for i := range n {
		if i != rank {
			all = append(all, i)
		}
	}
	return all
}

// reduce is an all-reduce of n ranks, after a rank's time on its processor.
func reduce(n int, before func(rank int) time.Duration) func(rank int) (call, time.Duration) {
	return func(rank int) (call, time.Duration) {
		return call{takes: 50 * time.Microsecond, with: others(n, rank)}, before(rank)
	}
}

// compute is a kernel, which takes some ranks longer, after up to 50 µs on the processor.
func compute(takes time.Duration) func(rank int) (call, time.Duration) {
	return func(rank int) (call, time.Duration) {
		return call{takes: takes + takes*time.Duration(rank)/5}, rand.N(50 * time.Microsecond)
	}
}

func wait(int) (call, time.Duration) { return call{}, 0 }

func times(n int, f func(int) (call, time.Duration)) []func(int) (call, time.Duration) {
	return slices.Repeat([]func(int) (call, time.Duration){f}, n)
}

func fixed(d time.Duration) func(int) time.Duration { return func(int) time.Duration { return d } }

func uneven(d time.Duration) func(int) time.Duration {
	return func(rank int) time.Duration { return time.Duration(rank)*d + rand.N(d/10) }
}

// pipeline hands on what each rank gets from the one before, which has the next kernel then.
func pipeline(n int) func(rank int) (call, time.Duration) {
	return func(rank int) (call, time.Duration) {
		with := []int{rank - 1, rank + 1}
		return call{takes: 200 * time.Microsecond, with: slices.DeleteFunc(with, func(r int) bool { return r < 0 || r == n })}, 0
	}
}

var jobs = []struct {
	name  string
	ranks int
	next  func() func(rank int) (call, time.Duration)
	// unlucky is how many of 10 tries fail at least that have all parked at once.
	unlucky int
	longest time.Duration
}{
	{"all-reduces, waited for", 2, func() func(int) (call, time.Duration) {
		return sequence(2, reduce(2, fixed(100*time.Microsecond)), wait)
	}, 0, time.Second},
	{"all-reduces, ahead", 2, func() func(int) (call, time.Duration) {
		return sequence(2, reduce(2, uneven(10*time.Microsecond)))
	}, 2, 2 * time.Second},
	{"one computes 20 ms", 4, func() func(int) (call, time.Duration) {
		return sequence(4, reduce(4, uneven(20*time.Millisecond)), wait)
	}, 6, time.Second},
	{"one computes 300 ms", 2, func() func(int) (call, time.Duration) {
		return sequence(2, reduce(2, uneven(300*time.Millisecond)), wait)
	}, 6, 2 * time.Second},
	{"a training: 500 kernels and 20 all-reduces a step, ahead", 4, func() func(int) (call, time.Duration) {
		return sequence(4, slices.Concat(times(500, compute(50*time.Microsecond)), times(19, reduce(4, fixed(10*time.Microsecond))), times(1, reduce(4, uneven(5*time.Millisecond))))...)
	}, 2, 3 * time.Second},
	{"a pipeline", 8, func() func(int) (call, time.Duration) { return pipeline(8) }, 0, 3 * time.Second},
	{"eight, each slower than the one before", 8, func() func(int) (call, time.Duration) {
		return sequence(8, reduce(8, uneven(5*time.Millisecond)), wait)
	}, 6, time.Second},
	{"each busy by itself for a second at a time", 2, func() func(int) (call, time.Duration) {
		return sequence(2, compute(time.Second), wait)
	}, 0, 4 * time.Second},
	{"each busy by itself for 50 ms at a time", 4, func() func(int) (call, time.Duration) {
		return sequence(4, compute(50*time.Millisecond), wait)
	}, 0, time.Second},
}

// once has all parked at once, and looks whether they are within the time.
func (j *job) once(limit time.Duration) bool {
	for _, r := range j.ranks {
		_ = r.park(limit)
	}
	time.Sleep(limit)
	late := slices.DeleteFunc(slices.Clone(j.ranks), func(r *modelRank) bool {
		done, _, _ := r.look()
		if done {
			_ = r.open()
		}
		return done
	})
	for _, r := range late {
		_ = r.cancel()
	}
	for _, r := range late {
		for done := false; !done; done, _, _ = r.look() {
			time.Sleep(time.Millisecond)
		}
		if _, _, err := r.look(); err == nil {
			_ = r.open()
		}
	}
	return len(late) == 0
}

// Ranks that take steps without a pause are parked in every try, and asked once they are not.
func TestRanksAreParked(t *testing.T) {
	for _, test := range jobs {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const tries, limit = 10, 5 * time.Second
				j := newJob(test.ranks, test.next())
				t.Cleanup(j.start())
				failed, rounds, opened := 0, 0, 0
				var longest time.Duration
				for range tries {
					time.Sleep(rand.N(100 * time.Millisecond))
					if !j.once(limit) {
						failed++
					}
					time.Sleep(rand.N(100 * time.Millisecond))
					began := time.Now()
					g := j.gates()
					if err := g.close(t.Context(), limit); err != nil {
						t.Fatalf("%v, %d rounds, %d changes, anew %d times", err, g.rounds, g.changes, g.opened)
					}
					longest, rounds, opened = max(longest, time.Since(began)), rounds+g.rounds, opened+g.opened
					if closed, busy := j.states(); closed != test.ranks || busy != 0 {
						t.Fatalf("%d of %d gates are closed, %d ranks are busy", closed, test.ranks, busy)
					}
					j.open()
				}
				if failed < test.unlucky {
					t.Errorf("asked once, the ranks were not parked in %d of %d tries: they hardly wait for each other", failed, tries)
				}
				if longest > test.longest || opened > 0 || j.wrong != "" {
					t.Errorf("it took %v; all were opened %d times; %s", longest, opened, j.wrong)
				}
				t.Logf("longest %v, %d rounds of turns a try; asked once, %d of %d failed", longest, rounds/tries, failed, tries)
			})
		})
	}
}

// Gates that do not all close within the time are open again, and so are those of the others of a process that is lost.
func TestRanksAreNotParked(t *testing.T) {
	gone := errors.New("gone")
	late := new(late)
	never := func(rank int) (call, time.Duration) {
		return call{with: []int{1 - rank}}, time.Duration(rank) * time.Hour
	}
	isGone := func(err error) bool { return errors.Is(err, gone) }
	losing := func(after time.Duration) func(*gates) {
		return func(g *gates) { g.all[1] = &lost{g.all[1].(*modelRank), time.Now().Add(after), gone} }
	}
	steps := sequence(3, reduce(3, fixed(time.Millisecond)), wait)
	for name, test := range map[string]struct {
		ranks  int
		next   func(rank int) (call, time.Duration)
		change func(g *gates)
		want   func(err error) bool
		opened bool
	}{
		"one never comes": {2, never, func(*gates) {}, func(err error) bool { return errors.As(err, &late) && slices.Equal(late.waiting, []int{0}) }, true},
		"a process alone": {1, compute(time.Hour), func(*gates) {}, func(err error) bool { return errors.As(err, &late) && err.Error() == "[0] wait for []" }, false},
		"lost at once":    {3, steps, losing(0), isGone, false},
		"lost later":      {2, never, losing(20 * time.Millisecond), isGone, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				j := newJob(test.ranks, test.next)
				t.Cleanup(j.start())
				time.Sleep(time.Second)
				began := time.Now()
				g := j.gates()
				test.change(g)
				err := g.close(t.Context(), 5*time.Second)
				if !test.want(err) || time.Since(began) > 6100*time.Millisecond || (g.opened > 0) != test.opened {
					t.Errorf("after %v, %d times anew: %v", time.Since(began), g.opened, err)
				}
				for _, i := range g.in(held) { // as who calls it does
					_ = g.all[i].open()
				}
				if closed, _ := j.states(); closed > 0 || j.wrong != "" {
					t.Errorf("%d gates are closed: %s", closed, j.wrong)
				}
			})
		})
	}
}

// lost is the gate of a process that ends some time after it was first asked.
type lost struct {
	*modelRank
	end time.Time
	err error
}

func (l *lost) look() (bool, uint32, error) {
	if time.Now().Before(l.end) {
		return l.modelRank.look()
	}
	l.job.mu.Lock()
	defer l.job.mu.Unlock()
	l.gone = true
	return false, 0, l.err
}

// Turns do not help processes that wait for each other in a circle: all are let go, and parked at another moment.
func TestRanksAreParkedAnew(t *testing.T) {
	send := func(int) (call, time.Duration) { return call{send: true}, 0 }
	receive := func(int) (call, time.Duration) { return call{receive: true}, rand.N(time.Millisecond) }
	synctest.Test(t, func(t *testing.T) {
		j := newJob(2, sequence(2, send, receive, wait, compute(2*time.Millisecond), wait))
		t.Cleanup(j.start())
		opened := 0
		for range 60 {
			time.Sleep(rand.N(100 * time.Millisecond))
			g := j.gates()
			err := g.close(t.Context(), time.Minute)
			if closed, busy := j.states(); closed != 2 || busy != 0 || j.wrong != "" || err != nil {
				t.Fatalf("%d gates are closed, %d ranks are busy, %s: %v", closed, busy, j.wrong, err)
			}
			opened += g.opened
			j.open()
		}
		if opened == 0 {
			t.Error("no two of them waited for each other")
		}
		t.Logf("all were let go %d times in 60", opened)
	})
}

// asked notes for how long it was asked to park.
type asked struct {
	gate
	limit time.Duration
}

func (a *asked) park(limit time.Duration) error {
	a.limit = limit
	return nil
}

// Processes that are asked anew when the time is just over are asked for a moment: an interposer takes the number of
// milliseconds as one without a sign, and less than none is weeks.
func TestGatesAskForAMoment(t *testing.T) {
	a := &asked{}
	g := &gates{all: []gate{a}, until: time.Now().Add(-time.Second), members: make([]member, 1)}
	if _, err := g.ask(); err != nil || a.limit != time.Millisecond {
		t.Errorf("asked for %v: %v", a.limit, err)
	}
}
