// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/bench/report"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// forcePlugin makes CRIU's CUDA plugin act where the kernel knows of no NVIDIA
// GPU: it looks for /proc/driver/nvidia/gpus, which the software GPU has not
// (FI_PLUGIN_CUDA_FORCE_ENABLE in CRIU's fault-injection.h).
const forcePlugin = "CRIU_FAULT=138"

// errNoPlugin says that CRIU is here without its CUDA plugin.
var errNoPlugin = errors.New("CRIU's cuda_plugin.so is not beside the programs")

// findPlugin is the directory of CRIU's CUDA plugin: beside the other tools in
// the cache of hack/setup, or with CRIU in a bundle.
func findPlugin(bins harness.Bins) (string, error) {
	for _, place := range []string{"../criu-plugins", "plugins"} {
		if path, err := bins.Path(filepath.Join(place, "cuda_plugin.so")); err == nil {
			return filepath.Dir(path), nil
		}
	}
	return "", errNoPlugin
}

// hostSubject is a workload without a container, dumped by CRIU with its own
// CUDA plugin. The plugin runs cuda-checkpoint, which is gpuckpt here.
type hostSubject struct {
	criu, plugin, images string
	env                  []string
	cmd                  *exec.Cmd
	pids                 []int // the first process, then its children
}

// startHost runs a workload in a session of its own, as CRIU wants it.
func startHost(c *harness.Containerd, images string, w workload) (*hostSubject, error) {
	plugin, err := findPlugin(c.Bins())
	if err != nil {
		return nil, err
	}
	criu, err := c.Bins().Path("criu")
	if err != nil {
		return nil, err
	}
	program, err := c.Bins().Path("gpuwork")
	if err != nil {
		return nil, err
	}
	s := &hostSubject{criu: criu, plugin: plugin, images: images, env: append(c.HostEnv(), "PATH="+c.Bins().SearchPath())}
	if c.GPU().Kind == harness.SoftwareGPU {
		s.env = append(s.env, forcePlugin)
	}
	s.cmd = exec.Command(program, w.args()...)
	s.cmd.Env = s.env
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := s.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the workload: %w", err)
	}
	return s, nil
}

// run runs CRIU.
func (s *hostSubject) run(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, s.criu, append(args, "-D", s.images, "-v1", "--shell-job", "--libdir", s.plugin, "--network-lock", "skip")...)
	cmd.Env = s.env
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("criu %s: %w: %s%s", args[0], err, strings.TrimSpace(string(out)), firstError(filepath.Join(s.images, args[0]+".log")))
	}
	return nil
}

// firstError is the first error in CRIU's log that is not about the limit of open
// files, which does no harm.
func firstError(log string) string {
	data, err := os.ReadFile(log)
	if err != nil {
		return err.Error()
	}
	for line := range strings.Lines(string(data)) {
		if strings.Contains(line, "Error (") && !strings.Contains(line, "RLIMIT_NOFILE") {
			return strings.TrimSpace(line)
		}
	}
	return ""
}

func (s *hostSubject) checkpoint(ctx context.Context, leave bool) (op report.Operation, err error) {
	pid := s.cmd.Process.Pid
	children, err := harness.Children(pid)
	if err != nil {
		return op, err
	}
	s.pids = append([]int{pid}, children...)
	args := []string{"dump", "-t", strconv.Itoa(pid), "-o", "dump.log"}
	if leave {
		args = append(args, "--leave-running")
	}
	watch := startWatch()
	if err := s.run(ctx, args...); err != nil {
		return op, err
	}
	op.Seconds = watch.seconds()
	if leave {
		op.Down = op.Seconds
	}
	return op, nil
}

func (s *hostSubject) end(ctx context.Context) error {
	if s.cmd.ProcessState == nil {
		_ = s.cmd.Process.Kill()
		_ = s.cmd.Wait() // so that its pid is free
	}
	return s.gone(ctx)
}

// adoptOrphans makes processes whose parent has ended children of this program,
// so that it can free their pids for a restore. Those of the containerd have
// containerd for that.
func adoptOrphans() error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("adopt orphans: %w", err)
	}
	return nil
}

// gone kills what is left of the workload, and waits until its pids are free.
func (s *hostSubject) gone(ctx context.Context) error {
	for _, pid := range s.pids {
		for {
			// Orphans are this program's children, see adoptOrphans; there is
			// nothing to wait for where another was quicker.
			_, _ = unix.Wait4(pid, nil, unix.WNOHANG, nil)
			if _, err := harness.ProcessState(pid); err != nil {
				break
			}
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
				return fmt.Errorf("kill process %d: %w", pid, err)
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("wait for the end of process %d: %w", pid, context.Cause(ctx))
			case <-time.After(5 * time.Millisecond):
			}
		}
	}
	return nil
}

func (s *hostSubject) restore(ctx context.Context) (op report.Operation, err error) {
	watch := startWatch()
	if err := s.run(ctx, "restore", "-d", "-o", "restore.log"); err != nil {
		return op, err
	}
	op.Seconds = watch.seconds()
	return op, nil
}

func (s *hostSubject) remove(ctx context.Context) error {
	return s.end(ctx)
}

func (s *hostSubject) logs() string {
	var all strings.Builder
	for _, name := range []string{"dump.log", "restore.log"} {
		data, err := os.ReadFile(filepath.Join(s.images, name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			fmt.Fprintln(&all, err)
		}
		if len(data) > 0 {
			fmt.Fprintf(&all, "the end of %s:\n%s\n", name, data[max(0, len(data)-2000):])
		}
	}
	return all.String()
}
