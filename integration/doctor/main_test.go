// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package doctor tests "gpuckpt doctor" on a private containerd, with a real
// GPU where there is one and the software GPU elsewhere.
package doctor

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

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/preflight"
)

var (
	// session ends when the tests are interrupted.
	session context.Context
	bins    harness.Bins
	gpu     harness.GPU
)

func TestMain(m *testing.M) {
	os.Exit(harness.Interruptible(func(ctx context.Context) int {
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
		fmt.Printf("GPU: %s, driver %s, %d device(s)\n", gpu.Kind, gpu.Driver, len(gpu.Devices))
		return m.Run()
	}))
}

// containerd starts one for the test, with the workload's image in it.
func containerd(t *testing.T, opts harness.Options, settings string) *harness.Containerd {
	t.Helper()
	opts.Bins, opts.GPU, opts.Dir = bins, gpu, os.Getenv("GPUCKPT_TEST_DIR")
	c, err := harness.Start(session, opts) // t.Context() ends before what is in it can be removed
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Stop(); err != nil {
			t.Error(err)
		}
	})
	if err := c.ImportWorkload(session); err != nil {
		t.Fatal(err)
	}
	if settings == "" {
		settings = fmt.Sprintf("log_dir = %q\n[staging]\ncgroup = %q\n", filepath.Join(c.Dir(), "criu-logs"), filepath.Join(c.Namespace(), "staging"))
	}
	if err := c.SetShimConfig(settings); err != nil {
		t.Fatal(err)
	}
	return c
}

// without makes a $PATH that has all that a containerd needs but one program.
func without(t *testing.T, left string) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"containerd-shim-gpuckpt-v2", "gpuckpt-cuda-helper", "runc", "criu", "mount", "umount"} {
		program, err := bins.Path(name)
		if err != nil {
			if program, err = exec.LookPath(name); err != nil {
				t.Fatal(err)
			}
		}
		if name == left {
			continue
		}
		// Copies: what lies beside a program is found through a link.
		data, err := os.ReadFile(program)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// start runs a workload with GPU 0, removed when the test ends.
func start(t *testing.T, c *harness.Containerd, spec harness.RunSpec, args ...string) *harness.Container {
	t.Helper()
	port, err := harness.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	spec.Port, spec.GPUs = port, []int{0}
	spec.Args = append(append([]string{"gpuwork"}, args...), "--port", strconv.Itoa(port))
	k, err := c.Run(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := k.Ask(t.Context(), "count"); err != nil { // it has its memory
		t.Fatal(err)
	}
	return k
}

// doctor runs gpuckpt doctor and gives what it prints and its exit code.
func doctor(t *testing.T, c *harness.Containerd, flags ...string) (string, int) {
	t.Helper()
	program, err := bins.Path("gpuckpt")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), program, append([]string{"doctor", "--address", c.Address(), "--namespace", c.Namespace()}, flags...)...)
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	err = cmd.Run()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	if out.Len() == 0 {
		return stderr.String(), cmd.ProcessState.ExitCode()
	}
	return out.String(), cmd.ProcessState.ExitCode()
}

// report runs gpuckpt doctor --json.
func report(t *testing.T, c *harness.Containerd, flags ...string) (preflight.Report, int) {
	t.Helper()
	out, code := doctor(t, c, append(flags, "--json")...)
	var r preflight.Report
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatalf("%v in %s", err, out)
	}
	return r, code
}

// find gives a check of a report.
func find(t *testing.T, r preflight.Report, area, name string) preflight.Check {
	t.Helper()
	for _, c := range r.Checks {
		if c.Area == area && c.Name == name {
			return c
		}
	}
	t.Fatalf("no check %s of %s in %+v", name, area, r.Checks)
	return preflight.Check{}
}

// is checks a check's status and words.
func is(t *testing.T, c preflight.Check, status preflight.Status, words ...string) {
	t.Helper()
	text := c.Found + "\n" + c.Problem + "\n" + c.Fix
	if c.Status != status {
		t.Errorf("%s %s is %s, want %s: %s", c.Area, c.Name, c.Status, status, text)
	}
	if (status == preflight.OK) != (c.Problem == "" && c.Fix == "") {
		t.Errorf("%s %s is %s, with problem %q and fix %q", c.Area, c.Name, c.Status, c.Problem, c.Fix)
	}
	for _, word := range words {
		if !strings.Contains(text, word) {
			t.Errorf("%s %s does not say %q: %s", c.Area, c.Name, word, text)
		}
	}
}

// keep writes what doctor prints to the directory for results, if there is one:
// docs/doctor.md shows it.
func keep(t *testing.T, name, text string) {
	t.Helper()
	if dir := os.Getenv("OUT"); dir != "" {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Error(err)
		}
	}
}
