// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// kubeletSettings are the kernel's settings that a kubelet changes
// (pkg/kubelet/cm, setupKernelTunables).
var kubeletSettings = []string{
	"vm.overcommit_memory",
	"vm.panic_on_oom",
	"kernel.panic",
	"kernel.panic_on_oops",
	"kernel.keys.root_maxkeys",
	"kernel.keys.root_maxbytes",
}

// copySettings writes the settings' values into files of a directory, which the
// kubelet then has in the settings' places: it changes those, and never the machine.
func copySettings(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("copy the kernel's settings: %w", err)
	}
	for _, name := range kubeletSettings {
		value, err := os.ReadFile(filepath.Join("/proc/sys", strings.ReplaceAll(name, ".", "/")))
		if errors.Is(err, fs.ErrNotExist) {
			continue // a kernel without
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), value, 0o644)
		}
		if err != nil {
			return fmt.Errorf("copy the kernel's settings: %w", err)
		}
	}
	return nil
}
