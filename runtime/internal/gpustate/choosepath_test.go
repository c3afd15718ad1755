// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"errors"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/gpu/steer"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
)

// What is more than the machine's memory goes where the setting says, or nowhere.
func TestChoosePathWithoutMemory(t *testing.T) {
	const huge = 1 << 50
	for _, test := range []struct {
		name, mode string
		onDisk     bool
		state      uint64
		unknown    bool
		window     bool
		err        string
	}{
		{name: "fits", mode: config.Refuse, onDisk: true, state: 4096},
		{name: "fits, through", mode: config.WriteThrough, onDisk: true, state: 4096},
		{name: "refused", mode: config.Refuse, onDisk: true, state: huge, err: "when_short"},
		{name: "not the driver's", mode: config.Driver, onDisk: true, state: huge, err: "when_short"},
		{name: "through", mode: config.WriteThrough, onDisk: true, state: huge, window: true},
		{name: "no place", mode: config.WriteThrough, state: huge, err: "suspend with a spill"},
		{name: "unknown", mode: config.WriteThrough, onDisk: true, unknown: true, window: true},
		{name: "unknown, no place", mode: config.WriteThrough, unknown: true},
		{name: "unknown, refused", mode: config.Refuse, onDisk: true, unknown: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			if test.window && !steer.CanSteer {
				t.Skip("this processor is not steered on")
			}
			staging := config.Default().Staging
			staging.Cgroup, staging.WhenShort = "", test.mode
			procs := cuda.Group{{PID: cuda.PID{Host: 1}}, {PID: cuda.PID{Host: 2}}, {PID: cuda.PID{Host: 3}, State: cuda.Checkpointed}}
			var use usage
			if !test.unknown {
				use.byGPU = map[string]uint64{"GPU-a": test.state}
			}
			dir := ""
			if test.onDisk {
				dir = "/proc" // which is no tmpfs, and not written to
			}
			path, err := choosePath(staging, dir, procs, use)
			switch {
			case test.err == "" && err != nil:
				t.Fatal(err)
			case test.err != "" && (err == nil || !strings.Contains(err.Error(), test.err)):
				t.Errorf("error %v, want one that says %q", err, test.err)
			case test.err != "" && !errors.Is(err, errdefs.ErrResourceExhausted):
				t.Errorf("the error is no ErrResourceExhausted: %v", err)
			}
			through, is := path.(writeThrough)
			if err == nil && is != test.window || through.window > staging.Buffer()/2 {
				t.Errorf("the path is %#v", path)
			}
		})
	}
}

// Where memory is no matter, the node's setting and the directory decide.
func TestChoosePath(t *testing.T) {
	staging := config.Default().Staging
	staging.Cgroup = ""
	disk := "/proc"
	for _, test := range []struct {
		steer bool
		dir   string
		want  DataPath
	}{
		{false, disk, driverAlone{}},
		{true, disk, memoryFirst{}},
		{true, "", memoryFirst{}},
		{true, "/dev/shm", imageFile{}},
	} {
		if !steer.CanSteer {
			test.want = driverAlone{}
		}
		staging.Steer = test.steer
		if got, err := choosePath(staging, test.dir, nil, usage{}); err != nil || got != test.want {
			t.Errorf("steer %v, %q: got %T, %v; want %T", test.steer, test.dir, got, err, test.want)
		}
	}
}

func TestChooseWindow(t *testing.T) {
	staging, procs := config.Default().Staging, cuda.Group{{PID: cuda.PID{Host: 1}}, {PID: cuda.PID{Host: 2}}}
	if window, err := chooseWindow(staging, 1<<40, procs); err != nil || window != 512<<20 {
		t.Errorf("with much room: %d, %v", window, err)
	}
	if window, err := chooseWindow(staging, tracerMemory+64<<20, procs); err != nil || window != 24<<20 {
		t.Errorf("with little room: %d, %v", window, err)
	}
	if window, err := chooseWindow(staging, tracerMemory+40<<20, procs); !errors.Is(err, errdefs.ErrResourceExhausted) {
		t.Errorf("with too little room: %d, %v", window, err)
	}
}

// Host memory for GPU state has a bound by what the driver says, or by the GPUs.
func TestMost(t *testing.T) {
	for _, test := range []struct{ use, memory, want uint64 }{
		{use: 32 << 20, memory: 1 << 40, want: 1<<30 + 32<<20},
		{use: 16 << 30, memory: 1 << 40, want: 18 << 30},
		{memory: 16 << 30, want: 18 << 30},
		{want: 0},
	} {
		job := &Job{Use: usage{byPID: map[int]uint64{7: test.use}}, GPUs: []cuda.GPU{{Memory: test.memory / 2}, {Memory: test.memory / 2}}}
		if got := job.most(7); got != test.want {
			t.Errorf("%d bytes used of %d: got %d, want %d", test.use, test.memory, got, test.want)
		}
	}
}
