// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// oldCRIU is a program that says it is a CRIU of some years ago.
func oldCRIU(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "criu")
	write(t, path, "#!/bin/sh\n[ \"$1\" = --version ] && echo Version: 3.17.1\n", 0o755)
	return path
}

// A checkpoint that cannot work is refused with what is wrong and what to do,
// by ctr and by the API, where the error has a code to act upon. The container
// counts on, and once the cause is gone it can be checkpointed.
func TestRefusals(t *testing.T) {
	for _, test := range []struct {
		name     string
		workload []string
		// prepare makes the checkpoint impossible and repair undoes that; nil
		// where the workload is what cannot be checkpointed.
		prepare func(t *testing.T, k *harness.Container) (repair func())
		code    string
		words   []string
		// again is what a real driver says the second time, where that differs.
		again    []string
		software bool // the workload asks it of the software GPU
	}{
		{
			name: "CRIU too old", workload: []string{"counter"},
			prepare: func(t *testing.T, _ *harness.Container) func() {
				return shared.Configured(t, "[criu]\npath = \""+oldCRIU(t)+"\"\n")
			},
			code: "FailedPrecondition", words: []string{"version 3.17.1", "too old", "install CRIU 4.2 or newer"},
		},
		{
			name: "driver too old", workload: []string{"counter"},
			prepare: func(t *testing.T, _ *harness.Container) func() {
				return shared.SoftwareGPU(t, "driver=550.54\n")
			},
			code: "FailedPrecondition", words: []string{"NVIDIA driver too old", "550.54", "570"},
		},
		{
			name: "managed memory", workload: []string{"managed"},
			code: "FailedPrecondition", words: []string{"CUDA_ERROR_NOT_SUPPORTED", "managed memory"},
			// Driver 580 gives its reason once only.
			again: []string{"CUDA_ERROR_UNKNOWN", "has refused this process before"},
		},
		{
			name: "profiler", workload: []string{"counter", "--with", "profile"}, software: true,
			code: "FailedPrecondition", words: []string{"CUDA_ERROR_NOT_SUPPORTED", "a profiler is at work in the process, or was"},
		},
		{
			name: "graphics", workload: []string{"plain", "--with", "draw"}, software: true,
			code: "FailedPrecondition", words: []string{"(gpuwork) uses a GPU for graphics (EGL, OpenGL, Vulkan)"},
		},
		{
			name: "graphics and CUDA", workload: []string{"counter", "--with", "draw"}, software: true,
			code: "FailedPrecondition", words: []string{"(gpuwork) uses a GPU for graphics (EGL, OpenGL, Vulkan)"},
		},
		{
			name: "kernel that does not end", workload: []string{"spin"},
			prepare: func(t *testing.T, k *harness.Container) func() {
				shared.Configured(t, "lock_timeout = \"500ms\"\n")
				k.Expect(t, "state", "spinning")
				return func() {
					k.Expect(t, "stop", "stopping")
					harness.Within(t, "the kernel ends", func() bool { return k.Answer(t, "state") == "idle" })
				}
			},
			code: "DeadlineExceeded", words: []string{"lock CUDA process", "still running on the GPU"},
		},
		{
			name: "no driver", workload: []string{"counter"},
			prepare: func(t *testing.T, _ *harness.Container) func() {
				return shared.Configured(t, "driver_root = \"/no/such/root\"\n")
			},
			code: "FailedPrecondition", words: []string{"no NVIDIA driver in driver_root", "/no/such/root"},
		},
		{
			name: "broken configuration", workload: []string{"counter"},
			prepare: func(t *testing.T, _ *harness.Container) func() {
				return shared.Configured(t, "lock_timeoot = \"10s\"\n")
			},
			code: "FailedPrecondition", words: []string{"gpuckpt configuration", shared.ShimConfigPath(), "lock_timeoot"},
		},
		{
			name: "option that CRIU does not have", workload: []string{"counter"},
			prepare: func(t *testing.T, _ *harness.Container) func() {
				return shared.Configured(t, "[criu.options]\nno-such-option = true\n")
			},
			code: "Unknown", words: []string{"dump", "criu failed", "option", "unknown", "gpuckpt-criu.conf"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			results.Add(t)
			if test.software && gpu.Kind != harness.SoftwareGPU {
				t.Skip("of the software GPU")
			}
			k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, test.workload...)
			first := number(t, k.Answer(t, "count"))
			var repair func()
			if test.prepare != nil {
				repair = test.prepare(t, k)
			}
			harness.Says(t, k.Checkpoint(t.Context(), "refused:1"), test.words...)
			isPaused(t, k, false)
			again := test.words
			if test.again != nil && gpu.Kind == harness.RealGPU {
				again = test.again
			}
			harness.Says(t, plainCheckpoint(t, shared, k), append(again, "code = "+test.code)...)
			isPaused(t, k, false)
			if next := number(t, k.Answer(t, "count")); next != first+1 {
				t.Fatalf("afterwards it counts %d, want %d", next, first+1)
			}
			if repair == nil {
				return
			}
			repair()
			takeCheckpoint(t, shared, k, "1")
			if next := number(t, k.Answer(t, "count")); next != first+2 {
				t.Fatalf("after a good checkpoint it counts %d, want %d", next, first+2)
			}
		})
	}
}

