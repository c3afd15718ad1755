// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package registry tests the way of a checkpoint image from a running container
// through a registry to another container, as an operator goes it: gpuckpt, ctr, a
// registry of distribution's on a loopback port, and what other programs have to
// say of the images (skopeo, checkpointctl, go-containerregistry).
package registry

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/content"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

var (
	session *harness.Session
	// shared serves every test that needs nothing special of its containerd.
	shared  *harness.Containerd
	bins    harness.Bins
	gpu     harness.GPU
	results *harness.Results
)

func TestMain(m *testing.M) {
	if keys, ok := os.LookupEnv(decoderKeys); ok {
		if err := decode(keys); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if err := harness.InOwnNetwork("/var/lib/containers", "/var/tmp"); err != nil { // where skopeo writes
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	harness.MainShared(m.Run, func(s *harness.Session, c *harness.Containerd) {
		session, shared, bins, gpu, results = s, c, s.Bins, s.GPU, s.Results
	}, dumps)
}

// dumps are the directories of checkpoints that gpuckpt should have removed.
func dumps(c *harness.Containerd) []string {
	left, _ := filepath.Glob(filepath.Join(c.Dumps(), "*")) // the pattern is sound
	return left
}

// command is gpuckpt for a containerd, with an environment of its own.
func command(ctx context.Context, t *testing.T, c *harness.Containerd, env []string, args ...string) *exec.Cmd {
	t.Helper()
	program, err := bins.Path("gpuckpt")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = append([]string{
		"CONTAINERD_ADDRESS=" + c.Address(), "CONTAINERD_NAMESPACE=" + c.Namespace(),
		"GPUCKPT_CONFIG=" + c.ShimConfigPath(), "GPUCKPT_IMAGE_PATH=" + c.Dumps(), "PATH=" + bins.SearchPath(), "HOME=" + t.TempDir(), "TMPDIR=" + t.TempDir(),
	}, env...)
	cmd.WaitDelay = time.Second
	return cmd
}

// try runs gpuckpt and gives what it printed.
func try(t *testing.T, c *harness.Containerd, env []string, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	t.Logf("gpuckpt %s", strings.Join(args, " "))
	var out, errs bytes.Buffer
	cmd := command(t.Context(), t, c, env, args...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	return out.String(), errs.String(), err
}

// gpuckpt runs it and fails the test unless it succeeds.
func gpuckpt(t *testing.T, c *harness.Containerd, args ...string) string {
	t.Helper()
	out, errs, err := try(t, c, nil, args...)
	if err != nil {
		t.Fatalf("gpuckpt %s: %v\n%s%s\n%s", strings.Join(args, " "), err, out, errs, c.LogTail(3000))
	}
	return out
}

// asJSON runs gpuckpt with --json.
func asJSON[T any](t *testing.T, c *harness.Containerd, args ...string) (v T) {
	t.Helper()
	return decoded[T](t, gpuckpt(t, c, append(args, "--json")...))
}

// decoded reads what gpuckpt has printed as JSON.
func decoded[T any](t *testing.T, out string) (v T) {
	t.Helper()
	if err := json.Unmarshal([]byte(out), &v); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return v
}

// fails runs gpuckpt, which must fail with every one of the words, in whatever
// case: CRIU and the Go runtime spell the kernel's differently.
func fails(t *testing.T, c *harness.Containerd, env, words []string, args ...string) {
	t.Helper()
	out, errs, err := try(t, c, env, args...)
	if err == nil {
		t.Fatalf("gpuckpt %s succeeded: %s", strings.Join(args, " "), out)
	}
	for _, word := range words {
		if !strings.Contains(strings.ToLower(errs), strings.ToLower(word)) {
			t.Errorf("gpuckpt %s: the error does not say %q:\n%s", strings.Join(args, " "), word, errs)
		}
	}
}

// start runs a workload of gpuwork on GPU 0, and waits until a pattern is in its
// memory.
func start(t *testing.T, c *harness.Containerd, spec harness.RunSpec, args ...string) *harness.Container {
	t.Helper()
	spec.GPUs = []int{0}
	k := c.Work(t, spec, args...)
	// Before it answers, it may begin to use CUDA in a checkpoint.
	if ask := map[string]string{"pattern": "info", "memory": "verify", "gpumemory": "verify"}[strings.Join(args[:min(len(args), 1)], "")]; ask != "" {
		k.Answer(t, ask)
	}
	return k
}

// resume runs a checkpoint image, as a user does with ctr.
func resume(t *testing.T, c *harness.Containerd, ref string, port int) *harness.Container {
	t.Helper()
	return start(t, c, harness.RunSpec{
		ID: harness.Name(t) + "-resumed", Image: ref, Port: port, Args: []string{"gpuwork"},
		Annotations: map[string]string{"dev.gpuckpt.restore": "true"},
	})
}

// forget removes all images but the workload's from a containerd, and with them
// their blobs.
func forget(t *testing.T, c *harness.Containerd) {
	t.Helper()
	if err := c.ForgetImages(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// has says whether the image of that digest is among a containerd's blobs.
func has(t *testing.T, c *harness.Containerd, digest string) bool {
	t.Helper()
	found := false
	err := c.Client().ContentStore().Walk(t.Context(), func(i content.Info) error {
		found = found || i.Digest.String() == digest
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}
