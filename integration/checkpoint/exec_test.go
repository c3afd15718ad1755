// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// execDetached starts a process in the container, whose output nobody reads.
func execDetached(t *testing.T, c *harness.Containerd, k *harness.Container, execID string, args ...string) {
	t.Helper()
	// ctr does not remove the FIFOs of a process that it does not wait for;
	// there they go with the containerd.
	fifos := filepath.Join(c.Dir(), "fifo")
	ctr(t, c, append([]string{"tasks", "exec", "--detach", "--fifo-dir", fifos, "--exec-id", execID, k.ID}, args...)...)
}

// endExec ends it.
func endExec(t *testing.T, c *harness.Containerd, k *harness.Container) {
	t.Helper()
	ctr(t, c, "tasks", "kill", "--signal", "SIGKILL", "--exec-id", "guest", k.ID)
	shim := shimOf(t, k)
	harness.Within(t, "the exec'd process ends", func() bool { return childOf(shim, "gpuwork sleep") == 0 })
}

// sendSpec is a probe of the program: it asks, and succeeds if there is an answer.
func sendSpec(k *harness.Container) *specs.Process {
	return guestSpec("gpuwork", "send", fmt.Sprintf("127.0.0.1:%d", k.Port), "probe")
}

func guestSpec(args ...string) *specs.Process {
	return &specs.Process{Args: args, Env: []string{"PATH=/usr/bin:/bin:/"}, Cwd: "/"}
}

// probe runs a process in the container to its end, as the kubelet runs a probe.
func probe(ctx context.Context, task client.Task, id string, spec *specs.Process) (code uint32, err error) {
	guest, err := task.Exec(ctx, id, spec, cio.NullIO)
	if err != nil {
		return 0, err
	}
	exits, err := guest.Wait(ctx)
	if err == nil {
		err = guest.Start(ctx)
	}
	if err == nil {
		code, _, err = (<-exits).Result()
	}
	// While a container is paused, containerd reports all of its processes as paused, ended ones too, and
	// its client deletes none of them.
	derr := error(errdefs.ErrFailedPrecondition)
	for began := time.Now(); errdefs.IsFailedPrecondition(derr) && time.Since(began) < time.Minute; time.Sleep(10 * time.Millisecond) {
		_, derr = guest.Delete(ctx)
	}
	return code, errors.Join(err, derr)
}

// A process that was exec'd into the container is no child of its first one:
// CRIU would leave it out. The checkpoint of a GPU container waits for its end, and
// is refused by its name if it does not end.
func TestExecedProcess(t *testing.T) {
	results.Add(t)
	undo := shared.Configured(t, "lock_timeout = \"200ms\"\n")
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	execDetached(t, shared, k, "guest", "gpuwork", "sleep")
	// Before it is gpuwork it is runc, which ctr does not wait for.
	shim, guest := shimOf(t, k), 0
	harness.Within(t, "the exec'd process is a child of the shim", func() bool {
		guest = childOf(shim, "gpuwork sleep")
		return guest != 0
	})
	harness.Says(t, k.Checkpoint(t.Context(), "refused:1"), "exec'd", fmt.Sprintf("%d (gpuwork)", guest))
	harness.Says(t, plainCheckpoint(t, shared, k), "FailedPrecondition", "exec'd", fmt.Sprint(guest))
	isPaused(t, k, false)
	k.Expect(t, "count", "102")

	undo()
	time.AfterFunc(300*time.Millisecond, func() { unix.Kill(guest, unix.SIGKILL) })
	ref := takeCheckpoint(t, shared, k, "1") // which waits
	k.MustRemove(t)
	r := restore(t, shared, k.ID, ref, k.Port)
	r.Expect(t, "count", "103")
}

