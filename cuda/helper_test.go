// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/internal/node/worker"
)

// within fails the test if do takes longer than a generous time: it hangs.
func within(t *testing.T, do func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		do()
	}()
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Fatal("hangs")
	}
}

// wants fails the test unless err Is target and mentions all of words.
func wants(t *testing.T, err, target error, words ...string) {
	t.Helper()
	if !errors.Is(err, target) {
		t.Fatalf("got error %v, want %v", err, target)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %q does not mention %q", err, w)
		}
	}
}

func TestHelperThatEndsIsAnError(t *testing.T) {
	for manner, words := range map[string][]string{
		"exit at once": {"exit status 7", "cannot work today"},
		"die":          {"exit status 3", "first line | out of luck"},
		"kill":         {"signal: killed"},
		"close socket": {"signal: killed"}, // alive but of no use
	} {
		t.Run(manner, func(t *testing.T) {
			h := fake(t, manner, nil)
			within(t, func() {
				_, err := h.State(t.Context(), 1)
				wants(t, err, ErrHelperGone, append(words, "get state of CUDA process 1")...)
				// And so is every later call.
				wants(t, h.Unlock(t.Context(), 1), ErrHelperGone, words...)
				if err := h.Close(); err != nil {
					t.Errorf("close: %v", err)
				}
			})
		})
	}
}

