// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"fmt"
	"sync"

	"github.com/containerd/containerd/v2/core/content"
	cimages "github.com/containerd/containerd/v2/core/images"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Ahead sends blobs of an image that is still being made. A Push to the same name with it in its Options waits for
// these, and sends the rest. The first blob that cannot be sent ends it: the Push sends what is missing, or says why it
// cannot.
//
// All methods can be called on nil.
type Ahead struct {
	ref   string
	push  *push
	ctx   context.Context //nolint:containedctx // of what Close ends
	stop  context.CancelFunc
	slots chan struct{}
	sent  sync.WaitGroup
}

// Begin begins to send blobs to the registry that ref names, as Push does. store has each when it is added, for
// as long as it takes to open it. The Progress of options is called beside whatever makes the image. Close must be
// called.
func Begin(ctx context.Context, store content.Provider, ref string, options Options) (*Ahead, error) {
	o := options.defaults()
	p, err := newPush(ctx, store, ref, o)
	if err != nil {
		return nil, fmt.Errorf("push %s: %w", ref, err)
	}
	a := &Ahead{ref: ref, push: p, slots: make(chan struct{}, o.Parallel)}
	a.ctx, a.stop = context.WithCancel(ctx)
	return a, nil
}

// Add sends a blob, once, and returns at once. It is no manifest: those go last.
func (a *Ahead) Add(d ocispec.Descriptor) {
	if a == nil || cimages.IsNonDistributable(d.MediaType) || !a.push.know(d) {
		return
	}
	a.sent.Go(func() {
		select {
		case a.slots <- struct{}{}:
			defer func() { <-a.slots }()
			if a.push.send(a.ctx, d) != nil {
				a.stop() // Push will tell: each blob would be tried as often
			}
		case <-a.ctx.Done():
		}
	})
}

// pushFor returns what a Push to a name goes on with, once all blobs are sent; nil for nothing. The end of ctx ends what
// is under way.
func (a *Ahead) pushFor(ctx context.Context, ref string) *push {
	if a == nil || a.ref != ref {
		return nil
	}
	defer context.AfterFunc(ctx, a.stop)()
	a.sent.Wait()
	return a.push
}

// Close ends what is under way.
func (a *Ahead) Close() {
	if a != nil {
		a.stop()
		a.sent.Wait()
	}
}
