// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// slow starts a container of which checkpoints and restores take a while until
// hurry is called, if it can be: the software GPU is told to take its time, a
// real one has much to copy.
func slow(t *testing.T) (k *harness.Container, hurry func()) {
	t.Helper()
	bytes := uint64(8 << 20)
	hurry = func() {}
	if gpu.Kind == harness.SoftwareGPU {
		hurry = shared.SoftwareGPU(t, "checkpoint_delay_ms=20000\n")
	} else {
		bytes = 16 << 30
	}
	k = shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", strconv.FormatUint(bytes, 10))
	k.Expect(t, "verify", "bad=0")
	return k, hurry
}

// inCheckpoint waits until the driver is at work on a container's checkpoint:
// only then are its threads held by a tracer.
func inCheckpoint(t *testing.T, k *harness.Container) {
	t.Helper()
	pid := k.MustPid(t)
	harness.Within(t, "the driver's checkpoint", func() bool {
		state, err := harness.ProcessState(pid)
		return err == nil && state == "t"
	})
}

// driverWorks reports whether the driver is at work in a process: the software GPU then sleeps in one of its
// threads. Of a real one that is not known, and it gets a moment.
func driverWorks(pid int) bool {
	if gpu.Kind != harness.SoftwareGPU {
		time.Sleep(50 * time.Millisecond)
		return true
	}
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/syscall", pid))
	return slices.ContainsFunc(threads, func(thread string) bool {
		call, _ := os.ReadFile(thread)
		return strings.HasPrefix(string(call), strconv.Itoa(unix.SYS_CLOCK_NANOSLEEP)+" ")
	})
}

// goesOn checks that a container is as it was.
func goesOn(t *testing.T, k *harness.Container) {
	t.Helper()
	isPaused(t, k, false)
	k.Expect(t, "verify", "bad=0")
	k.Expect(t, "write 500", "wrote 500")
	k.Expect(t, "verify", "bad=0")
}

// The helper is killed while the driver copies: a clear error, and the
// container goes on.
func TestHelperKilled(t *testing.T) {
	results.Add(t)
	k, hurry := slow(t)
	shim := shimOf(t, k)
	done := make(chan error, 1)
	go func() { done <- k.Checkpoint(t.Context(), "refused:1") }()
	inCheckpoint(t, k)
	killHelper(t, shim)
	hurry()
	harness.Says(t, <-done, "save GPU state", "CUDA helper is gone", "killed")
	goesOn(t, k)
	takeCheckpoint(t, shared, k, "1")
	goesOn(t, k)
}

// One of two CUDA processes is killed while the driver copies: the checkpoint
// fails and the program goes on, which here means that it ends, as it always does
// without one of its processes. Nothing stays frozen or held.
func TestProcessKilled(t *testing.T) {
	hurry := func() {}
	if gpu.Kind == harness.SoftwareGPU {
		hurry = shared.SoftwareGPU(t, "checkpoint_delay_ms=20000\n")
	}
	bytes := "8M"
	if gpu.Kind == harness.RealGPU {
		bytes = "8G"
	}
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}, Ports: 2}, "multi", "--procs", "2", "--bytes", bytes)
	k.Process(0).Expect(t, "verify", "bad=0")
	k.Process(1).Expect(t, "verify", "bad=0")
	pids := childrenOf(k.MustPid(t), "gpuwork")
	if len(pids) != 2 {
		t.Fatalf("the container has the processes %v, want two", pids)
	}
	done := make(chan error, 1)
	go func() { done <- checkpointTask(t, shared, k, t.TempDir()) }()
	harness.Within(t, "the driver's checkpoint", func() bool {
		state, err := harness.ProcessState(pids[0])
		return err == nil && state == "t"
	})
	if err := unix.Kill(pids[1], unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	hurry()
	harness.Says(t, <-done, "save GPU state")
	harness.Within(t, "the program ends", func() bool {
		status, err := k.Status(t.Context())
		return err == nil && status == containerd.Stopped
	})
	nothingRuns(t, shared, k)
}

