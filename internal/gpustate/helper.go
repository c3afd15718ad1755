// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"context"
	"sync"
	"time"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/cuda"
)

// helperIdle is how long a locked container keeps its CUDA helper for a checkpoint
// that may follow. The helper has the driver loaded: 0.3 s to load again, some
// 100 MB of memory meanwhile.
const helperIdle = 30 * time.Second

// helpers keeps a CUDA helper for as long as it is needed. The timer that ends an
// idle helper fires between the State's calls, hence the mutex.
type helpers struct {
	mu     sync.Mutex
	helper *cuda.Helper // nil if none runs
	idle   *time.Timer  // nil while the helper is in use
}

// ensure returns a helper that stays until idleAfter or close. start starts one if
// there is none, or if the one there has died.
func (k *helpers) ensure(start func() (*cuda.Helper, error)) (*cuda.Helper, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.stopIdle()
	if k.helper != nil {
		if k.helper.Alive() {
			return k.helper, nil
		}
		k.end()
	}
	var err error
	k.helper, err = start()
	return k.helper, err
}

// idleAfter ends the helper in a while, unless ensure is called before.
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

// close ends the helper.
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
	if k.helper != nil {
		closeAsync(k.helper)
		k.helper = nil
	}
}

// closeAsync ends a helper and does not wait for its end: the driver takes 0.1 to
// 0.2 s to come down when nothing else holds a GPU. Nobody misses a helper that
// fails to end well, and it goes with this process.
func closeAsync(h *cuda.Helper) { go h.Close() }

// Visible returns the UUIDs of the GPUs that a spec grants; nil, which is all of the
// node's GPUs, where that is not certain.
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

// startHelper starts a helper as the node is configured.
func (s *State) startHelper(ctx context.Context, opts cuda.Options) (*cuda.Helper, error) {
	opts.Path, opts.Run = s.opts.Config.Helper, s.run
	return cuda.Start(ctx, opts)
}

// startHost starts a helper outside of the container that brings up the GPUs of
// these UUIDs only, and asks it for them by ask. If the driver cannot bring these
// up alone, as with a partitioned GPU, it brings up all (nil).
func (s *State) startHost(ctx context.Context, visible []string, ask func(*cuda.Helper, context.Context) (cuda.Info, error)) (*cuda.Helper, cuda.Info, error) {
	helper, err := s.startHelper(ctx, cuda.Options{Visible: visible})
	if err != nil {
		return nil, cuda.Info{}, err
	}
	info, err := ask(helper, ctx)
	if visible != nil && ctx.Err() == nil && (err != nil || len(info.GPUs) < len(visible)) {
		closeAsync(helper)
		return s.startHost(ctx, nil, ask)
	}
	if err != nil {
		closeAsync(helper)
		return nil, cuda.Info{}, err
	}
	return helper, info, nil
}

// helper returns a helper outside of the container that stays until it is idle or
// closed.
func (s *State) helper(ctx context.Context) (*cuda.Helper, error) {
	return s.helpers.ensure(func() (*cuda.Helper, error) {
		helper, _, err := s.startHost(ctx, s.opts.Visible, (*cuda.Helper).Info)
		return helper, err
	})
}
