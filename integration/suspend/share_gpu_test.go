// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package suspend

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// A is suspended, B runs on the same GPU and leaves no room for A, which cannot
// be resumed until B has gone: then all bits of A are there.
func TestShareGPU(t *testing.T) {
	for _, size := range session.Sizes(t) {
		t.Run(size.Name, func(t *testing.T) {
			result := results.Add(t)
			result.Number("gpu_memory_bytes", float64(size.Bytes))
			if gpu.Kind == harness.SoftwareGPU { // as large as is filled soon
				shared.SoftwareGPU(t, "gpu0.memory_mib="+strconv.FormatUint(size.Bytes>>20*5/3, 10)+"\n")
			}
			a := shared.Work(t, harness.RunSpec{ID: harness.Name(t) + "-a", GPUs: []int{0}}, "pattern", "--bytes", size.Arg(), "--chunks", "3", "--seed", "7")
			a.Expect(t, "verify", "bad=0")
			a.Expect(t, "count", "101")
			free, has := memory(t, 0, a)
			if has < size.Bytes {
				t.Fatalf("NVML counts %d bytes for the running container, which has %d at least", has, size.Bytes)
			}

			if err := result.Time("suspend", func() error { suspend(t, shared, a); return nil }); err != nil {
				t.Fatal(err)
			}
			result.Phases(t, a)
			hasNone(t, 0, a, free)
			result.Number("host_memory_bytes", float64(stagingMemory(t, "staging")))

			// B leaves half of what A needs.
			room, _ := memory(t, 0, a)
			fill := (room - has/2 - (has - size.Bytes)) &^ (1<<20 - 1)
			result.Number("other_gpu_memory_bytes", float64(fill))
			b := shared.Work(t, harness.RunSpec{ID: harness.Name(t) + "-b", GPUs: []int{0}}, "pattern", "--bytes", strconv.FormatUint(fill, 10), "--seed", "8")
			b.Expect(t, "verify", "bad=0")

			for range 2 { // it can be tried again
				harness.Says(t, gpuckpt(t, shared, "resume", a.ID), "GPU 0", gpu.Devices[0].UUID, "memory free", "needs", "(gpuwork) has", "stays suspended")
				isPaused(t, shared, a, true)
			}
			_, err := shared.Ctr(t.Context(), "tasks", "resume", a.ID)
			harness.Says(t, err, "GPU 0", "memory free", "stays suspended")
			isPaused(t, shared, a, true)
			b.Expect(t, "verify", "bad=0")
			if err := b.Remove(t.Context()); err != nil {
				t.Fatal(err)
			}

			if err := result.Time("resume", func() error { resume(t, shared, a); return nil }); err != nil {
				t.Fatal(err)
			}
			result.Phases(t, a)
			a.Expect(t, "verify", "bad=0")
			a.Expect(t, "count", "102")
			a.Expect(t, "write 900", "wrote 900")
			a.Expect(t, "verify", "bad=0")
			if left := stagingMemory(t, "staging"); left > size.Bytes/4 {
				t.Errorf("%d bytes of host memory are still taken after the resume", left)
			}

			// And once more, as often as one likes.
			suspend(t, shared, a)
			resume(t, shared, a)
			a.Expect(t, "verify", "bad=0")
			a.Expect(t, "count", "103")
		})
	}
}

// What suspend leaves is a paused container: ctr resumes it, GPU and all.
func TestResumeByCtr(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	suspend(t, shared, k)
	if _, err := shared.Ctr(t.Context(), "tasks", "resume", k.ID); err != nil {
		t.Fatal(err)
	}
	isPaused(t, shared, k, false)
	k.Expect(t, "count", "102")
}

// All CUDA processes of a container go and come together, on their GPUs.
func TestProcesses(t *testing.T) {
	results.Add(t)
	gpus := []int{0}
	if len(gpu.Devices) > 1 {
		gpus = []int{0, 1}
	}
	k := shared.Work(t, harness.RunSpec{GPUs: gpus, Ports: 3}, "multi", "--procs", "3", "--gpus", strconv.Itoa(len(gpus)), "--bytes", "8M")
	for n := range 3 {
		k.Process(n).Expect(t, "verify", "bad=0")
	}
	users := usersIn(t, k)
	if users != 3 {
		t.Errorf("NVML counts %d processes of the container, want 3", users)
	}
	suspend(t, shared, k)
	if users := usersIn(t, k); users != 0 {
		t.Errorf("NVML counts %d processes of the suspended container", users)
	}
	resume(t, shared, k)
	for n := range 3 {
		k.Process(n).Expect(t, "verify", "bad=0")
	}
}

// usersIn counts the uses of GPUs by children of a container's first process.
func usersIn(t *testing.T, k *harness.Container) (users int) {
	t.Helper()
	parent := "\nPPid:\t" + strconv.Itoa(k.MustPid(t)) + "\n"
	for _, d := range survey(t).Devices {
		for _, u := range d.Users {
			status, err := os.ReadFile("/proc/" + strconv.Itoa(u.PID) + "/status")
			if err == nil && strings.Contains(string(status), parent) {
				users++
			}
		}
	}
	return users
}

