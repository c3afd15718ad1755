// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package trials has changes of a checkpoint restored, some at once, and finds which of them did what is
// wrong afterwards.
//
// The host is compared with what it was before all trials. What is wrong and stays was done by a trial
// that ran then. What has gone by itself is a trial's only if the trial alone does it again: others do
// things to the machine too, and to a container.
package trials

import (
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/gpuckpt/gpuckpt/internal/criu/image/imagetest"
)

// Place is where changes are restored, one after the other.
type Place interface {
	// Restore restores a dump with one image changed. It returns what is wrong with how that ended, and
	// why it failed.
	Restore(t *testing.T, file string, image []byte) (wrong []string, failed error)
	// Left returns what the last restore has left behind.
	Left() []string
}

// Trial is a change that is restored.
type Trial struct {
	Change imagetest.Change
	Failed error
	Wrong  []string // what the change does that it may not

	place Place
}

// Trials are the changes that are restored.
type Trials struct {
	// Host is what no trial may change.
	Host *Kept
	// New makes a new place.
	New func(t *testing.T) Place
	// Log returns the end of the log that tells of the last restore.
	Log func() string

	all   []*Trial
	alone sync.RWMutex // held for reading while a change is restored beside others
	mu    sync.Mutex
	// suspects are the changes that run, and those after which something was wrong.
	suspects []*Trial
}

// Restore restores a change beside others. If anything is wrong afterwards, it finds which of the
// changes that ran has done it. Restore returns the place for the next change.
func (s *Trials) Restore(t *testing.T, at Place, change imagetest.Change) Place {
	r := &Trial{Change: change, place: at}
	s.alone.RLock()
	s.mu.Lock()
	s.all, s.suspects = append(s.all, r), append(s.suspects, r)
	s.mu.Unlock()
	wrong, failed := at.Restore(t, change.File, change.Image)
	spoilt := len(wrong) > 0
	wrong = append(wrong, s.Host.Changed()...)
	r.Wrong, r.Failed = wrong, failed
	if len(wrong) == 0 {
		s.mu.Lock()
		s.suspects = slices.DeleteFunc(s.suspects, func(o *Trial) bool { return o == r })
		s.mu.Unlock()
		r.Change.Image = nil
	}
	s.alone.RUnlock()
	if len(wrong) > 0 {
		s.alone.Lock()
		defer s.alone.Unlock()
		s.blame(t)
	}
	if spoilt {
		at = s.New(t)
	}
	return at
}

// blame finds which of the suspects has done what is wrong. Nothing else runs.
func (s *Trials) blame(t *testing.T) {
	suspects := s.suspects
	s.suspects = nil
	if len(suspects) == 0 {
		return // another trial's blame has had them
	}
	var stays []string
	for _, r := range suspects {
		stays = append(stays, r.place.Left()...)
	}
	stays = append(stays, s.Host.Changed()...)
	s.Host.Accept()
	var guilty []*Trial
	for _, r := range suspects {
		if len(suspects) == 1 && len(stays) > 0 {
			r.Wrong = nil // it is in what stays
		} else if s.again(t, r) {
			guilty = append(guilty, r)
		}
		r.Change.Image = nil
	}
	if len(stays) == 0 {
		return
	}
	if len(guilty) == 0 { // what is so already is not done again
		guilty = suspects
	}
	who := "it stays"
	for _, other := range guilty[1:] {
		who += fmt.Sprintf("; this change did it, or %v", other.Change)
	}
	guilty[0].Wrong = slices.Concat([]string{who}, stays, guilty[0].Wrong)
}

// again restores a suspect alone, three times or until something is wrong, and reports whether something was.
func (s *Trials) again(t *testing.T, r *Trial) bool {
	first := r.Wrong
	r.Wrong = nil
	for range 3 {
		if r.Wrong, r.Failed = s.New(t).Restore(t, r.Change.File, r.Change.Image); len(r.Wrong) > 0 {
			r.Wrong = append(r.Wrong, s.Log())
		}
		if r.Wrong = append(r.Wrong, s.Host.Changed()...); len(r.Wrong) > 0 {
			s.Host.Accept()
			break
		}
	}
	if len(r.Wrong) == 0 && len(first) > 0 {
		t.Logf("%v: three times alone nothing is wrong; beside others it was: %v", r.Change, first)
	}
	return len(r.Wrong) > 0
}

// All returns the trials, after the last one: each with what is wrong, which has been reported by no
// other. What has changed since the last trial is returned by itself.
func (s *Trials) All() (all []*Trial, since []string) {
	return s.all, s.Host.Changed()
}
