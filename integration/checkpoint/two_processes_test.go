// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// allGPUs are the indices of the machine's GPUs, two at most.
func allGPUs() []int {
	if len(gpu.Devices) < 2 {
		return []int{0}
	}
	return []int{0, 1}
}

// Two CUDA processes in one container, on two GPUs where there are two: both
// are verified, and the metadata tells of both.
func TestTwoProcesses(t *testing.T) {
	result := results.Add(t)
	gpus := allGPUs()
	const bytes = 16 << 20
	k := shared.Work(t, harness.RunSpec{GPUs: gpus, Ports: 2},
		"multi", "--procs", "2", "--gpus", fmt.Sprint(len(gpus)), "--bytes", fmt.Sprint(bytes))
	for n := range 2 {
		k.Process(n).Expect(t, "verify", "bad=0")
		k.Process(n).Expect(t, "count", "101")
	}
	ref := takeCheckpoint(t, shared, k, "1")
	result.Phases(t, k)
	checkMetadata(t, metadataOf(t, shared, ref), k, bytes)
	k.MustRemove(t)
	r := restore(t, shared, k.ID, ref, k.Port)
	result.Phases(t, r)
	for n := range 2 {
		r.Process(n).Expect(t, "verify", "bad=0")
		r.Process(n).Expect(t, "count", "102")
	}
}

// checkMetadata compares gpuckpt.json with what the processes say of themselves
// and with what the machine has.
func checkMetadata(t *testing.T, m *images.Metadata, k *harness.Container, bytes uint64) {
	t.Helper()
	if m == nil {
		t.Fatal("the checkpoint has no gpuckpt.json")
	}
	if m.DriverVersion != gpu.Driver {
		t.Errorf("driver %q, want %q", m.DriverVersion, gpu.Driver)
	}
	if major, _, ok := strings.Cut(m.CUDAVersion, "."); !ok || major == "0" {
		t.Errorf("CUDA version %q, want one such as 13.0", m.CUDAVersion)
	}
	if len(m.Processes) != 2 {
		t.Fatalf("%d processes, want 2: %+v", len(m.Processes), m.Processes)
	}
	for n, p := range m.Processes {
		info := strings.Fields(k.Process(n).Answer(t, "info")) // pid=2 bytes=… gpus=1 GPU-… 0x…
		if info[0] != fmt.Sprintf("pid=%d", p.PID) {
			t.Errorf("process %d has pid %d, it says %s", n, p.PID, info[0])
		}
		if p.Bytes < bytes || p.Bytes > bytes+(8<<30) {
			t.Errorf("process %d: %d bytes of GPU state, it allocated %d", n, p.Bytes, bytes)
		}
		if p.State != "running" {
			t.Errorf("process %d: state %q, want running", n, p.State)
		}
		if uuid := info[3]; !slices.Contains(p.GPUs, uuid) {
			t.Errorf("process %d uses %s, the metadata has %v", n, uuid, p.GPUs)
		}
	}
	for _, g := range m.GPUs {
		at := slices.IndexFunc(gpu.Devices, func(d harness.GPUDevice) bool { return d.Index == g.Index })
		if at < 0 {
			t.Errorf("GPU %+v, the machine has %+v", g, gpu.Devices)
			continue
		}
		d := gpu.Devices[at]
		if g.UUID != d.UUID || g.Name != d.Name || g.Memory == 0 || g.Memory > d.Memory {
			t.Errorf("GPU %+v, the machine has %+v", g, d)
		}
	}
	if len(m.GPUs) != len(allGPUs()) {
		t.Errorf("%d GPUs, want %d: %+v", len(m.GPUs), len(allGPUs()), m.GPUs)
	}
	var names []string
	for _, p := range m.Phases {
		names = append(names, p.Name)
	}
	for _, want := range []string{"lock", "preflight", "save GPU state", "dump"} {
		if !slices.Contains(names, want) {
			t.Errorf("no phase %q: %q", want, names)
		}
	}
}

// The files of a checkpoint can go into a directory of the user's instead of
// containerd's store, and a container can be restored from there.
func TestImagePath(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	dir := t.TempDir()
	if _, err := k.CheckpointTask(t.Context(), harness.TaskCheckpoint{ImagePath: dir}); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(3000))
	}
	if _, err := images.ReadMetadata(dir); err != nil {
		t.Fatal(err)
	}
	k.Expect(t, "count", "102")
	endTask(t, shared, k)
	if err := restoreTask(t, shared, k, dir); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(3000))
	}
	k.Expect(t, "count", "102")
	if _, err := images.ReadMetadata(dir); err != nil {
		t.Errorf("the user's directory after a restore from it: %v", err)
	}
}
