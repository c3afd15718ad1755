// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"fmt"
	"net"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// Snapshotter is a running gpuckpt snapshotter, for the containerd in a directory.
type Snapshotter struct {
	dir string
	cmd *exec.Cmd
}

// StartSnapshotter starts a snapshotter for the containerd that is going to be started in a directory
// (Options.ConfigIn), with further variables and flags, and returns when it answers.
func StartSnapshotter(bins Bins, dir string, env []string, flags ...string) (*Snapshotter, error) {
	program, err := bins.Path("gpuckpt")
	if err != nil {
		return nil, err
	}
	s := &Snapshotter{dir: dir}
	flags = append([]string{"snapshotter", "--root", s.root(), "--listen", s.socket(), "--address", home{dir: dir}.socket()}, flags...)
	s.cmd = exec.Command(program, flags...)
	s.cmd.Env = append([]string{"HOME=" + dir, "PATH=" + bins.SearchPath()}, env...)
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := s.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start gpuckpt's snapshotter: %w", err)
	}
	for deadline := time.Now().Add(startLimit); ; time.Sleep(5 * time.Millisecond) {
		c, err := net.Dial("unix", s.socket())
		if err == nil {
			return s, c.Close()
		}
		if time.Now().After(deadline) {
			s.Stop()
			return nil, fmt.Errorf("wait for gpuckpt's snapshotter: %w", err)
		}
	}
}

func (s *Snapshotter) socket() string { return filepath.Join(s.dir, "snap.sock") }
func (s *Snapshotter) root() string   { return filepath.Join(s.dir, "snapshots") }

// Config is the part of containerd's configuration that deploy/snapshotter.toml is, and has CRI use the
// snapshotter as well.
func (s *Snapshotter) Config() string {
	return fmt.Sprintf(`
[proxy_plugins.gpuckpt]
type = "snapshot"
address = %q
[proxy_plugins.gpuckpt.exports]
enable_remote_snapshot_annotations = "true"
root = %q
[[plugins.'io.containerd.transfer.v1.local'.unpack_config]]
platform = "linux"
snapshotter = "overlayfs"
[[plugins.'io.containerd.transfer.v1.local'.unpack_config]]
platform = "linux"
snapshotter = "gpuckpt"
[plugins.'io.containerd.cri.v1.images']
snapshotter = "gpuckpt"
`, s.socket(), s.root())
}

// Stop ends the snapshotter, after its containerd. It can be called on nil.
func (s *Snapshotter) Stop() {
	if s != nil {
		_ = s.cmd.Process.Kill()
		_ = s.cmd.Wait() // by the signal
	}
}
