// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// job is ranks that take steps together, for ever: each computes, launches its part of the step, and
// goes on once all have launched theirs. It runs in the time of a synctest bubble.
type job struct {
	// compute is how long a rank works before its part of a step.
	compute func(rank int) time.Duration

	mu       sync.Mutex
	changed  *sync.Cond
	launched []int  // parts, by rank
	closed   []bool // the rank's calls block
	ended    bool
	late     int // locks that took too long
}

func newJob(n int, compute func(rank int) time.Duration) *job {
	j := &job{compute: compute, launched: make([]int, n), closed: make([]bool, n)}
	j.changed = sync.NewCond(&j.mu)
	return j
}

// start lets the ranks run; the function that it returns ends them.
func (j *job) start() (end func()) {
	var ranks sync.WaitGroup
	for rank := range j.launched {
		ranks.Go(func() {
			for {
				time.Sleep(j.compute(rank))
				j.mu.Lock()
				for j.closed[rank] && !j.ended {
					j.changed.Wait()
				}
				if j.launched[rank]++; !j.ended {
					j.changed.Broadcast()
				}
				for !j.done(rank) && !j.ended {
					j.changed.Wait()
				}
				ended := j.ended
				j.mu.Unlock()
				if ended {
					return
				}
			}
		})
	}
	return func() {
		j.mu.Lock()
		j.ended = true
		j.changed.Broadcast()
		j.mu.Unlock()
		ranks.Wait()
	}
}

// done reports whether a rank's work is done: all have launched as much.
func (j *job) done(rank int) bool { return slices.Min(j.launched) >= j.launched[rank] }

// lock does as driver 580: calls block from some moment on, and once the work is done it answers.
func (j *job) lock(_ context.Context, rank int, timeout time.Duration) error {
	time.Sleep(rand.N(time.Millisecond))
	over := false
	defer time.AfterFunc(timeout, func() {
		j.mu.Lock()
		over = true
		j.changed.Broadcast()
		j.mu.Unlock()
	}).Stop()
	j.mu.Lock()
	j.closed[rank] = true
	for !j.done(rank) && !over {
		j.changed.Wait()
	}
	late := !j.done(rank)
	if late {
		j.late++
		j.closed[rank] = false
		j.changed.Broadcast()
	}
	j.mu.Unlock()
	if late {
		return &Error{Op: "lock", PID: rank, Result: NotReady}
	}
	time.Sleep(10*time.Millisecond + rand.N(5*time.Millisecond))
	return nil
}

func (j *job) open(who []int) {
	j.mu.Lock()
	for _, rank := range who {
		j.closed[rank] = false
	}
	j.changed.Broadcast()
	j.mu.Unlock()
}

func (j *job) unlock(_ context.Context, who []int) error {
	for _, rank := range who {
		time.Sleep(rand.N(time.Millisecond))
		j.open([]int{rank})
	}
	time.Sleep(10 * time.Millisecond)
	return nil
}

// standsStill fails the test unless all ranks are locked with their work done.
func (j *job) standsStill(t *testing.T) {
	t.Helper()
	j.mu.Lock()
	before := slices.Clone(j.launched)
	j.mu.Unlock()
	time.Sleep(time.Minute)
	j.mu.Lock()
	defer j.mu.Unlock()
	if !slices.Equal(before, j.launched) || slices.Min(before) != slices.Max(before) || slices.Contains(j.closed, false) {
		t.Errorf("locked, the ranks have launched %v and then %v; closed are %v", before, j.launched, j.closed)
	}
}

// once is the lock of before: all are asked once.
func (j *job) once(timeout time.Duration) error {
	return sum(atOnce(len(j.launched), func(rank int) error { return j.lock(context.Background(), rank, timeout) }))
}

// fixed is a step of the same length for all; uneven has the later ranks compute longer.
func fixed(d time.Duration) func(int) time.Duration {
	return func(int) time.Duration { return d }
}

func uneven(d time.Duration) func(int) time.Duration {
	return func(rank int) time.Duration { return d/100 + time.Duration(rank)*d + rand.N(d/10) }
}

var jobs = []struct {
	name    string
	ranks   int
	compute func(int) time.Duration
	// unlucky is how many of 20 locks fail at least, if each process is asked once.
	unlucky int
}{
	{"short steps", 2, fixed(500 * time.Microsecond), 3},
	{"one computes 20 ms", 2, uneven(20 * time.Millisecond), 15},
	{"one computes 300 ms", 2, uneven(300 * time.Millisecond), 15},
	{"eight, each slower than the one before", 8, uneven(5 * time.Millisecond), 10},
}

