// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"fmt"
	"slices"

	"github.com/gpuckpt/gpuckpt/internal/ptrace"
)

// copying is a process with copy threads, and its thread that makes system calls.
type copying struct {
	*copyThreads
	thread Thread
}

// startCopyThreads starts copy threads in all processes at once. The notes say where
// that failed.
func startCopyThreads(threads []Thread, n int, step func(string)) (all []copying, notes []string) {
	made := make([]*copyThreads, len(threads))
	errs := ptrace.InThreads(threads, step, func(i int, t *ptrace.Thread) (err error) {
		made[i], err = newCopyThreads(t, n, step)
		return err
	})
	for i, c := range made {
		if c != nil {
			all = append(all, copying{c, threads[i]})
		}
		if errs[i] != nil {
			notes = append(notes, fmt.Sprintf("the driver copies by itself: %v", errs[i]))
		}
	}
	return all, notes
}

// stopCopyThreads ends what startCopyThreads began, in all processes at once.
func stopCopyThreads(all []copying, step func(string)) (notes []string, err error) {
	var threads []Thread
	for _, c := range all {
		threads = append(threads, c.thread)
	}
	notes = make([]string, len(all))
	errs := ptrace.InThreads(threads, step, func(i int, t *ptrace.Thread) error {
		notes[i] = all[i].note(t)
		return all[i].stop(t)
	})
	return slices.DeleteFunc(notes, func(n string) bool { return n == "" }), errors.Join(errs...)
}
