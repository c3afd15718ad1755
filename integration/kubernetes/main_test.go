// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package kubernetes tests GPU pods end to end: a real kubelet checkpoints them
// through CRI and the shim, and runs pods that are made of what it wrote.
package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/kubernetes/node"
)

var (
	session *harness.Session
	bins    harness.Bins
	gpu     harness.GPU
	results *harness.Results
)

// places are the directories of the machine that these tests write to. CNI keeps what it has done in
// /var/lib/cni, wherever a network's own is.
var places = map[string]*harness.Covered{"/etc": nil, "/usr/local": nil, "/var/lib": nil}

func TestMain(m *testing.M) {
	if os.Getenv(envServes) != "" {
		if err := serve(os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	err := harness.InOwnNetwork()
	for dir := range places {
		if err == nil {
			places[dir], err = harness.Cover(dir)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	harness.Main(m.Run, func(s *harness.Session) error {
		session, bins, gpu, results = s, s.Bins, s.GPU, s.Results
		return nil
	})
}

// shared is the node of every test that needs nothing special of one. The first that wants it starts it.
func shared(t *testing.T) *node.Node {
	t.Helper()
	n, err := startShared()
	if err != nil {
		t.Fatal(err)
	}
	return n
}

var startShared = sync.OnceValues(func() (*node.Node, error) {
	n, err := newNode(session.Context(), node.Options{APIServer: true})
	if err == nil {
		session.AtEnd(n.Stop)
	}
	return n, err
})

// newNode starts one. What the shims leave on a machine goes with it.
func newNode(ctx context.Context, opts node.Options) (*node.Node, error) {
	opts.GPU = gpu
	if _, err := opts.Bins.Path("containerd"); err != nil {
		opts.Bins = bins
	}
	opts.Dir = os.Getenv(harness.EnvDir)
	n, err := node.Start(ctx, opts)
	if err != nil {
		return nil, err
	}
	if err := n.ConfigureShim(opts.ShimConfig); err != nil {
		return nil, errors.Join(err, n.Stop())
	}
	if !opts.APIServer {
		return n, nil
	}
	if err := n.Apply(ctx, runtimeClasses); err != nil {
		return nil, errors.Join(err, n.Stop())
	}
	return n, nil
}

// runtimeClasses are the ways to ask for the runtime.
const runtimeClasses = `
{apiVersion: node.k8s.io/v1, kind: RuntimeClass, metadata: {name: gpuckpt}, handler: gpuckpt}
---
{apiVersion: node.k8s.io/v1, kind: RuntimeClass, metadata: {name: gpuckpt-by-name}, handler: gpuckpt-by-name}
`
