// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
)

// The matrix finds what it looks for: an undo that is left out, as by an error in the code, is found in
// what it would have undone.
func TestPlanted(t *testing.T) {
	session.Results.Add(t)
	for i, planted := range []struct{ scenario, after, undo, found string }{
		{"checkpoint", "dump", "remove images", "files of the checkpoint are left"},
		{"suspend", "save GPU state", "resume", "the container is paused, error <nil>; want it to run"},
	} {
		t.Run(planted.undo, func(t *testing.T) {
			l := newLane(t, fmt.Sprintf("planted-%d-%d", rounds, i), Steered)
			// An undo that fails before it begins is left out. The table allows it to need another try; a
			// step that says that it was undone must have been.
			cell := Cell{Outcome: Back}
			for _, p := range Places() {
				if p.Scenario.Name == planted.scenario && p.After == planted.after && p.Step == planted.undo && p.Moment == "begin" {
					cell.Place = p
				}
			}
			for _, f := range Faults() {
				if f.Name == "error" {
					cell.Fault = f
				}
			}
			r := &recorder{TB: t}
			done := make(chan struct{})
			go func() {
				defer close(done)
				l.try(r, cell)
			}()
			<-done
			if !strings.Contains(r.text(), planted.found) {
				t.Errorf("with the undo %q left out, the matrix does not find that %s, but\n%s", planted.undo, planted.found, r.text())
			}
			if err := shared.Remove(t.Context(), l.k.ID); err != nil {
				t.Error(err)
			}
		})
	}
	rounds++
}

// recorder is a test whose errors are kept and fail nothing.
type recorder struct {
	testing.TB
	mu   sync.Mutex
	said []string
}

func (r *recorder) note(text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.said = append(r.said, text)
}

func (r *recorder) text() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return strings.Join(r.said, "\n")
}

func (r *recorder) Failed() bool                      { return r.text() != "" }
func (r *recorder) Error(args ...any)                 { r.note(fmt.Sprintln(args...)) }
func (r *recorder) Errorf(format string, args ...any) { r.note(fmt.Sprintf(format, args...)) }
func (r *recorder) Fatal(args ...any)                 { r.Error(args...); runtime.Goexit() }
func (r *recorder) Fatalf(format string, args ...any) { r.Errorf(format, args...); runtime.Goexit() }
