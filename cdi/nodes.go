// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"path"
	"regexp"
	"strconv"
	"strings"
	"sync"
)

// nodeForm matches NVIDIA's device nodes: those of the GPUs and those that all GPUs share.
var nodeForm = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^/dev/(nvidia[0-9]+|nvidiactl|nvidia-modeset|nvidia-uvm|nvidia-uvm-tools|nvidia-nvlink|nvidia-nvswitch[0-9]+|nvidia-nvswitchctl|nvidia-caps/nvidia-cap[0-9]+|nvidia-caps-imex-channels/channel[0-9]+)$`)
})

// IsNode reports whether a path in a container is that of an NVIDIA device node.
func IsNode(p string) bool { return nodeForm().MatchString(path.Clean(p)) }

// NodeDirs returns the directories below /dev that hold NVIDIA's nodes.
func NodeDirs() []string { return []string{".", "nvidia-caps", "nvidia-caps-imex-channels"} }

// MinorOf returns N of /dev/nvidiaN. The driver goes by that name, whatever the node's numbers.
func MinorOf(p string) (int, bool) {
	digits, ok := strings.CutPrefix(path.Clean(p), "/dev/nvidia")
	if !ok || !IsNode(p) {
		return 0, false
	}
	minor, err := strconv.Atoi(digits)
	return minor, err == nil
}

// NodePath returns the path of the node of a GPU by its minor.
func NodePath(minor int) string { return "/dev/nvidia" + strconv.Itoa(minor) }

// HasDynamicMajor reports whether the kernel chooses the major number of a node at each boot or
// load of its module anew. GPUs and nvidiactl have 195 everywhere.
func HasDynamicMajor(p string) bool {
	return IsNode(p) && strings.HasPrefix(path.Clean(p), "/dev/nvidia-") && path.Clean(p) != "/dev/nvidia-modeset"
}

// isInstance reports whether a node gives access to a MIG instance. The first two, which every
// machine has, configure and watch MIG (/proc/driver/nvidia/capabilities).
func isInstance(p string) bool {
	digits, ok := strings.CutPrefix(path.Clean(p), "/dev/nvidia-caps/nvidia-cap")
	n, err := strconv.Atoi(digits)
	return ok && err == nil && n > 2
}
