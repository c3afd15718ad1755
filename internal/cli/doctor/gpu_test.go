// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/images/oci"
)

func TestCheckDriver(t *testing.T) {
	info := cuda.Info{DriverVersion: "580.1", CUDAVersion: "13.0"}
	device := func(index int, change func(*cuda.Device)) cuda.Device {
		d := cuda.Device{GPU: cuda.GPU{Index: index, UUID: fmt.Sprintf("GPU-%d", index), Name: "NVIDIA H200", Memory: 4 << 30, Free: 3 << 30}, MIG: new(false), Persistence: new(true), Virtualization: "passthrough", ComputeMode: "default"}
		if change != nil {
			change(&d)
		}
		return d
	}
	surveyed := func(devices ...cuda.Device) cuda.Survey { return cuda.Survey{DriverVersion: "580.1", Devices: devices} }
	mig := func(d *cuda.Device) { d.MIG = new(true) }
	for _, test := range []struct {
		name  string
		files map[string]string
		gpus  GPUs
		wants []want
	}{
		{"good", nil, GPUs{Info: info, Survey: surveyed(device(0, nil))},
			[]want{{"driver", "version", OK, []string{"580.1, CUDA 13.0"}}, {"gpu", "0", OK, []string{"NVIDIA H200, GPU-0, 3GiB of 4GiB free"}}}},
		{"nothing told", nil, GPUs{Info: info, Survey: surveyed(cuda.Device{})}, []want{{"gpu", "0", OK, nil}}},
		{"no helper", nil, GPUs{InfoErr: errors.New("x"), SurveyErr: errors.New("x")}, []want{{"driver", "version", Failure, []string{"gpuckpt-cuda-helper", "make install"}}}},
		{"helper is broken", nil, GPUs{Helper: "/h", InfoErr: cuda.ErrHelperGone, SurveyErr: cuda.ErrHelperGone}, []want{{"driver", "version", Failure, []string{"ldd /h"}}}},
		{"no driver", nil, GPUs{Helper: "/h", InfoErr: cuda.ErrNoDriver, SurveyErr: cuda.ErrNoDriver}, []want{{"driver", "version", Failure, []string{"no NVIDIA driver", "ubuntu-drivers install"}}}},
		{"no libcuda", nil, GPUs{Helper: "/h", InfoErr: cuda.ErrNoDriver, Survey: surveyed(device(0, nil))}, []want{{"driver", "version", Failure, []string{"libnvidia-compute-580-server"}}}},
		{"too old", nil, GPUs{Helper: "/h", InfoErr: fmt.Errorf("%w: found version 550.1", cuda.ErrDriverTooOld), Survey: surveyed(device(0, nil))}, []want{{"driver", "version", Failure, []string{"550.1"}}}},
		{"updated", nil, GPUs{Helper: "/h", InfoErr: &cuda.Error{Op: "init", Result: 803}, Survey: surveyed(device(0, nil))}, []want{{"driver", "version", Failure, []string{"reboot"}}}},
		{"no nodes", nil, GPUs{Helper: "/h", InfoErr: &cuda.Error{Op: "init", Result: cuda.NoDevice}, Survey: surveyed()},
			[]want{{"driver", "version", Failure, []string{"nvidia-modprobe"}}, {"gpu", "count", Failure, nil}}},
		{"no nodes, and NVML fails", nil, GPUs{Helper: "/h", InfoErr: &cuda.Error{Op: "init", Result: cuda.NoDevice}, SurveyErr: errors.New("x")},
			[]want{{"driver", "version", Failure, []string{"nvidia-modprobe"}}}},
		{"other module", map[string]string{"/sys/module/nvidia/version": "570.2\n", "/dev/nvidia-uvm": ""}, GPUs{Info: info, Survey: surveyed(device(0, nil))},
			[]want{{"driver", "kernel module", Failure, []string{"570.2", "580.1", "reboot"}}}},
		{"no uvm", map[string]string{"/sys/module/nvidia/version": "580.1\n"}, GPUs{Info: info, Survey: surveyed(device(0, nil))},
			[]want{{"driver", "/dev/nvidia-uvm", Warning, []string{"nvidia-modprobe --unified-memory"}}}},
		{"MPS", map[string]string{"/proc/12/comm": "nvidia-cuda-mps\n", "/proc/13/comm": "bash\n"}, GPUs{Info: info, Survey: surveyed(device(0, nil))},
			[]want{{"driver", "MPS", Warning, []string{"(12)", "echo quit | nvidia-cuda-mps-control"}}}},
		{"one with MIG", nil, GPUs{Info: info, Survey: surveyed(device(0, nil), device(1, mig))}, []want{{"gpu", "1", Warning, []string{"MIG", "nvidia-smi --id=1 --multi-instance-gpu=0"}}}},
		{"all with MIG", nil, GPUs{Info: info, Survey: surveyed(device(0, mig))}, []want{{"gpu", "0", Failure, []string{"MIG"}}}},
		{"vGPU", nil, GPUs{Info: info, Survey: surveyed(device(0, func(d *cuda.Device) { d.Virtualization = "vgpu" }))}, []want{{"gpu", "0", Failure, []string{"vGPU", "pass-through"}}}},
		{"prohibited", nil, GPUs{Info: info, Survey: surveyed(device(0, func(d *cuda.Device) { d.ComputeMode = "prohibited" }))}, []want{{"gpu", "0", Failure, []string{"--compute-mode=DEFAULT"}}}},
		{"no persistence", nil, GPUs{Info: info, Survey: surveyed(device(0, func(d *cuda.Device) { d.Persistence = new(false) }))},
			[]want{{"gpu", "0", OK, nil}, {"gpu", "0 persistence", Warning, []string{"nvidia-smi --id=0 --persistence-mode=1"}}}},
	} {
		t.Run(test.name, func(t *testing.T) { compare(t, CheckDriver(fake(t, test.files), test.gpus), test.wants) })
	}
}

