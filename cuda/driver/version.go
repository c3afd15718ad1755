// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"os"
	"regexp"
	"strconv"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// minimum is the first driver branch with the checkpoint functions.
const minimum = 570

// facts are what CUDA does not report of the driver, or only a newer one does.
type facts struct {
	version string           // of the kernel driver, "580.159.03", or ""
	gpus    map[string]known // by UUID, as far as they are known
	all     bool             // all of each GPU is known
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
	if done := useNVML("nvmlSystemGetDriverVersion"); done != nil {
		defer done()
		if v, r := nvml.SystemGetDriverVersion(); r == nvml.SUCCESS {
			return v
		}
	}
	b, err := os.ReadFile("/proc/driver/nvidia/version")
	if err != nil {
		return ""
	}
	return parseVersion(string(b))
}

// parseVersion finds the version in /proc/driver/nvidia/version, whose line
// reads "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03
// Release Build …".
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

// useNVML initialises NVML and returns what ends its use, or nil if it is not
// there or lacks one of the functions: go-nvml aborts the program when it calls
// a function that is missing.
func useNVML(functions ...string) (done func()) {
	if nvml.Init() != nvml.SUCCESS {
		return nil
	}
	done = func() { _ = nvml.Shutdown() }
	for _, f := range functions {
		if !has(f) {
			done()
			return nil
		}
	}
	return done
}

// has reports whether NVML, in use, has a function.
func has(function string) bool { return nvml.Extensions().LookupSymbol(function) == nil }
