// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"context"
	"os"
	"sync"
	"time"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/config"
	"github.com/gpuckpt/gpuckpt/internal/driverroot"
)

// helperIdle is how long a locked container keeps its CUDA helper for a checkpoint that may follow.
// The helper has the driver loaded: 0.3 s to load again, some 100 MB of memory meanwhile.
const helperIdle = 30 * time.Second

// helpers starts CUDA helpers, and keeps one outside of the container for as long as it is needed.
// The timer that ends an idle helper fires between the State's calls, hence the mutex.
type helpers struct {
	run  Run
	node config.Node // where the helper and the driver are
	// visible are the UUIDs of the GPUs that the driver brings up; nil for all.
	visible []string

	mu   sync.Mutex
	kept *cuda.Helper // nil if none runs
	idle *time.Timer  // nil while the helper is in use
}

// asking is how a helper outside of the container is asked for the GPUs.
type asking func(*cuda.Helper, context.Context) (cuda.Info, error)

// begin starts a helper in place of the one that is kept, and asks it for the GPUs.
func (k *helpers) begin(ctx context.Context, ask asking) (*cuda.Helper, cuda.Info, error) {
	k.close()
	helper, info, err := k.startOutside(ctx, k.visible, ask)
	k.mu.Lock()
	defer k.mu.Unlock()
	k.kept = helper
	return helper, info, err
}

// get returns a helper that stays until idleAfter or close, a fresh one if none is kept that lives.
func (k *helpers) get(ctx context.Context) (*cuda.Helper, error) {
	k.mu.Lock()
	k.stopIdle()
	helper := k.kept
	k.mu.Unlock()
	if helper != nil && helper.Alive() {
		return helper, nil
	}
	helper, _, err := k.begin(ctx, (*cuda.Helper).Info)
	return helper, err
}

// allGPUs lists the GPUs of the node, also those that were not to be brought up.
func (k *helpers) allGPUs(ctx context.Context) ([]cuda.GPU, error) {
	if k.visible != nil {
		k.close()
		k.visible = nil
	}
	helper, err := k.get(ctx)
	if err != nil {
		return nil, err
	}
	info, err := helper.Info(ctx)
	return info.GPUs, err
}

// idleAfter ends the helper in a while, unless get is called before.
func (k *helpers) idleAfter(wait time.Duration) {
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

func (k *helpers) close() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.stopIdle()
	k.end()
}

func (k *helpers) stopIdle() {
	if k.idle != nil {
		k.idle.Stop()
		k.idle = nil
	}
}

func (k *helpers) end() {
	if k.kept != nil {
		closeAsync(k.kept)
		k.kept = nil
	}
}

// start starts a helper that is not kept.
func (k *helpers) start(ctx context.Context, opts cuda.Options) (*cuda.Helper, error) {
	place, err := driverroot.Find(k.node.DriverRoot, os.Getenv("LD_LIBRARY_PATH"), k.node.CDISpecDirs)
	if err != nil {
		return nil, err
	}
	opts.Path, opts.LibraryDir, opts.Run = k.node.Helper, place.Dir, k.run
	opts.StallTimeout = time.Duration(k.node.StallTimeout)
	return cuda.Start(ctx, opts)
}

// startOutside starts a helper that brings up these GPUs only, and asks it for them; all of them
// (nil) if the driver cannot bring these up alone, as with a partitioned GPU.
func (k *helpers) startOutside(ctx context.Context, visible []string, ask asking) (*cuda.Helper, cuda.Info, error) {
	helper, err := k.start(ctx, cuda.Options{Visible: visible})
	if err != nil {
		return nil, cuda.Info{}, err
	}
	info, err := ask(helper, ctx)
	if visible != nil && ctx.Err() == nil && (err != nil || len(info.GPUs) < len(visible)) {
		closeAsync(helper)
		return k.startOutside(ctx, nil, ask)
	}
	if err != nil {
		closeAsync(helper)
		return nil, cuda.Info{}, err
	}
	return helper, info, nil
}

// closeAsync ends a helper and does not wait: the driver takes 0.1 to 0.2 s to come down when
// nothing else holds a GPU. Nobody misses a helper that fails to end well.
func closeAsync(h *cuda.Helper) { go h.Close() }

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
