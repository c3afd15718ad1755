// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"os"
	"regexp"
	"strconv"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpuckpt/gpuckpt/cuda"
)

// minimum is the first driver branch with the checkpoint functions.
const minimum = 570

// facts are what CUDA does not report of the driver, or only a newer one does.
type facts struct {
	version string                 // of the kernel driver, "580.159.03", or ""
	gpus    map[string]cuda.Device // by UUID, as far as they are known
	all     bool                   // all of each GPU is known
}

// readFacts asks NVML, which takes some 10 ms to begin with.
func readFacts() facts {
	if nvml.Init() == nvml.SUCCESS { // counted: those within cost nothing
		defer func() { _ = nvml.Shutdown() }()
	}
	gpus, all := askNVML()
	return facts{version: driverVersion(), gpus: gpus, all: all}
}

// driverVersion returns the kernel driver's version, "580.159.03", or "".
func driverVersion() string {
	if nvml.Init() == nvml.SUCCESS {
		defer func() { _ = nvml.Shutdown() }()
		if v, r := ask("nvmlSystemGetDriverVersion", nvml.SystemGetDriverVersion); r == nvml.SUCCESS {
			return v
		}
	}
	b, _ := os.ReadFile("/proc/driver/nvidia/version")
	return parseVersion(string(b))
}

// parseVersion finds the version in /proc/driver/nvidia/version, "NVRM version: NVIDIA UNIX Open
// Kernel Module for x86_64  580.159.03  Release Build …".
func parseVersion(s string) string {
	for line := range strings.Lines(s) {
		if strings.HasPrefix(line, "NVRM version:") {
			return regexp.MustCompile(`\b[0-9]{3,}\.[0-9]+(\.[0-9]+)?\b`).FindString(line)
		}
	}
	return ""
}

// tooOld is false for a version that is unknown: the functions are there.
func tooOld(version string) bool {
	branch, _, _ := strings.Cut(version, ".")
	n, err := strconv.Atoi(branch)
	return err == nil && n < minimum
}