// Probes go on as if there were no checkpoints: three of them, each ten times a second, and none
// begun before its last has ended, as the kubelet runs them. No probe fails, and none makes a
// checkpoint fail.
func TestProbesBesideCheckpoints(t *testing.T) {
	results.Add(t)
	shared.SoftwareGPU(t, "checkpoint_delay_ms=300\n")
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	task := taskOf(t, shared, k)
	stop := make(chan struct{})
	end := sync.OnceFunc(func() { close(stop) })
	var probes, waited atomic.Int32
	var all sync.WaitGroup
	defer all.Wait() // also where a checkpoint fails: nobody may report to a test that is over
	defer end()
	for p := range 3 {
		all.Go(func() {
			every := time.NewTicker(100 * time.Millisecond)
			defer every.Stop()
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				case <-every.C:
				}
				began := time.Now()
				if code, err := probe(t.Context(), task, fmt.Sprintf("probe-%d-%d", p, i), sendSpec(k)); err != nil || code != 0 {
					t.Errorf("probe %d of %d: it ended with %d, %v", i, p, code, err)
				}
				probes.Add(1)
				if time.Since(began) > 300*time.Millisecond {
					waited.Add(1)
				}
			}
		})
	}
	for i := range 4 {
		time.Sleep(300 * time.Millisecond)
		if err := checkpointTask(t, shared, k, t.TempDir()); err != nil {
			t.Errorf("checkpoint %d: %v", i, err)
		}
		takeCheckpoint(t, shared, k, fmt.Sprint(i)) // ctr, which pauses
	}
	end()
	all.Wait()
	t.Logf("%d probes, of which %d took more than 300 ms", probes.Load(), waited.Load())
	if waited.Load() == 0 {
		t.Error("no probe met a checkpoint")
	}
	isPaused(t, k, false)
}

