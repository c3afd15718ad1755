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
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	cimages "github.com/containerd/containerd/v2/core/images"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

var (
	session context.Context // ends when the tests are interrupted
	bins    harness.Bins
	gpu     harness.GPU
	shared  *harness.Containerd
	results *harness.Results
)

func TestMain(m *testing.M) {
	os.Exit(harness.Interruptible(func(ctx context.Context) int { return run(ctx, m) }))
}

func run(ctx context.Context, m *testing.M) (code int) {
	var err error
	session = ctx
	if bins, err = harness.FindBins(); err != nil {
		fmt.Fprintf(os.Stderr, "%v; run `make test`\n", err)
		return 1
	}
	if gpu, err = harness.DetectGPU(bins); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	results = harness.NewResults(ctx, bins, gpu)
	if shared, err = newContainerd(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code = m.Run()
	if left, _ := filepath.Glob(filepath.Join(dumps(shared), "*")); len(left) > 0 {
		fmt.Fprintln(os.Stderr, "left by a checkpoint:", left)
		code = 1
	}
	if err := shared.Stop(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	if path, err := results.Write(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	} else if path != "" {
		fmt.Println("results:", path)
	}
	return code
}

// newContainerd starts one with the workload's image in it, whose shims leave
// nothing on the machine.
func newContainerd(ctx context.Context) (*harness.Containerd, error) {
	c, err := harness.Start(ctx, harness.Options{Bins: bins, GPU: gpu, Dir: os.Getenv("GPUCKPT_TEST_DIR")})
	if err != nil {
		return nil, err
	}
	if err := c.ImportWorkload(ctx); err != nil {
		return nil, errors.Join(err, c.Stop())
	}
	config := fmt.Sprintf("log_dir = %q\n[staging]\ncgroup = %q\n", filepath.Join(c.Dir(), "criu-logs"), filepath.Join(c.Namespace(), "staging"))
	return c, c.SetShimConfig(config)
}

// own starts a containerd for one test.
func own(t *testing.T) *harness.Containerd {
	t.Helper()
	c, err := newContainerd(session)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Stop(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// dumps is where gpuckpt dumps for a containerd's containers.
func dumps(c *harness.Containerd) string { return filepath.Join(c.Dir(), "dumps") }

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
		"GPUCKPT_IMAGE_PATH=" + dumps(c), "PATH=" + bins.SearchPath(), "HOME=" + t.TempDir(), "TMPDIR=" + t.TempDir(),
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
	out := gpuckpt(t, c, append(args, "--json")...)
	if err := json.Unmarshal([]byte(out), &v); err != nil {
		t.Fatalf("gpuckpt %s --json: %v\n%s", strings.Join(args, " "), err, out)
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

// checkpointAnswer and transferAnswer are what gpuckpt prints.
type checkpointAnswer struct {
	Digest                                     string
	Running                                    bool
	GPUBytes, Bytes, WrittenBytes, ReusedBytes uint64
	GPUWrittenBytes, GPUReusedBytes            uint64
	PausedSeconds, Seconds                     float64
	DumpSeconds, BuildSeconds, UnpackSeconds   float64
}

type transferAnswer struct {
	Digest                         string
	Bytes, MovedBytes, ReusedBytes uint64
	GPUBytes, GPUReusedBytes       uint64
}

// start runs a workload of gpuwork on GPU 0.
func start(t *testing.T, c *harness.Containerd, spec harness.RunSpec, args ...string) *harness.Container {
	t.Helper()
	if spec.Port == 0 {
		port, err := harness.FreePort()
		if err != nil {
			t.Fatal(err)
		}
		spec.Port = port
	}
	if spec.ID == "" {
		spec.ID = id(t)
	}
	spec.GPUs = []int{0}
	if spec.Args == nil {
		spec.Args = append(append([]string{"gpuwork"}, args...), "--port", strconv.Itoa(spec.Port))
	}
	k, err := c.Run(t.Context(), spec)
	if err != nil {
		t.Fatalf("%v\n%s", err, c.LogTail(3000))
	}
	removeAtEnd(t, k)
	if len(args) > 0 && args[0] == "pattern" { // it is ready when it answers
		if _, err := k.Ask(t.Context(), "info"); err != nil {
			t.Fatalf("%v\nits output: %s", err, k.Logs())
		}
	}
	return k
}

// resume runs a checkpoint image, as a user does with ctr.
func resume(t *testing.T, c *harness.Containerd, ref string, port int) *harness.Container {
	t.Helper()
	return start(t, c, harness.RunSpec{
		ID: id(t) + "-resumed", Image: ref, Port: port, Args: []string{"gpuwork"},
		Annotations: map[string]string{"dev.gpuckpt.restore": "true"},
	})
}

func id(t *testing.T) string {
	return strings.NewReplacer("/", "-", "_", "-").Replace(strings.ToLower(t.Name()))
}

func removeAtEnd(t *testing.T, k *harness.Container) {
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := k.Remove(ctx); err != nil {
			t.Error(err)
		}
	})
}

func remove(t *testing.T, k *harness.Container) {
	t.Helper()
	if err := k.Remove(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func expect(t *testing.T, k *harness.Container, question, want string) {
	t.Helper()
	got, err := k.Ask(t.Context(), question)
	if err != nil {
		t.Fatalf("%v\nits output: %s", err, k.Logs())
	}
	if got != want {
		t.Fatalf("%q: got %q, want %q", question, got, want)
	}
}

// forget removes all images but the workload's from a containerd, and with them
// their blobs.
func forget(t *testing.T, c *harness.Containerd) {
	t.Helper()
	ctx := t.Context()
	list, err := c.Client().ImageService().List(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, image := range list {
		if image.Name == harness.WorkloadImage {
			continue
		}
		if err := c.Client().ImageService().Delete(ctx, image.Name, cimages.SynchronousDelete()); err != nil {
			t.Fatal(err)
		}
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
