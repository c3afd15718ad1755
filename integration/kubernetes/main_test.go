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
	"path/filepath"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/kubernetes/node"
)

var (
	// shared serves every test that needs nothing special of its node.
	shared *node.Node
	// session ends when the tests are interrupted.
	session context.Context
	bins    harness.Bins
	gpu     harness.GPU
	results *harness.Results
)

func TestMain(m *testing.M) {
	// CNI keeps what it has done in that directory, wherever a network's own is.
	if err := harness.InOwnNetwork("/var/lib/cni"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(harness.Interruptible(func(ctx context.Context) int { return run(ctx, m) }))
}

func run(ctx context.Context, m *testing.M) (code int) {
	var err error
	session = ctx
	if bins, err = harness.FindBins(); err != nil {
		fmt.Fprintf(os.Stderr, "%v; run `make test-kubernetes`\n", err)
		return 1
	}
	if gpu, err = harness.DetectGPU(bins); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Printf("GPU: %s, driver %s, %d device(s)\n", gpu.Kind, gpu.Driver, len(gpu.Devices))
	results = harness.NewResults(ctx, bins, gpu)
	if shared, err = newNode(ctx, node.Options{APIServer: true}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code = m.Run()
	if err := shared.Stop(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	path, err := results.Write()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if path != "" {
		fmt.Println("results:", path)
	}
	return code
}

// newNode starts one. What the shims leave on a machine goes with it.
func newNode(ctx context.Context, opts node.Options) (*node.Node, error) {
	opts.GPU = gpu
	if _, err := opts.Bins.Path("containerd"); err != nil {
		opts.Bins = bins
	}
	opts.Dir = os.Getenv("GPUCKPT_TEST_DIR")
	n, err := node.Start(ctx, opts)
	if err != nil {
		return nil, err
	}
	if err := configureShim(n.Containerd, opts.ShimConfig); err != nil {
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

// configureShim sets the shim's configuration.
func configureShim(c *harness.Containerd, toml string) error {
	return c.SetShimConfig(fmt.Sprintf("log_dir = %q\n%s\n[staging]\ncgroup = %q\n",
		filepath.Join(c.Dir(), "criu-logs"), toml, filepath.Join(c.Cgroup(), "staging")))
}
