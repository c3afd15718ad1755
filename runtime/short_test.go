// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"errors"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/config"
	"github.com/gpuckpt/gpuckpt/trace"
)

// What is more than the machine's memory goes where the setting says, or nowhere.
func TestCheckMemory(t *testing.T) {
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
			if test.window && !trace.CanSteer {
				t.Skip("this processor is not steered on")
			}
			node := config.Default()
			node.Staging.Cgroup, node.Staging.WhenShort = "", test.mode
			g := &gpuState{config: node, procs: []cuda.Process{{PID: 1}, {PID: 2}, {PID: 3, State: cuda.Checkpointed}}}
			if !test.unknown {
				g.use = map[string]uint64{"GPU-a": test.state}
			}
			dir := ""
			if test.onDisk {
				dir = "/proc" // which is no tmpfs, and not written to
			}
			err := g.checkMemory(dir, test.state)
			wantError(t, err, test.err)
			if test.err != "" && !errors.Is(err, errdefs.ErrResourceExhausted) {
				t.Errorf("the error is no ErrResourceExhausted: %v", err)
			}
			if (g.window > 0) != test.window || g.window > uint64(node.Staging.Buffer)/2 {
				t.Errorf("the window is %d", g.window)
			}
		})
	}
}

func TestChooseWindow(t *testing.T) {
	g := &gpuState{config: config.Default(), procs: []cuda.Process{{PID: 1}, {PID: 2}}}
	if err := g.chooseWindow(1 << 40); err != nil || g.window != 512<<20 {
		t.Errorf("with much room: %d, %v", g.window, err)
	}
	if err := g.chooseWindow(tracerMemory + 64<<20); err != nil || g.window != 24<<20 {
		t.Errorf("with little room: %d, %v", g.window, err)
	}
	if err := g.chooseWindow(tracerMemory + 40<<20); !errors.Is(err, errdefs.ErrResourceExhausted) {
		t.Errorf("with too little room: %d, %v", g.window, err)
	}
}
