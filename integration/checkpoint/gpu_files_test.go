// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// A process that was forked after CUDA began keeps files of the GPU open, which it cannot use. It
// is dumped with its parent, and both go on: after a checkpoint, and after a restore.
func TestForkedAfterCUDA(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}, Ports: 2}, "forked")
	k.Expect(t, "count", "101")
	k.Process(1).Expect(t, "count", "101")
	ref := takeCheckpoint(t, shared, k, "forked")
	k.Expect(t, "count", "102")
	k.Process(1).Expect(t, "count", "102")
	for i := range 3 { // each of the one before
		k.MustRemove(t)
		k = restore(t, shared, k.ID, ref, k.Port)
		count := strconv.Itoa(102 + i)
		k.Expect(t, "count", count)
		k.Process(1).Expect(t, "count", count)
		ref = takeCheckpoint(t, shared, k, fmt.Sprintf("forked-%d", i))
	}
}

// A process that uses NVML alone is checkpointed as a CUDA process is: NVML has the driver serve it.
func TestMonitor(t *testing.T) {
	results.Add(t)
	testMonitor(t)
}

// NVML that finds no libcuda keeps a file of the driver open, and the driver does not know the process.
// It is dumped and restored.
func TestMonitorWithoutCUDA(t *testing.T) {
	results.Add(t)
	shared.SoftwareGPU(t, "nvml_alone=1\n")
	testMonitor(t)
}

func testMonitor(t *testing.T) {
	t.Helper()
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "monitor")
	k.Expect(t, "count", "101")
	ref := takeCheckpoint(t, shared, k, "monitor")
	k.Expect(t, "count", "102")
	for range 2 {
		k.MustRemove(t)
		k = restore(t, shared, k.ID, ref, k.Port)
		k.Expect(t, "count", "102")
	}
}

// A thread of the driver that reads a mapping of the GPU by a timer does not run while
// the mapping is gone: not in a checkpoint after which the container goes on.
func TestTimerThread(t *testing.T) {
	results.Add(t)
	shared.SoftwareGPU(t, "timer_ms=1\n")
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	for range 3 {
		checkpointInto(t, shared, k, t.TempDir())
	}
	k.Expect(t, "count", "102")
}

// Nor does that thread run in a restore before the GPU state is back: CRIU holds it until then.
func TestTimerThreadRestored(t *testing.T) {
	results.Add(t)
	shared.SoftwareGPU(t, "timer_ms=1\n")
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	ref := takeCheckpoint(t, shared, k, "timer")
	k.MustRemove(t)
	for range 3 {
		r := restore(t, shared, k.ID, ref, k.Port)
		r.Expect(t, "count", "102")
		r.MustRemove(t)
	}
}

// A program that forks all the time, as PyTorch's compiler starts its workers: a child that comes up
// between the lock and the freeze keeps the files that it was forked with, and is dumped with them. Where
// a thread is stopped in fork, it has locks of the C library that the driver's thread needs, in the
// checkpoint and in the restore. The driver's thread that wakes by a timer does not run when that one does.
func TestForkedBesideTheLock(t *testing.T) {
	if gpu.Kind == harness.SoftwareGPU {
		shared.SoftwareGPU(t, "lock_delay_ms=200\nfork_ms=40\ntimer_ms=1\n")
	}
	for name, spec := range map[string]harness.RunSpec{"driver": {GPUs: []int{0}}, "interposer": withInterposer()} {
		t.Run(name, func(t *testing.T) {
			results.Add(t)
			k := shared.Work(t, spec, "forking")
			k.Expect(t, "count", "101")
			for i := range 3 {
				ref := takeCheckpoint(t, shared, k, fmt.Sprint("forking-", i))
				k.MustRemove(t)
				k = restore(t, shared, k.ID, ref, k.Port)
				k.Expect(t, "count", fmt.Sprint(102+i))
			}
			if !regexp.MustCompile("waited for a lock of another thread.* id="+k.ID+" ").MatchString(shared.Log()) && gpu.Kind == harness.SoftwareGPU {
				t.Error("no thread of the driver waited for a lock of another: the test shows nothing")
			}
		})
	}
}

// A program that spawns processes by vfork: the child shares its memory, and the thread that called
// waits in the kernel, where CRIU cannot stop it. The freeze waits until neither is so.
func TestStoppedInFork(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "vforking")
	k.Expect(t, "count", "101")
	for i := range 2 {
		ref := takeCheckpoint(t, shared, k, fmt.Sprint("vforking-", i))
		k.MustRemove(t)
		k = restore(t, shared, k.ID, ref, k.Port)
		k.Expect(t, "count", fmt.Sprint(102+i))
	}
}

