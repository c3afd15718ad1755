// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// A restore keeps a TCP connection open whose two ends are in the container, and closes one to
// another program; or does with both what the container asks for. That program hears nothing of the
// restore, and the container that runs on keeps its connection.
func TestConnections(t *testing.T) {
	results.Add(t)
	for _, test := range []struct {
		name        string
		annotations map[string]string
		want        string
	}{
		{"each", nil, "102 open peer closed"},
		{"all closed", map[string]string{"dev.gpuckpt.criu.tcp-close": "true"}, "102 closed peer closed"},
	} {
		t.Run(test.name, func(t *testing.T) {
			peer, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer peer.Close()
			go func() {
				for {
					c, err := peer.Accept()
					if err != nil {
						return
					}
					go io.Copy(io.Discard, c)
				}
			}()
			k := shared.Work(t, harness.RunSpec{GPUs: []int{0}, Annotations: test.annotations}, "loop", "--peer", peer.Addr().String())
			k.Expect(t, "count", "101 open peer open")
			ref := takeCheckpoint(t, shared, k, "1")
			k.Expect(t, "count", "102 open peer open")
			for range 3 {
				k.MustRemove(t)
				k = restore(t, shared, k.ID, ref, k.Port)
				k.Expect(t, "count", test.want)
			}
		})
	}
}

// A server is checkpointed while a client waits for it to accept the connection, as always under load.
// It answers that client then, and is restored without.
func TestConnectionsNotAccepted(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "web")
	address := net.JoinHostPort("127.0.0.1", strconv.Itoa(k.Port))
	dial := func() net.Conn {
		t.Helper()
		var c net.Conn
		harness.Within(t, "the server listens", func() (there bool) {
			var err error
			c, err = net.Dial("tcp", address)
			return err == nil
		})
		return c
	}
	count := func(c net.Conn, want string) {
		t.Helper()
		defer c.Close()
		_, err := io.WriteString(c, "GET /count HTTP/1.1\r\n\r\n")
		answer, rerr := io.ReadAll(c)
		if err := errors.Join(err, rerr); err != nil || !strings.HasSuffix(string(answer), "\n"+want) {
			t.Fatalf("the server answers %q, %v, want %s", answer, err, want)
		}
	}
	count(dial(), "101")
	first := dial() // the server waits for its request
	second := dial()
	ref := takeCheckpoint(t, shared, k, "1")
	count(first, "102")
	count(second, "103")
	k.MustRemove(t)
	restore(t, shared, k.ID, ref, k.Port)
	count(dial(), "102")
}

// A container that ends with its checkpoint says nothing to the other end of a connection that is to stay open.
func TestConnectionsAfterExit(t *testing.T) {
	results.Add(t)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	annotations := map[string]string{"dev.gpuckpt.criu.tcp-established": "true"}
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}, Annotations: annotations}, "loop", "--peer", listener.Addr().String())
	peer, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	hears := func(want string) {
		t.Helper()
		k.Expect(t, "count", want+" open peer open")
		if err := peer.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
			t.Fatal(err)
		}
		if n, err := peer.Read(make([]byte, 1)); n != 1 || err != nil {
			t.Errorf("at %s the peer has read %d bytes, %v", want, n, err)
		}
	}
	hears("101")
	dir := t.TempDir()
	exitInto(t, k, dir)
	ctr(t, shared, "tasks", "delete", k.ID)
	if err := restoreTask(t, shared, k, dir); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(3000))
	}
	hears("102")
	hears("103")
	if _, err := peer.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	file, err := peer.(*net.TCPConn).File()
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	harness.Within(t, "the restored program takes what the peer sends", func() bool {
		n, err := unix.IoctlGetInt(int(file.Fd()), unix.SIOCOUTQ)
		return err == nil && n == 0
	})
}

// In a network namespace that the client made, as a pod's, the address is another one after a
// restore. A connection by the old address, both of whose ends are in the container, is open by the
// new one.
func TestConnectionsByNewAddress(t *testing.T) {
	results.Add(t)
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("no program ip, which makes the networks")
	}
	network := filepath.Join(t.TempDir(), "network")
	spec := harness.RunSpec{GPUs: []int{0}, OwnNetwork: true, Amend: []oci.SpecOpts{
		oci.WithLinuxNamespace(specs.LinuxNamespace{Type: specs.NetworkNamespace, Path: network}),
	}}
	makeNetwork(t, network, "10.88.7.5/24")
	k := shared.Work(t, spec, "loop", "--interface", "eth0")
	expectIn(t, network, k, "101 open")
	ref := takeCheckpoint(t, shared, k, "1")
	expectIn(t, network, k, "102 open")
	for _, address := range []string{"10.88.7.6/24", "10.88.7.5/24"} {
		k.MustRemove(t)
		makeNetwork(t, network, address)
		k = restore(t, shared, k.ID, ref, k.Port)
		expectIn(t, network, k, "102 open")
		connections, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/tcp", k.MustPid(t)))
		if err != nil {
			t.Fatal(err)
		}
		// The address as the kernel prints it: in hexadecimal, the last byte first.
		last := strings.Split(strings.TrimSuffix(address, "/24"), ".")[3]
		if want := "0" + last + "07580A:"; strings.Count(string(connections), want) < 4 {
			t.Errorf("the connection is not by %s:\n%s", address, connections)
		}
	}
}

// makeNetwork makes a network namespace with an interface eth0 of an address, at a path, in the place
// of one that is there. It goes with the test.
func makeNetwork(t *testing.T, path, address string) {
	t.Helper()
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Unmount(path, unix.MNT_DETACH) })
	}
	onThread(t, func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		for _, args := range []string{"link add eth0 type veth peer name eth1", "addr add " + address + " dev eth0", "link set lo up", "link set eth0 up", "link set eth1 up"} {
			if out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput(); err != nil {
				return fmt.Errorf("ip %s: %w: %s", args, err, out)
			}
		}
		return unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "")
	})
}

// expectIn asks a container in a network namespace.
func expectIn(t *testing.T, path string, k *harness.Container, want string) {
	t.Helper()
	onThread(t, func() error {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		if err := unix.Setns(int(f.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		got, err := k.Ask(t.Context(), "count")
		if err == nil && got != want {
			err = fmt.Errorf("%s: got %q, want %q", k.ID, got, want)
		}
		return err
	})
}

// onThread does something on a thread that ends then.
func onThread(t *testing.T, do func() error) {
	t.Helper()
	failed := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		failed <- do()
	}()
	if err := <-failed; err != nil {
		t.Fatal(err)
	}
}