// A process that was made before the pause is started while the driver's threads
// run: the container is thawed then, and runc, which lets nobody into a paused one,
// would let it in. It starts when the container goes on.
func TestExecStartedInCheckpoint(t *testing.T) {
	results.Add(t)
	k, hurry := slow(t)
	task := taskOf(t, shared, k)
	guest, err := task.Exec(t.Context(), "guest", guestSpec("gpuwork", "sleep"), cio.NullIO)
	if err != nil {
		t.Fatal(err)
	}
	done, started := make(chan error, 1), make(chan error, 1)
	dir := t.TempDir()
	go func() { done <- checkpointTask(t, shared, k, dir) }()
	inCheckpoint(t, k)
	go func() { started <- guest.Start(t.Context()) }()
	time.Sleep(100 * time.Millisecond)
	if pid := childOf(shimOf(t, k), "gpuwork sleep"); pid != 0 {
		t.Errorf("process %d was exec'd into the container", pid)
	}
	hurry()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if err := <-started; err != nil {
		t.Error(err)
	}
	goesOn(t, k)
	exits, err := guest.Wait(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	endExec(t, shared, k)
	<-exits
	if _, err := guest.Delete(t.Context()); err != nil {
		t.Error(err)
	}
}

// Who waits at the gate hears of it if the checkpoint ends the container, and starts if the checkpoint
// fails.
func TestExecAfterCheckpoint(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	task := taskOf(t, shared, k)
	paused := func(do func()) error {
		t.Helper()
		ctr(t, shared, "tasks", "pause", k.ID)
		ended := make(chan error, 1)
		go func() {
			_, err := probe(t.Context(), task, fmt.Sprint("probe-", time.Now().UnixNano()), sendSpec(k))
			ended <- err
		}()
		select {
		case err := <-ended:
			t.Fatalf("the probe has not waited: %v", err)
		case <-time.After(100 * time.Millisecond):
		}
		do()
		return <-ended
	}
	full := t.TempDir()
	checkpointInto(t, shared, k, full)
	if err := paused(func() {
		harness.Says(t, checkpointTask(t, shared, k, full), "holds a GPU checkpoint already")
		ctr(t, shared, "tasks", "resume", k.ID)
	}); err != nil {
		t.Errorf("after a checkpoint that failed: %v", err)
	}
	harness.Says(t, paused(func() {
		ctr(t, shared, "tasks", "checkpoint", "--exit", "--image-path", t.TempDir(), k.ID)
	}), "cannot exec", "it has ended with its checkpoint")
}

// A shell is refused by its name, and ended where that was asked for.
func TestShell(t *testing.T) {
	results.Add(t)
	for _, test := range []struct{ name, settings string }{
		{"refused", "lock_timeout = \"2m\"\n"}, {"ended", "shells = \"end\"\n"},
	} {
		t.Run(test.name, func(t *testing.T) {
			shared.Configured(t, test.settings)
			k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
			k.Expect(t, "count", "101")
			shell := guestSpec("gpuwork", "sleep")
			shell.Terminal = true
			guest, err := taskOf(t, shared, k).Exec(t.Context(), "shell", shell, cio.NewCreator(cio.WithStreams(nil, io.Discard, nil), cio.WithTerminal, cio.WithFIFODir(filepath.Join(shared.Dir(), "fifo"))))
			if err != nil {
				t.Fatal(err)
			}
			exits, err := guest.Wait(t.Context())
			if err == nil {
				err = guest.Start(t.Context())
			}
			if err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			if test.name == "refused" {
				harness.Says(t, k.Checkpoint(t.Context(), "refused:1"), "with a terminal", fmt.Sprintf("%d (gpuwork)", guest.Pid()), "leave the shell", `shells = "end"`)
				if time.Since(began) > time.Minute {
					t.Error("the shell was waited for")
				}
				if err := guest.Kill(t.Context(), unix.SIGKILL); err != nil {
					t.Fatal(err)
				}
			} else {
				takeCheckpoint(t, shared, k, "1")
			}
			<-exits
			if _, err := guest.Delete(t.Context()); err != nil {
				t.Error(err)
			}
			isPaused(t, k, false)
			k.Expect(t, "count", "102")
		})
	}
}

// A container without CUDA is treated as runc's shim would.
func TestExecedProcessNoCUDA(t *testing.T) {
	results.Add(t)
	outcome := map[string]bool{}
	eachRuntime(t, func(t *testing.T, spec harness.RunSpec) {
		k := shared.Work(t, spec, "plain")
		k.Expect(t, "count", "101")
		execDetached(t, shared, k, "guest", "gpuwork", "sleep")
		err := k.Checkpoint(t.Context(), "checkpoint.test/"+harness.Name(t)+":1")
		t.Logf("with an exec'd process: %v", err)
		outcome[spec.Runtime] = err == nil
		isPaused(t, k, false)
		k.Expect(t, "count", "102")
	})
	if outcome[harness.Runtime] != outcome[harness.RuncRuntime] {
		t.Errorf("checkpoints succeed: %v; want the same with both", outcome)
	}
}

// CRIU leaves out what was exec'd into a container without CUDA, and so does all that goes past CRIU: large
// memory and each kind of lock, semaphores, timers and watches.
func TestExecedProcessIsLeftOut(t *testing.T) {
	results.Add(t)
	guests := [][]string{
		{"memory", "--bytes", "144M", "--locks", "/"},
		{"odd", "--state", "semaphore"}, {"odd", "--state", "first-thread-timer"}, {"odd", "--state", "others-epoll"},
	}
	k := shared.Work(t, harness.RunSpec{Ports: 1 + len(guests)}, "plain")
	k.Expect(t, "count", "101")
	for i, guest := range guests {
		args := append(append([]string{"gpuwork"}, guest...), "--port", strconv.Itoa(k.Port+1+i))
		execDetached(t, shared, k, fmt.Sprint("guest-", i), args...)
		k.Process(1+i).Answer(t, "ready?")
	}
	dir := t.TempDir()
	if _, err := k.CheckpointTask(t.Context(), harness.TaskCheckpoint{ImagePath: dir, Exit: true}); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(3000))
	}
	restoreInPlace(t, k, dir)
	k.Expect(t, "count", "102")
}
