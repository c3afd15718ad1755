// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package hostile has hostile checkpoints restored for real, by the shim, runc and CRIU, in namespaces
// that are thrown away: by the shim as it is, and by one that believes images, a build without the
// checks that come before CRIU. What is left in the second case is CRIU's sandbox, and the inspection
// of what CRIU has restored.
package hostile

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// shared has the shim that believes images, checking the one that is shipped.
var shared, checking *harness.Containerd

// tests starts more of them.
var tests *harness.Session

// outside is a directory of the host's that is mounted in the containers.
var outside string

func TestMain(m *testing.M) {
	if err := apart(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	harness.Main(m.Run, func(s *harness.Session) error {
		tests = s
		dir, err := os.MkdirTemp("", "gpuckpt-unchecked")
		if err != nil {
			return err
		}
		s.AtEnd(func() error { return os.RemoveAll(dir) })
		if outside, err = os.MkdirTemp("", "gpuckpt-outside"); err != nil {
			return err
		}
		s.AtEnd(func() error { return os.RemoveAll(outside) })
		shim := filepath.Join(dir, "containerd-shim-gpuckpt-v2")
		build := exec.CommandContext(s.Context(), "go", "build", "-tags", "gpuckpt_unchecked", "-o", shim, "./cmd/containerd-shim-gpuckpt-v2")
		build.Dir, build.Stderr = "../..", os.Stderr
		build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off")
		if err := build.Run(); err != nil {
			return err
		}
		for dir := range covered { // Go's cache, in /root, has what was built
			if real, err := filepath.EvalSymlinks(dir); err != nil || real != dir {
				delete(covered, dir) // not on this machine, or another name
				continue
			}
			if covered[dir], err = harness.Cover(dir); err != nil {
				return err
			}
		}
		plugin, err := s.Bins.Path("gpuckpt_criu.so")
		if err != nil {
			return err
		}
		if err := os.Symlink(plugin, filepath.Join(dir, "gpuckpt_criu.so")); err != nil {
			return err
		}
		bins, err := harness.NewBins(append([]string{dir}, filepath.SplitList(os.Getenv(harness.EnvBin))...)...)
		if err != nil {
			return err
		}
		without = filepath.Join(dir, "without")
		// Signatures are another wall: here anybody's checkpoint counts.
		if shared, err = s.StartWithWorkload(harness.Options{Bins: bins, ShimConfig: patience + harness.AnyCheckpoint, Env: []string{"GPUCKPT_WITHOUT=" + without}}); err != nil {
			return err
		}
		checking, err = s.StartWithWorkload(harness.Options{ShimConfig: patience + harness.AnyCheckpoint})
		return err
	})
}

// patience is how long a CRIU may hang that a change has confused.
const patience = "stall_timeout = \"5s\"\n"

// apart starts the program over in network, mount, IPC and UTS namespaces of its own. What is mounted
// elsewhere on the machine meanwhile is not seen in them.
func apart() error {
	const env = "GPUCKPT_TEST_APART"
	if os.Getenv(env) == "" {
		runtime.LockOSThread() // whose namespaces the program that is executed next has
		if err := unix.Unshare(unix.CLONE_NEWIPC | unix.CLONE_NEWUTS); err != nil {
			return fmt.Errorf("enter namespaces: %w", err)
		}
		if err := os.Setenv(env, "1"); err != nil {
			return err
		}
	}
	if err := harness.InOwnNetwork(); err != nil {
		return err
	}
	if err := unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("keep mounts apart: %w", err)
	}
	return nil
}