// Ranks that take steps without a pause are locked in every try, and asked once they are not.
func TestRanksAreLockedTogether(t *testing.T) {
	for _, test := range jobs {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const tries, timeout = 20, 10 * time.Second
				var longest time.Duration
				failed := 0
				j := newJob(test.ranks, test.compute)
				t.Cleanup(j.start())
				for range tries {
					time.Sleep(rand.N(time.Second))
					if j.once(timeout) != nil {
						failed++
					}
					j.open(all(test.ranks))

					time.Sleep(rand.N(time.Second))
					began := time.Now()
					l := &lockstep{lock: j.lock, unlock: j.unlock}
					if errs, err := l.run(t.Context(), test.ranks, timeout); err != nil {
						t.Fatalf("%v; %v", err, errs)
					}
					longest = max(longest, time.Since(began))
					j.standsStill(t)
					j.open(all(test.ranks))
				}
				if failed < test.unlucky {
					t.Errorf("asked once, the ranks were not locked in %d of %d tries: they hardly wait for each other", failed, tries)
				}
				t.Logf("longest lock %v; asked once, %d of %d failed", longest, failed, tries)
			})
		})
	}
}

func all(n int) (ranks []int) {
	for i := range n {
		ranks = append(ranks, i)
	}
	return ranks
}

// A lock that does not come about leaves nobody locked, and no call under way.
func TestRanksThatAreNeverDone(t *testing.T) {
	for name, test := range map[string]struct {
		compute func(int) time.Duration
		words   string
	}{
		"one does not come": {func(rank int) time.Duration { return time.Duration(rank) * time.Hour }, "[0] wait for [1]"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				j := newJob(2, test.compute)
				t.Cleanup(j.start())
				time.Sleep(time.Second)
				began := time.Now()
				l := &lockstep{lock: j.lock, unlock: j.unlock}
				errs, err := l.run(t.Context(), 2, 3*time.Second)
				if err == nil || err.Error() != test.words || sum(errs) != nil {
					t.Errorf("got %v, %v", err, errs)
				}
				if took := time.Since(began); took > 4*time.Second {
					t.Errorf("it took %v", took)
				}
				time.Sleep(time.Minute)
				j.mu.Lock()
				defer j.mu.Unlock()
				if slices.Contains(j.closed, true) {
					t.Errorf("still locked: %v", j.closed)
				}
				if j.late < 3 {
					t.Errorf("rank 0 was asked %d times: one long try keeps a circle of ranks waiting", j.late)
				}
			})
		})
	}
}

// Work that takes nearly as long as the timeout is waited for, beside a process that is idle.
func TestLongWorkBesideAnIdleProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		done := time.Now().Add(9 * time.Second)
		work := func(ctx context.Context, i int, timeout time.Duration) error {
			if left := time.Until(done); i == 0 && left > timeout {
				time.Sleep(timeout)
				return &Error{Op: "lock", Result: NotReady}
			} else if i == 0 {
				time.Sleep(max(0, left))
			}
			return nil
		}
		l := &lockstep{lock: work, unlock: func(context.Context, []int) error { return nil }}
		if _, err := l.run(t.Context(), 2, 10*time.Second); err != nil {
			t.Error(err)
		}
	})
}

// Any other answer than a timeout ends the lock; those that are locked are let go by run, or, if
// that fails too, by the undo.
func TestLostRank(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gone := errors.New("gone")
		j := newJob(3, fixed(time.Millisecond))
		t.Cleanup(j.start())
		l := &lockstep{unlock: j.unlock, lock: func(ctx context.Context, i int, timeout time.Duration) error {
			if i == 1 {
				time.Sleep(30 * time.Millisecond)
				return gone
			}
			return j.lock(ctx, i, timeout)
		}}
		errs, err := l.run(t.Context(), 3, 10*time.Second)
		if !errors.Is(err, gone) || errs[0] != nil || !errors.Is(errs[1], gone) || errs[2] != nil {
			t.Errorf("got %v, %v", err, errs)
		}
		j.mu.Lock()
		defer j.mu.Unlock()
		if j.closed[0] || j.closed[2] {
			t.Errorf("still locked: %v", j.closed)
		}
	})
}

// The error names the processes that wait for each other.
func TestLateNamesWhoWaits(t *testing.T) {
	h := fake(t, "machine:11=running;12=running", nil)
	g := Group{{PID: PID{Host: 11}, State: Running}, {PID: PID{Host: 12}, State: Running}}
	for turns, words := range map[int][]string{
		0: {"lock CUDA process 12", "retry with a longer timeout"},
		7: {"lock CUDA process 12", "processes [12] and [11] wait for each other", "7 times", "within 2s", "quieter moment"},
	} {
		err := g.late(h, &late{waiting: []int{1}, held: []int{0}, turns: turns}, 2*time.Second)
		refused(t, err, NotReady)
		for _, word := range words {
			if !strings.Contains(err.Error(), word) {
				t.Errorf("%v does not say %q", err, word)
			}
		}
	}
	if s := fmt.Sprint(&late{waiting: []int{1}, held: []int{0}}); s != "[1] wait for [0]" {
		t.Error(s)
	}
}