func TestHelperKilledFromOutsideEndsAllCalls(t *testing.T) {
	h := fake(t, "hang", nil)
	var wg sync.WaitGroup
	errs := make([]error, 8)
	for i := range errs {
		wg.Go(func() {
			errs[i] = h.Checkpoint(t.Context(), i+1)
		})
	}
	waitForCalls(t, h, len(errs))
	if err := syscall.Kill(h.worker.Pid(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	within(t, wg.Wait)
	for _, err := range errs {
		wants(t, err, ErrHelperGone, "signal: killed")
	}
}

// waitForCalls waits until n calls wait for their replies.
func waitForCalls(t *testing.T, h *Helper, n int) {
	t.Helper()
	for range 600 {
		if h.worker.Pending() == n {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	t.Fatalf("there never were %d calls", n)
}

func TestHungHelperIsKilled(t *testing.T) {
	for _, manner := range []string{"hang", "deaf"} {
		t.Run(manner, func(t *testing.T) {
			h := fake(t, manner, func(o *Options) { o.CallTimeout = 50 * time.Millisecond })
			within(t, func() {
				_, err := h.State(t.Context(), 1)
				wants(t, err, ErrHelperHung, "get state of CUDA process 1", "50ms")
				<-h.worker.Done() // killed and reaped
				wants(t, h.Unlock(t.Context(), 1), ErrHelperHung)
			})
		})
	}
}

func TestOneHungCallLeavesTheOthersTheirTime(t *testing.T) {
	h := fake(t, "hang for 2", func(o *Options) { o.CopyTimeout = 500 * time.Millisecond })
	hung := make(chan error)
	go func() { hung <- h.Checkpoint(t.Context(), 2) }()
	waitForCalls(t, h, 1)
	if err := h.Checkpoint(t.Context(), 1); err != nil {
		t.Error(err)
	}
	within(t, func() { wants(t, <-hung, ErrHelperHung) })
}

func TestGarbageIsRefused(t *testing.T) {
	for _, manner := range []string{"garbage", "wrong id", "unknown fault"} {
		t.Run(manner, func(t *testing.T) {
			h := fake(t, manner, nil)
			within(t, func() {
				_, err := h.State(t.Context(), 1)
				wants(t, err, ErrHelperGarbled)
				<-h.worker.Done()
			})
		})
	}
}

func TestContextEndsTheCallButNotTheHelper(t *testing.T) {
	h := fake(t, "hang for 2", nil)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- h.Checkpoint(ctx, 2) }()
	waitForCalls(t, h, 1)
	cancel()
	within(t, func() { wants(t, <-ended, context.Canceled, "checkpoint CUDA process 2") })
	if _, err := h.State(t.Context(), 1); err != nil {
		t.Errorf("the helper is of no more use: %v", err)
	}
	if err := h.Lock(ctx, 1, time.Second); !errors.Is(err, context.Canceled) {
		t.Errorf("a call with an ended context: %v", err)
	}
	h.worker.Kill() // or Close would wait for the call
}

func TestCloseReapsAndMayBeRepeated(t *testing.T) {
	h := fake(t, "machine:1=running", nil)
	if _, err := h.State(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	within(t, func() {
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				if err := h.Close(); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	})
	if err := syscall.Kill(h.worker.Pid(), 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("the helper is still there: %v", err)
	}
	_, err := h.State(t.Context(), 1)
	wants(t, err, os.ErrClosed)
}

func TestExitStatusSurvivesAReaperOfTheCallers(t *testing.T) {
	h := fake(t, "kill", func(o *Options) {
		o.Run = func(cmd *exec.Cmd) (func() (int, error), error) {
			if err := cmd.Start(); err != nil {
				return nil, err
			}
			return func() (int, error) {
				var ws syscall.WaitStatus
				if _, err := syscall.Wait4(cmd.Process.Pid, &ws, 0, nil); err != nil {
					return 0, err
				}
				cmd.Wait() // finds nothing to reap, as beside a shim's reaper
				return 128 + int(ws.Signal()), nil
			}, nil
		}
	})
	_, err := h.State(t.Context(), 1)
	wants(t, err, ErrHelperGone, "signal: killed")
}

func TestExitStatusLostToAReaper(t *testing.T) {
	h := fake(t, "kill", func(o *Options) {
		o.Run = func(cmd *exec.Cmd) (func() (int, error), error) {
			wait, err := worker.StartAndWait(cmd)
			if err != nil {
				return nil, err
			}
			return func() (int, error) {
				syscall.Wait4(cmd.Process.Pid, nil, 0, nil)
				return wait()
			}, nil
		}
	})
	within(t, func() {
		_, err := h.State(t.Context(), 1)
		wants(t, err, ErrHelperGone, "another part of this program")
	})
}

func TestFaultsOfTheDriver(t *testing.T) {
	_, err := fake(t, "no driver", nil).State(t.Context(), 1)
	wants(t, err, ErrNoDriver, "libcuda.so.1: not found")
	_, err = fake(t, "too old", nil).Info(t.Context())
	wants(t, err, ErrDriverTooOld, "535.104.05", "570")
	_, err = fake(t, "no device", nil).State(t.Context(), 1)
	var e *Error
	if !errors.As(err, &e) || e.Op != "init" || e.Result != NoDevice {
		t.Errorf("got %v", err)
	}
	if errors.Is(err, ErrNotCUDA) {
		t.Error("no GPU was taken for no CUDA process")
	}
}

func TestCallsThatAreRefusedHere(t *testing.T) {
	h := fake(t, "machine:1=running", nil)
	if _, err := h.State(t.Context(), 0); err == nil {
		t.Error("pid 0 was sent")
	}
	if err := h.Lock(t.Context(), 1, 100*24*time.Hour); err == nil {
		t.Error("a timeout over 32 bits of milliseconds was sent")
	}
	if err := h.Restore(t.Context(), 1, []Pair{{Old: "0", New: "1"}}); err == nil {
		t.Error("pairs of no UUIDs were sent")
	}
	if s, err := h.State(t.Context(), 1); err != nil || s != Running {
		t.Errorf("after them: %v, %v", s, err)
	}
}

func TestStartWithoutHelper(t *testing.T) {
	if _, err := Start(t.Context(), Options{Path: "/nonexistent/helper"}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
	t.Setenv("PATH", t.TempDir())
	if _, err := Start(t.Context(), Options{}); !errors.Is(err, exec.ErrNotFound) {
		t.Errorf("got %v", err)
	}
}

func TestHelperSeesAllGPUs(t *testing.T) {
	t.Setenv("CUDA_VISIBLE_DEVICES", "3")
	cmd, err := Options{Path: "x", Join: 12, Env: []string{"A=b"}}.command()
	if err != nil {
		t.Fatal(err)
	}
	env := "\n" + strings.Join(cmd.Env, "\n") + "\n"
	if strings.Contains(env, "CUDA_VISIBLE_DEVICES") {
		t.Error("CUDA_VISIBLE_DEVICES is passed on")
	}
	for _, want := range []string{"\nA=b\n", "\n_GPUCKPT_JOIN=12\n"} {
		if !strings.Contains(env, want) {
			t.Errorf("no %q in the environment", want)
		}
	}
}
