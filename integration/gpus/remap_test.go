// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpus

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

func pattern(gpus int) []string {
	return []string{"pattern", "--bytes", fmt.Sprint(bytes), "--chunks", "3", "--seed", "7", "--gpus", fmt.Sprint(gpus)}
}

// given is the annotation that says where GPUs go.
func given(pairs ...string) map[string]string {
	return map[string]string{cdi.PairsAnnotation: strings.Join(pairs, ",")}
}

// A container that had only GPU 0 goes on with only GPU 1, and back: the
// program, NVML and new programs are on the one that it is granted.
func TestAnotherGPU(t *testing.T) {
	result := two(t)
	k := start(t, harness.RunSpec{GPUs: []int{0}}, pattern(1)...)
	k.Expect(t, "verify", "bad=0")
	k.Expect(t, "count", "101")
	isOn(t, k, 0, uuid(0))
	visible(t, k, 0)
	dir := checkpointed(t, result, k)

	for i, at := range []int{1, 0} {
		k = restored(t, result, harness.RunSpec{GPUs: []int{at}}, dir, k.Port)
		k.Expect(t, "verify", "bad=0")
		k.Expect(t, "count", fmt.Sprint(102+i))
		k.Expect(t, "write 300", "wrote 300")
		k.Expect(t, "verify", "bad=0")
		isOn(t, k, 0, uuid(at))
		visible(t, k, at)
		hasNodes(t, k, at)
		dir = checkpointed(t, result, k)
		if m := metadata(t, dir); len(m.GPUs) != 1 || m.GPUs[0].UUID != uuid(at) {
			t.Errorf("the next checkpoint names %+v, want %s", m.GPUs, uuid(at))
		}
	}
}

// reaching are the ways by which a process's kernel on a GPU reaches the memory of another one: by
// cuCtxEnablePeerAccess, and by memory that is mapped for both.
var reaching = map[string][]string{"peer access": {"peer"}, "mappings": {"peer", "--share", "handle"}}

// One process whose kernel on a GPU reaches the memory of another one, with the interposer: it goes on
// beside its checkpoint and after it, also with the two swapped.
func TestPeerAccess(t *testing.T) {
	for name, args := range reaching {
		t.Run(name, func(t *testing.T) {
			result := two(t)
			with := map[string]string{annotations.Interposer: "true"}
			k := start(t, harness.RunSpec{GPUs: []int{0, 1}, Annotations: with}, args...)
			k.Expect(t, "count", "101")
			dir := t.TempDir()
			if err := checkpointInto(t, k, t.TempDir()); err != nil {
				t.Fatal(err)
			}
			k.Expect(t, "count", "102")
			if err := checkpointInto(t, k, dir); err != nil {
				t.Fatal(err)
			}
			result.Phases(t, k)
			k.Expect(t, "count", "103")
			k.MustRemove(t)
			swapped := given(uuid(0)+"="+uuid(1), uuid(1)+"="+uuid(0))
			maps.Copy(swapped, with)
			for _, how := range []map[string]string{with, swapped} {
				k = restored(t, result, harness.RunSpec{GPUs: []int{0, 1}, Annotations: how}, dir, k.Port)
				k.Expect(t, "count", "103")
				k.MustRemove(t)
			}
		})
	}
}

// The same without the interposer is refused, however often, before the driver is asked, and runs on.
func TestPeerAccessRefused(t *testing.T) {
	for name, args := range reaching {
		t.Run(name, func(t *testing.T) {
			two(t)
			k := start(t, harness.RunSpec{GPUs: []int{0, 1}}, args...)
			for try := range 20 {
				k.Expect(t, "count", fmt.Sprint(101+try))
				dir := t.TempDir()
				harness.Says(t, checkpointInto(t, k, dir), "preflight", "gpuwork", "reaches memory of one GPU from another", annotations.Interposer)
				if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
					t.Fatalf("the checkpoint has left %v, %v", left, err)
				}
			}
			k.Expect(t, "count", "121")
		})
	}
}

// Where the interposer's memory is left to the driver, because it is written through to a disk or because
// nothing is steered, the interposer does not help, and the program is refused.
func TestPeerAccessLeftToTheDriver(t *testing.T) {
	two(t)
	k := start(t, harness.RunSpec{GPUs: []int{0, 1}, Annotations: map[string]string{annotations.Interposer: "true"}}, reaching["mappings"]...)
	k.Expect(t, "count", "101")
	undo := shared.Configured(t, shared.Staging("unsteered", "steer = false"))
	harness.Says(t, checkpointInto(t, k, harness.DiskDir(t)), "reaches memory of one GPU from another", "[staging] steer is off")
	undo()
	k.Expect(t, "count", "102")
	shared.Configured(t, shared.Staging("short", fmt.Sprintf("memory_limit = %d\nwhen_short = \"write-through\"", 48<<20)))
	harness.Says(t, checkpointInto(t, k, harness.DiskDir(t)), "reaches memory of one GPU from another", "its interposer needs room in memory")
	k.Expect(t, "count", "103")
}

