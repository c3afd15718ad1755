// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"strconv"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/bench/report"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// manyAtOnce makes such a run. Each container has a network of its own, since all have one port.
func (i *imageCase) manyAtOnce(ctx context.Context, o report.ImageOutcome) report.ImageOutcome {
	r := report.ManyRun{ImageOutcome: o, Count: i.many, GPUs: max(1, min(i.gpus, i.many))}
	i.once(ctx, &r.ImageOutcome, func(ctx context.Context) error { return i.restoreMany(ctx, &r) })
	if r.Verified {
		i.b.logf("%s: one %s, all %s, memory %s and %s, verified", r.Name(), report.Seconds(r.One), report.Seconds(r.All),
			report.RoundSize(float64(r.OneMemory.Used)), report.RoundSize(float64(r.AllMemory.Used)))
	}
	if ctx.Err() == nil { // else it was broken off
		i.manyRuns = append(i.manyRuns, r)
	}
	return r.ImageOutcome
}

func (i *imageCase) restoreMany(ctx context.Context, r *report.ManyRun) (err error) {
	w, err := newWorkload(i.shape())
	if err != nil {
		return err
	}
	k, err := i.c.Run(ctx, harness.RunSpec{ID: i.id(), GPUs: []int{0}, OwnNetwork: true, Args: append([]string{"gpuwork"}, w.args()...)})
	if err != nil {
		return err
	}
	if err := countsInside(ctx, k, w.port, "101"); err != nil {
		return err
	}
	const ref = "gpuckpt.test/bench:many"
	if err := i.c.Gpuckpt(ctx, &struct{}{}, "checkpoint", k.ID, "--image", ref); err != nil {
		return err
	}
	if err := k.Remove(ctx); err != nil {
		return err
	}
	// The first one has ctr unpack the image.
	first, err := i.runOf(ctx, ref, 0, 1, nil)
	if err != nil {
		return err
	}
	if err := first[0].Remove(ctx); err != nil {
		return err
	}
	if _, err := i.cold(); err != nil {
		return err
	}
	one, err := i.runOf(ctx, ref, 1, 1, func(took float64, m report.MemoryPeak) { r.One, r.OneMemory = took, m })
	if err == nil {
		r.OneDriver, r.OnePhases, err = longestDriver(i.c, one)
	}
	if err != nil {
		return err
	}
	if err := errors.Join(countsInside(ctx, one[0], w.port, "102"), one[0].Remove(ctx)); err != nil {
		return err
	}
	if _, err := i.cold(); err != nil {
		return err
	}
	all, err := i.runOf(ctx, ref, r.GPUs, r.Count, func(took float64, m report.MemoryPeak) { r.All, r.AllMemory = took, m })
	if err == nil {
		r.AllDriver, r.AllPhases, err = longestDriver(i.c, all)
	}
	for _, k := range all {
		if err == nil {
			err = countsInside(ctx, k, w.port, "102")
		}
	}
	return err
}

// longestDriver returns the longest that the driver took to restore one of the containers, in seconds, and the
// steps of that restore.
func longestDriver(c *harness.Containerd, containers []*harness.Container) (longest float64, phases []images.Phase, err error) {
	for _, k := range containers {
		line, err := c.Timeline(k.ID)
		if err != nil {
			return 0, nil, err
		}
		if took := driverSeconds(line.Phases); took >= longest {
			longest, phases = took, line.Phases
		}
	}
	return longest, phases, nil
}

// runOf starts so many containers of an image at once, on GPUs in turns, and measures it.
func (i *imageCase) runOf(ctx context.Context, ref string, gpus, count int, measured func(float64, report.MemoryPeak)) ([]*harness.Container, error) {
	started := make([]*harness.Container, count)
	ids := make([]string, count)
	for n := range ids {
		ids[n] = i.id()
	}
	sampler, err := startSampler()
	if err != nil {
		return nil, err
	}
	took, err := timed(func() error {
		group, ctx := errgroup.WithContext(ctx)
		for n, id := range ids {
			group.Go(func() (err error) {
				started[n], err = i.c.Run(ctx, harness.RunSpec{
					ID: id, Image: ref, GPUs: []int{n % max(1, gpus)}, OwnNetwork: true, Args: []string{"gpuwork"},
					Annotations: map[string]string{annotations.Restore: "true"},
				})
				return err
			})
		}
		return group.Wait()
	})
	peak, serr := sampler.stop()
	if err := errors.Join(err, serr); err != nil {
		return nil, fmt.Errorf("run %d containers of %s at once: %w", count, ref, err)
	}
	if measured != nil {
		measured(took, peak)
	}
	return started, nil
}

// countsInside is counts, for a container with a network of its own.
func countsInside(ctx context.Context, k *harness.Container, port int, want string) error {
	pid, err := k.Pid(ctx)
	if err != nil {
		return err
	}
	for _, question := range []struct{ ask, want string }{{"verify", "bad=0"}, {"count", want}} {
		answer, err := askInside(ctx, pid, port, question.ask)
		if err == nil && answer != question.want {
			err = fmt.Errorf("it answers %q to %q, it should be %q", answer, question.ask, question.want)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", k.ID, err)
		}
	}
	return nil
}

// askInside asks a program on the loopback interface of its own network.
func askInside(ctx context.Context, pid, port int, question string) (answer string, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked: the thread ends, which is in another network
		var ns int
		if ns, err = unix.Open(fmt.Sprintf("/proc/%d/ns/net", pid), unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
			return
		}
		defer unix.Close(ns)
		if err = unix.Setns(ns, unix.CLONE_NEWNET); err == nil {
			answer, err = harness.Ask(ctx, net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), question)
		}
	}()
	<-done
	return answer, err
}
