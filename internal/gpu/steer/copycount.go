// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"slices"

	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/internal/node/host"
)

// Left alone the driver copies GPU state on one thread of each process, far below the bus's speed.
// Copy threads help in a Save (Target) and a Restore (HelpCopy).

// CopyThreads returns how many threads are to copy in each of the processes; the setting is the
// most. More than the processors that the container or a process may use would only take these from
// each other, and so would those of operations that copy at once. init is the container's first process.
func CopyThreads(setting, init int, pids []int, atOnce int) int {
	if setting == 0 {
		return 0
	}
	n := min(setting, host.Processors(init)/max(1, len(pids)*atOnce))
	for _, pid := range pids {
		n = min(n, host.RunsOn(pid))
	}
	return max(1, n)
}

// HelpCopy has the driver copy faster from mapped areas, where it can be helped.
func HelpCopy(ctx context.Context, tracer *Session, mappings []Mapping, threads int) error {
	if threads < 2 {
		return nil // alone the driver reads faster than our code (measured, H200): 1.9 s for 16 GiB, not 2.4 s
	}
	var drivers []Thread
	for _, m := range mappings {
		if t := (Thread{PID: m.PID, TID: m.TID}); !slices.Contains(drivers, t) {
			drivers = append(drivers, t)
		}
	}
	notes, err := tracer.StartCopyThreads(drivers, threads)
	LogNotes(ctx, notes)
	return err
}

// EndCopy undoes HelpCopy. An error is for the log: the processes are right.
func EndCopy(ctx context.Context, tracer *Session) {
	notes, err := tracer.StopCopyThreads()
	LogNotes(ctx, notes)
	if err != nil {
		log.G(ctx).WithError(err).Warn("code that copied for the driver is left in a process")
	}
}

// LogNotes logs the notes of a tracer.
func LogNotes(ctx context.Context, notes []string) {
	for _, n := range notes {
		log.G(ctx).Info("staging area: " + n)
	}
}
