// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package nerdctl tests GPU containers that an unmodified nerdctl runs,
// checkpoints and restores through the shim.
package nerdctl

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
)

var (
	shared  *harness.Containerd
	session *harness.Session
	bins    harness.Bins
	results *harness.Results
	// cniPlugins is the directory of the programs that make networks, cniConfig that
	// of the networks: one for all containerds, as a machine has one bridge.
	cniPlugins, cniConfig string
)

// cniState is where CNI keeps what it has done, in these tests a directory of their own.
const cniState = "/var/lib/cni"

func TestMain(m *testing.M) {
	// What nerdctl's hooks remember is in the second, and the networks that ctr knows are in the third.
	if err := harness.InOwnNetwork(cniState, "/run/nerdctl", "/etc/cni", "/opt/cni"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	harness.Main(m.Run, func(s *harness.Session) error {
		session, bins, results = s, s.Bins, s.Results
		bridge, err := bins.Path("bridge")
		if err != nil {
			return fmt.Errorf("%w; run `make test-kubernetes`", err)
		}
		cniPlugins, cniConfig = filepath.Dir(bridge), cniState+"/net.d"
		if shared, err = s.StartWithWorkload(harness.Options{}); err != nil {
			return err
		}
		return writeCDISpec(shared)
	})
}

// writeCDISpec describes the GPUs where nerdctlOn has nerdctl look.
func writeCDISpec(c *harness.Containerd) error { return c.WriteCDISpec(filepath.Join(c.Dir(), "cdi")) }

// nerdctl runs nerdctl on the shared containerd and gives its standard output.
func nerdctl(ctx context.Context, args ...string) (string, error) {
	return nerdctlOn(ctx, shared, args...)
}

// nerdctlOn is nerdctl on a containerd. A start from a checkpoint is tried again
// where nerdctl lost a race that docs/troubleshooting.md tells of.
func nerdctlOn(ctx context.Context, c *harness.Containerd, args ...string) (string, error) {
	out, err := once(ctx, c, args...)
	for tries := 1; tries < 3 && lostCheckpoint(args, err); tries++ {
		fmt.Printf("nerdctl lost the checkpoint to containerd's garbage collection, once more: %v\n", err)
		out, err = once(ctx, c, args...)
	}
	return out, err
}

// lostCheckpoint says whether containerd's garbage collection came between: what
// nerdctl puts into the content store for a start, the same bytes as the checkpoint
// image it has just removed, is not marked as kept while these are still there.
func lostCheckpoint(args []string, err error) bool {
	return err != nil && len(args) > 1 && args[0] == "start" && args[1] == "--checkpoint" &&
		strings.Contains(err.Error(), "content digest") && strings.Contains(err.Error(), "not found")
}

func once(ctx context.Context, c *harness.Containerd, args ...string) (string, error) {
	dir := c.Dir()
	return c.Output(ctx, "nerdctl", append([]string{
		"--address", c.Address(), "--namespace", c.Namespace(), "--snapshotter", c.Snapshotter(),
		"--data-root", filepath.Join(dir, "nerdctl"), "--cni-netconfpath", cniConfig, "--cni-path", cniPlugins,
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

// container is one that nerdctl runs, with a counter that a port of the host leads to.
type container struct {
	name string
	port int
	// published says that the port leads to the container's own network.
	published bool
}

// runCounter runs a counter in GPU memory in the host's network, removed when the
// test ends.
func runCounter(t *testing.T, flags ...string) container {
	t.Helper()
	port, err := harness.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	return run(t, container{strings.ToLower(t.Name()), port, false}, "counter", port, append(flags, "--net", "host")...)
}

// run runs a workload that listens on a port in its network.
func run(t *testing.T, k container, workload string, port int, flags ...string) container {
	t.Helper()
	removeAtEnd(t, k.name)
	args := []string{"run", "--detach", "--name", k.name, "--runtime", harness.Runtime, "--device", harness.CDIKind + "=0"}
	must(t, append(append(args, flags...), harness.WorkloadImage, workload, "--port", strconv.Itoa(port))...)
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
	host := "127.0.0.1"
	if k.published {
		host = "localhost" // which Ask takes for a network other than loopback: that is who refuses
	}
	got, err := harness.Ask(t.Context(), net.JoinHostPort(host, strconv.Itoa(k.port)), "count")
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

// image checkpoints the container, which ends with it, into an image.
func (k container) image(t *testing.T, ref string) {
	t.Helper()
	id := must(t, "inspect", "--format", "{{.ID}}", k.name)
	if _, err := shared.Output(t.Context(), "gpuckpt", "checkpoint", id, "--image", ref, "--image-path", filepath.Join(shared.Dir(), "dumps"),
		"--address", shared.Address(), "--namespace", shared.Namespace(), "--quiet"); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(4000))
	}
}
