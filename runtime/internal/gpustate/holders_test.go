// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
)

// A process that has taken a file on a disk from the driver's thread is ended, also where the file has
// lost its name. One that has a file of that name, and one that has memory that cannot grow, go on.
func TestHoldersAreEnded(t *testing.T) {
	on := func(t *testing.T) *os.File {
		f, err := os.Create(filepath.Join(diskDir(t), "gpu-1-0"))
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	for name, test := range map[string]struct {
		lent  func(*testing.T) *os.File
		taken func(*testing.T, *os.File) *os.File
		ended bool
	}{
		"taken":        {on, func(_ *testing.T, f *os.File) *os.File { return f }, true},
		"without name": {on, func(t *testing.T, f *os.File) *os.File { return f }, true},
		"another":      {on, func(t *testing.T, _ *os.File) *os.File { return on(t) }, false},
		"of that name": {on, func(t *testing.T, f *os.File) *os.File {
			if err := os.Remove(f.Name()); err != nil {
				t.Fatal(err)
			}
			other, err := os.Create(f.Name())
			if err != nil {
				t.Fatal(err)
			}
			if err := os.Remove(f.Name()); err != nil { // both are "gpu-1-0 (deleted)"
				t.Fatal(err)
			}
			return other
		}, false},
		"memory": {func(t *testing.T) *os.File {
			f, err := staging.MemoryFile(staging.HugePage)
			if err != nil {
				t.Fatal(err)
			}
			return f
		}, func(_ *testing.T, f *os.File) *os.File { return f }, false},
	} {
		t.Run(name, func(t *testing.T) {
			f := test.lent(t)
			defer f.Close()
			if name == "without name" {
				if err := os.Remove(f.Name()); err != nil {
					t.Fatal(err)
				}
			}
			cmd := exec.Command("sleep", "100")
			cmd.ExtraFiles = []*os.File{test.taken(t, f)}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			defer func() { _ = cmd.Wait() }()
			defer func() { _ = cmd.Process.Kill() }()
			began := time.Now()
			err := endHolders([]int{cmd.Process.Pid}, []*Lent{{file: f}})
			t.Logf("after %v: %v", time.Since(began), err)
			if (err != nil) != test.ended || test.ended && !strings.Contains(err.Error(), "(sleep) had taken the file") {
				t.Error(err)
			}
			var info unix.Siginfo
			waited := unix.Waitid(unix.P_PID, cmd.Process.Pid, &info, unix.WEXITED|unix.WNOWAIT|map[bool]int{false: unix.WNOHANG}[test.ended], nil)
			if gone := info.Signo != 0; waited != nil || gone != test.ended {
				t.Errorf("ended: %v, %v", gone, waited)
			}
		})
	}
}
