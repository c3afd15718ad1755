// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// Between its dump and its end a container that ends with its checkpoint takes nothing of a connection that is to
// stay open: no restore would have it. It takes it when the checkpoint fails and it goes on.
func TestNothingTakenAfterDump(t *testing.T) {
	session.Results.Add(t)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	annotations := map[string]string{"dev.gpuckpt.criu.tcp-established": "true"}
	spec := harness.RunSpec{ID: harness.Name(t), GPUs: []int{0}, Annotations: annotations}
	k := shared.Work(t, spec, "loop", "--peer", listener.Addr().String())
	peer, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	k.Expect(t, "count", "101 open peer open")
	write := func() {
		if _, err := peer.Write([]byte("x")); err != nil {
			t.Error(err)
		}
	}
	write()
	takes(t, peer, 1)
	defer steered.at(k.ID, nil)
	steered.at(k.ID, func(p point) string {
		if p.Operation != "checkpoint" || p.Step != "admit" || p.Moment != "begin" {
			return ""
		}
		write()
		if n := queued(peer); n != 1 {
			t.Errorf("of a connection that is dumped %d bytes are taken, want 1", n)
		}
		return "no admission"
	})
	_, err = k.CheckpointTask(t.Context(), harness.TaskCheckpoint{ImagePath: filepath.Join(t.TempDir(), "images"), Exit: true})
	harness.Says(t, err, "no admission")
	k.Expect(t, "count", "102 open peer open")
	takes(t, peer, 2)
}

// takes waits until the other end of a connection has taken so many bytes that its program has not read.
func takes(t *testing.T, peer net.Conn, want int) {
	t.Helper()
	within(t, "the bytes", func() error {
		if n := queued(peer); n != want {
			return fmt.Errorf("%d bytes are taken, want %d", n, want)
		}
		return nil
	})
}

// queued is how many bytes the other end of a connection by IPv4 has taken, -1 where there is none.
func queued(peer net.Conn) (bytes int) {
	table, _ := os.ReadFile("/proc/net/tcp")
	ports := [2]int{peer.RemoteAddr().(*net.TCPAddr).Port, peer.LocalAddr().(*net.TCPAddr).Port}
	for line := range strings.Lines(string(table)) {
		var ends [2]int
		fields := strings.Fields(line)
		if len(fields) < 5 {
			continue
		}
		for i, address := range fields[1:3] {
			_, port, _ := strings.Cut(address, ":")
			_, _ = fmt.Sscanf(port, "%X", &ends[i])
		}
		if slices.Equal(ends[:], ports[:]) {
			_, queue, _ := strings.Cut(fields[4], ":")
			_, _ = fmt.Sscanf(queue, "%X", &bytes)
			return bytes
		}
	}
	return -1
}
