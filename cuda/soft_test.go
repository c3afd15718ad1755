// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/internal/node/worker"
)

// refused fails the test unless the driver answered this code.
func refused(t *testing.T, err error, want Result) {
	t.Helper()
	var e *Error
	if !errors.As(err, &e) || e.Result != want {
		t.Fatalf("got error %v, want %v", err, want)
	}
}

func do(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestSoftProcessGoesThereAndBack(t *testing.T) {
	dev := devices(t, 2)
	h, w, ctx := softHelper(t, dev, nil), start(t, dev, nil, "counter"), t.Context()
	w.counts(101)
	w.is(h, Running)
	tid, err := h.RestoreThread(ctx, w.pid)
	do(t, err)
	if _, err := os.Stat(fmt.Sprintf("/proc/%d/task/%d", w.pid, tid)); err != nil {
		t.Errorf("restore thread %d: %v", tid, err)
	}

	do(t, h.Lock(ctx, w.pid, 10*time.Second))
	w.is(h, Locked)
	before, err := AnonymousRanges(w.pid)
	do(t, err)
	do(t, h.Checkpoint(ctx, w.pid))
	w.is(h, Checkpointed)
	after, err := AnonymousRanges(w.pid)
	do(t, err)
	if fresh := NewRanges(before, after); len(fresh) == 0 {
		t.Error("the checkpoint made no new area")
	}
	if open, err := deviceFiles(w.pid); err != nil || len(open) != 0 {
		t.Errorf("checkpointed, it has device files open: %v, %v", open, err)
	}
	if may, err := MayUseCUDA(w.pid); err != nil || !may {
		t.Errorf("checkpointed, it may not use CUDA: %v, %v", may, err)
	}

	do(t, h.Restore(ctx, w.pid, nil))
	w.is(h, Locked)
	do(t, h.Unlock(ctx, w.pid))
	w.is(h, Running)
	w.counts(102)
}

func TestSoftStepsInTheWrongState(t *testing.T) {
	dev := devices(t, 1)
	h, w, ctx := softHelper(t, dev, nil), start(t, dev, nil, "counter"), t.Context()
	w.counts(101)
	refused(t, h.Checkpoint(ctx, w.pid), IllegalState)
	refused(t, h.Restore(ctx, w.pid, nil), IllegalState)
	refused(t, h.Unlock(ctx, w.pid), IllegalState)
	do(t, h.Lock(ctx, w.pid, time.Second))
	refused(t, h.Lock(ctx, w.pid, time.Second), IllegalState)
	do(t, h.Checkpoint(ctx, w.pid))
	refused(t, h.Unlock(ctx, w.pid), IllegalState)
	refused(t, h.Checkpoint(ctx, w.pid), IllegalState)
}

// The error of a step says that the process has ended meanwhile, which the driver does not say.
func TestSoftProcessEndsInAStep(t *testing.T) {
	for _, step := range []string{"checkpoint", "restore"} {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			dev := devices(t, 1)
			h, ctx := softHelper(t, dev, nil), t.Context()
			w := start(t, dev, []string{"SOFTCUDA_" + strings.ToUpper(step) + "_DELAY_MS=60000"}, "counter")
			w.counts(101)
			procs, err := Find(ctx, h, []int{w.pid})
			do(t, err)
			do(t, procs.Lock(ctx, h, time.Minute))
			take := procs.Checkpoint
			if step == "restore" {
				do(t, procs.Checkpoint(ctx, h))
				take = func(ctx context.Context, h *Helper) error { return procs.Restore(ctx, h, nil) }
			}
			time.AfterFunc(300*time.Millisecond, func() { _ = syscall.Kill(w.pid, syscall.SIGKILL) })
			err = take(ctx, h)
			if err == nil || !strings.Contains(err.Error(), "the process has ended") {
				t.Errorf("the error is %v", err)
			}
		})
	}
}