func TestFacts(t *testing.T) {
	m := &images.Metadata{
		SchemaVersion: 1, DriverVersion: "580.1", CUDAVersion: "13.0",
		GPUs:      []images.GPU{{UUID: "GPU-a", Name: "H200", Memory: 10}, {UUID: "GPU-b", Name: "H200", Memory: 10}},
		Processes: []images.Process{{PID: 1, Bytes: 3}, {PID: 7, Bytes: 4}},
	}
	want := Facts{Schema: 1, Driver: "580.1", CUDA: "13.0", Count: 2, Models: []string{"H200"}, Memory: 20, State: 7}
	f, err := FromAnnotations(oci.Facts(m))
	if err != nil || !reflect.DeepEqual(f, want) {
		t.Errorf("got %+v, error %v; want %+v", f, err, want)
	}
	back, err := FromAnnotations(f.Annotations())
	if err != nil || !reflect.DeepEqual(back, want) {
		t.Errorf("got %+v, error %v; want %+v", back, err, want)
	}
	if _, err := FromAnnotations(map[string]string{"a": "b"}); !errors.Is(err, ErrNoFacts) {
		t.Errorf("error %v, want ErrNoFacts", err)
	}
	for _, key := range []string{annotations.Schema, annotations.GPUCount, annotations.GPUMemory, annotations.GPUState, annotations.GPUFree} {
		a := f.Annotations()
		a[key] = "-1x"
		if _, err := FromAnnotations(a); err == nil {
			t.Errorf("%s may be %q", key, a[key])
		}
	}
	node := OfNode(GPUs{Info: cuda.Info{CUDAVersion: "13.0"}, Survey: cuda.Survey{DriverVersion: "580.1", Devices: []cuda.Device{
		{GPU: cuda.GPU{Name: "H200", Memory: 10, Free: 9}}, {GPU: cuda.GPU{Name: "H100", Memory: 5, Free: 5}}, {GPU: cuda.GPU{Name: "L4", Memory: 3, Free: 3}, MIG: new(true)},
	}}}, 100)
	if want := (Facts{Schema: images.SchemaVersion, Driver: "580.1", CUDA: "13.0", Count: 2, Models: []string{"H100", "H200"}, Memory: 15, Free: 14, HostFree: 100}); !reflect.DeepEqual(node, want) {
		t.Errorf("got %+v, want %+v", node, want)
	}
}