// A child that was forked after CUDA began has the old GPU's file open, and goes on where there is
// only another GPU.
func TestForkedOnAnotherGPU(t *testing.T) {
	result := two(t)
	k := start(t, harness.RunSpec{GPUs: []int{0}, Ports: 2}, "forked")
	k.Expect(t, "count", "101")
	k.Process(1).Expect(t, "count", "101")
	dir := checkpointed(t, result, k)
	k = restored(t, result, harness.RunSpec{GPUs: []int{1}, Ports: 2}, dir, k.Port)
	k.Expect(t, "count", "102")
	k.Process(1).Expect(t, "count", "102")
}

// One process on two GPUs goes on with the two swapped.
func TestSwapOneProcess(t *testing.T) {
	result := two(t)
	k := start(t, harness.RunSpec{GPUs: []int{0, 1}}, pattern(2)...)
	k.Expect(t, "verify", "bad=0")
	isOn(t, k, 0, uuid(0), uuid(1))
	dir := checkpointed(t, result, k)
	r := restored(t, result, harness.RunSpec{GPUs: []int{0, 1}, Annotations: given(uuid(0)+"="+uuid(1), uuid(1)+"="+uuid(0))}, dir, k.Port)
	r.Expect(t, "verify", "bad=0")
	isOn(t, r, 0, uuid(1), uuid(0))
	visible(t, r, 0, 1)
}

// Two processes, each with its state on a GPU of its own, change places.
func TestSwapTwoProcesses(t *testing.T) {
	result := two(t)
	k := start(t, harness.RunSpec{GPUs: []int{0, 1}, Ports: 2}, "multi", "--procs", "2", "--gpus", "2", "--bytes", fmt.Sprint(bytes))
	for n := range 2 {
		k.Process(n).Expect(t, "verify", "bad=0")
		isOn(t, k, n, uuid(n))
	}
	dir := checkpointed(t, result, k)
	for _, p := range metadata(t, dir).Processes {
		if len(p.GPUs) != 2 {
			t.Errorf("the checkpoint names %v for process %d, want both GPUs", p.GPUs, p.PID)
		}
	}
	// By the indices: gpuckpt.json's, and the driver's here.
	r := restored(t, result, harness.RunSpec{GPUs: []int{0, 1}, Annotations: given("0=1", "1=0")}, dir, k.Port)
	for n := range 2 {
		r.Process(n).Expect(t, "verify", "bad=0")
		r.Process(n).Expect(t, "count", "101")
		isOn(t, r, n, uuid(1-n))
	}
	visible(t, r, 0, 1)
}

// A container that had one GPU is granted two: its GPU keeps its place unless
// the annotation says otherwise, and newcomers see both.
func TestMoreGranted(t *testing.T) {
	result := two(t)
	for at := range 2 {
		for _, to := range []int{0, 1} {
			t.Run(fmt.Sprintf("%d to %d of 0 and 1", at, to), func(t *testing.T) {
				k := start(t, harness.RunSpec{GPUs: []int{at}}, pattern(1)...)
				k.Expect(t, "verify", "bad=0")
				dir := checkpointed(t, result, k)
				spec := harness.RunSpec{GPUs: []int{0, 1}}
				if to != at {
					spec.Annotations = given(uuid(at) + "=" + uuid(to))
				}
				r := restored(t, result, spec, dir, k.Port)
				r.Expect(t, "verify", "bad=0")
				isOn(t, r, 0, uuid(to))
				visible(t, r, 0, 1)
			})
		}
	}
}

// A container that had one GPU was granted two, and is checkpointed again: both
// are its own now.
func TestMoreGrantedAgain(t *testing.T) {
	result := two(t)
	k := start(t, harness.RunSpec{GPUs: []int{0}}, pattern(1)...)
	k.Expect(t, "verify", "bad=0")
	both := harness.RunSpec{GPUs: []int{0, 1}}
	r := restored(t, result, both, checkpointed(t, result, k), k.Port)
	r.Expect(t, "verify", "bad=0")
	dir := checkpointed(t, result, r)
	if got := metadata(t, dir).Processes[0].GPUs; len(got) != 2 {
		t.Errorf("the checkpoint names %v for the process, want both GPUs", got)
	}
	r = restored(t, result, both, dir, k.Port)
	r.Expect(t, "verify", "bad=0")
	isOn(t, r, 0, uuid(0))
	both.Annotations = given("0=1", "1=0")
	r = restored(t, result, both, checkpointed(t, result, r), k.Port)
	r.Expect(t, "verify", "bad=0")
	isOn(t, r, 0, uuid(1))
}

