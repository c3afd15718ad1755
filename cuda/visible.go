// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuckpt/gpuckpt/cuda/internal/wire"
)

// ProcGPUs is where NVIDIA's kernel module describes the GPUs, each in a directory.
// Reading it wakes no GPU.
const ProcGPUs = "/proc/driver/nvidia/gpus"

// UUIDs returns the UUIDs of the GPUs with these minors (N of /dev/nvidiaN), for
// Options.Visible. dir is a directory like ProcGPUs. The UUIDs are in the order of the
// bus, by which the directories are named; for GPUs of one model that is CUDA's order.
// The error reports a GPU that is not there, or that has no UUID yet: the module
// knows it only once the GPU has been in use.
func UUIDs(dir string, minors []int) ([]string, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*", "information"))
	if err != nil {
		return nil, err
	}
	known := map[int]bool{}
	var uuids []string
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		minor, uuid, err := parseInformation(string(text))
		if err != nil {
			continue // one that nobody asks for, or it is missed below
		}
		if known[minor] {
			return nil, fmt.Errorf("%s: two GPUs have the minor %d", dir, minor)
		}
		known[minor] = true
		if slices.Contains(minors, minor) {
			uuids = append(uuids, uuid)
		}
	}
	for _, minor := range minors {
		if !known[minor] {
			return nil, fmt.Errorf("%s: no UUID of /dev/nvidia%d", dir, minor)
		}
	}
	return uuids, nil
}

// parseInformation reads the lines "GPU UUID:" and "Device Minor:" of a GPU's
// file "information". A UUID that is not known yet has "?" for its digits.
func parseInformation(text string) (minor int, uuid string, err error) {
	minor = -1
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(line, ":")
		value = strings.TrimSpace(value)
		switch strings.TrimSpace(name) {
		case "GPU UUID":
			id, err := wire.ParseUUID(value)
			if err != nil {
				return 0, "", err
			}
			uuid = wire.FormatUUID(id)
		case "Device Minor":
			n, err := strconv.ParseUint(value, 10, 16)
			if err != nil {
				return 0, "", fmt.Errorf("device minor %q: %w", value, err)
			}
			minor = int(n)
		}
	}
	if minor < 0 || uuid == "" {
		return 0, "", errors.New("no UUID or no device minor")
	}
	return minor, uuid, nil
}
