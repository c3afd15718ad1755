// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"

	"github.com/gpuckpt/gpuckpt/bench/report"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// newResults takes the machine's description from the harness.
func newResults(h *harness.Results, args []string, cpus int, memory uint64) *report.Results {
	return &report.Results{
		Commit: h.Commit, GPUKind: h.GPUKind, Driver: h.Driver, GPUs: h.GPUs, Kernel: h.Kernel,
		CgroupVersion: h.CgroupVersion, Versions: h.Versions, CPUs: cpus, MemoryBytes: memory,
		Calls: []report.Call{{Date: h.Date, Args: args}}, HugePages: hugePages(),
	}
}

// hugePages reads how the kernel gives out huge pages: much of what is measured depends on it.
func hugePages() map[string]string {
	settings := make(map[string]string)
	for _, name := range []string{"enabled", "shmem_enabled", "defrag"} {
		data, err := os.ReadFile(filepath.Join("/sys/kernel/mm/transparent_hugepage", name))
		if err != nil {
			continue // a kernel without them
		}
		_, chosen, _ := strings.Cut(string(data), "[")
		settings[name], _, _ = strings.Cut(chosen, "]")
	}
	return settings
}
