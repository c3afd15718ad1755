// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"bytes"
	"encoding/json"
	"os/exec"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// gpuckpt ps lists containers with GPUs: what they have, what was done last, and what keeps them
// from a checkpoint.
func TestPs(t *testing.T) {
	c := session.Own(t, harness.Options{})
	pod := map[string]string{"io.containerd.runc.v2.group": "pod"} // one shim, in the bundle of the first
	c.Work(t, harness.RunSpec{ID: "without", Annotations: pod}, "loop")
	ours := start(t, c, harness.RunSpec{ID: "ours", Annotations: pod}, "pattern", "--bytes", "24M")
	start(t, c, harness.RunSpec{ID: "runcs", Runtime: harness.RuncRuntime}, "counter")
	program, err := bins.Path("gpuckpt")
	if err != nil {
		t.Fatal(err)
	}
	ps := func(flags ...string) string {
		t.Helper()
		var stderr bytes.Buffer
		cmd := exec.CommandContext(t.Context(), program, append([]string{"ps", "--address", c.Address(), "--namespace", c.Namespace()}, flags...)...)
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%v: %s", err, stderr.String())
		}
		return string(out)
	}
	line := func(out, container string) []string {
		for l := range strings.Lines(out) {
			if fields := strings.Fields(l); len(fields) > 1 && fields[1] == container {
				return fields
			}
		}
		return nil
	}
	says := func(out, container, words string) {
		t.Helper()
		if got := strings.Join(line(out, container), " "); !strings.Contains(got, words) {
			t.Errorf("%s: %q, want %q", container, got, words)
		}
	}
	out := ps()
	says(out, "ours", "ours running 1")
	says(out, "ours", "- -")
	says(out, "runcs", "its runtime, io.containerd.runc.v2, is not gpuckpt's")
	if line(out, "without") != nil || line(ps("--all"), "without") == nil {
		t.Errorf("a container without GPUs is listed by --all alone: %s", out)
	}
	if err := ours.Checkpoint(t.Context(), "gpuckpt.test/ps:1"); err != nil {
		t.Fatal(err)
	}
	says(ps("--all-namespaces"), "ours", "checkpoint")
	run(t, program, "suspend", "--address", c.Address(), "--namespace", c.Namespace(), ours.ID)
	says(ps(), "ours", "ours suspended 1 0B suspend")
	if err := exec.CommandContext(t.Context(), program, "resume", "--gpus", "GPU-none", "--address", c.Address(), "--namespace", c.Namespace(), ours.ID).Run(); err == nil {
		t.Error("resumed on no GPU")
	}
	says(ps(), "ours", "ours suspended 1 0B")
	run(t, program, "resume", "--address", c.Address(), "--namespace", c.Namespace(), ours.ID)
	var list []struct {
		Container string
		State     string
		Bytes     uint64 `json:"gpuBytes"`
		Last      struct{ Operation string }
	}
	if err := json.Unmarshal([]byte(ps("--json")), &list); err != nil || len(list) != 2 {
		t.Fatalf("%+v, %v", list, err)
	}
	if l := list[0]; l.Container != "ours" || l.State != "running" || l.Bytes < 24<<20 || l.Last.Operation != "resume" {
		t.Errorf("%+v", l)
	}
}