func TestSoftInfo(t *testing.T) {
	info, err := softHelper(t, devices(t, 2), nil).Info(t.Context())
	do(t, err)
	if !strings.HasPrefix(info.DriverVersion, "580.") || info.CUDAVersion != "13.0" {
		t.Errorf("driver %q, CUDA %q", info.DriverVersion, info.CUDAVersion)
	}
	if len(info.GPUs) != 2 {
		t.Fatalf("GPUs: %+v", info.GPUs)
	}
	for i, g := range info.GPUs {
		want := GPU{UUID: fmt.Sprintf("GPU-5af7c0da-0000-4000-8000-%012x", i), Name: "Software GPU",
			Memory: 2 << 30, Index: i, Minor: i, PCIBusID: g.PCIBusID, Free: g.Free}
		if g != want || g.PCIBusID == "" || g.Free == 0 || g.Free > g.Memory {
			t.Errorf("GPU %d: %+v, want %+v", i, g, want)
		}
	}
}

func TestSoftProcessesWithoutCUDA(t *testing.T) {
	dev := devices(t, 1)
	h := softHelper(t, dev, nil)
	const nobody = 4194304 // above the kernel's pid_max
	_, err := h.State(t.Context(), os.Getpid())
	wants(t, err, ErrNotCUDA)
	_, err = h.RestoreThread(t.Context(), os.Getpid())
	wants(t, err, ErrNotCUDA)
	var refused *Error
	if _, err = h.State(t.Context(), nobody); !errors.As(err, &refused) || refused.Result != OperatingSystem {
		t.Errorf("process %d: got error %v, want CUDA_ERROR_OPERATING_SYSTEM", nobody, err)
	}
	for _, pid := range []int{os.Getpid(), nobody} {
		if may, err := MayUseCUDA(pid); err != nil || may {
			t.Errorf("process %d may use CUDA: %v, %v", pid, may, err)
		}
	}
}

func TestSoftFind(t *testing.T) {
	dev := devices(t, 2)
	h := softHelper(t, dev, nil)
	a, b := start(t, dev, nil, "counter"), start(t, dev, nil, "counter")
	plain := start(t, dev, nil, "plain")
	multi := start(t, dev, nil, "multi", "--procs", "2", "--bytes", "1M") // its parent knows no CUDA
	a.counts(101)
	b.counts(101)
	plain.counts(101)
	multi.ask("verify")
	do(t, h.Lock(t.Context(), b.pid, time.Second))
	dead := exec.Command("true")
	do(t, dead.Run())

	got, err := Find(t.Context(), h, []int{plain.pid, b.pid, os.Getpid(), dead.Process.Pid, multi.pid, a.pid})
	do(t, err)
	if len(got) != 2 || got[0].PID.Host != b.pid || got[0].State != Locked || got[1].PID.Host != a.pid || got[1].State != Running {
		t.Fatalf("found %+v", got)
	}
	for _, p := range got {
		if p.PID.NS != p.PID.Host || p.RestoreThread.Host == 0 || p.RestoreThread == p.PID {
			t.Errorf("found %+v", p)
		}
	}
	do(t, h.Unlock(t.Context(), b.pid))
}

// NVML has the driver serve its process, which has made no call of CUDA: it goes there and back.
func TestSoftMonitorGoesThereAndBack(t *testing.T) {
	dev := devices(t, 1)
	h, w, ctx := softHelper(t, dev, nil), start(t, dev, nil, "monitor"), t.Context()
	w.counts(101)
	procs, err := Find(ctx, h, []int{w.pid})
	do(t, err)
	if len(procs) != 1 || procs[0].State != Running || procs[0].RestoreThread.Host == w.pid {
		t.Fatalf("found %+v", procs)
	}
	do(t, procs.Lock(ctx, h, time.Second))
	do(t, procs.Checkpoint(ctx, h))
	w.is(h, Checkpointed)
	do(t, procs.Restore(ctx, h, nil))
	do(t, procs.Unlock(ctx, h))
	w.counts(102)
}

// The driver may call a process running that it does not serve, as one whose NVML has no libcuda: it
// is no CUDA process for that.
func TestSoftRunningIsNoCUDAProcess(t *testing.T) {
	dev := devices(t, 1)
	// The library is there, so that Find does ask the driver.
	h, w, ctx := softHelper(t, dev, nil), start(t, dev, []string{"LD_PRELOAD=libcuda.so.1", "SOFTCUDA_NVML_ALONE=1"}, "monitor"), t.Context()
	w.counts(101)
	if may, err := MayUseCUDA(w.pid); err != nil || !may {
		t.Fatalf("it may use CUDA: %v, error %v", may, err)
	}
	w.is(h, Running)
	_, err := h.RestoreThread(ctx, w.pid)
	wants(t, err, ErrNotCUDA)
	procs, err := Find(ctx, h, []int{w.pid})
	if err != nil || len(procs) > 0 {
		t.Errorf("found %+v, error %v", procs, err)
	}
	_, err = Toggle(ctx, h, w.pid, time.Second, nil)
	refused(t, err, NotInitialized)
	w.counts(102)
}

