// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// limit bounds each wait of the tests for something that must come. No machine under load reaches it.
const limit = time.Minute

// lane is a container in which one fault after the other is made. Its program counts on the GPU.
type lane struct {
	k *harness.Container
	// dir has the lane's checkpoints.
	dir string
	// last is the newest checkpoint that is good, taken when the program had counted to lastCount.
	last             string
	count, lastCount int
	taken            int
	// spill is the directory of the spill of a cell, "" for none.
	spill string
	// disk is one that a cell breaks, nil for none.
	disk *disk
	// pid is the program's, shim its shim's.
	pid, shim int
	// way is that of its GPU memory.
	way Way
	// other is its spec for another GPU, with which the next restore is made; nil where the way is not Other.
	other *specs.Spec
	// life counts the containers of the lane.
	life int
	// broken says that a fault has left what no next one can begin with.
	broken bool
	// lost says that no next one could be started.
	lost bool
}

// newLane starts a container, and takes a checkpoint that all can go back to.
func newLane(t testing.TB, id string, way Way) *lane {
	t.Helper()
	l := &lane{dir: filepath.Join(shared.Dir(), id), count: 100, way: way}
	if err := l.mount(t); err != nil {
		t.Fatal(err)
	}
	// It outlives the test, and goes with its containerd.
	spec, workload := harness.RunSpec{ID: id, GPUs: []int{0}}, []string{"counter"}
	switch way {
	case Kept: // pieces of memory that the interposer makes, as large as such are at least
		spec.Annotations = map[string]string{annotations.Interposer: "true"}
		workload = []string{"pattern", "--bytes", "8M", "--chunks", "2"}
	case Window: // more than goes through at a time
		workload = []string{"pattern", "--bytes", "64M", "--chunks", "2"}
	case Other: // which says on which GPU it is
		workload = []string{"pattern", "--bytes", "2M", "--chunks", "1"}
	}
	k, err := shared.Run(session.Context(), harness.Gpuwork(t, spec, workload...))
	if err != nil {
		t.Fatal(errors.Join(err, unix.Unmount(l.dir, unix.MNT_DETACH)))
	}
	l.k = k
	l.counts(t)
	l.found(t)
	if way == Other {
		spec.ID, spec.Port, spec.GPUs = id+"-spec", k.Port, []int{1}
		l.other = specOf(t, harness.Gpuwork(t, spec, workload...), id)
		before := l.k.Answer(t, "info")
		defer func() {
			if now := l.k.Answer(t, "info"); now == before {
				t.Fatalf("it is on the same GPU: %s", now)
			}
		}()
	}
	l.cycle(t)
	files, err := filepath.Glob(filepath.Join(l.last, "gpu-*"))
	if err != nil {
		t.Fatal(err)
	}
	if through := strings.Contains(shared.Log(), "written through to the disk"); way == Window && !through {
		t.Fatalf("nothing is written through to the disk:\n%s", l.log())
	}
	if (way == Driver) != (len(files) == 0) {
		t.Fatalf("the way is %q, and the checkpoint has the files %q", way, files)
	}
	return l
}

// mount makes the lane's directory: in memory or, for the way through a window, on a disk. It has little
// room, so that it can be filled up.
func (l *lane) mount(t testing.TB) error {
	if err := os.MkdirAll(l.dir, 0o700); err != nil {
		return err
	}
	size := int64(64 << 20)
	if session.GPU.Kind == harness.RealGPU {
		size = 4 << 30
	}
	if l.way != Window {
		return unix.Mount("tmpfs", l.dir, "tmpfs", 0, fmt.Sprintf("size=%d", size))
	}
	file := filepath.Join(harness.DiskDir(t), "disk") // which goes when it is unmounted
	for _, args := range [][]string{
		{"truncate", "--size", strconv.FormatInt(4*size, 10), file},
		{"mkfs.ext4", "-q", file},
		{"mount", "-t", "ext4", "-o", "loop", file, l.dir},
	} {
		if text, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%q: %w: %s", args, err, text)
		}
	}
	return nil
}

