// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/containerd/typeurl/v2"
	"golang.org/x/sync/errgroup"

	"github.com/gpuckpt/gpuckpt/bench/report"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/internal/operation/oplog"
	"github.com/gpuckpt/gpuckpt/internal/operation/sequence"
)

// containerSubject is a container, checkpointed through containerd's task API
// into a directory: what ctr and the kubelet do, without their archives. The
// client pauses first, as they do, but for a container that our shim is to leave
// running.
type containerSubject struct {
	c      *harness.Containerd
	k      *harness.Container
	images string
	// byHand says that the CUDA steps are taken here, around runc's shim.
	byHand bool
	// timeline says that the shim leaves one.
	timeline bool
	workload workload
}

// startContainer runs a workload with the shim of a method. memoryLimit is the
// cgroup's, in bytes, 0 for none.
func startContainer(ctx context.Context, c *harness.Containerd, method, id, images string, w workload, memoryLimit uint64) (*containerSubject, error) {
	cuda := w.Content != report.ContentNone
	spec := harness.RunSpec{ID: id, GPUs: w.gpus(), Port: w.port, Args: append([]string{"gpuwork"}, w.args()...), MemoryLimit: memoryLimit}
	if method == report.Stock {
		spec.Runtime = harness.RuncRuntime
		// This project's shim finds CRIU settings that work on the machine;
		// runc's must be told.
		spec.Annotations = map[string]string{"org.criu.config": c.CRIUConfigPath()}
	}
	if method == report.Interposer {
		spec.Annotations = map[string]string{annotations.Interposer: "true"}
	}
	if w.Shm > 0 {
		spec.Amend = []oci.SpecOpts{oci.WithDevShmSize(int64(w.Shm>>10) + 1<<10)}
	}
	k, err := c.Run(ctx, spec)
	if err != nil {
		return nil, err
	}
	return &containerSubject{
		c: c, k: k, images: images, workload: w,
		byHand: method == report.Stock && cuda, timeline: isOurs(method) && cuda,
	}, nil
}

// load finds the container's task.
func (s *containerSubject) load(ctx context.Context) (client.Task, error) {
	container, err := s.c.Client().LoadContainer(ctx, s.k.ID)
	if err != nil {
		return nil, fmt.Errorf("load the container: %w", err)
	}
	task, err := container.Task(ctx, nil)
	if err != nil {
		return nil, fmt.Errorf("load the task: %w", err)
	}
	return task, nil
}

func (s *containerSubject) checkpoint(ctx context.Context, leave bool) (op report.Operation, err error) {
	task, err := s.load(ctx)
	if err != nil {
		return op, err
	}
	opts, err := typeurl.MarshalAnyToProto(&options.CheckpointOptions{Exit: !leave, ImagePath: s.images})
	if err != nil {
		return op, fmt.Errorf("encode the options: %w", err)
	}
	cgroup := memoryCgroup(int(task.Pid()))
	watch := startWatch()
	if s.byHand {
		if err := s.cuda(ctx, watch, int(task.Pid()), "lock", "checkpoint"); err != nil {
			return op, err
		}
	}
	// A shim of ours that is asked for a checkpoint pauses by itself, and lets the
	// program go on when that may be.
	alone := leave && s.timeline
	if !alone {
		pausing := time.Now()
		if err := watch.time("pause", func() error { return task.Pause(ctx) }); err != nil {
			return op, err
		}
		op.Pause = time.Since(pausing).Seconds()
	}
	err = watch.time("dump", func() error {
		_, err := s.c.Client().TaskService().Checkpoint(ctx, &tasks.CheckpointTaskRequest{ContainerID: s.k.ID, Options: opts})
		return err
	})
	if err != nil {
		return op, err
	}
	op.Seconds = watch.seconds()
	op.CgroupPeak = cgroup.peak()
	op.Phases = watch.phases
	if s.timeline {
		line, err := s.readTimeline()
		if err != nil {
			return op, err
		}
		op.Phases = line.Phases
		op.Covered = covered(line.Phases, op.Seconds-op.Pause)
	}
	if s.timeline || s.byHand {
		op.Driver = driverSeconds(op.Phases)
	}
	if !leave {
		return op, nil
	}
	if alone {
		for _, p := range op.Phases {
			if p.Name == "resume" {
				op.Down = (p.Start + p.Took).Seconds()
			}
		}
		if op.Down == 0 {
			return op, errors.New("the timeline does not say when the program went on")
		}
		return op, nil
	}
	if err := watch.time("resume", func() error { return task.Resume(ctx) }); err != nil {
		return op, err
	}
	if s.byHand {
		if err := s.cuda(ctx, watch, int(task.Pid()), "restore", "unlock"); err != nil {
			return op, err
		}
		op.Phases = watch.phases
	}
	op.Down = watch.seconds()
	return op, nil
}

