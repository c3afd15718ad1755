// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package nerdctl

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
)

// inside is where a counter listens that has a network of its own.
const inside = 5000

// publish gives the flag that publishes a counter's port, and the port.
func publish(t *testing.T) (flag string, port int) {
	t.Helper()
	port, err := harness.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	return "--publish=" + strconv.Itoa(port) + ":" + strconv.Itoa(inside) + "/udp", port
}

// The network that nerdctl gives a container by itself: a bridge made by CNI, a
// published port, /etc/hosts. After a checkpoint and a start the container has an
// address again, which the port leads to, and a way to itself.
func TestBridge(t *testing.T) {
	results.Add(t)
	flag, port := publish(t)
	k := run(t, container{strings.ToLower(t.Name()), port, true}, "counter", inside, flag, "--annotation", "dev.gpuckpt.on-checkpoint=stop")
	k.expect(t, "101")
	must(t, "checkpoint", "create", k.name, "bridge")
	must(t, "start", "--checkpoint", "bridge", k.name)
	k.expect(t, "102") // by the published port
	address := must(t, "inspect", "--format", "{{.NetworkSettings.IPAddress}}", k.name)
	answers(t, net.JoinHostPort(address, strconv.Itoa(inside)), "103")
	hosts, err := os.ReadFile(must(t, "inspect", "--format", "{{.HostsPath}}", k.name))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(hosts), address) {
		t.Errorf("/etc/hosts does not have %s:\n%s", address, hosts)
	}

	must(t, "checkpoint", "create", k.name, "bridge-again")
	must(t, "start", "--checkpoint", "bridge-again", k.name)
	k.expect(t, "104")
	must(t, "rm", "--force", k.name)
	if _, err := os.Stat("/var/lib/cni/networks/bridge/" + address); err == nil {
		t.Errorf("the address %s is still taken", address)
	}
}

// A checkpoint after which the container runs on leaves its network alone.
func TestBridgeKeep(t *testing.T) {
	results.Add(t)
	flag, port := publish(t)
	k := run(t, container{strings.ToLower(t.Name()), port, true}, "counter", inside, flag)
	k.expect(t, "101")
	must(t, "checkpoint", "create", k.name, "bridge-keep")
	k.expect(t, "102")
}

// A network of the user's, with an address of the user's choice: a connection inside
// the container is open afterwards.
func TestOwnNetwork(t *testing.T) {
	results.Add(t)
	const address = "10.77.0.9"
	must(t, "network", "create", "--subnet", "10.77.0.0/24", "own")
	k := run(t, container{name: strings.ToLower(t.Name())}, "loop", inside, "--network", "own", "--ip", address,
		"--annotation", "dev.gpuckpt.on-checkpoint=stop")
	at := net.JoinHostPort(address, strconv.Itoa(inside))
	answers(t, at, "101 open")
	must(t, "checkpoint", "create", k.name, "own")
	must(t, "start", "--checkpoint", "own", k.name)
	answers(t, at, "102 open")
	must(t, "rm", "--force", k.name)
	must(t, "network", "rm", "own")
}

