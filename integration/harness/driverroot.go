// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"fmt"
	"os"
	"path/filepath"
)

// containerLibraries is where containers have the libraries of a GPU that Below returns.
const containerLibraries = "/usr/lib/x86_64-linux-gnu"

// Below returns the GPU with its driver's libraries in a driver container whose root is mounted at
// root, as NVIDIA's GPU Operator has it: no loader of the host looks there, and containers get the
// files from there.
func (g GPU) Below(root string) (GPU, error) {
	dir := filepath.Join(root, containerLibraries)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return GPU{}, fmt.Errorf("make a driver root: %w", err)
	}
	moved := g
	moved.hostPath, moved.libraries = "", nil
	for _, library := range g.libraries {
		data, err := os.ReadFile(library.host)
		name := filepath.Base(library.container)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), data, 0o755)
		}
		if err != nil {
			return GPU{}, fmt.Errorf("make a driver root: %w", err)
		}
		moved.libraries = append(moved.libraries, driverLibrary{host: filepath.Join(dir, name), container: filepath.Join(containerLibraries, name)})
	}
	return moved, nil
}
