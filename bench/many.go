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

	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// manyRun is containers of one checkpoint image that are restored at once, beside one alone. The
// image is unpacked before. Times are the client's, in seconds.
type manyRun struct {
	imageOutcome
	// Count containers are restored at once, on GPUs GPUs in turns.
	Count int `json:"count"`
	GPUs  int `json:"gpus"`
	// One is ctr starting one of them, All until the last of all runs.
	One float64 `json:"oneSeconds"`
	All float64 `json:"allSeconds"`
	// OneMemory and AllMemory are what that takes of the machine's memory. The software GPU's memory is
	// the machine's too.
	OneMemory memoryPeak `json:"oneMemory"`
	AllMemory memoryPeak `json:"allMemory"`
}

// name is the run's for people.
func (r manyRun) name() string {
	return fmt.Sprintf("checkpoint image of %s, %d at once, round %d", formatSize(r.Size), r.Count, r.Round)
}

// manyAtOnce makes such a run. Each container has a network of its own, since all have one port.
func (i *imageCase) manyAtOnce(ctx context.Context, o imageOutcome) imageOutcome {
	r := manyRun{imageOutcome: o, Count: i.many, GPUs: max(1, min(i.gpus, i.many))}
	i.once(ctx, &r.imageOutcome, func(ctx context.Context) error { return i.restoreMany(ctx, &r) })
	if r.Verified {
		i.b.logf("%s: one %s, all %s, memory %s and %s, verified", r.name(), seconds(r.One), seconds(r.All),
			roundSize(float64(r.OneMemory.Used)), roundSize(float64(r.AllMemory.Used)))
	}
	if ctx.Err() == nil { // else it was broken off
		i.manyRuns = append(i.manyRuns, r)
	}
	return r.imageOutcome
}

func (i *imageCase) restoreMany(ctx context.Context, r *manyRun) (err error) {
	w, err := newWorkload(i.shape())
	if err != nil {
		return err
	}
	k, err := i.c.Run(ctx, harness.RunSpec{ID: i.id(), GPUs: []int{0}, OwnNetwork: true, Args: append([]string{"gpuwork"}, w.args()...)})
	if err != nil {
		return err
	}
	if err := i.countsInside(ctx, k, w.port, "101"); err != nil {
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
	one, err := i.runOf(ctx, ref, 1, 1, func(took float64, m memoryPeak) { r.One, r.OneMemory = took, m })
	if err != nil {
		return err
	}
	if err := errors.Join(i.countsInside(ctx, one[0], w.port, "102"), one[0].Remove(ctx)); err != nil {
		return err
	}
	if _, err := i.cold(); err != nil {
		return err
	}
	all, err := i.runOf(ctx, ref, r.GPUs, r.Count, func(took float64, m memoryPeak) { r.All, r.AllMemory = took, m })
	for _, k := range all {
		if err == nil {
			err = i.countsInside(ctx, k, w.port, "102")
		}
	}
	return err
}

// runOf starts so many containers of an image at once, on GPUs in turns, and measures it.
func (i *imageCase) runOf(ctx context.Context, ref string, gpus, count int, measured func(float64, memoryPeak)) ([]*harness.Container, error) {
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
func (i *imageCase) countsInside(ctx context.Context, k *harness.Container, port int, want string) error {
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

// manyTable compares restores at once with one.
func manyTable(runs []manyRun) table {
	t := table{columns: []string{"GPU memory", "at once", "GPUs", "one", "all", "", "at most 1.5 ×", "memory, one", "memory, all"}}
	for _, r := range runs {
		if !r.Verified {
			continue
		}
		kept := "kept"
		if r.All > 1.5*r.One {
			kept = "missed"
		}
		t.add(r.shape().String(), fmt.Sprint(r.Count), fmt.Sprint(r.GPUs), seconds(r.One), seconds(r.All), fmt.Sprintf("%.2f×", r.All/r.One), kept,
			roundSize(float64(r.OneMemory.Used)), roundSize(float64(r.AllMemory.Used)))
	}
	return t
}