// Where the driver does not take a process back to the GPUs that it had unless it is
// told which, it is told, from inside the container.
func TestSameGPUByPairs(t *testing.T) {
	if gpu.Kind != harness.SoftwareGPU {
		t.Skip("needs a driver that can be told what to refuse")
	}
	result := results.Add(t)
	k := start(t, harness.RunSpec{GPUs: []int{0}}, pattern(1)...)
	k.Expect(t, "verify", "bad=0")
	dir := checkpointed(t, result, k)
	shared.SoftwareGPU(t, "fail=restore:801:2\n")
	from := len(shared.Log())
	r := restored(t, result, harness.RunSpec{GPUs: []int{0}}, dir, k.Port)
	r.Expect(t, "verify", "bad=0")
	isOn(t, r, 0, uuid(0))
	if !strings.Contains(shared.Log()[from:], "GPU pairs taken by the driver") {
		t.Errorf("no pairs were taken\n%s", shared.LogTail(3000))
	}
}

// NVML may call a GPU otherwise than CUDA does: it is the same.
func TestNamedOtherwise(t *testing.T) {
	result := two(t)
	if gpu.Kind != harness.SoftwareGPU {
		t.Skip("only the software GPU can be told another name")
	}
	k := start(t, harness.RunSpec{GPUs: []int{0}}, pattern(1)...)
	k.Expect(t, "verify", "bad=0")
	dir := checkpointed(t, result, k)
	shared.SoftwareGPU(t, "gpu0.nvml_name=GPU, Software\n")
	r := restored(t, result, harness.RunSpec{GPUs: []int{0}}, dir, k.Port)
	r.Expect(t, "verify", "bad=0")
}

// A process that CUDA_VISIBLE_DEVICES lets see the second of two GPUs: the
// checkpoint names both that its container has, and wants as many.
func TestVisibleDevices(t *testing.T) {
	result := two(t)
	k := start(t, harness.RunSpec{GPUs: []int{0, 1}, Env: []string{"CUDA_VISIBLE_DEVICES=" + uuid(1)}}, pattern(1)...)
	k.Expect(t, "verify", "bad=0")
	isOn(t, k, 0, uuid(1))
	dir := checkpointed(t, result, k)
	names := func(dir string) {
		t.Helper()
		m := metadata(t, dir)
		if got := m.Processes[0].GPUs; len(got) != 2 || len(m.GPUs) != 2 {
			t.Errorf("the checkpoint names %v for the process and %v, want both GPUs", got, m.GPUs)
		}
	}
	names(dir)
	r := restored(t, result, harness.RunSpec{GPUs: []int{0, 1}}, dir, k.Port)
	r.Expect(t, "verify", "bad=0")
	isOn(t, r, 0, uuid(1))
	dir = checkpointed(t, result, r)
	names(dir)
	refused(t, harness.RunSpec{GPUs: []int{0}}, dir, "made on 2 GPUs", uuid(0), uuid(1), "granted 1 GPU: "+uuid(0))
	r = restored(t, result, harness.RunSpec{GPUs: []int{0, 1}, Annotations: given("0=1", "1=0")}, dir, k.Port)
	r.Expect(t, "verify", "bad=0")
	isOn(t, r, 0, uuid(0))
}

// The helper that works in the container's namespaces has no more capabilities there than the
// driver needs.
func TestHelperInContainer(t *testing.T) {
	result := two(t)
	if gpu.Kind != harness.SoftwareGPU {
		t.Skip("only the software GPU can be made slow enough to look at the helper")
	}
	k := start(t, harness.RunSpec{GPUs: []int{0}}, pattern(1)...)
	k.Expect(t, "verify", "bad=0")
	dir := checkpointed(t, result, k)
	shared.SoftwareGPU(t, "restore_delay_ms=1000\n")
	found, end := make(chan uint64, 1), make(chan struct{})
	go func() {
		defer close(found)
		for {
			select {
			case <-end:
				return
			case <-time.After(5 * time.Millisecond):
			}
			names, _ := filepath.Glob("/proc/[0-9]*/comm")
			for _, name := range names {
				if comm, _ := os.ReadFile(name); !strings.HasPrefix(string(comm), "gpuckpt-cuda-he") {
					continue
				}
				pid, err := strconv.Atoi(filepath.Base(filepath.Dir(name)))
				if err != nil {
					continue
				}
				inside, _ := harness.StatusField(pid, "NSpid")
				filter, _ := harness.StatusField(pid, "Seccomp")
				caps, _ := harness.StatusField(pid, "CapPrm")
				if set, err := strconv.ParseUint(caps, 16, 64); err == nil && len(strings.Fields(inside)) > 1 && filter == "2" {
					found <- set
					return
				}
			}
		}
	}()
	r := restored(t, result, harness.RunSpec{GPUs: []int{1}}, dir, k.Port)
	close(end)
	r.Expect(t, "verify", "bad=0")
	set, ok := <-found
	if !ok {
		t.Fatal("no helper was seen in the container")
	}
	for _, no := range []int{unix.CAP_SYS_MODULE, unix.CAP_SYS_RAWIO, unix.CAP_SYS_BOOT, unix.CAP_NET_ADMIN, unix.CAP_SETUID, unix.CAP_SETPCAP, unix.CAP_SYS_CHROOT} {
		if set&(1<<no) != 0 {
			t.Errorf("it has capability %d (%#x)", no, set)
		}
	}
}
