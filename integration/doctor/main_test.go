// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package doctor tests "gpuckpt doctor" on a private containerd, with a real
// GPU where there is one and the software GPU elsewhere.
package doctor

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/internal/cli/doctor"
)

var (
	session *harness.Session
	bins    harness.Bins
	gpu     harness.GPU
)

func TestMain(m *testing.M) {
	harness.Main(m.Run, func(s *harness.Session) (err error) {
		session, bins, gpu = s, s.Bins, s.GPU
		return nil
	})
}

// start runs a workload with GPU 0, and waits until it has its memory.
func start(t *testing.T, c *harness.Containerd, spec harness.RunSpec, args ...string) *harness.Container {
	t.Helper()
	spec.GPUs = []int{0}
	k := c.Work(t, spec, args...)
	k.Answer(t, "count")
	return k
}

// runDoctor runs gpuckpt doctor and gives what it prints and its exit code.
func runDoctor(t *testing.T, c *harness.Containerd, flags ...string) (string, int) {
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
func report(t *testing.T, c *harness.Containerd, flags ...string) (doctor.Report, int) {
	t.Helper()
	out, code := runDoctor(t, c, append(flags, "--json")...)
	var r doctor.Report
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatalf("%v in %s", err, out)
	}
	return r, code
}

// find gives a check of a report.
func find(t *testing.T, r doctor.Report, area, name string) doctor.Check {
	t.Helper()
	for _, c := range r.Checks {
		if c.Area == area && c.Name == name {
			return c
		}
	}
	t.Fatalf("no check %s of %s in %+v", name, area, r.Checks)
	return doctor.Check{}
}

// is checks a check's status and words.
func is(t *testing.T, c doctor.Check, status doctor.Status, words ...string) {
	t.Helper()
	text := c.Found + "\n" + c.Problem + "\n" + c.Fix
	if c.Status != status {
		t.Errorf("%s %s is %s, want %s: %s", c.Area, c.Name, c.Status, status, text)
	}
	if (status == doctor.OK) != (c.Problem == "" && c.Fix == "") {
		t.Errorf("%s %s is %s, with problem %q and fix %q", c.Area, c.Name, c.Status, c.Problem, c.Fix)
	}
	for _, word := range words {
		if !strings.Contains(text, word) {
			t.Errorf("%s %s does not say %q: %s", c.Area, c.Name, word, text)
		}
	}
}

// keep writes what doctor prints to the directory for results, if there is one.
func keep(t *testing.T, name, text string) {
	t.Helper()
	if dir := os.Getenv("OUT"); dir != "" {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Error(err)
		}
	}
}
