// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package nerdctl

import (
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/integration/harness"
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

// Without a network there is the loopback interface, up, as at the first start.
func TestNoNetwork(t *testing.T) {
	results.Add(t)
	k := run(t, container{name: strings.ToLower(t.Name())}, "loop", inside, "--network", "none",
		"--annotation", "dev.gpuckpt.on-checkpoint=stop")
	k.says(t, "101 open")
	must(t, "checkpoint", "create", k.name, "none")
	must(t, "start", "--checkpoint", "none", k.name)
	k.says(t, "102 open")
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