// Without a network there is the loopback interface, up, as at the first start, and the sysctls that were asked for.
func TestNoNetwork(t *testing.T) {
	results.Add(t)
	k := run(t, container{name: strings.ToLower(t.Name())}, "loop", inside, "--network", "none", "--sysctl", "net.core.somaxconn=77",
		"--annotation", "dev.gpuckpt.on-checkpoint=stop")
	k.says(t, "101 open")
	must(t, "checkpoint", "create", k.name, "none")
	must(t, "start", "--checkpoint", "none", k.name)
	k.says(t, "102 open")
	err := host.InNetwork("/proc/"+must(t, "inspect", "--format", "{{.State.Pid}}", k.name)+"/ns/net", func() error {
		value, err := os.ReadFile("/proc/sys/net/core/somaxconn")
		if string(value) != "77\n" {
			t.Errorf("net.core.somaxconn is %s", value)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

// A checkpoint image goes on in a network of its own, at another port; not in the
// host's network, which it never had.
func TestImageNetwork(t *testing.T) {
	results.Add(t)
	flag, port := publish(t)
	k := run(t, container{strings.ToLower(t.Name()), port, true}, "counter", inside, flag, "--annotation", "dev.gpuckpt.on-checkpoint=stop")
	k.expect(t, "101")
	ref := "gpuckpt.test/" + k.name + ":1"
	k.image(t, ref)
	must(t, "rm", "--force", k.name)

	restored := []string{"run", "--detach", "--runtime", harness.Runtime, "--device", harness.CDIKind + "=0", "--annotation", "dev.gpuckpt.restore=true"}
	name := k.name + "-restored"
	removeAtEnd(t, name)
	flag, port = publish(t)
	must(t, append(restored, "--name", name, flag, ref)...)
	container{name, port, true}.expect(t, "102")

	refused := k.name + "-refused"
	removeAtEnd(t, refused)
	_, err := nerdctl(t.Context(), append(restored, "--name", refused, "--network", "host", ref)...)
	if err == nil || !strings.Contains(err.Error(), "the container has the host's network") {
		t.Errorf("in the host's network: %v", err)
	}
}

// gpuckpt restore --cni makes a network as "ctr run --cni" does, and it goes with the container, whoever removes
// that.
func TestRestoreCNI(t *testing.T) {
	results.Add(t)
	const name, ref = "cni", "gpuckpt.test/cni:1"
	ctr := func(args ...string) (string, error) { return shared.Ctr(t.Context(), args...) }
	must := func(_ string, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(ctr("run", "--detach", "--runtime", harness.Runtime, "--snapshotter", shared.Snapshotter(), "--allow-new-privs", "--rlimit-nofile", "2048:4096",
		harness.WorkloadImage, name, "gpuwork", "plain", "--port", strconv.Itoa(inside)))
	harness.Within(t, "it counts", func() bool {
		out, _ := ctr("tasks", "exec", "--exec-id", "ask", name, "gpuwork", "send", "127.0.0.1:"+strconv.Itoa(inside), "count")
		return strings.TrimSpace(out) == "101"
	})
	gpuckpt := func(args ...string) (string, error) {
		return shared.Output(t.Context(), "gpuckpt", append(args, "--address", shared.Address(), "--namespace", shared.Namespace(), "--quiet")...)
	}
	must(gpuckpt("checkpoint", name, "--image", ref))
	must(ctr("tasks", "delete", "--force", name))
	must(ctr("containers", "delete", name))

	restore := []string{"restore", "--name", name, "--cni", "--allow-new-privs", "--rlimit-nofile", "2048:4096", "--snapshotter", shared.Snapshotter(), ref}
	_, err := gpuckpt(restore...)
	harness.Says(t, err, "--cni: read the networks in /etc/cni/net.d")
	const config = `{"cniVersion": "1.0.0", "name": "ctrs", "plugins": [{"type": "bridge", "bridge": "ctrs0", "isGateway": true,
		"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.78.0.0/24", "rangeStart": "10.78.0.9", "rangeEnd": "10.78.0.9"}]]}}]}`
	must("", errors.Join(os.MkdirAll("/etc/cni/net.d", 0o755), os.WriteFile("/etc/cni/net.d/10-ctrs.conflist", []byte(config), 0o600), os.Symlink(cniPlugins, "/opt/cni/bin")))
	must(gpuckpt(restore...))
	answers(t, net.JoinHostPort("10.78.0.9", strconv.Itoa(inside)), "102")
	lease := filepath.Join(cniState, "networks/ctrs/10.78.0.9")
	if _, err := os.Stat(lease); err != nil {
		t.Error(err)
	}
	must(ctr("tasks", "delete", "--force", name))
	if _, err := os.Stat(lease); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its address is kept: %v", err)
	}
	must(ctr("containers", "delete", name))
}

// says asks a counter from inside its container.
func (k container) says(t *testing.T, want string) {
	t.Helper()
	ask := []string{"exec", k.name, "/usr/bin/gpuwork", "send", "127.0.0.1:" + strconv.Itoa(inside), "count"}
	got, err := nerdctl(t.Context(), ask...)
	for deadline := time.Now().Add(30 * time.Second); err != nil && time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		got, err = nerdctl(t.Context(), ask...) // it is still starting, and has counted nothing
	}
	if err != nil || strings.TrimSpace(got) != want {
		t.Fatalf("it says %q, %v; want %q", got, err, want)
	}
}

func answers(t *testing.T, address, want string) {
	t.Helper()
	got, err := harness.Ask(t.Context(), address, "count")
	if err != nil {
		t.Fatal(err)
	}
	if got != want {
		t.Fatalf("%s answers %q, want %q", address, got, want)
	}
}