// On a node without CRIU containers run, and a checkpoint is refused at once.
func TestNoCRIU(t *testing.T) {
	results.Add(t)
	c := session.Own(t, harness.Options{Env: []string{"PATH=" + bins.PathWithout(t, t.TempDir(), "criu")}})
	k := c.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	harness.Says(t, k.Checkpoint(t.Context(), "refused:1"), "no criu in $PATH", "install CRIU 4.2 or newer")
	harness.Says(t, plainCheckpoint(t, c, k), "code = FailedPrecondition")
	isPaused(t, k, false)
	k.Expect(t, "count", "102")
}

// The criu that the node's file names is the one that dumps and restores.
func TestConfiguredCRIU(t *testing.T) {
	results.Add(t)
	path, err := bins.Path("criu")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	write(t, filepath.Join(dir, "criu"), "#!/bin/sh\necho \"$1\" >>"+dir+"/calls\nexec "+path+" \"$@\"\n", 0o755)
	calls := func() int {
		text, err := os.ReadFile(dir + "/calls")
		if err != nil {
			t.Fatal(err)
		}
		return strings.Count(string(text), "swrk") // runc's
	}
	shared.Configured(t, "[criu]\npath = \""+dir+"/criu\"\n")
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	if err := k.Checkpoint(t.Context(), "configured:1"); err != nil {
		t.Fatal(err)
	}
	dumped := calls()
	k.MustRemove(t)
	restore(t, shared, k.ID, "configured:1", k.Port).Expect(t, "count", "102")
	if all := calls(); dumped == 0 || all <= dumped {
		t.Errorf("runc has called it %d times to dump, and %d times in all", dumped, all)
	}
}

// When CRIU fails, the error quotes it and names its log, which is kept.
func TestCRIUFails(t *testing.T) {
	results.Add(t)
	// A device file that is not a GPU's.
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}, CtrFlags: []string{"--device", "/dev/cpu_dma_latency"}}, "counter", "--open", "/dev/cpu_dma_latency")
	k.Expect(t, "count", "101")
	kept := filepath.Join(shared.CRIULogs(), shared.Namespace()+"-"+k.ID+"-dump.log")
	harness.Says(t, k.Checkpoint(t.Context(), "refused:1"), "CRIU said: ", "Can't dump file", kept)
	log, err := os.ReadFile(kept)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(log), "Dumping FAILED") {
		t.Errorf("the kept log is not that of the failed dump:\n%s", log)
	}
	isPaused(t, k, false)
	k.Expect(t, "count", "102")

	// An error of a time at which CRIU was not even started does not quote
	// the log of another.
	err = checkpointTask(t, shared, k, "/proc/no-place")
	harness.Says(t, err, "/proc/no-place")
	if strings.Contains(err.Error(), "CRIU said") {
		t.Errorf("it quotes an older log: %v", err)
	}
	k.Expect(t, "count", "103")
}
