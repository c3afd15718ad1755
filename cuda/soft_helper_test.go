// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestSoftHelperFinishesWhatItBeganWhenItsClientDies(t *testing.T) {
	dev := devices(t, 1)
	w := start(t, dev, []string{"SOFTCUDA_CHECKPOINT_DELAY_MS=1000"}, "counter")
	w.counts(101)
	h := softHelper(t, dev, nil)
	do(t, h.Lock(t.Context(), w.pid, time.Second))
	before, err := AnonymousRanges(w.pid)
	do(t, err)

	client := exec.Command(os.Args[0])
	client.Env = append(os.Environ(), h.cmd.Env...)
	client.Env = append(client.Env, fmt.Sprintf("%s=client:%s:%d", fakeEnv, h.cmd.Path, w.pid))
	do(t, client.Start())
	defer client.Wait()
	var helper []int
	within(t, func() {
		for midway := false; !midway; time.Sleep(10 * time.Millisecond) {
			now, err := AnonymousRanges(w.pid)
			do(t, err)
			midway = len(NewRanges(before, now)) > 0
		}
		helper = childrenOf(t, client.Process.Pid)
	})
	do(t, client.Process.Kill())
	if len(helper) != 1 {
		t.Fatalf("the client has children %v", helper)
	}
	within(t, func() {
		for {
			status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", helper[0]))
			if err != nil || strings.Contains(string(status), "State:\tZ") {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
	})
	w.is(h, Checkpointed)
}

func TestSoftNoDriver(t *testing.T) {
	dir := t.TempDir() // whose libcuda is none, in case this machine has one
	do(t, os.WriteFile(filepath.Join(dir, "libcuda.so.1"), []byte("no library"), 0o600))
	h := softHelper(t, devices(t, 1), func(o *Options) { o.Env = append(o.Env, "LD_LIBRARY_PATH="+dir) })
	_, err := h.State(t.Context(), os.Getpid())
	wants(t, err, ErrNoDriver, "libcuda.so.1")
	_, err = h.Info(t.Context())
	wants(t, err, ErrNoDriver)
}

func TestSoftDriverTooOld(t *testing.T) {
	t.Run("by its version", func(t *testing.T) {
		h := softHelper(t, devices(t, 1), func(o *Options) { o.Env = append(o.Env, "SOFTCUDA_DRIVER=535.104.05") })
		_, err := h.Info(t.Context())
		wants(t, err, ErrDriverTooOld, "535.104.05", "570")
	})
	t.Run("by its functions", func(t *testing.T) {
		dir := t.TempDir()
		src := filepath.Join(dir, "old.c")
		var c strings.Builder
		for _, f := range []string{"cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetUuid_v2",
			"cuDeviceGetName", "cuDeviceTotalMem_v2", "cuDeviceGetPCIBusId", "cuGetErrorString"} {
			fmt.Fprintf(&c, "int %s(void) { return 0; }\n", f)
		}
		do(t, os.WriteFile(src, []byte(c.String()), 0o600))
		if out, err := exec.Command("gcc", "-shared", "-fPIC", "-o", filepath.Join(dir, "libcuda.so.1"), src).CombinedOutput(); err != nil {
			t.Fatalf("gcc: %v\n%s", err, out)
		}
		h := softHelper(t, devices(t, 1), func(o *Options) {
			o.Env = append(o.Env, "LD_LIBRARY_PATH="+dir+":"+soft(t), "SOFTCUDA_DRIVER=550.54.14")
		})
		_, err := h.State(t.Context(), os.Getpid())
		wants(t, err, ErrDriverTooOld, "550.54.14")
	})
}

func TestSoftHelperByHand(t *testing.T) {
	out, err := exec.Command(filepath.Join(soft(t), HelperName)).CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 1 || !strings.Contains(string(out), "not by hand") {
		t.Errorf("got %v: %s", err, out)
	}
}
