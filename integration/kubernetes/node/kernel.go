// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"bytes"
	"errors"
	"fmt"
	"os"
)

// kubeletSettings are the kernel's settings that a kubelet changes
// (pkg/kubelet/cm, setupKernelTunables), and those of the bridge plugin.
var kubeletSettings = []string{
	"/proc/sys/vm/overcommit_memory",
	"/proc/sys/vm/panic_on_oom",
	"/proc/sys/kernel/panic",
	"/proc/sys/kernel/panic_on_oops",
	"/proc/sys/kernel/keys/root_maxkeys",
	"/proc/sys/kernel/keys/root_maxbytes",
	"/proc/sys/net/ipv4/ip_forward",
}

// kernelSettings are the values of settings before a kubelet ran, by their files.
type kernelSettings map[string][]byte

func readKernelSettings() kernelSettings {
	settings := kernelSettings{}
	for _, path := range kubeletSettings {
		if value, err := os.ReadFile(path); err == nil {
			settings[path] = value
		}
	}
	return settings
}

// restore sets what has changed to what it was.
func (k kernelSettings) restore() error {
	var errs []error
	for path, value := range k {
		if now, err := os.ReadFile(path); err == nil && bytes.Equal(now, value) {
			continue
		}
		if err := os.WriteFile(path, value, 0); err != nil {
			errs = append(errs, fmt.Errorf("set the kernel's settings back: %w", err))
		}
	}
	return errors.Join(errs...)
}
