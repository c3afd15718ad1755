// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/leases"
)

// conversion takes a checkpoint from one place to another.
type conversion struct {
	daemon
	buildFlags
	base string

	ctx      context.Context // with containerd's namespace
	progress *progress
	dial     func() (*client.Client, error)
	closers  []func() error // see atEnd
}

// conversionAnswer is what it prints.
type conversionAnswer struct {
	Source      string `json:"source"`
	Destination string `json:"destination"`
	// Digest of the image, where an image was made.
	Digest string `json:"digest,omitempty"`
	// Built says that the image was built, and not copied.
	Built        bool   `json:"built"`
	GPUBytes     uint64 `json:"gpuBytes,omitempty"`
	Bytes        uint64 `json:"bytes,omitempty"`
	WrittenBytes uint64 `json:"writtenBytes,omitempty"`
	ReusedBytes  uint64 `json:"reusedBytes,omitempty"`
}

// words are what is printed without --json.
func (a *conversionAnswer) words(w io.Writer) (err error) {
	switch {
	case a.Built:
		_, err = fmt.Fprintf(w, "%s@%s\n%s of GPU state; %s stored, of which %s were there already\n",
			a.Destination, a.Digest, size(a.GPUBytes), size(a.Bytes), size(a.ReusedBytes))
	case a.Digest != "":
		_, err = fmt.Fprintf(w, "%s@%s\n", a.Destination, a.Digest)
	default:
		_, err = fmt.Fprintln(w, a.Destination)
	}
	return err
}

// run converts; mustBuild refuses a source that is an image already. On an error
// the destination is as it was.
func (v *conversion) run(ctx context.Context, from, to place, mustBuild bool) (_ *conversionAnswer, err error) {
	v.ctx = ctx
	v.dial = sync.OnceValues(func() (*client.Client, error) {
		named, c, err := v.connect(ctx)
		if err != nil {
			return nil, err
		}
		v.atEnd(c.Close)
		// What is written belongs to nobody else until it has a name.
		leased, release, err := c.WithLease(named, leases.WithRandomID(), leases.WithExpiration(leaseLimit))
		if err != nil {
			return nil, fmt.Errorf("keep containerd from collecting the image: %w", err)
		}
		v.ctx = leased
		v.atEnd(func() error { return release(context.WithoutCancel(leased)) })
		return c, nil
	})
	defer func() {
		for i := len(v.closers) - 1; i >= 0; i-- {
			err = errors.Join(err, v.closers[i]())
		}
	}()
	v.progress = v.daemon.progress()
	defer v.progress.wait()
	if from.kind == inContainerd || to.kind == inContainerd {
		if _, err := v.dial(); err != nil { // so that every step has the context
			return nil, err
		}
	}
	src, err := from.open(v.ctx, v.dial, &v.daemon)
	if err != nil {
		return nil, err
	}
	defer joinClose(&err, src)
	if mustBuild && src.image != nil {
		return nil, fmt.Errorf("%s is no dump, no checkpoint of containerd's and no Kubernetes archive, of which an image could be built", from)
	}
	if to.ref == "" && to.kind != inKubernetes {
		to.ref = src.name
	}
	answer := &conversionAnswer{Source: from.String(), Destination: to.String()}
	switch to.kind {
	case inContainerd:
		err = v.intoContainerd(src, to, answer)
	case inLayout:
		err = v.intoLayout(src, to.path, to.ref, answer)
	case inOCIArchive:
		err = v.intoArchive(src, to, answer)
	case inKubernetes:
		err = v.intoKubernetes(src, to.path)
	default:
		err = fmt.Errorf("a checkpoint cannot be written to a place of the kind %q", to.kind)
	}
	if err != nil {
		return nil, fmt.Errorf("write %s: %w", to, err)
	}
	return answer, nil
}

// atEnd has something closed when the conversion is over, what came last first.
func (v *conversion) atEnd(do func() error) { v.closers = append(v.closers, do) }
