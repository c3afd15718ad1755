// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package trials

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/gpuckpt/gpuckpt/internal/criu/image/imagetest"
)

// world is a host that changes are made to, in place of a real one.
type world struct {
	mu   sync.Mutex
	is   map[string]string
	does func(w *world, change string, times int) (left []string)
	// times is how often each change was restored.
	times map[string]int
}

func (w *world) look() map[string]string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return maps.Clone(w.is)
}

// place is one of the world's.
type place struct {
	*world
	left []string
}

var errRefused = errors.New("refused")

func (p *place) Restore(_ *testing.T, file string, _ []byte) ([]string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.times[file]++
	p.left = p.does(p.world, file, p.times[file])
	return slices.Clone(p.left), errRefused
}

func (p *place) Left() []string { return p.left }

// run has changes restored that are called by their numbers, in as many places at once.
func (w *world) run(t *testing.T, changes, places int) (all []*Trial, since []string) {
	t.Helper()
	w.is, w.times = map[string]string{"dev": "rw", "file": "as it was", "clock": "1"}, make(map[string]int)
	host := &Kept{Look: w.look}
	earlier := host.Look()
	w.is["clock"] = "2"
	if _, skipped := host.Keep(earlier); !slices.Equal(skipped, []string{"clock"}) {
		t.Fatalf("%v is not compared", skipped)
	}
	s := &Trials{Host: host, New: func(*testing.T) Place { return &place{world: w} }, Log: func() string { return "the log" }}
	queue := make(chan int)
	var wg sync.WaitGroup
	for range places {
		at := s.New(t)
		wg.Go(func() {
			for n := range queue {
				at = s.Restore(t, at, imagetest.Change{File: fmt.Sprint(n), Image: []byte{1}})
			}
		})
	}
	for n := range changes {
		queue <- n
	}
	close(queue)
	wg.Wait()
	return s.All()
}

// What a trial does to the host is reported: also if it stays, and once.
func TestBlame(t *testing.T) {
	for _, test := range []struct {
		name string
		does func(w *world, change string, times int) []string
		want map[string]string // what is wrong of each change that does wrong
	}{
		{"nothing", func(w *world, _ string, n int) []string { w.is["clock"] = fmt.Sprint(n); return nil }, nil},
		{"damage that stays, and that no second time can add to", func(w *world, change string, _ int) []string {
			if change == "3" {
				w.is["dev"] = "ro"
			}
			return nil
		}, map[string]string{"3": `it stays; dev: from byte 1 on it was "w" and is "o"`}},
		{"damage that stays, by two", func(w *world, change string, _ int) []string {
			switch change {
			case "3":
				w.is["dev"] = "ro"
			case "7":
				w.is["socket"] = "there"
			}
			return nil
		}, map[string]string{"3": "it stays; dev: ", "7": "it stays; socket is new"}},
		{"the same thing damaged further", func(w *world, change string, _ int) []string {
			if change == "3" || change == "4" {
				w.is["dev"] = change
			}
			return nil
		}, map[string]string{"3": `and is "3"`, "4": `and is "4"`}},
		{"something is gone", func(w *world, change string, _ int) []string {
			if change == "3" {
				delete(w.is, "file")
			}
			return nil
		}, map[string]string{"3": `it stays; file: from byte 0 on it was "as it was" and is ""`}},
		{"a process that is left", func(_ *world, change string, times int) []string {
			if change == "3" && times == 1 {
				return []string{"process 7"}
			}
			return nil
		}, map[string]string{"3": "it stays; process 7"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := &world{does: test.does}
			all, since := w.run(t, 10, 1)
			if len(all) != 10 || len(since) > 0 {
				t.Errorf("%d trials; and since: %v", len(all), since)
			}
			for _, r := range all {
				wrong := strings.Join(r.Wrong, "; ")
				if want, bad := test.want[r.Change.File]; bad != (wrong != "") || !strings.Contains(wrong, want) {
					t.Errorf("change %s: %q, want %q", r.Change.File, wrong, want)
				}
				if !errors.Is(r.Failed, errRefused) || r.Change.Image != nil {
					t.Errorf("change %s: %v, with %d bytes of its image", r.Change.File, r.Failed, len(r.Change.Image))
				}
			}
		})
	}
}

// Of changes that ran at once, the one that does damage again is to blame; if none does, and the damage
// stays, it is reported once, with all that may have done it.
func TestBlameOfSome(t *testing.T) {
	// The first two run at once: neither ends before both have done what they do.
	beside := func(does func(w *world, change string, times int)) func(*world, string, int) []string {
		var both sync.WaitGroup
		both.Add(2)
		return func(w *world, change string, times int) []string {
			does(w, change, times)
			if times == 1 {
				w.mu.Unlock()
				both.Done()
				both.Wait()
				w.mu.Lock()
			}
			return nil
		}
	}
	for _, test := range []struct {
		name string
		does func(w *world, change string, times int)
		want []string // what is wrong of all of them, in any order
	}{
		{"the damage stays", func(w *world, change string, _ int) {
			if change == "1" {
				w.is["dev"] = "ro"
			}
		}, []string{"it stays; this change did it, or"}},
		{"the damage becomes more", func(w *world, change string, times int) {
			if change == "1" {
				w.is["dev"] = strings.Repeat("o", times)
			}
		}, []string{"it stays; dev"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := &world{does: beside(test.does)}
			all, since := w.run(t, 2, 2)
			if len(since) > 0 {
				t.Errorf("since: %v", since)
			}
			var wrong []string
			for _, r := range all {
				if len(r.Wrong) > 0 {
					wrong = append(wrong, strings.Join(r.Wrong, "; "))
				}
			}
			if len(wrong) != len(test.want) {
				t.Fatalf("%d are wrong, want %d: %q", len(wrong), len(test.want), wrong)
			}
			for i, want := range test.want {
				if !strings.Contains(wrong[i], want) {
					t.Errorf("%q, want %q", wrong[i], want)
				}
			}
		})
	}
}

// What others do beside a trial, and has gone, is not the trial's.
func TestBlameNobody(t *testing.T) {
	w := &world{does: func(_ *world, change string, times int) []string {
		if change == "3" && times == 1 {
			return []string{"it hangs"} // an event: nothing is left of it
		}
		return nil
	}}
	w.is, w.times = map[string]string{"dev": "rw"}, make(map[string]int)
	host := &Kept{Look: w.look}
	host.Keep(host.Look())
	s := &Trials{Host: host, New: func(*testing.T) Place { return &event{place{world: w}} }, Log: func() string { return "" }}
	at := s.New(t)
	for n := range 5 {
		at = s.Restore(t, at, imagetest.Change{File: fmt.Sprint(n)})
	}
	all, since := s.All()
	for _, r := range all {
		if len(r.Wrong) > 0 {
			t.Errorf("change %s: %v", r.Change.File, r.Wrong)
		}
	}
	if w.times["3"] != 4 || w.times["2"] != 1 || len(since) > 0 {
		t.Errorf("restored %v; since: %v", w.times, since)
	}
	// What comes after the last trial is nobody's, and seen.
	w.is["dev"] = "ro"
	if _, since := s.All(); len(since) != 1 || !strings.Contains(since[0], "dev") {
		t.Errorf("since: %v", since)
	}
}

// event is a place where nothing is left.
type event struct{ place }

func (e *event) Left() []string { return nil }
