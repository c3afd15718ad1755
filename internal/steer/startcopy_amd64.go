// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"fmt"
	"runtime"

	"github.com/gpuckpt/gpuckpt/internal/ptrace"
)

// copying is a process with copy threads, and its thread that makes system calls.
type copying struct {
	*copyThreads
	tid int
}

// startCopyThreads starts copy threads in all processes at once. The notes say where
// that failed.
func startCopyThreads(threads []Thread, n int, step func(string)) (all []copying, notes []string) {
	type result struct {
		copying
		err error
	}
	results := make(chan result)
	for _, th := range threads {
		go func() {
			runtime.LockOSThread() // never unlocked: its end detaches
			r := result{copying: copying{tid: th.TID}}
			var t *ptrace.Thread
			if t, r.err = ptrace.StopThread(th.PID, th.TID, step); r.err == nil {
				r.copyThreads, r.err = newCopyThreads(t, n, step)
				r.err = errors.Join(r.err, t.Detach())
				t.Close()
			}
			if r.err != nil {
				r.err = fmt.Errorf("process %d: the driver copies by itself: %w", th.PID, r.err)
			}
			results <- r
		}()
	}
	for range threads {
		r := <-results
		if r.copyThreads != nil {
			all = append(all, r.copying)
		}
		if r.err != nil {
			notes = append(notes, r.err.Error())
		}
	}
	return all, notes
}

// stopCopyThreads ends what startCopyThreads began, in all processes at once.
func stopCopyThreads(all []copying, step func(string)) (notes []string, err error) {
	type result struct {
		note string
		err  error
	}
	results := make(chan result)
	for _, q := range all {
		go func() {
			runtime.LockOSThread() // never unlocked: its end detaches
			t, err := ptrace.StopThread(q.pid, q.tid, step)
			if err != nil {
				results <- result{err: fmt.Errorf("process %d: %w", q.pid, err)}
				return
			}
			defer t.Close()
			note := q.note(t)
			err = q.stop(t)
			results <- result{note, errors.Join(err, t.Detach())}
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
