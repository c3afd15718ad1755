// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package kubernetes tests GPU pods end to end: a real kubelet checkpoints them
// through CRI and the shim, and runs pods that are made of what it wrote.
package kubernetes

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

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
	if shared, err = newNode(ctx, node.Options{}); err != nil {
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
	opts.Bins, opts.GPU = bins, gpu
	opts.Dir = os.Getenv("GPUCKPT_TEST_DIR")
	n, err := node.Start(ctx, opts)
	if err != nil {
		return nil, err
	}
	return n, configure(n, opts.ShimConfig)
}

// configure sets the shim's configuration.
func configure(n *node.Node, toml string) error {
	return n.SetShimConfig(fmt.Sprintf("log_dir = %q\n%s\n[staging]\ncgroup = %q\n",
		filepath.Join(n.Dir(), "criu-logs"), toml, filepath.Join(n.Cgroup(), "staging")))
}

// podName makes a pod's name of the test's.
func podName(t *testing.T) string {
	name := strings.NewReplacer("/", "-", "_", "-", " ", "-").Replace(strings.ToLower(t.Name()))
	return strings.TrimPrefix(name, "test")
}

// run runs a static pod, deleted when the test ends.
func runPod(t *testing.T, n *node.Node, name, manifest string) node.Pod {
	t.Helper()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		if err := n.Delete(ctx, name); err != nil {
			t.Error(err)
		}
	})
	pod, err := n.Run(t.Context(), name, manifest)
	if err != nil {
		t.Fatalf("%v\n%s\n%s", err, n.KubeletLog(6000), n.LogTail(3000))
	}
	return pod
}

// ask asks the program of a pod and gives the answer, or fails the test.
func ask(t *testing.T, pod node.Pod, port int, question string) string {
	t.Helper()
	answer, err := harness.Ask(t.Context(), net.JoinHostPort(pod.Status.PodIP, strconv.Itoa(port)), question)
	if err != nil {
		t.Fatal(err)
	}
	return answer
}

func expect(t *testing.T, pod node.Pod, port int, want string) {
	t.Helper()
	if got := ask(t, pod, port, "count"); got != want {
		t.Fatalf("the counter is %q, want %q", got, want)
	}
}