func TestMatch(t *testing.T) {
	need := Facts{Schema: 1, Driver: "580.1", Count: 2, Models: []string{"H200"}, Memory: 20 << 30, State: 7 << 30}
	have := Facts{Schema: 1, Driver: "580.1", Count: 4, Models: []string{"H200"}, Memory: 40 << 30, Free: 30 << 30, HostFree: 100 << 30}
	for _, test := range []struct {
		name   string
		change func(need, have *Facts)
		wants  []want
	}{
		{"fits", func(*Facts, *Facts) {}, []want{{"checkpoint", "GPUs", OK, []string{"needs 2 of 4"}}, {"checkpoint", "free GPU memory", OK, []string{"7GiB of 30GiB"}}}},
		{"schema", func(n, _ *Facts) { n.Schema = 2 }, []want{{"checkpoint", "schema", Failure, []string{"version 2"}}}},
		{"driver", func(_, h *Facts) { h.Driver = "590.1" }, []want{{"checkpoint", "driver", Failure, []string{"580.1", "590.1"}}}},
		{"count", func(n, _ *Facts) { n.Count = 5 }, []want{{"checkpoint", "GPUs", Failure, []string{"needs 5", "has 4"}}}},
		{"model", func(_, h *Facts) { h.Models = []string{"H100"} }, []want{{"checkpoint", "model", Failure, []string{"H200", "H100"}}}},
		{"memory", func(_, h *Facts) { h.Memory = 1 << 30 }, []want{{"checkpoint", "GPU memory", Failure, []string{"20GiB", "1GiB"}}}},
		{"free", func(_, h *Facts) { h.Free = 1 << 30 }, []want{{"checkpoint", "free GPU memory", Failure, []string{"needs 7GiB", "1GiB is free"}}}},
		{"host", func(_, h *Facts) { h.HostFree = 1 << 30 }, []want{{"checkpoint", "free memory", Warning, nil}}},
		{"no GPU at all", func(_, h *Facts) { *h = Facts{Schema: 1} }, []want{{"checkpoint", "driver", Failure, []string{"none"}}, {"checkpoint", "GPUs", Failure, nil}, {"checkpoint", "model", Failure, nil}, {"checkpoint", "GPU memory", Failure, nil}}},
		{"without GPUs", func(n, h *Facts) { *n, *h = Facts{Schema: 1}, Facts{Schema: 1} }, []want{{"checkpoint", "GPUs", OK, []string{"none needed"}}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			n, h := need, have
			test.change(&n, &h)
			compare(t, Match(n, h), test.wants)
		})
	}
}

// What an image says it needs is no line of its own: it could look like a command to be run.
func TestMatchLines(t *testing.T) {
	var r Report
	r.Add(Match(Facts{Schema: 1, Driver: "1\n$ sh x", Count: 1, Models: []string{"A\n$ sh x"}}, Facts{Schema: 1})...)
	if text := r.Text(); strings.Contains(text, "\n$ ") || strings.Contains(text, "  $ ") {
		t.Error(text)
	}
}

// Annotations come from anybody's image: whatever they hold, reading them does
// not fail otherwise than by an error, and what was read can be written again.
func FuzzFromAnnotations(f *testing.F) {
	f.Add("1", "580.1", "2", "H200, H100", "20", "7")
	f.Add("x", "", "-1", ", ,", "99999999999999999999", "")
	f.Fuzz(func(t *testing.T, schema, driver, count, models, memory, state string) {
		facts, err := FromAnnotations(map[string]string{
			annotations.Schema: schema, annotations.Driver: driver, annotations.GPUCount: count,
			annotations.GPUModels: models, annotations.GPUMemory: memory, annotations.GPUState: state,
		})
		if err != nil {
			return
		}
		again, err := FromAnnotations(facts.Annotations())
		if err != nil || again.Count != facts.Count || again.Memory != facts.Memory || again.State != facts.State || again.Schema != facts.Schema {
			t.Errorf("read %+v, and after writing it %+v, error %v", facts, again, err)
		}
		Match(facts, facts)
	})
}