// end ends the task; the container and its files stay.
func (s *containerSubject) end(ctx context.Context) error {
	if err := s.k.Kill(ctx); err != nil {
		return err
	}
	_, err := s.c.Ctr(ctx, "tasks", "delete", s.k.ID)
	return err
}

func (s *containerSubject) restore(ctx context.Context) (op report.Operation, err error) {
	container, err := s.c.Client().LoadContainer(ctx, s.k.ID)
	if err != nil {
		return op, fmt.Errorf("load the container: %w", err)
	}
	output := cio.LogFile(filepath.Join(s.c.Dir(), "logs", s.k.ID+".log"))
	watch := startWatch()
	var task client.Task
	err = watch.time("create", func() error {
		task, err = container.NewTask(ctx, output, client.WithRestoreImagePath(s.images))
		return err
	})
	if err != nil {
		return op, err
	}
	created := watch.seconds()
	if err := watch.time("start", func() error { return task.Start(ctx) }); err != nil {
		return op, err
	}
	if s.byHand {
		if err := s.cuda(ctx, watch, int(task.Pid()), "restore", "unlock"); err != nil {
			return op, err
		}
	}
	op.Seconds = watch.seconds()
	op.CgroupPeak = memoryCgroup(int(task.Pid())).peak()
	op.Phases = watch.phases
	if s.timeline {
		line, err := s.readTimeline()
		if err != nil {
			return op, err
		}
		// The shim counts from Start; here Create comes before it.
		op.Phases = watch.phases[:1]
		for _, p := range line.Phases {
			p.Start += time.Duration(created * float64(time.Second))
			op.Phases = append(op.Phases, p)
		}
		op.Covered = covered(op.Phases, op.Seconds)
	}
	if s.timeline || s.byHand {
		op.Driver = driverSeconds(op.Phases)
	}
	return op, nil
}

func (s *containerSubject) remove(ctx context.Context) error { return s.k.Remove(ctx) }

func (s *containerSubject) logs() string {
	return fmt.Sprintf("the workload's output: %s\nthe end of containerd's log:\n%s", s.k.Logs(), s.c.LogTail(2000))
}

// byHandPhase names a step of "gpuckpt cuda" in a timeline.
func byHandPhase(step string) string {
	if step == "checkpoint" || step == "restore" {
		return "driver " + step
	}
	return step
}

// cuda takes the CUDA steps by hand, one after the other, each as a phase. init
// is the container's first process.
func (s *containerSubject) cuda(ctx context.Context, watch *stopwatch, init int, steps ...string) error {
	for _, step := range steps {
		if err := watch.time(byHandPhase(step), func() error { return s.cudaStep(ctx, init, step) }); err != nil {
			return err
		}
	}
	return nil
}

// cudaStep runs "gpuckpt cuda STEP" for each CUDA process of the container, all
// at once.
func (s *containerSubject) cudaStep(ctx context.Context, init int, step string) error {
	pids := []int{init}
	if s.workload.Procs > 1 { // init is their parent and has no CUDA
		var err error
		if pids, err = harness.Children(init); err != nil {
			return err
		}
	}
	program, err := s.c.Bins().Path("gpuckpt")
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	for _, pid := range pids {
		group.Go(func() error {
			cmd := exec.CommandContext(ctx, program, "cuda", "--action", step, "--pid", strconv.Itoa(pid))
			cmd.Env = append(s.c.HostEnv(), "PATH="+s.c.Bins().SearchPath())
			if out, err := cmd.CombinedOutput(); err != nil {
				return fmt.Errorf("gpuckpt cuda %s %d: %w: %s", step, pid, err, strings.TrimSpace(string(out)))
			}
			return nil
		})
	}
	return group.Wait()
}

// readTimeline reads the phases of the shim's last operation on the container.
func (s *containerSubject) readTimeline() (line oplog.Entry, err error) {
	path := filepath.Join(s.c.Dir(), "state", "io.containerd.runtime.v2.task", s.c.Namespace(), s.k.ID, sequence.TimelineName)
	data, err := os.ReadFile(path)
	if err != nil {
		return line, fmt.Errorf("read the timeline: %w", err)
	}
	if err := json.Unmarshal(data, &line); err != nil {
		return line, fmt.Errorf("read the timeline %s: %w", path, err)
	}
	return line, nil
}
