// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// A container is restored at once on the network that it was on, though a connection of its own to another
// program is still in TIME_WAIT at the port of its listener, which has no SO_REUSEADDR. So it is however
// the container ended.
func TestPortsAtOnce(t *testing.T) {
	results.Add(t)
	for name, end := range map[string]func(t *testing.T, k *harness.Container, dir string){
		"ended with its checkpoint": func(t *testing.T, k *harness.Container, dir string) {
			exitInto(t, k, dir)
			ctr(t, shared, "tasks", "delete", k.ID)
		},
		"killed": func(t *testing.T, k *harness.Container, dir string) {
			checkpointInto(t, shared, k, dir)
			endTask(t, shared, k)
		},
	} {
		t.Run(name, func(t *testing.T) {
			k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "loop")
			k.Expect(t, "count", "101 open")
			port := listensAt(t, k)
			client, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
			if err != nil {
				t.Fatal(err)
			}
			defer client.Close()
			k.Expect(t, "count", "102 open") // and it has accepted it
			dir := t.TempDir()
			end(t, k, dir)
			if _, err := io.Copy(io.Discard, client); err != nil {
				t.Errorf("the end of the container's connection to another program is %v", err)
			}
			client.Close()
			for tries := 50; len(sockets(t, "self", timeWait, port)) == 0; tries-- {
				if time.Sleep(20 * time.Millisecond); tries == 0 {
					t.Fatal("no connection is in TIME_WAIT: the test shows nothing")
				}
			}
			if err := restoreTask(t, shared, k, dir); err != nil {
				t.Fatalf("%v\n%s", err, shared.LogTail(3000))
			}
			k.Expect(t, "count", "103 open")
			if again := listensAt(t, k); again != port {
				t.Errorf("it listens at %d, and did at %d", again, port)
			}
		})
	}
}

// States of a TCP socket, as /proc/net/tcp has them.
const (
	timeWait = "06"
	listens  = "0A"
)

// listensAt returns the port of the socket by which a container's first process listens.
func listensAt(t *testing.T, k *harness.Container) (port int) {
	t.Helper()
	pid := fmt.Sprint(k.MustPid(t))
	own := map[string]bool{}
	files, err := filepath.Glob(filepath.Join("/proc", pid, "fd", "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		to, _ := os.Readlink(f)
		own[strings.TrimSuffix(strings.TrimPrefix(to, "socket:["), "]")] = true
	}
	of := sockets(t, pid, listens, 0)
	of = slices.DeleteFunc(of, func(fields []string) bool { return !own[fields[9]] })
	if len(of) != 1 {
		t.Fatalf("it listens by %d sockets", len(of))
	}
	if _, err := fmt.Sscanf(of[0][1][len("0100007F:"):], "%X", &port); err != nil {
		t.Fatal(err)
	}
	return port
}

// sockets returns the lines of a process' /proc/net/tcp that have a state and a local port, 0 for any.
func sockets(t *testing.T, pid, state string, port int) (found [][]string) {
	t.Helper()
	file, err := os.Open(filepath.Join("/proc", pid, "net", "tcp"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for lines := bufio.NewScanner(file); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) > 9 && fields[3] == state && (port == 0 || strings.HasSuffix(fields[1], fmt.Sprintf(":%04X", port))) {
			found = append(found, fields)
		}
	}
	return found
}
