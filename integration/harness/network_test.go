// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"bufio"
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// apartEnv names the directory for a test program that is to make a mess.
const apartEnv = "GPUCKPT_TEST_APART"

const forwarding = "/proc/sys/net/ipv4/ip_forward"

// A program in a network of its own that is killed leaves nothing on the machine.
func TestInOwnNetwork(t *testing.T) {
	if dir := os.Getenv(apartEnv); dir != "" {
		makeMess(t, dir)
		return
	}
	dir := filepath.Join(t.TempDir(), "state")
	before, err := os.ReadFile(forwarding)
	if err != nil {
		t.Fatal(err)
	}
	child := exec.Command("/proc/self/exe", "-test.run=^TestInOwnNetwork$")
	child.Env = append(os.Environ(), apartEnv+"="+dir)
	child.Stderr = os.Stderr
	stdin, err := child.StdinPipe() // it waits for its end
	if err != nil {
		t.Fatal(err)
	}
	defer stdin.Close()
	stdout, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	if said, err := bufio.NewReader(stdout).ReadString('\n'); err != nil || !slices.Contains(strings.Fields(said), "lo") || strings.Contains(said, "eth") {
		t.Errorf("its network interfaces are %q, %v", said, err)
	}
	if err := child.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := child.Wait(); err == nil {
		t.Error("it ended before it was killed")
	}
	if after, err := os.ReadFile(forwarding); err != nil || !bytes.Equal(after, before) {
		t.Errorf("net.ipv4.ip_forward was %q and is %q, %v", before, after, err)
	}
	if left, err := os.ReadDir(filepath.Dir(dir)); err != nil || len(left) > 0 {
		t.Errorf("it leaves %v, %v", left, err)
	}
}

// makeMess changes what tests change, names the network interfaces, and waits.
func makeMess(t *testing.T, dir string) {
	if err := InOwnNetwork(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	now, err := os.ReadFile(forwarding)
	if err != nil {
		t.Fatal(err)
	}
	other := "1"
	if strings.TrimSpace(string(now)) == other {
		other = "0"
	}
	if err := os.WriteFile(forwarding, []byte(other), 0); err != nil {
		t.Fatal(err)
	}
	interfaces, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range interfaces {
		fmt.Print(i.Name, " ")
	}
	fmt.Println()
	_, _ = os.Stdin.Read(make([]byte, 1)) // until it is killed
}
