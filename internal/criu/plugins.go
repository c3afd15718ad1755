// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"

	criucore "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/containerd/go-runc"
)

// cudaPlugin is CRIU's own plugin for CUDA, which would run the CUDA steps a second
// time.
const cudaPlugin = "cuda_plugin.so"

// CUDAPlugin returns the path of CRIU's CUDA plugin, "" when there is none. dirs are
// looked at first, without those that are "", and then the directories where
// distributions and CRIU's own build put plugins.
func CUDAPlugin(exists func(path string) bool, dirs ...string) string {
	for _, dir := range append(dirs, "/usr/lib/criu", "/usr/local/lib/criu", "/usr/lib64/criu", "/usr/libexec/criu", "/usr/lib/x86_64-linux-gnu/criu") {
		if path := filepath.Join(dir, cudaPlugin); dir != "" && exists(path) {
			return path
		}
	}
	return ""
}

// libdir makes the directory that CRIU's option libdir names, when the container needs one, and
// returns its path: every plugin of CRIU's but the CUDA plugin, and gpuckpt's own. It returns ""
// when CRIU can use its own directory. asked is the directory that the node's or the container's
// options name; its plugins are all kept.
func (s Settings) libdir(asked string) (string, error) {
	ours := len(s.Devices) > 0 || s.Gate
	if asked != "" && !ours {
		return "", nil // CRIU reads the option itself
	}
	from, keep := cmp.Or(asked, os.Getenv("CRIU_LIBS_DIR")), asked != ""
	if from == "" {
		if plugin := CUDAPlugin(func(path string) bool { _, err := os.Stat(path); return err == nil }); plugin != "" {
			from = filepath.Dir(plugin)
		}
	}
	if from == "" && !ours {
		return "", nil
	}
	dir := s.PluginDir()
	if err := linkPlugins(from, dir, keep); err != nil {
		return "", fmt.Errorf("set up CRIU's plugins: %w", err)
	}
	if !ours {
		return dir, nil
	}
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	plugin, err := FindPlugin(self)
	if err != nil {
		return "", err
	}
	var sandbox []string
	if s.Sandbox != nil {
		if sandbox, err = s.Sandbox.lines(filepath.Join(s.Bundle, sandboxName), dir); err != nil {
			return "", fmt.Errorf("set up CRIU's sandbox: %w", err)
		}
	}
	return dir, AddPlugin(plugin, dir, s.Devices, s.Gate, sandbox)
}

// PluginDir is the directory of the container's own plugins, where ListenGate listens.
func (s Settings) PluginDir() string { return filepath.Join(s.Bundle, "criu-plugins") }

// WithPlugin returns a context with which runc has CRIU load the plugin of a container before any other
// library: the plugin watches what CRIU mounts then, and without that no sandbox that is to be so is
// entered. ended are processes that have ended, as Ended says it, and free are addresses that need not be there, each
// between spaces.
func WithPlugin(ctx context.Context, bundle, ended, free string) context.Context {
	return runc.WithExtraEnv(ctx, "LD_PRELOAD="+filepath.Join(Settings{Bundle: bundle}.PluginDir(), PluginName), "GPUCKPT_ENDED="+ended+" ", "GPUCKPT_FREE="+free+" ")
}

// Ended returns what WithPlugin needs of a process that has ended, by its image: "" if CRIU itself restores what it
// has ended with.
func Ended(file string, core *criucore.CoreEntry) string {
	const dead = 2 // TASK_DEAD of CRIU
	var pid int
	status := core.GetTc().GetExitCode() >> 8 & 0xff
	if n, _ := fmt.Sscanf(file, "core-%d.img", &pid); n != 1 || core.GetTc().GetTaskState() != dead || status < 128 {
		return ""
	}
	return fmt.Sprintf(" %d:%d", pid, status)
}

func linkPlugins(from, dir string, keepCUDA bool) error {
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	if from == "" {
		return nil
	}
	plugins, err := filepath.Glob(filepath.Join(from, "*.so"))
	if err != nil {
		return err
	}
	for _, p := range plugins {
		if name := filepath.Base(p); name == cudaPlugin && !keepCUDA || name == PluginName {
			continue
		}
		if err := os.Symlink(p, filepath.Join(dir, filepath.Base(p))); err != nil {
			return err
		}
	}
	return nil
}