// killHelper kills the CUDA helper of a shim.
func killHelper(t *testing.T, shim int) {
	t.Helper()
	helpers := childrenOf(shim, "gpuckpt-cuda-helper")
	if len(helpers) == 0 { // the first is there from the lock on; a mover may follow
		t.Fatal("the shim has no helper")
	}
	if err := unix.Kill(helpers[0], unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

// A client gives up in the middle of a checkpoint. The shim is not told of it;
// the container goes on afterwards without anybody's help.
func TestClientGivesUp(t *testing.T) {
	results.Add(t)
	k, hurry := slow(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	options := imagePath(t, t.TempDir())
	done := make(chan error, 1)
	go func() {
		_, err := shared.Client().TaskService().Checkpoint(ctx, &tasks.CheckpointTaskRequest{ContainerID: k.ID, Options: options})
		done <- err
	}()
	inCheckpoint(t, k)
	cancel()
	hurry()
	harness.Says(t, <-done, "Canceled")
	harness.Within(t, "the container goes on", func() bool {
		status, err := k.Status(t.Context())
		return err == nil && status == containerd.Running
	})
	goesOn(t, k)
	checkpointInto(t, shared, k, t.TempDir())
	goesOn(t, k)
}

// containerd itself is killed in the middle of a checkpoint: the shim, whose
// request is cancelled by that, takes the container back to where it was.
func TestContainerdKilled(t *testing.T) {
	for _, test := range []struct {
		name   string
		moment func(t *testing.T, k *harness.Container, dir string)
	}{
		{"driver", func(t *testing.T, k *harness.Container, _ string) { inCheckpoint(t, k) }},
		{"dump", func(t *testing.T, _ *harness.Container, dir string) {
			harness.Within(t, "CRIU's dump", func() bool {
				pages, err := os.Stat(filepath.Join(dir, "pages-1.img"))
				return err == nil && pages.Size() > 0
			})
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			results.Add(t)
			c := session.Own(t, harness.Options{})
			c.Configured(t, c.Staging("staging", "steer = false")) // CRIU is to have something to do
			// Nobody could remove it by ctr in the end; Stop does it by force.
			k, err := c.Run(t.Context(), harness.Gpuwork(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "256M"))
			if err != nil {
				t.Fatal(err)
			}
			k.Expect(t, "verify", "bad=0")
			dir := t.TempDir()
			done := make(chan error, 1)
			go func() { done <- checkpointTask(t, c, k, dir) }()
			test.moment(t, k, dir)
			if err := unix.Kill(c.Pid(), unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
			harness.Says(t, <-done, "Unavailable")
			k.Expect(t, "verify", "bad=0")
			k.Expect(t, "write 500", "wrote 500")
			k.Expect(t, "verify", "bad=0")
			if _, err := os.Stat(filepath.Join(dir, images.MetadataName)); err == nil {
				t.Error("the checkpoint was completed, it had not been interrupted")
			}
		})
	}
}

// ctr is killed in the middle of its checkpoint. It had paused the container
// itself, so that is how it stays until its user resumes it.
func TestClientKilled(t *testing.T) {
	results.Add(t)
	k, hurry := slow(t)
	program, err := bins.Path("ctr")
	if err != nil {
		t.Fatal(err)
	}
	client := exec.Command(program, "--address", shared.Address(), "--namespace", shared.Namespace(),
		"containers", "checkpoint", "--rw", "--image", "--task", k.ID, "killed:1")
	if err := client.Start(); err != nil {
		t.Fatal(err)
	}
	inCheckpoint(t, k)
	if err := client.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = client.Wait()
	hurry()
	harness.Within(t, "the shim's log says what to do", func() bool {
		return strings.Contains(shared.LogTail(20000), "(ctr tasks resume "+k.ID+")")
	})
	isPaused(t, k, true)

	// Resume waits for its turn, after the way back.
	ctr(t, shared, "tasks", "resume", k.ID)
	goesOn(t, k)
	takeCheckpoint(t, shared, k, "1")
	goesOn(t, k)
}

// The helper is killed while the driver restores: a clear error, and nothing of
// the container runs on with half its state.
func TestHelperKilledInRestore(t *testing.T) {
	results.Add(t)
	k, hurry := slow(t)
	hurry()
	ref := takeCheckpoint(t, shared, k, "1")
	k.MustRemove(t)
	if gpu.Kind == harness.SoftwareGPU {
		hurry = shared.SoftwareGPU(t, "restore_delay_ms=20000\n")
	}

	done := make(chan error, 1)
	go func() {
		_, err := shared.Restore(t.Context(), k.ID, ref, k.Port)
		done <- err
	}()
	// The restored process is runc's child while it waits at the gate; it maps the state's file, by a mount
	// whose root that is.
	var helper int
	harness.Within(t, "the driver's restore", func() bool {
		runc := runcOf(k)
		shim, err := harness.Parent(runc)
		if err != nil {
			return false
		}
		pid := childOf(runc, "gpuwork")
		maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
		helpers := childrenOf(shim, "gpuckpt-cuda-helper")
		if err != nil || !strings.Contains(string(maps), " /\n") || len(helpers) != 1 || !driverWorks(pid) {
			return false
		}
		helper = helpers[0]
		return true
	})
	if err := unix.Kill(helper, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	hurry()
	harness.Says(t, <-done, "restore GPU state", "CUDA helper is gone")
	nothingRuns(t, shared, k)
	k.MustRemove(t)
	r := restore(t, shared, k.ID, ref, k.Port)
	goesOn(t, r)
}

// nothingRuns checks that no process of a container is left. The task is:
// ctr does not delete one that did not start.
func nothingRuns(t *testing.T, c *harness.Containerd, k *harness.Container) {
	t.Helper()
	for dir, pids := range processesOf(t, c, k) {
		t.Errorf("processes are left in %s: %s", dir, pids)
	}
	if status, err := k.Status(t.Context()); err == nil && status != "stopped" && status != "created" || err != nil && !errdefs.IsNotFound(err) {
		t.Errorf("the task is %q, error %v", status, err)
	}
}

// processesOf are the processes in a container's cgroups, of which containerd need
// not know.
func processesOf(t *testing.T, c *harness.Containerd, k *harness.Container) map[string]string {
	t.Helper()
	dirs, err := harness.CgroupsOf(filepath.Join(c.Namespace(), k.ID))
	if err != nil {
		t.Fatal(err)
	}
	found := make(map[string]string)
	for _, dir := range dirs {
		if pids, err := os.ReadFile(filepath.Join(dir, "cgroup.procs")); err == nil && len(pids) > 0 {
			found[dir] = string(pids)
		}
	}
	return found
}

// A driver that does not give a program's GPU state back ends the container, with that reason: nothing
// stays paused, and of the checkpoint nothing is left. It says so at once, or when it refuses again.
func TestDriverKeeps(t *testing.T) {
	if gpu.Kind != harness.SoftwareGPU {
		t.Skip("only the software GPU can be told to keep it")
	}
	const cannotDump = "/dev/cpu_dma_latency"
	into := func(t *testing.T, k *harness.Container, dir string) error { return checkpointTask(t, shared, k, dir) }
	image := func(t *testing.T, k *harness.Container, _ string) error { return k.Checkpoint(t.Context(), "kept:1") }
	paused := func(t *testing.T, k *harness.Container, dir string) error {
		ctr(t, shared, "tasks", "pause", k.ID)
		return checkpointTask(t, shared, k, dir)
	}
	resumed := func(t *testing.T, k *harness.Container, dir string) error {
		harness.Says(t, checkpointTask(t, shared, k, dir), "CUDA_ERROR_OPERATING_SYSTEM", "resume it again")
		_, err := shared.Ctr(t.Context(), "tasks", "resume", k.ID)
		return err
	}
	for name, test := range map[string]struct {
		fail, result string
		args         []string
		checkpoint   func(t *testing.T, k *harness.Container, dir string) error
	}{
		"left running":           {"fail=restore:1", "CUDA_ERROR_INVALID_VALUE", nil, into},
		"by ctr":                 {"fail=restore:999", "CUDA_ERROR_UNKNOWN", nil, image},
		"paused":                 {"fail=restore:1", "CUDA_ERROR_INVALID_VALUE", nil, paused},
		"resumed":                {"fail=restore:304", "CUDA_ERROR_OPERATING_SYSTEM", nil, resumed},
		"CRIU fails":             {"fail=restore:1", "Can't dump file", []string{"--open", cannotDump}, into},
		"one of two, on the way": {"gpu1.fail=checkpoint:2\ngpu0.fail=restore:1", "CUDA_ERROR_INVALID_VALUE", []string{"--procs", "2", "--gpus", "2"}, into},
	} {
		t.Run(name, func(t *testing.T) {
			results.Add(t)
			spec := harness.RunSpec{GPUs: []int{0}, CtrFlags: []string{"--device", cannotDump}}
			work := "pattern"
			if len(test.args) > 2 {
				spec.GPUs, spec.Ports, work = []int{0, 1}, 2, "multi"
			}
			k := shared.Work(t, spec, append([]string{work, "--bytes", "8M"}, test.args...)...)
			k.Expect(t, "verify", "bad=0")
			if spec.Ports == 2 {
				k.Process(1).Expect(t, "verify", "bad=0")
			}
			dir := t.TempDir()
			undo := shared.SoftwareGPU(t, test.fail+"\n")
			harness.Says(t, test.checkpoint(t, k, dir), "restore CUDA process", test.result, "the container has ended", "does not give it back")
			undo()
			harness.Within(t, "the task exits", func() bool {
				status, err := k.Status(t.Context())
				return err == nil && status == containerd.Stopped
			})
			nothingRuns(t, shared, k)
			if left, err := os.ReadDir(dir); name != "resumed" && (err != nil || len(left) > 0) { // which was complete
				t.Errorf("the checkpoint has left %v, %v", left, err)
			}
			if left, err := filepath.Glob(filepath.Join(shared.Records(), "*", k.ID+".json")); err != nil || len(left) > 0 {
				t.Errorf("records are left: %v, %v", left, err)
			}
			ctr(t, shared, "tasks", "delete", k.ID)
			nothingLeft(t, shared, k)
		})
	}
}
