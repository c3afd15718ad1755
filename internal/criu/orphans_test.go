// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// What a killed CRIU or runc leaves mounted goes, and nothing in it.
func TestRemoveMounts(t *testing.T) {
	work, state, inside := t.TempDir(), filepath.Join(t.TempDir(), "id"), t.TempDir()
	writeFile(t, filepath.Join(inside, "file"), "1\n")
	yard := filepath.Join(work, ".criu.cgyard.abcdef")
	mount := func(from, at, kind string, flags uintptr) {
		t.Helper()
		if err := os.MkdirAll(at, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount(from, at, kind, flags, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(at, unix.MNT_DETACH) })
	}
	mount("none", yard, "tmpfs", 0)
	mount(inside, filepath.Join(yard, "memory"), "", unix.MS_BIND)
	mount(inside, filepath.Join(state, "criu-root"), "", unix.MS_BIND)
	for range 2 { // the second time there is nothing
		if err := RemoveMounts(work, state); err != nil {
			t.Fatal(err)
		}
		if left, err := os.ReadDir(work); err != nil || len(left) > 0 {
			t.Errorf("%v are left, %v", left, err)
		}
		if _, err := os.Stat(state); !os.IsNotExist(err) {
			t.Errorf("runc's directory is left, %v", err)
		}
	}
	if _, err := os.Stat(filepath.Join(inside, "file")); err != nil {
		t.Error(err)
	}

	// What is not mounted and not empty stays.
	for _, file := range []string{filepath.Join(yard, "file"), filepath.Join(state, "state.json")} {
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		writeFile(t, file, "")
		_ = RemoveMounts(work, state)
		if _, err := os.Stat(file); err != nil {
			t.Error(err)
		}
	}
}

// The CRIU of a dead shim is ended, which waits for the container that is killed.
func TestEndOfDeadShim(t *testing.T) {
	bundle := t.TempDir()
	if err := EndOfDeadShim(bundle); err != nil { // no process was made
		t.Error(err)
	}
	for what, ends := range map[string]bool{"criu traces:swrk 3": true, "criu traces:by hand": false} {
		cmd := startFake(what, 0)
		init := proc.Children(cmd.Process.Pid)
		t.Cleanup(func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		})
		if len(init) != 1 {
			t.Fatalf("%s: it has %v", what, init)
		}
		writeFile(t, filepath.Join(bundle, "init.pid"), strconv.Itoa(init[0]))
		if err := EndOfDeadShim(bundle); err != nil {
			t.Error(err)
		}
		ended := false
		for began := time.Now(); !ended && (ends && time.Since(began) < 20*time.Second || time.Since(began) < 100*time.Millisecond); time.Sleep(time.Millisecond) {
			status, _ := proc.StatusOf(cmd.Process.Pid)
			ended = status.Ended()
		}
		if ended != ends {
			t.Errorf("%s: ended: %t", what, ended)
		}
	}
}
