// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/typeurl/v2"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// envSoak is how long TestSoak goes on, a Go duration.
const envSoak = "GPUCKPT_TEST_SOAK"

// The bounds. A wait is that of one operation among as many as there are containers: on a machine that
// does much else it may be longer, but not far from that of the others.
const (
	longestWait = 2 * time.Minute
	ofTheMedian = 10
	patience    = 10 * time.Minute // of one that is refused and asks again
	// What a machine with nothing to do may have more of than after the first round.
	moreMemory      = 64 << 20 // bytes of containerd's
	moreDescriptors = 20
	moreThreads     = 20
	logPerOperation = 16 << 10 // bytes of containerd's log
)

// soak is one run.
type soak struct {
	t      *testing.T
	c      *harness.Containerd
	result *harness.TestResult
	all    []*harness.Container

	// short says that memory is too short for all at once: what is refused leaves the container as it
	// was, and is asked for again.
	short bool

	mu         sync.Mutex
	waits      map[string][]time.Duration // by operation
	operations int
	refused    int
}

// Many containers go through every operation at once, in rounds, every third one with little memory
// for GPU state. Each program counts on, and what is left after a round does not grow.
func TestSoak(t *testing.T) {
	result := results.Add(t)
	lasts, n := time.Second, 3
	if text := os.Getenv(envSoak); text != "" {
		var err error
		if lasts, err = time.ParseDuration(text); err != nil {
			t.Fatal(err)
		}
		n = 20
	}
	s := &soak{t: t, c: session.Own(t, harness.Options{}), result: result, waits: make(map[string][]time.Duration)}
	var first, last footprint
	rounds := 0
	for began := time.Now(); rounds < 2 || time.Since(began) < lasts; rounds++ {
		s.round(rounds, n)
		last = s.footprint()
		if rounds == 0 {
			first = last
		}
		for name, value := range last.values() {
			result.Number(fmt.Sprintf("round%04d_%s", rounds+1, name), value)
		}
		t.Logf("round %d, %v: %+v", rounds+1, time.Since(began), last)
	}
	result.Number("rounds_count", float64(rounds))
	result.Number("operations_count", float64(s.operations))
	result.Number("refused_count", float64(s.refused))
	for what, waits := range s.waits {
		slices.Sort(waits)
		longest, median := waits[len(waits)-1], waits[len(waits)/2]
		t.Logf("%s: %d times, median %v, longest %v", what, len(waits), median, longest)
		result.Number("wait_"+what+"_median_seconds", median.Seconds())
		result.Number("wait_"+what+"_longest_seconds", longest.Seconds())
		if bound := max(longestWait, ofTheMedian*median); longest > bound {
			t.Errorf("%s took %v, more than %v", what, longest, bound)
		}
	}
	for _, bound := range []struct {
		what            string
		first, now, may float64
	}{
		{"bytes of containerd's memory", first.memory, last.memory, moreMemory},
		{"descriptors of containerd", first.descriptors, last.descriptors, moreDescriptors},
		{"threads of containerd", first.threads, last.threads, moreThreads},
		{"processes", first.processes, last.processes, 0},
		{"mounts", first.mounts, last.mounts, 0},
		{"cgroups", first.cgroups, last.cgroups, 0},
		{"records", 0, last.records, 0},
		{"bytes of staging memory", first.staging, last.staging, 16 << 20},
		{"bytes of log", 0, last.log, logPerOperation * float64(s.operations)},
	} {
		if bound.now > bound.first+bound.may {
			t.Errorf("%s: %.0f after the first round, %.0f after %d rounds, may grow by %.0f", bound.what, bound.first, bound.now, rounds, bound.may)
		}
	}
}

