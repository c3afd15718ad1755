// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"path"
	"regexp"
	"strconv"
	"strings"
)

// nodeForm are NVIDIA's device nodes below /dev: the GPUs themselves and what
// all of them share.
var nodeForm = regexp.MustCompile(`^/dev/(nvidia[0-9]+|nvidiactl|nvidia-modeset|nvidia-uvm|nvidia-uvm-tools|nvidia-nvlink|nvidia-nvswitch[0-9]+|nvidia-nvswitchctl|nvidia-caps/nvidia-cap[0-9]+|nvidia-caps-imex-channels/channel[0-9]+)$`)

// IsNode says whether a path in a container is that of an NVIDIA device node.
func IsNode(p string) bool { return nodeForm.MatchString(path.Clean(p)) }

// NodeDirs are the directories below /dev in which NVIDIA's nodes lie.
func NodeDirs() []string { return []string{".", "nvidia-caps", "nvidia-caps-imex-channels"} }

// MinorOf gives N of /dev/nvidiaN, the node of a GPU. The driver opens the node
// of that name, so it is the name that counts, whatever the node's numbers.
func MinorOf(p string) (int, bool) {
	digits, ok := strings.CutPrefix(path.Clean(p), "/dev/nvidia")
	if !ok || !IsNode(p) {
		return 0, false
	}
	minor, err := strconv.Atoi(digits)
	return minor, err == nil
}

// HasDynamicMajor says whether the kernel chooses the major number of a node
// anew at each boot or load of its module, so that another node's is of no use
// here. The GPUs and nvidiactl have 195 everywhere.
func HasDynamicMajor(p string) bool {
	return IsNode(p) && strings.HasPrefix(path.Clean(p), "/dev/nvidia-") && path.Clean(p) != "/dev/nvidia-modeset"
}

// isInstance says whether a node gives access to a MIG instance. The first
// two, which every node has, configure and watch MIG (/proc/driver/nvidia/capabilities).
func isInstance(p string) bool {
	digits, ok := strings.CutPrefix(path.Clean(p), "/dev/nvidia-caps/nvidia-cap")
	n, err := strconv.Atoi(digits)
	return ok && err == nil && n > 2
}
