// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"errors"
	"fmt"
	"runtime"
)

// quickened is a process whose driver copies faster, and its thread that makes calls.
type quickened struct {
	*copiers
	tid int
}

// quickenAll quickens processes, at once. Who is not is in the notes.
func quickenAll(threads []Thread, n int) (all []quickened, notes []string) {
	type result struct {
		quickened
		err error
	}
	results := make(chan result)
	for _, th := range threads {
		go func() {
			runtime.LockOSThread() // never unlocked: its end detaches
			r := result{quickened: quickened{tid: th.TID}}
			var t *thread
			if t, r.err = stopThread(th.PID, th.TID); r.err == nil {
				r.copiers, r.err = t.quicken(n)
				r.err = errors.Join(r.err, t.detach())
				t.close()
			}
			if r.err != nil {
				r.err = fmt.Errorf("process %d: the driver copies by itself: %w", th.PID, r.err)
			}
			results <- r
		}()
	}
	for range threads {
		r := <-results
		if r.copiers != nil {
			all = append(all, r.quickened)
		}
		if r.err != nil {
			notes = append(notes, r.err.Error())
		}
	}
	return all, notes
}

// calmAll undoes that.
func calmAll(all []quickened) (notes []string, err error) {
	type result struct {
		note string
		err  error
	}
	results := make(chan result)
	for _, q := range all {
		go func() {
			runtime.LockOSThread() // never unlocked: its end detaches
			t, err := stopThread(q.pid, q.tid)
			if err != nil {
				results <- result{err: fmt.Errorf("process %d: %w", q.pid, err)}
				return
			}
			defer t.close()
			note := q.note(t)
			err = q.undo(t)
			results <- result{note, errors.Join(err, t.detach())}
		}()
	}
	for range all {
		r := <-results
		err = errors.Join(err, r.err)
		if r.note != "" {
			notes = append(notes, r.note)
		}
	}
	return notes, err
}
