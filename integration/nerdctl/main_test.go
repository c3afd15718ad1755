// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package nerdctl tests GPU containers that an unmodified nerdctl runs,
// checkpoints and restores through the shim.
package nerdctl

import (
	"context"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

var (
	shared  *harness.Containerd
	results *harness.Results
)

func TestMain(m *testing.M) {
	harness.Main(m.Run, func(s *harness.Session) (err error) {
		results = s.Results
		if shared, err = s.StartWithWorkload(harness.Options{}); err != nil {
			return err
		}
		return shared.WriteCDISpec(filepath.Join(shared.Dir(), "cdi"))
	})
}

// nerdctl runs nerdctl on the private containerd and gives its standard output.
func nerdctl(ctx context.Context, args ...string) (string, error) {
	dir := shared.Dir()
	return shared.Output(ctx, "nerdctl", append([]string{
		"--address", shared.Address(), "--namespace", shared.Namespace(), "--snapshotter", shared.Snapshotter(),
		"--data-root", filepath.Join(dir, "nerdctl"), "--cni-netconfpath", filepath.Join(dir, "cni"),
		"--cgroup-manager", "cgroupfs", "--cdi-spec-dirs", filepath.Join(dir, "cdi"),
	}, args...)...)
}

// must is nerdctl for a command that is to succeed.
func must(t *testing.T, args ...string) string {
	t.Helper()
	out, err := nerdctl(t.Context(), args...)
	if err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(4000))
	}
	return strings.TrimSpace(out)
}

// container is one that nerdctl runs, with a counter that listens on a port.
type container struct {
	name string
	port int
}

// runCounter runs a counter in GPU memory, removed when the test ends.
func runCounter(t *testing.T, flags ...string) container {
	t.Helper()
	port, err := harness.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	k := container{strings.ToLower(t.Name()), port}
	removeAtEnd(t, k.name)
	args := []string{"run", "--detach", "--name", k.name, "--runtime", harness.Runtime, "--net", "host", "--device", harness.CDIKind + "=0"}
	must(t, append(append(args, flags...), harness.WorkloadImage, "counter", "--port", strconv.Itoa(port))...)
	return k
}

func removeAtEnd(t *testing.T, name string) {
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if _, err := nerdctl(ctx, "rm", "--force", name); err != nil {
			t.Error(err)
		}
	})
}

func (k container) expect(t *testing.T, want string) {
	t.Helper()
	got, err := harness.Ask(t.Context(), "127.0.0.1:"+strconv.Itoa(k.port), "count")
	if err != nil {
		t.Fatal(err)
	}
	if got != want {
		t.Fatalf("the counter is %q, want %q", got, want)
	}
}

// status is the container's in nerdctl's words: "running", "exited".
func (k container) status(t *testing.T) string {
	t.Helper()
	return must(t, "inspect", "--format", "{{.State.Status}}", k.name)
}