// round starts containers, has each operation done on all of them at once, and removes them.
func (s *soak) round(number, n int) {
	t := s.t
	t.Helper()
	settings := ""
	s.short = number%3 == 2
	if s.short {
		settings = s.c.Staging(fmt.Sprintf("short%d", n), "memory_limit = 67108864\nwhen_short = \"write-through\"")
	}
	if err := s.c.ConfigureShim(settings); err != nil {
		t.Fatal(err)
	}
	base := harness.DiskDir(t)
	defer os.RemoveAll(base)
	dir := func(k *harness.Container) string { return filepath.Join(base, k.ID) }
	s.all = make([]*harness.Container, n)
	for i := range s.all {
		spec := harness.Gpuwork(t, harness.RunSpec{ID: fmt.Sprintf("soak-%d-%d", number, i), GPUs: []int{0}}, "counter")
		k, err := s.c.Run(t.Context(), spec)
		if err != nil {
			t.Fatal(err)
		}
		s.all[i] = k
	}
	s.count("101")
	s.each("checkpoint", func(ctx context.Context, k *harness.Container) error {
		return s.checkpoint(ctx, k, dir(k))
	})
	s.count("102")
	for _, operation := range []string{"suspend", "resume", "suspend", "resume"} {
		s.each(operation, func(ctx context.Context, k *harness.Container) error {
			_, err := s.c.OutputEnv(ctx, []string{"CONTAINERD_ADDRESS=" + s.c.Address(), "CONTAINERD_NAMESPACE=" + s.c.Namespace()}, "gpuckpt", operation, k.ID)
			return err
		})
	}
	s.count("103")
	s.each("kill", func(ctx context.Context, k *harness.Container) error {
		if err := k.Kill(ctx); err != nil {
			return err
		}
		_, err := s.c.Ctr(ctx, "tasks", "delete", k.ID)
		return err
	})
	s.each("restore", func(ctx context.Context, k *harness.Container) error { return s.restore(ctx, k, dir(k)) })
	s.count("102") // as at the checkpoint
	one := s.all[0]
	s.all = s.all[:1]
	for i := range 4 { // one container again and again, beside nobody
		again := filepath.Join(base, "again"+strconv.Itoa(i))
		s.each("checkpoint_alone", func(ctx context.Context, k *harness.Container) error {
			return errors.Join(s.checkpoint(ctx, k, again), os.RemoveAll(again))
		})
		s.count(strconv.Itoa(103 + i))
	}
	s.all = []*harness.Container{one}
	list, err := s.c.Client().Containers(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range list {
		if err := s.c.Remove(t.Context(), k.ID()); err != nil {
			t.Fatal(err)
		}
	}
}

// each does something with all containers at once, and notes how long each one waits.
func (s *soak) each(what string, do func(context.Context, *harness.Container) error) {
	s.t.Helper()
	var wait sync.WaitGroup
	errs := make([]error, len(s.all))
	for i, k := range s.all {
		wait.Go(func() {
			began := time.Now()
			if err := s.untilDone(what, k, do); err != nil {
				errs[i] = fmt.Errorf("%s %s: %w", what, k.ID, err)
			}
			s.mu.Lock()
			defer s.mu.Unlock()
			s.waits[what] = append(s.waits[what], time.Since(began))
			s.operations++
		})
	}
	wait.Wait()
	if err := errors.Join(errs...); err != nil {
		s.t.Fatalf("%v\n%s", err, s.c.LogTail(3000))
	}
}

// untilDone does something with a container, where memory is short again and again.
func (s *soak) untilDone(what string, k *harness.Container, do func(context.Context, *harness.Container) error) error {
	ctx := s.t.Context()
	for end := time.Now().Add(patience); ; time.Sleep(100 * time.Millisecond) {
		err := do(ctx, k)
		if err == nil || !s.short || what == "answer" || time.Now().After(end) {
			return err
		}
		s.mu.Lock()
		s.refused++
		s.mu.Unlock()
		switch status, serr := k.Status(ctx); {
		case what == "restore": // of which nothing is left but the task
			_, _ = s.c.Ctr(ctx, "tasks", "delete", "--force", k.ID)
		case what == "checkpoint" && serr == nil && status == client.Paused: // as the error says
			if _, err := s.c.Ctr(ctx, "tasks", "resume", k.ID); err != nil {
				return err
			}
		}
	}
}

// count wants each program's next count.
func (s *soak) count(want string) {
	s.t.Helper()
	s.each("answer", func(ctx context.Context, k *harness.Container) error {
		if got, err := k.Ask(ctx, "count"); err != nil || got != want {
			return fmt.Errorf("count is %q, want %q: %w", got, want, err)
		}
		return nil
	})
}

// checkpoint has the shim write a checkpoint, without ctr, which makes an image of it besides.
func (s *soak) checkpoint(ctx context.Context, k *harness.Container, dir string) error {
	opts, err := typeurl.MarshalAnyToProto(&options.CheckpointOptions{ImagePath: dir})
	if err != nil {
		return err
	}
	_, err = s.c.Client().TaskService().Checkpoint(ctx, &tasks.CheckpointTaskRequest{ContainerID: k.ID, Options: opts})
	return err
}

func (s *soak) restore(ctx context.Context, k *harness.Container, dir string) error {
	container, err := s.c.Client().LoadContainer(ctx, k.ID)
	if err != nil {
		return err
	}
	task, err := container.NewTask(ctx, cio.LogFile(filepath.Join(s.c.Dir(), "logs", k.ID+".log")), client.WithRestoreImagePath(dir))
	if err != nil {
		return err
	}
	return task.Start(ctx)
}

// footprint is what is there while no container is, in bytes and pieces.
type footprint struct {
	memory, slab, staging, log                                float64
	descriptors, threads, processes, mounts, cgroups, records float64
}

func (f footprint) values() map[string]float64 {
	return map[string]float64{
		"containerd_bytes": f.memory, "slab_bytes": f.slab, "staging_bytes": f.staging, "log_bytes": f.log,
		"descriptors_count": f.descriptors, "threads_count": f.threads, "processes_count": f.processes, "mounts_count": f.mounts,
		"cgroups_count": f.cgroups, "records_count": f.records,
	}
}

// footprint measures when what ends by itself has had its time.
func (s *soak) footprint() (f footprint) {
	s.t.Helper()
	fail := func(err error) {
		if err != nil {
			s.t.Fatal(err)
		}
	}
	harness.Within(s.t, "the shims end", func() bool { return len(s.ours()) == 0 })
	memory, err := harness.ProcessMemory(s.c.Pid())
	fail(err)
	threads, err := harness.Threads(s.c.Pid())
	fail(err)
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", s.c.Pid()))
	fail(err)
	mounts, err := harness.MountsUnder(s.c.Dir())
	fail(err)
	f.memory, f.threads, f.descriptors = float64(memory.RSS), float64(len(threads)), float64(len(files))
	f.processes, f.mounts, f.log = float64(len(s.ours())), float64(len(mounts)), float64(len(s.c.Log()))
	f.slab = slab(s.t)
	containers, err := harness.CgroupsOf(s.c.Cgroup())
	fail(err)
	for _, dir := range containers {
		fail(filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
			if err == nil && d.IsDir() && strings.HasPrefix(d.Name(), "soak-") {
				f.cgroups++
			}
			return err
		}))
	}
	staging, err := harness.CgroupsOf(s.c.StagingCgroup("staging"))
	fail(err)
	for _, dir := range staging {
		if text, err := os.ReadFile(filepath.Join(dir, "memory.usage_in_bytes")); err == nil { // version 1
			f.staging, _ = strconv.ParseFloat(strings.TrimSpace(string(text)), 64)
		} else if text, err := os.ReadFile(filepath.Join(dir, "memory.current")); err == nil {
			f.staging, _ = strconv.ParseFloat(strings.TrimSpace(string(text)), 64)
		}
	}
	records, err := filepath.Glob(filepath.Join(s.c.Records(), "*", "*"))
	fail(err)
	f.records = float64(len(records))
	return f
}

// ours are the processes that containerd has started and that are still there: shims, and what they
// have started.
func (s *soak) ours() (pids []int) {
	files, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, file := range files {
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		environ, _ := os.ReadFile(file) // it may have ended
		if err == nil && pid != s.c.Pid() && pid != os.Getpid() && strings.Contains(string(environ), "GPUCKPT_CONFIG="+s.c.ShimConfigPath()) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// slab is the kernel's own memory. It is the machine's, so it is printed and not bounded.
func slab(t *testing.T) float64 {
	t.Helper()
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(line); fields[0] == "Slab:" {
			kib, _ := strconv.ParseFloat(fields[1], 64)
			return kib * 1024
		}
	}
	return 0
}