// specOf is the spec that a container has when it is made so, with the cgroup of another.
func specOf(t testing.TB, like harness.RunSpec, id string) *specs.Spec {
	t.Helper()
	k, err := shared.Create(t.Context(), like)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := k.Remove(t.Context()); err != nil {
			t.Error(err)
		}
	}()
	container, err := shared.Client().LoadContainer(t.Context(), k.ID)
	if err != nil {
		t.Fatal(err)
	}
	spec, err := container.Spec(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	spec.Linux.CgroupsPath = filepath.Join(filepath.Dir(spec.Linux.CgroupsPath), id)
	return spec
}

// counts checks that the program counts on, and with the right number.
func (l *lane) counts(t testing.TB) {
	t.Helper()
	l.count++
	l.k.Expect(t, "count", strconv.Itoa(l.count))
	if l.way == Kept || l.way == Window || l.way == Other {
		l.k.Expect(t, "verify", "bad=0")
	}
}

// execs checks that a process can be exec'd into the container: none waits at the gate for ever.
func (l *lane) execs(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	err := func() error {
		container, err := shared.Client().LoadContainer(ctx, l.k.ID)
		if err != nil {
			return err
		}
		task, err := container.Task(ctx, nil)
		if err != nil {
			return err
		}
		spec, err := container.Spec(ctx)
		if err != nil {
			return err
		}
		spec.Process.Args = []string{"gpuwork"} // which lists what it can do
		l.taken++
		process, err := task.Exec(ctx, "exec-"+strconv.Itoa(l.taken), spec.Process, cio.NullIO)
		if err != nil {
			return err
		}
		exit, err := process.Wait(ctx)
		if err != nil {
			return err
		}
		if err := process.Start(ctx); err != nil {
			return err
		}
		select {
		case <-exit:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		_, err = process.Delete(ctx)
		return err
	}()
	if err != nil {
		t.Fatalf("a process that is exec'd: %v", err)
	}
}

// found notes who the program and its shim are.
func (l *lane) found(t testing.TB) {
	t.Helper()
	l.pid = l.k.MustPid(t)
	shim, err := harness.Parent(l.pid)
	if err != nil {
		t.Fatal(err)
	}
	l.shim = shim
}

// up brings the container back from the last good checkpoint, unless it runs.
func (l *lane) up(t testing.TB) {
	t.Helper()
	if status, err := l.k.Status(t.Context()); err == nil && status == client.Running {
		return
	}
	l.gone(t)
	if err := l.restore(t.Context(), shared.Client(), l.last); err != nil {
		t.Fatalf("restore of the last checkpoint: %v", err)
	}
	l.count = l.lastCount
	l.found(t)
	l.counts(t)
}

// cycle takes a checkpoint that ends the container, and restores it.
func (l *lane) cycle(t testing.TB) {
	t.Helper()
	dir := l.newDir()
	if err := l.checkpoint(t.Context(), shared.Client(), dir, true); err != nil {
		t.Fatalf("the next checkpoint: %v", err)
	}
	l.good(t, dir)
	l.gone(t)
	l.up(t)
}

// again ends the container, and brings it back with its spec as it is now.
func (l *lane) again(t testing.TB) {
	t.Helper()
	if err := l.kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	l.gone(t)
	l.up(t)
}

// hook gives the container's spec the hook of a cell, and no other. It counts from the next task on.
func (l *lane) hook(t testing.TB, c Cell) {
	t.Helper()
	container, err := shared.Client().LoadContainer(t.Context(), l.k.ID)
	if err != nil {
		t.Fatal(err)
	}
	spec, err := container.Spec(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	maps.DeleteFunc(spec.Annotations, func(key, _ string) bool { return strings.HasPrefix(key, annotations.HookPrefix) })
	if name := map[string]string{"tell before": "before-checkpoint", "tell restored": "after-restore"}[c.Place.Step]; name != "" {
		name = annotations.HookPrefix + name
		if spec.Annotations == nil {
			spec.Annotations = make(map[string]string)
		}
		spec.Annotations[name] = "gpuwork exit 3"
		if c.Place.Step == "tell restored" {
			spec.Annotations[name+".on-failure"] = "refuse"
		}
		if c.Fault.Name == "hook-hangs" {
			spec.Annotations[name], spec.Annotations[annotations.HookPrefix+"timeout"] = "gpuwork sleep", "300ms"
		}
	}
	if err := container.Update(t.Context(), client.UpdateContainerOpts(client.WithSpec(spec))); err != nil {
		t.Fatal(err)
	}
}

// newDir is where the next checkpoint goes.
func (l *lane) newDir() string {
	l.taken++
	return filepath.Join(l.dir, strconv.Itoa(l.taken))
}

// dirOfCell is newDir on the disk that the cell breaks, if it does.
func (l *lane) dirOfCell() string {
	dir := l.newDir()
	if l.disk != nil {
		dir = filepath.Join(l.disk.Dir, filepath.Base(dir))
	}
	return dir
}

// good makes a checkpoint the one to go back to.
func (l *lane) good(t testing.TB, dir string) {
	t.Helper()
	if _, err := images.ReadMetadata(dir); err != nil {
		t.Fatal(err)
	}
	if l.last != "" {
		if err := os.RemoveAll(l.last); err != nil {
			t.Fatal(err)
		}
	}
	l.last, l.lastCount = dir, l.count
}

func (l *lane) checkpoint(ctx context.Context, c *client.Client, dir string, exit bool) error {
	opts, err := typeurl.MarshalAnyToProto(&options.CheckpointOptions{ImagePath: dir, Exit: exit})
	if err != nil {
		return err
	}
	_, err = c.TaskService().Checkpoint(ctx, &tasks.CheckpointTaskRequest{ContainerID: l.k.ID, Options: opts})
	return err
}

func (l *lane) restore(ctx context.Context, c *client.Client, dir string) error {
	container, err := c.LoadContainer(ctx, l.k.ID)
	if err != nil {
		return err
	}
	if l.other != nil { // from one GPU to the other, and back
		last, err := container.Spec(ctx)
		if err == nil {
			err = container.Update(ctx, client.UpdateContainerOpts(client.WithSpec(l.other)))
		}
		if err != nil {
			return err
		}
		l.other = last
	}
	task, err := container.NewTask(ctx, cio.LogFile(filepath.Join(shared.Dir(), "logs", l.k.ID+".log")), client.WithRestoreImagePath(dir))
	if err != nil {
		return err
	}
	return task.Start(ctx)
}

// order sends an update with these annotations.
func (l *lane) order(ctx context.Context, c *client.Client, orders map[string]string) error {
	container, err := c.LoadContainer(ctx, l.k.ID)
	if err != nil {
		return err
	}
	task, err := container.Task(ctx, nil)
	if err != nil {
		return err
	}
	return task.Update(ctx, client.WithResources(&specs.LinuxResources{}), client.WithAnnotations(orders))
}

func (l *lane) suspend(ctx context.Context, c *client.Client, spill string) error {
	orders := map[string]string{annotations.Suspend: "true"}
	if spill != "" {
		orders[annotations.SuspendSpill] = spill
	}
	return l.order(ctx, c, orders)
}

func (l *lane) resume(ctx context.Context, c *client.Client) error {
	return l.order(ctx, c, map[string]string{annotations.Suspend: "false"})
}

func (l *lane) pause(ctx context.Context) error {
	_, err := shared.Client().TaskService().Pause(ctx, &tasks.PauseTaskRequest{ContainerID: l.k.ID})
	return err
}

// resumeByHand does what the documents say: ctr tasks resume.
func (l *lane) resumeByHand(ctx context.Context) error {
	container, err := shared.Client().LoadContainer(ctx, l.k.ID)
	if err != nil {
		return err
	}
	task, err := container.Task(ctx, nil)
	if err != nil {
		return err
	}
	return task.Resume(ctx)
}

// kill ends the container; it is no error when it has ended.
func (l *lane) kill(ctx context.Context) error {
	_, err := shared.Client().TaskService().Kill(ctx, &tasks.KillRequest{ContainerID: l.k.ID, Signal: uint32(unix.SIGKILL), All: true})
	if errdefs.IsNotFound(err) || err != nil && (strings.Contains(err.Error(), "not found") || strings.Contains(err.Error(), "already finished")) {
		return nil
	}
	return err
}

// ended waits until no process of the container is left and its task, if there still is one, has
// ended.
func (l *lane) ended(t testing.TB) {
	t.Helper()
	within(t, "the container ends", func() error {
		if pids := l.processes(t); len(pids) > 0 {
			return fmt.Errorf("processes are left: %s", describe(pids))
		}
		status, err := l.k.Status(t.Context())
		if err == nil && status != client.Stopped && status != client.Created {
			return fmt.Errorf("the task is %s", status)
		}
		if err != nil && !errdefs.IsNotFound(err) && !strings.Contains(err.Error(), "not found") {
			return err
		}
		return nil
	})
}

// gone deletes the task, which must have ended, and looks for what is left of it.
func (l *lane) gone(t testing.TB) {
	t.Helper()
	l.ended(t)
	within(t, "the task is deleted", func() error {
		_, err := shared.Client().TaskService().Delete(t.Context(), &tasks.DeleteTaskRequest{ContainerID: l.k.ID})
		if errdefs.IsNotFound(err) || err != nil && strings.Contains(err.Error(), "not found") {
			return nil
		}
		return err
	})
	within(t, "nothing is left of the container", func() error { return l.left(t) })
	// A shim that has not ended yet would be taken for that of the next task.
	within(t, "the shim has ended, and what containerd cleans up with", func() error {
		if pids := shimsOf(l.k.ID); len(pids) > 0 {
			return errors.New(describe(pids))
		}
		return nil
	})
	l.pid, l.shim = 0, 0
}

// shimsOf are the shims of a container, among them the one that cleans up after another.
func shimsOf(id string) (pids []int) {
	lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range lines {
		line, _ := os.ReadFile(file) // or it has ended
		words := strings.Split(string(line), "\x00")
		if at := slices.Index(words, "-id"); at < 0 || at+1 == len(words) || words[at+1] != id || !slices.Contains(words, shared.Namespace()) {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file))); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// left is an error that names what is left on the machine of a container without a task.
func (l *lane) left(t testing.TB) error {
	var left []string
	if _, err := os.Stat(shared.Bundle(l.k.ID)); !errors.Is(err, os.ErrNotExist) {
		left = append(left, "the bundle")
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, shared.Namespace()+"/"+l.k.ID+"/") {
			left = append(left, "mount "+strings.Fields(line)[4])
		}
	}
	dirs, err := harness.CgroupsOf(filepath.Join(shared.Namespace(), l.k.ID))
	if err != nil {
		return err
	}
	left = append(left, dirs...)
	if state := filepath.Join("/run/containerd/runc", shared.Namespace(), l.k.ID); exists(state) {
		left = append(left, state)
	}
	if pids := helpers(l.shim); len(pids) > 0 {
		left = append(left, describe(pids))
	}
	if left != nil {
		return errors.New(strings.Join(left, ", "))
	}
	return nil
}

// processes are those of the container's cgroup.
func (l *lane) processes(t testing.TB) (pids []int) {
	t.Helper()
	dirs, err := harness.CgroupsOf(filepath.Join(shared.Namespace(), l.k.ID))
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range dirs {
		text, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
		if err != nil {
			continue
		}
		for field := range strings.FieldsSeq(string(text)) {
			if pid, err := strconv.Atoi(field); err == nil {
				pids = append(pids, pid)
			}
		}
	}
	slices.Sort(pids)
	return slices.Compact(pids)
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// log is the end of what was logged of the container, for people.
func (l *lane) log() string { return logOf(l.k.ID) }

func logOf(id string) string {
	var lines []string
	for line := range strings.Lines(shared.Log()) {
		if strings.Contains(line, id) && !strings.Contains(line, "event") {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines[max(0, len(lines)-12):], "")
}

// within waits until check finds no fault, and fails the test with the last one it found.
func within(t testing.TB, what string, check func() error) {
	t.Helper()
	var err error
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if err = check(); err == nil {
			return
		}
	}
	t.Fatalf("%s: not within %v: %v", what, limit, err)
}
