// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package cudahelper starts the processes that call NVIDIA's driver for a State of package gpustate.
package cudahelper

import (
	"context"
	"os"
	"os/exec"
	"sync"
	"time"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/driverroot"
	"github.com/gpuckpt/gpuckpt/runtime/internal/devnode"
)

// Idle is how long a locked container keeps its CUDA helper for a checkpoint that may follow.
// The helper has the driver loaded: 0.3 s to load again, some 100 MB of memory meanwhile.
const Idle = 30 * time.Second

// Run starts a command and returns what waits for it, as cuda.Options.Run: a
// program that reaps all its children passes its reaper.
type Run = func(*exec.Cmd) (wait func() (int, error), err error)

// Helpers starts CUDA helpers, and keeps one outside of the container for as long as it is needed.
// The timer that ends an idle helper fires between the State's calls, hence the mutex.
type Helpers struct {
	Run  Run
	Node config.Node // where the helper and the driver are
	// Visible are the UUIDs of the GPUs that the driver brings up; nil for all.
	Visible []string

	mu   sync.Mutex
	kept *cuda.Helper // nil if none runs
	idle *time.Timer  // nil while the helper is in use
}

// Asking is how a helper outside of the container is asked for the GPUs.
type Asking func(*cuda.Helper, context.Context) (cuda.Info, error)

// Begin starts a helper in place of the one that is kept, and asks it for the GPUs.
func (k *Helpers) Begin(ctx context.Context, ask Asking) (*cuda.Helper, cuda.Info, error) {
	k.Close()
	helper, info, err := k.startOutside(ctx, k.Visible, ask)
	k.mu.Lock()
	defer k.mu.Unlock()
	k.kept = helper
	return helper, info, err
}

// Get returns a helper that stays until IdleAfter or Close, a fresh one if none is kept that lives.
func (k *Helpers) Get(ctx context.Context) (*cuda.Helper, error) {
	k.mu.Lock()
	k.stopIdle()
	helper := k.kept
	k.mu.Unlock()
	if helper != nil && helper.Alive() {
		return helper, nil
	}
	helper, _, err := k.Begin(ctx, (*cuda.Helper).Info)
	return helper, err
}

// AllGPUs lists the GPUs of the node, also those that were not to be brought up.
func (k *Helpers) AllGPUs(ctx context.Context) ([]cuda.GPU, error) {
	if k.Visible != nil {
		k.Close()
		k.Visible = nil
	}
	helper, err := k.Get(ctx)
	if err != nil {
		return nil, err
	}
	info, err := helper.Info(ctx)
	return info.GPUs, err
}

// IdleAfter ends the helper in a while, unless Get is called before.
func (k *Helpers) IdleAfter(wait time.Duration) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.stopIdle()
	var idle *time.Timer
	idle = time.AfterFunc(wait, func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		if k.idle == idle { // else somebody uses the helper again
			k.idle = nil
			k.end()
		}
	})
	k.idle = idle
}

// Close ends the helper that is kept.
func (k *Helpers) Close() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.stopIdle()
	k.end()
}

func (k *Helpers) stopIdle() {
	if k.idle != nil {
		k.idle.Stop()
		k.idle = nil
	}
}

func (k *Helpers) end() {
	if k.kept != nil {
		CloseAsync(k.kept)
		k.kept = nil
	}
}

// Start starts a helper that is not kept.
func (k *Helpers) Start(ctx context.Context, opts cuda.Options) (*cuda.Helper, error) {
	opts, err := place(k.Node, opts)
	if err != nil {
		return nil, err
	}
	if opts.Join != 0 {
		if err := devnode.Verify(opts.Join); err != nil {
			return nil, err
		}
	}
	opts.Run = k.Run
	return cuda.Start(ctx, opts)
}

// place adds where the helper and the driver are.
func place(node config.Node, opts cuda.Options) (cuda.Options, error) {
	place, err := driverroot.Find(node.DriverRoot, os.Getenv("LD_LIBRARY_PATH"), node.CDISpecDirs)
	opts.LibraryDir, opts.StallTimeout = place.Dir, time.Duration(node.StallTimeout)
	return opts, err
}

// startOutside starts a helper that brings up these GPUs only, and asks it for them; all of them
// (nil) if the driver cannot bring these up alone, as with a partitioned GPU.
func (k *Helpers) startOutside(ctx context.Context, visible []string, ask Asking) (*cuda.Helper, cuda.Info, error) {
	helper, err := k.Start(ctx, cuda.Options{Visible: visible})
	if err != nil {
		return nil, cuda.Info{}, err
	}
	info, err := ask(helper, ctx)
	if visible != nil && ctx.Err() == nil && (err != nil || len(info.GPUs) < len(visible)) {
		CloseAsync(helper)
		return k.startOutside(ctx, nil, ask)
	}
	if err != nil {
		CloseAsync(helper)
		return nil, cuda.Info{}, err
	}
	return helper, info, nil
}

// CloseAsync ends a helper and does not wait: the driver takes 0.1 to 0.2 s to come down when
// nothing else holds a GPU. Nobody misses a helper that fails to end well.
func CloseAsync(h *cuda.Helper) { go h.Close() }

// Visible returns the UUIDs of the GPUs that a spec grants; nil, all, where that is not certain.
func Visible(request cdi.Request) []string { return visibleGPUs(cuda.ProcGPUs, request) }

// visibleGPUs is Visible for a directory like cuda.ProcGPUs.
func visibleGPUs(proc string, request cdi.Request) []string {
	if !request.Complete() {
		return nil
	}
	uuids, err := cuda.UUIDs(proc, request.Minors)
	if err != nil {
		return nil // all of them, which only takes longer
	}
	return uuids
}
