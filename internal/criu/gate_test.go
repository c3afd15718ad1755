// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// A CRIU that hangs is waited for as long as it may take.
func TestGateOfHungCRIU(t *testing.T) {
	gate, err := ListenGate(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer gate.Close()
	if _, err := gate.Await(t.Context(), 20*time.Millisecond); !errors.Is(err, ErrHangs) || !strings.Contains(err.Error(), "in 20ms") {
		t.Errorf("error %v", err)
	}
	if got := Patience(time.Minute, 1<<30); got != time.Minute+32*time.Second {
		t.Errorf("1 GiB may take %v", got)
	}
}

// The shim and a plugin talk at a gate whose directory has a path longer than a socket's address.
func TestGate(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("long", 40))
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	gate, err := ListenGate(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer gate.Close()
	plugin := make(chan []string, 1)
	go func() {
		at, err := os.Open(dir)
		if err != nil {
			plugin <- []string{err.Error()}
			return
		}
		defer at.Close()
		conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Net: "unixpacket", Name: "/proc/self/fd/" + strconv.Itoa(int(at.Fd())) + "/" + gateSocket})
		if err != nil {
			plugin <- []string{err.Error()}
			return
		}
		defer conn.Close()
		var heard []string
		say := "restored 4711"
		for {
			if _, err := conn.Write([]byte(say)); err != nil {
				break
			}
			var buf [128]byte
			n, err := conn.Read(buf[:])
			if err != nil || n == 0 {
				break
			}
			heard = append(heard, string(buf[:n]))
			if heard[len(heard)-1] == "go" {
				break
			}
			say = "ok"
			if string(buf[:n]) == "free 13" {
				say = "error No such process"
			}
		}
		plugin <- heard
	}()
	pid, err := gate.Await(t.Context(), time.Minute)
	if err != nil || pid != 4711 {
		t.Fatalf("pid %d, error %v", pid, err)
	}
	if err := gate.Free(12); err != nil {
		t.Error(err)
	}
	if err := gate.Free(13); err == nil || !strings.Contains(err.Error(), "thread 13") || !strings.Contains(err.Error(), "No such process") {
		t.Errorf("error %v", err)
	}
	if err := gate.Hold(12); err != nil {
		t.Error(err)
	}
	if err := gate.Loose(14); err != nil {
		t.Error(err)
	}
	if err := gate.Open(); err != nil {
		t.Error(err)
	}
	if got, want := strings.Join(<-plugin, ","), "free 12,free 13,hold 12,loose 14,go"; got != want {
		t.Errorf("the plugin heard %q, want %q", got, want)
	}
}

// Who waits for a CRIU that fails waits no longer than it.
func TestGateGivenUp(t *testing.T) {
	gate, err := ListenGate(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer gate.Close()
	ctx, cancel := context.WithCancelCause(t.Context())
	failed := errors.New("CRIU failed")
	cancel(failed)
	if _, err := gate.Await(ctx, time.Minute); !errors.Is(err, failed) {
		t.Errorf("error %v", err)
	}
}
