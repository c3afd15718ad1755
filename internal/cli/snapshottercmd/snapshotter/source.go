// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"fmt"
	"sync"

	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/images/registry"
)

// source is the registry of an image. It is looked up when it is first needed.
type source struct {
	mu   sync.Mutex
	here *registry.Source
}

// open returns the registry.
func (s *source) open(a *arrival) (*registry.Source, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.here != nil {
		return s.here, nil
	}
	found, err := registry.Open(a.s.ctx, a.Ref, "pull", a.s.o.Registry)
	if err != nil {
		return nil, err
	}
	if found.Image.Digest.String() != a.Manifest {
		return nil, fmt.Errorf("the registry has the image %s for %s: %w", found.Image.Digest, a.Ref, errdefs.ErrNotFound)
	}
	s.here = found
	return found, nil
}

// again has the registry looked up again: what is known of it may be what is wrong.
func (s *source) again() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.here = nil
}