func TestSoftManagedMemoryIsRefusedAndTheProcessGoesOn(t *testing.T) {
	dev := devices(t, 1)
	h, w, ctx := softHelper(t, dev, nil), start(t, dev, nil, "managed"), t.Context()
	w.counts(101)
	procs, err := Find(ctx, h, []int{w.pid})
	do(t, err)
	do(t, procs.Lock(ctx, h, time.Second))
	err = procs.Checkpoint(ctx, h)
	refused(t, err, NotSupported)
	if !strings.Contains(err.Error(), "cudaMallocManaged") {
		t.Errorf("%v does not name the cause", err)
	}
	w.is(h, Locked)
	do(t, procs.Unlock(ctx, h))
	w.counts(102)
}

func TestSoftLockTimesOutBehindARunningKernel(t *testing.T) {
	dev := devices(t, 1)
	h, w := softHelper(t, dev, nil), start(t, dev, nil, "spin")
	for range 600 { // "spinning" is said a little before the kernel runs
		if err := h.Lock(t.Context(), w.pid, 50*time.Millisecond); err == nil {
			do(t, h.Unlock(t.Context(), w.pid))
		} else if e := new(Error); errors.As(err, &e) && e.Result == NotReady {
			w.is(h, Running)
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Error("a process with a kernel in flight was locked each time")
}

func TestSoftLockOfAStoppedProcessEndsAtItsLimit(t *testing.T) {
	dev := devices(t, 1)
	h := softHelper(t, dev, func(o *Options) { o.CallTimeout = 500 * time.Millisecond })
	w := start(t, dev, nil, "counter")
	w.counts(101)
	w.stop()
	within(t, func() {
		err := Group{{PID: PID{Host: w.pid}, State: Running}}.Lock(t.Context(), h, 100*time.Millisecond)
		wants(t, err, ErrHelperHung, "lock CUDA process", "undo") // which cannot work either
	})
	do(t, syscall.Kill(w.pid, syscall.SIGCONT))
	// It now carries out what it was asked; then it can be brought back.
	h = softHelper(t, dev, nil)
	do(t, settle(t.Context(), h, w.pid, worker.Limit{Most: time.Minute}))
	do(t, driveTo(t.Context(), h, w.pid, Running, h.whileItWorks(w.pid)))
	w.counts(102)
}

func TestSoftOtherProcessesAreServedMeanwhile(t *testing.T) {
	dev := devices(t, 2)
	h, ctx := softHelper(t, dev, nil), t.Context()
	a := start(t, dev, nil, "counter")
	b := start(t, dev, nil, "counter", "--gpu", "1")
	a.counts(101)
	b.counts(101)
	a.stop()
	locked := make(chan error)
	go func() { locked <- h.Lock(ctx, a.pid, 0) }()
	waitForCalls(t, h, 1)
	do(t, h.Lock(ctx, b.pid, time.Second))
	do(t, h.Checkpoint(ctx, b.pid))
	do(t, h.Restore(ctx, b.pid, nil))
	do(t, h.Unlock(ctx, b.pid))
	b.counts(102)
	do(t, syscall.Kill(a.pid, syscall.SIGCONT))
	within(t, func() { do(t, <-locked) })
	do(t, h.Unlock(ctx, a.pid))
	a.counts(102)
}

func TestSoftRestoreOntoAnotherGPUFromInside(t *testing.T) {
	ctx := t.Context()
	outside := softHelper(t, devices(t, 2), nil)
	w := contained(t, "nvidiactl nvidia0", "counter")
	w.counts(102) // the first was its sign of life
	procs, err := Find(ctx, outside, []int{w.pid})
	do(t, err)
	if len(procs) != 1 || procs[0].PID.NS != 1 || !slices.Equal(procs[0].GPUs, []int{0}) {
		t.Fatalf("found %+v", procs)
	}
	do(t, procs.Lock(ctx, outside, time.Second))
	do(t, procs.Checkpoint(ctx, outside))

	// The container comes back with another GPU.
	dev := fmt.Sprintf("/proc/%d/root/dev/", w.pid)
	do(t, os.Rename(dev+"nvidia0", dev+"nvidia1"))
	pairs, err := ParsePairs("GPU-5af7c0da-0000-4000-8000-000000000000=GPU-5af7c0da-0000-4000-8000-000000000001")
	do(t, err)
	refused(t, outside.Restore(ctx, w.pid, pairs), NotSupported)

	inside := softHelper(t, "/nonexistent", func(o *Options) {
		o.Join = w.pid
		o.Env = append(o.Env, "SOFTCUDA_MAKE_NODE=nvidia-made")
	})
	info, err := inside.Info(ctx)
	do(t, err)
	if len(info.GPUs) != 1 || info.GPUs[0].Minor != 1 || info.GPUs[0].UUID != pairs[0].New {
		t.Fatalf("inside there are %+v", info.GPUs)
	}
	if _, err := os.Stat(dev + "nvidia-made"); err != nil {
		t.Error("the software driver made no node:", err)
	}
	refused(t, inside.Restore(ctx, 1, nil), NotSupported)
	refused(t, inside.Restore(ctx, 1, []Pair{{Old: pairs[0].New, New: pairs[0].Old}}), InvalidValue)
	do(t, procs.Restore(ctx, inside, pairs))
	do(t, procs.Unlock(ctx, inside))
	w.counts(103)
	if open, err := deviceFiles(w.pid); err != nil || !slices.Contains(open, 1) || slices.Contains(open, 0) {
		t.Errorf("it has device files %v open, %v", open, err)
	}
	do(t, inside.Close())
	// What the driver made in the container goes, what was there stays.
	left, err := filepath.Glob(dev + "nvidia*")
	do(t, err)
	if want := []string{dev + "nvidia1", dev + "nvidiactl"}; !slices.Equal(left, want) {
		t.Errorf("the container has %v, want %v", left, want)
	}
}

func TestSoftJoinedHelperSeesNoGPU(t *testing.T) {
	w := contained(t, "null", "plain")
	_, err := softHelper(t, "/nonexistent", func(o *Options) { o.Join = w.pid }).Info(t.Context())
	var e *Error
	if !errors.As(err, &e) || e.Op != "init" || e.Result != NoDevice || !strings.Contains(err.Error(), "/dev/nvidia") {
		t.Errorf("got %v", err)
	}
}

func TestSoftJoiningNobodyIsAnError(t *testing.T) {
	h := softHelper(t, devices(t, 1), func(o *Options) { o.Join = 4194304 })
	_, err := h.Info(t.Context())
	wants(t, err, ErrHelperGone, "exit status 1", "/proc/4194304/ns/mnt")
}

// The joined helper is a child of the process that Start started.
func TestSoftJoinedHelperDiesAsOne(t *testing.T) {
	for name, killChild := range map[string]bool{"parent killed": false, "child killed": true} {
		t.Run(name, func(t *testing.T) {
			w := contained(t, "nvidiactl nvidia0", "counter")
			h := softHelper(t, "/nonexistent", func(o *Options) { o.Join = w.pid })
			if _, err := h.State(t.Context(), 1); err != nil {
				t.Fatal(err)
			}
			children := childrenOf(t, h.worker.Pid())
			if len(children) != 1 {
				t.Fatalf("children: %v", children)
			}
			victim := h.worker.Pid()
			if killChild {
				victim = children[0]
			}
			do(t, syscall.Kill(victim, syscall.SIGKILL))
			within(t, func() {
				var err error
				for err == nil { // the child may live on for a moment
					_, err = h.State(t.Context(), 1)
				}
				wants(t, err, ErrHelperGone, "signal: killed")
				for {
					status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", children[0]))
					if err != nil || strings.Contains(string(status), "State:\tZ") {
						return
					}
					time.Sleep(10 * time.Millisecond)
				}
			})
		})
	}
}
