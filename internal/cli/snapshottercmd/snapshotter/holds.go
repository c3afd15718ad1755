// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"strings"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/log"
	"github.com/opencontainers/go-digest"
	"golang.org/x/sync/errgroup"

	"github.com/gpuckpt/gpuckpt/images/oci"
)

// holds keep a client's pull from fetching GPU state into the content store. When the first layer of
// an image is missing, containerd fetches all layers above it at once, also those that it will find
// to exist. It gives that up when it has come to the last layer. Until then it waits here, because a
// blob has one writer at a time.
type holds struct {
	once    sync.Once
	c       *client.Client
	ctx     context.Context
	cancel  context.CancelFunc
	limit   *time.Timer
	idle    *time.Timer  // runs while the pull asks for no layer
	release func() error // of the lease

	mu   sync.Mutex
	held map[string]content.Writer // by their names in the store
}

const (
	// holdFor bounds how long a pull is in the way of others, and holdIdle how long one is that was given
	// up: another one asks for its next layer, or ends, within milliseconds.
	holdFor  = 10 * time.Minute
	holdIdle = 10 * time.Second
	// pullLimit bounds the wait for the end of a pull whose last layer is there, which takes
	// milliseconds. pullPause is the wait between two looks, and for what comes behind the last.
	pullLimit = time.Minute
	pullPause = 500 * time.Millisecond
	// holdAtOnce is how many writers are opened at once.
	holdAtOnce = 16
)

func newHolds(ctx context.Context, c *client.Client, release func() error) *holds {
	h := &holds{c: c, release: release, held: make(map[string]content.Writer)}
	h.ctx, h.cancel = context.WithCancel(ctx)
	h.limit, h.idle = time.AfterFunc(holdFor, h.drop), time.AfterFunc(holdIdle, h.drop)
	h.idle.Stop()
	return h
}

// take opens a writer for each layer of GPU state that the content store lacks and nobody writes, unless
// a pull has them still. A pull calls it when it asks for a layer, and answered when it has its answer.
func (h *holds) take(image *oci.Image) (answered func()) {
	answered = func() { h.idle.Reset(holdIdle) }
	if h.idle.Stop() {
		return answered
	}
	h.limit.Reset(holdFor)
	var group errgroup.Group
	group.SetLimit(holdAtOnce)
	for _, l := range image.Layers {
		if l.Kind != oci.LayerGPU {
			continue
		}
		group.Go(func() error {
			d := l.Descriptor()
			ref := remotes.MakeRefKey(h.ctx, d)
			// Without it, the bytes may come twice. Nothing depends on it.
			if w, err := h.c.ContentStore().Writer(h.ctx, content.WithRef(ref), content.WithDescriptor(d)); err == nil {
				h.mu.Lock()
				h.held[ref] = w
				h.mu.Unlock()
			}
			return nil
		})
	}
	_ = group.Wait() // no call returns an error
	return answered
}

// drop closes the writers.
func (h *holds) drop() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for ref, w := range h.held {
		w.Close()
		_ = h.c.ContentStore().Abort(h.ctx, ref) // else it goes with the lease
	}
	clear(h.held)
}

// endAfterPull is end, once the pull has come to its end: then containerd has noted at the image's
// config which snapshots it has, and gives up what it fetches.
func (h *holds) endAfterPull(config digest.Digest) {
	defer h.end()
	for began, noted := time.Now(), false; !noted && time.Since(began) < pullLimit; {
		info, err := h.c.ContentStore().Info(h.ctx, config)
		for label := range info.Labels {
			noted = noted || strings.HasPrefix(label, "containerd.io/gc.ref.snapshot.")
		}
		select {
		case <-time.After(pullPause):
		case <-h.ctx.Done():
			return
		}
		if err != nil {
			return // it was removed
		}
	}
}

// end drops all, and ends the connection to containerd.
func (h *holds) end() {
	h.once.Do(func() {
		h.limit.Stop()
		h.idle.Stop()
		h.drop()
		h.cancel()
		if err := h.release(); err != nil {
			log.G(h.ctx).WithError(err).Warn("the lease of a pull stays for a day")
		}
		h.c.Close()
	})
}
