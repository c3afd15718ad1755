// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"fmt"
	"os"
	"path/filepath"
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

// pluginsWithoutCUDA makes dir hold every plugin of CRIU's but the CUDA plugin, and
// returns dir. It returns "" when the host has no CUDA plugin, and CRIU can use its
// own directory.
func pluginsWithoutCUDA(configured, dir string) (string, error) {
	from := configured
	if from == "" {
		from = os.Getenv("CRIU_LIBS_DIR")
	}
	if from == "" {
		plugin := CUDAPlugin(func(path string) bool { _, err := os.Stat(path); return err == nil })
		if plugin == "" {
			return "", nil
		}
		from = filepath.Dir(plugin)
	}
	if err := linkPlugins(from, dir); err != nil {
		return "", fmt.Errorf("set CRIU's CUDA plugin aside: %w", err)
	}
	return dir, nil
}

func linkPlugins(from, dir string) error {
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	plugins, err := filepath.Glob(filepath.Join(from, "*.so"))
	if err != nil {
		return err
	}
	for _, p := range plugins {
		if filepath.Base(p) == cudaPlugin {
			continue
		}
		if err := os.Symlink(p, filepath.Join(dir, filepath.Base(p))); err != nil {
			return err
		}
	}
	return nil
}
