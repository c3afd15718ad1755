// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/kubernetes/node"
)

// older are the programs with containerd 2.2 in the place of the newest.
func older(t *testing.T) harness.Bins {
	t.Helper()
	dir := t.TempDir()
	for _, program := range []string{"containerd", "ctr"} {
		path, err := bins.Path(program + "-2.2")
		if err == nil {
			err = os.Symlink(path, filepath.Join(dir, program))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	b, err := harness.NewBins(append([]string{dir}, filepath.SplitList(os.Getenv(harness.EnvBin))...)...)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// containerd 2.2, which starts shims in another way than those from 2.3 on, and its
// ctr: checkpoint, kill, restore.
func TestOlderCtr(t *testing.T) {
	results.Add(t)
	needs(t, "containerd-2.2")
	c, err := harness.Start(session, harness.Options{Bins: older(t), GPU: gpu, Dir: os.Getenv(harness.EnvDir)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Stop(); err != nil {
			t.Error(err)
		}
	})
	version, err := c.Ctr(t.Context(), "version")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Count(version, "v2.2.") != 2 {
		t.Fatalf("not containerd 2.2 and its ctr: %s", version)
	}
	port, err := harness.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(c.ImportWorkload(t.Context()), c.ConfigureShim("")); err != nil {
		t.Fatal(err)
	}
	k, err := c.Run(t.Context(), harness.RunSpec{ID: "older", Port: port, GPUs: []int{0}, Args: []string{"gpuwork", "counter", "--port", strconv.Itoa(port)}})
	if err != nil {
		t.Fatalf("%v\n%s", err, c.LogTail(4000))
	}
	says := func(want string) {
		t.Helper()
		if got, err := k.Ask(t.Context(), "count"); err != nil || got != want {
			t.Fatalf("the counter is %q, %v, want %q\n%s", got, err, want, c.LogTail(4000))
		}
	}
	says("101")
	if err := k.Checkpoint(t.Context(), "older:1"); err != nil {
		t.Fatalf("%v\n%s", err, c.LogTail(4000))
	}
	says("102")
	if err := k.Remove(t.Context()); err != nil {
		t.Fatal(err)
	}
	if k, err = c.Restore(t.Context(), "older", "older:1", port); err != nil {
		t.Fatalf("%v\n%s", err, c.LogTail(4000))
	}
	says("102")
}

// The kubelet on containerd 2.2, with the runtime by its path and by its name:
// checkpoint, and a pod of the image that is made of it.
func TestOlderKubelet(t *testing.T) {
	needs(t, "containerd-2.2")
	for _, runtime := range []string{node.ByPath, node.ByName} {
		t.Run(runtime, func(t *testing.T) {
			results.Add(t)
			n := own(t, node.Options{Runtime: runtime, Bins: older(t)})
			name := podName(t)
			pod, err := n.RunStatic(t.Context(), name, counter{}.manifest(name))
			if err != nil {
				t.Fatalf("%v\n%s", err, n.LogTail(4000))
			}
			expect(t, pod, counterPort, "101")
			archive, err := n.Checkpoint(t.Context(), pod.Metadata.Name, "counter", 0)
			if err != nil {
				t.Fatalf("%v\n%s", err, n.LogTail(4000))
			}
			holdsGPUState(t, archive)
			expect(t, pod, counterPort, "102")

			ref := "gpuckpt.test/" + name + ":1"
			if _, err := n.Output(t.Context(), "gpuckpt", "image", "build", "kubernetes-archive:"+archive, ref, "--address", n.Address(), "--namespace", node.Namespace, "--quiet"); err != nil {
				t.Fatal(err)
			}
			restored, err := n.RunStatic(t.Context(), name+"-restored", counter{image: ref, annotations: restoring}.manifest(name+"-restored"))
			if err != nil {
				t.Fatalf("%v\n%s", err, n.LogTail(4000))
			}
			expect(t, restored, counterPort, "102")
		})
	}
}
