// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Whatever a plugin in a CRIU that an image has taken over says, the shim gets an answer or an error.
func FuzzGate(f *testing.F) {
	f.Add([]byte("restored 7"), []byte("ok"))
	f.Add([]byte("restored -7"), []byte("error no such thread"))
	f.Add([]byte("restored 99999999999999999999"), []byte{})
	f.Fuzz(func(t *testing.T, first, second []byte) {
		dir := t.TempDir()
		g, err := ListenGate(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer g.Close()
		d, err := unix.Open(dir, unix.O_PATH|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(d)
		at := filepath.Join("/proc/self/fd", strconv.Itoa(d), gateSocket)
		plugin, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Net: "unixpacket", Name: at})
		if err != nil {
			t.Fatal(err)
		}
		for _, text := range [][]byte{first, second} {
			if len(text) > 0 && len(text) < 1<<16 {
				if _, err := plugin.Write(text); err != nil {
					t.Fatal(err)
				}
			}
		}
		plugin.Close()
		pid, err := g.Await(context.Background(), time.Minute)
		if err != nil {
			return
		}
		if pid <= 0 {
			t.Fatalf("process %d", pid)
		}
		if err := g.Hold(os.Getpid()); err == nil && string(second) != "ok" {
			t.Fatalf("%q is taken for a yes", second)
		}
	})
}