// Two processes that share device memory, by CUDA IPC without events or by an exported handle, or
// host memory of the driver: the driver would checkpoint them and never restore them. So they are found before it is asked, and run
// on. Where there are two GPUs, one maps memory of the other's.
func TestSharedMemoryRefused(t *testing.T) {
	device := []string{"shares GPU memory", "CUDA IPC", "gpuwork", "NCCL_P2P_DISABLE=1", "dev.gpuckpt.interposer"}
	for _, test := range []struct {
		way   string
		words []string
	}{
		{"ipc", device},
		{"handle", device},
		{"host", []string{"share host memory", "gpuwork", "NCCL_CUMEM_HOST_ENABLE=0"}},
	} {
		t.Run(test.way, func(t *testing.T) {
			results.Add(t)
			gpus := allGPUs()
			k := shared.Work(t, harness.RunSpec{GPUs: gpus, Ports: 2}, "ipc", "--share", test.way, "--gpus", strconv.Itoa(len(gpus)))
			k.Expect(t, "count", "101")
			k.Process(1).Expect(t, "count", "102")
			for try := range sharedTries(t) {
				harness.Says(t, checkpointTask(t, shared, k, t.TempDir()), test.words...)
				k.Expect(t, "count", strconv.Itoa(103+2*try))
				k.Process(1).Expect(t, "count", strconv.Itoa(104+2*try))
			}
		})
	}
}

// sharedTries is how often TestSharedMemoryRefused asks for a checkpoint: $GPUCKPT_TEST_SHARED, else once.
func sharedTries(t *testing.T) int {
	t.Helper()
	text := os.Getenv("GPUCKPT_TEST_SHARED")
	if text == "" {
		return 1
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// Memory with an exported handle that nobody has imported is restored as any other.
func TestExportedMemory(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "ipc", "--share", "handle", "--procs", "1")
	k.Expect(t, "count", "101")
	ref := takeCheckpoint(t, shared, k, "exported")
	k.MustRemove(t)
	r := restore(t, shared, k.ID, ref, k.Port)
	r.Expect(t, "count", "102")
}

// A driver whose kernel module does not say what a process has imported is not trusted with it.
func TestSharedMemoryUnknown(t *testing.T) {
	results.Add(t)
	shared.SoftwareGPU(t, "mute=1\n")
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	harness.Says(t, checkpointTask(t, shared, k, t.TempDir()), "the driver does not report it", "use one of 570 to 595")
	k.Expect(t, "count", "102")
}

// A driver that can restore such processes is asked.
func TestSharedMemoryByLaterDriver(t *testing.T) {
	results.Add(t)
	shared.SoftwareGPU(t, "driver=610.1-softcuda\n")
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}, Ports: 2}, "ipc")
	k.Expect(t, "count", "101")
	k.Process(1).Expect(t, "count", "102") // it has imported the memory
	err := checkpointTask(t, shared, k, t.TempDir())
	if err == nil || strings.Contains(err.Error(), "CUDA IPC") {
		t.Errorf("error %v, want the driver's", err)
	}
}

// Files of 8 MiB that are mapped and have no name any more, in /dev/shm and in the root file
// system, are dumped and come back without any annotation: PyTorch shares its tensors by such files.
func TestUnlinkedFiles(t *testing.T) {
	results.Add(t)
	for _, test := range []struct {
		name string
		spec harness.RunSpec
		work string
	}{
		{"without a GPU", harness.RunSpec{}, "plain"},
		{"with a GPU", harness.RunSpec{GPUs: []int{0}, MemoryLimit: 4 << 30}, "counter"},
	} {
		t.Run(test.name, func(t *testing.T) {
			k := shared.Work(t, test.spec, test.work, "--unlinked", "/dev/shm/shared", "--unlinked", "/unlinked")
			k.Expect(t, "count", "101")
			want := unlinkedFiles(t, k)
			if len(want) != 2 || want[0] != want[1] {
				t.Fatalf("two files of one content expected, got %q", want)
			}
			ref := takeCheckpoint(t, shared, k, "1")
			k.Expect(t, "count", "102")
			k.MustRemove(t)
			r := restore(t, shared, k.ID, ref, k.Port)
			r.Expect(t, "count", "102")
			if got := unlinkedFiles(t, r); !slices.Equal(got, want) {
				t.Errorf("the files are %q, want %q", got, want)
			}
		})
	}
}

// unlinkedFiles returns size and digest of each file that the container's first process has open
// and that has no name.
func unlinkedFiles(t *testing.T, k *harness.Container) (files []string) {
	t.Helper()
	links, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", k.MustPid(t)))
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		name, err := os.Readlink(link)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasSuffix(name, " (deleted)") || strings.HasPrefix(name, "/memfd:") {
			continue
		}
		data, err := os.ReadFile(link)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, fmt.Sprintf("%d bytes %x", len(data), sha256.Sum256(data)))
	}
	return files
}
