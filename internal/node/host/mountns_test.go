// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// What enters a container's mount namespace never does so on the first thread:
// that one does not end with it, and it is the one that /proc/self means.
func TestTheFirstThreadStaysAtHome(t *testing.T) {
	cmd := exec.Command("unshare", "--mount", "sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	home := namespaceOf(t, "self")
	for namespaceOf(t, strconv.Itoa(cmd.Process.Pid)) == home { // until it has unshared
	}
	away := namespaceOf(t, strconv.Itoa(cmd.Process.Pid))
	for range 500 {
		err := InMountNamespace(cmd.Process.Pid, func() error {
			if at := namespaceOf(t, "thread-self"); at != away {
				t.Errorf("ran in %s, not in %s", at, away)
			}
			if unix.Gettid() == os.Getpid() {
				t.Error("ran on the first thread")
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if at := namespaceOf(t, "self"); at != home {
			t.Fatalf("the first thread is in %s, not in %s", at, home)
		}
		if t.Failed() {
			return
		}
	}
}

func namespaceOf(t *testing.T, process string) string {
	t.Helper()
	at, err := os.Readlink("/proc/" + process + "/ns/mnt")
	if err != nil {
		t.Error(err)
	}
	return strings.TrimSpace(at)
}