// The processes may use several GPUs, and resume on them in another order.
func TestAnotherGPU(t *testing.T) {
	results.Add(t)
	if len(gpu.Devices) < 2 {
		t.Skip("needs two GPUs")
	}
	first, second := gpu.Devices[0].UUID, gpu.Devices[1].UUID
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0, 1}}, "pattern", "--gpus", "1", "--bytes", "16M")
	k.Expect(t, "verify", "bad=0")
	free, has := memory(t, 0, k)
	if has == 0 {
		t.Fatal("NVML counts nothing for the container on GPU 0")
	}
	suspend(t, shared, k)
	hasNone(t, 0, k, free)
	for _, wrong := range []struct {
		gpus string
		says string
	}{
		{"1", "the container had 2 GPUs"},
		{"1,1", "named twice"},
		{"0,7", "no GPU 7"},
		{"GPU-00000000-0000-4000-8000-000000000000,1", "no GPU GPU-00000000"},
	} {
		harness.Says(t, gpuckpt(t, shared, "resume", "--gpus", wrong.gpus, k.ID), wrong.says)
		isPaused(t, shared, k, true)
	}
	resume(t, shared, k, "--gpus", second+","+first)
	k.Expect(t, "verify", "bad=0")
	if _, has := memory(t, 1, k); has == 0 {
		t.Error("NVML counts nothing for the container on GPU 1")
	}
	// It remembers none of it: by index, back again.
	suspend(t, shared, k)
	resume(t, shared, k, "--gpus", "1,0")
	k.Expect(t, "verify", "bad=0")
	if _, has := memory(t, 0, k); has == 0 {
		t.Error("NVML counts nothing for the container on GPU 0")
	}
}

// A container that has one GPU goes on on another that it has never seen, and
// that one alone: what it had is taken from it.
func TestUnseenGPU(t *testing.T) {
	result := results.Add(t)
	if len(gpu.Devices) < 2 {
		t.Skip("needs two GPUs")
	}
	if gpu.Kind == harness.SoftwareGPU {
		hostNodes(t)
	}
	// With the capability, NVIDIA's library in the program itself would make the
	// nodes of all GPUs in the container.
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}, Amend: []oci.SpecOpts{oci.WithDroppedCapabilities([]string{"CAP_MKNOD"})}},
		"pattern", "--bytes", "32M", "--seed", "5")
	nodes(t, k, "/dev/nvidia0")
	k.Expect(t, "verify", "bad=0")
	free, _ := memory(t, 0, k)
	suspend(t, shared, k)
	hasNone(t, 0, k, free)
	if gpu.Kind == harness.SoftwareGPU {
		// What was given is taken back when the driver fails.
		t.Run("driver fails", func(t *testing.T) {
			shared.SoftwareGPU(t, "fail=restore:2\n")
			harness.Says(t, gpuckpt(t, shared, "resume", "--gpus", "1", k.ID), "CUDA_ERROR_OUT_OF_MEMORY", "stays suspended")
			isPaused(t, shared, k, true)
			nodes(t, k, "/dev/nvidia0")
		})
	}
	if err := result.Time("resume", func() error { resume(t, shared, k, "--gpus", gpu.Devices[1].UUID); return nil }); err != nil {
		t.Fatal(err)
	}
	result.Phases(t, k)
	k.Expect(t, "verify", "bad=0")
	k.Expect(t, "write 900", "wrote 900")
	k.Expect(t, "verify", "bad=0")
	if _, has := memory(t, 1, k); has == 0 {
		t.Error("NVML counts nothing for the container on GPU 1")
	}
	if _, has := memory(t, 0, k); has != 0 {
		t.Errorf("NVML counts %d bytes for the container on GPU 0", has)
	}
	nodes(t, k, "/dev/nvidia1")

	// A new CUDA program in the container sees and uses the new GPU alone, also
	// after a change of limits.
	sees(t, k, gpu.Devices[1].UUID, gpu.Devices[0].UUID)
	container, err := shared.Client().LoadContainer(t.Context(), k.ID)
	if err != nil {
		t.Fatal(err)
	}
	task, err := container.Task(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	shares := uint64(512)
	if err := task.Update(t.Context(), client.WithResources(&specs.LinuxResources{CPU: &specs.LinuxCPU{Shares: &shares}})); err != nil {
		t.Fatal(err)
	}
	sees(t, k, gpu.Devices[1].UUID, gpu.Devices[0].UUID)
	suspend(t, shared, k)
	resume(t, shared, k) // where it was last
	k.Expect(t, "verify", "bad=0")
	suspend(t, shared, k)
	resume(t, shared, k, "--gpus", "0")
	k.Expect(t, "verify", "bad=0")
	nodes(t, k, "/dev/nvidia0")
}

// sees has a new program in the container list GPUs by NVML and use each by
// CUDA: there must be the one, and not the other.
func sees(t *testing.T, k *harness.Container, one, other string) {
	t.Helper()
	out, err := shared.Ctr(t.Context(), "tasks", "exec", "--exec-id", "list", k.ID, "gpuwork", "list")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out, one) || strings.Contains(out, other) {
		t.Errorf("a new program sees %q; want %s and not %s", out, one, other)
	}
}

// nodes checks which GPUs' nodes a container's /dev has.
func nodes(t *testing.T, k *harness.Container, want ...string) {
	t.Helper()
	root := "/proc/" + strconv.Itoa(k.MustPid(t)) + "/root"
	found, err := filepath.Glob(root + "/dev/nvidia[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	for i := range found {
		found[i] = strings.TrimPrefix(found[i], root)
	}
	if !slices.Equal(found, want) {
		t.Errorf("the container has %q, want %q", found, want)
	}
}

// hostNodes makes the software GPUs' nodes in /dev as these tests see it, where a real GPU's are.
func hostNodes(t *testing.T) {
	t.Helper()
	dev := filepath.Join(shared.Dir(), "softgpu", "dev")
	for _, name := range []string{"nvidia0", "nvidia1"} {
		var st unix.Stat_t
		if err := unix.Stat(filepath.Join(dev, name), &st); err != nil {
			t.Fatal(err)
		}
		node := filepath.Join("/dev", name)
		if err := unix.Mknod(node, st.Mode, int(st.Rdev)); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := os.Remove(node); err != nil {
				t.Error(err)
			}
		})
	}
}
