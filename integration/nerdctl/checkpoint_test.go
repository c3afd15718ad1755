// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package nerdctl

import (
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// A checkpoint leaves the container running, as the node's configuration says:
// nerdctl has no options for a runtime that is not called runc.
func TestKeep(t *testing.T) {
	results.Add(t)
	k := runCounter(t)
	k.expect(t, "101")
	must(t, "checkpoint", "create", "--leave-running", k.name, "kept")
	k.expect(t, "102")
	if out := must(t, "checkpoint", "ls", k.name); !strings.Contains(out, "kept") {
		t.Errorf("checkpoint ls does not list it: %s", out)
	}
	must(t, "checkpoint", "rm", k.name, "kept")
	if out := must(t, "checkpoint", "ls", k.name); strings.Contains(out, "kept") {
		t.Errorf("checkpoint ls lists it after checkpoint rm: %s", out)
	}
	if _, err := nerdctl(t.Context(), "start", "--checkpoint", "kept", k.name); err == nil {
		t.Error("a checkpoint that was removed is started from")
	}
}

// With the annotation the container ends with its checkpoint, and goes on from
// there.
func TestStopAndStart(t *testing.T) {
	result := results.Add(t)
	k := runCounter(t, "--annotation", "dev.gpuckpt.on-checkpoint=stop")
	k.expect(t, "101")
	if err := result.Time("checkpoint", func() error {
		_, err := nerdctl(t.Context(), "checkpoint", "create", k.name, "stopped")
		return err
	}); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(4000))
	}
	if status := k.status(t); status != "exited" {
		t.Errorf("after its checkpoint the container is %s", status)
	}
	for range 2 { // a checkpoint can be gone on from more than once
		if err := result.Time("restore", func() error {
			_, err := nerdctl(t.Context(), "start", "--checkpoint", "stopped", k.name)
			return err
		}); err != nil {
			t.Fatalf("%v\n%s", err, shared.LogTail(4000))
		}
		k.expect(t, "102")
		k.expect(t, "103")
		must(t, "kill", k.name)
		must(t, "wait", k.name)
	}
}

// What a container writes after it was restored is in its log.
func TestLogs(t *testing.T) {
	results.Add(t)
	k := runCounter(t, "--annotation", "dev.gpuckpt.on-checkpoint=stop")
	k.expect(t, "101")
	must(t, "checkpoint", "create", k.name, "logs")
	must(t, "start", "--checkpoint", "logs", k.name)
	k.expect(t, "102")
	harness.Within(t, "what it has written is in its log", func() bool {
		return strings.HasSuffix(strings.TrimSpace(must(t, "logs", k.name)), "102")
	})
	if out := must(t, "exec", k.name, "/usr/bin/gpuwork", "echo", "inside"); out != "inside" {
		t.Errorf("exec printed %q", out)
	}
}

// A checkpoint image is run like any other, and goes on.
func TestRunImage(t *testing.T) {
	result := results.Add(t)
	k := runCounter(t, "--annotation", "dev.gpuckpt.on-checkpoint=stop")
	k.expect(t, "101")
	const ref = "gpuckpt.test/nerdctl:1"
	k.image(t, ref)
	must(t, "rm", "--force", k.name)
	name := k.name + "-restored"
	removeAtEnd(t, name)
	if err := result.Time("run", func() error {
		_, err := nerdctl(t.Context(), "run", "--detach", "--name", name, "--runtime", harness.Runtime, "--net", "host",
			"--device", harness.CDIKind+"=0", "--annotation", "dev.gpuckpt.restore=true", ref)
		return err
	}); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(4000))
	}
	k.expect(t, "102")
}
