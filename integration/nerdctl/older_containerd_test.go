// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package nerdctl

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// nerdctl on an older containerd: a checkpoint after which the container runs on, one
// after which it does not, and a start from each.
func TestOlder(t *testing.T) {
	for _, version := range harness.OlderContainerds {
		t.Run(version, func(t *testing.T) { testOlder(t, version) })
	}
}

func testOlder(t *testing.T, version string) {
	results.Add(t)
	older, err := bins.WithContainerd(version, t.TempDir())
	if err != nil {
		t.Fatalf("%v; run `make setup-kubernetes`", err)
	}
	c := session.Own(t, harness.Options{Bins: older})
	if err := writeCDISpec(c); err != nil {
		t.Fatal(err)
	}
	do := func(args ...string) string {
		t.Helper()
		out, err := nerdctlOn(t.Context(), c, args...)
		if err != nil {
			t.Fatalf("%v\n%s", err, c.LogTail(4000))
		}
		return out
	}
	if said := do("version", "--format", "{{json .Server}}"); !strings.Contains(said, "v"+version+".") {
		t.Fatalf("not containerd %s: %s", version, said)
	}
	port, err := harness.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	k := container{"older", port, true}
	start := func(name, behaviour, image string, more ...string) {
		do(append([]string{"run", "--detach", "--name", name, "--runtime", harness.Runtime, "--device", harness.CDIKind + "=0",
			fmt.Sprintf("--publish=%d:%d/udp", port, inside), "--annotation", "dev.gpuckpt.on-checkpoint=" + behaviour, image}, more...)...)
	}
	counter := []string{"counter", "--port", strconv.Itoa(inside)}
	start("kept", "keep", harness.WorkloadImage, counter...)
	k.expect(t, "101")
	do("checkpoint", "create", "kept", "kept")
	k.expect(t, "102")
	do("rm", "--force", "kept")

	start("older", "stop", harness.WorkloadImage, counter...)
	k.expect(t, "101")
	do("checkpoint", "create", "older", "stopped")
	do("start", "--checkpoint", "stopped", "older")
	k.expect(t, "102")
	do("rm", "--force", "older")
}
