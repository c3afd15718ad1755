// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuckpt/gpuckpt/cuda/internal/wire"
)

// ProcGPUs has a directory of NVIDIA's kernel module for each GPU. Reading it wakes none.
const ProcGPUs = "/proc/driver/nvidia/gpus"

// UUIDs returns the UUIDs of the GPUs with these minors (N of /dev/nvidiaN), for Options.Visible,
// in the order of the bus; for GPUs of one model that is CUDA's. dir is a directory like ProcGPUs.
// It is an error if a GPU is not there, or has not been in use: its UUID is not known then.
func UUIDs(dir string, minors []int) ([]string, error) {
	files, _ := filepath.Glob(filepath.Join(dir, "*", "information"))
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
	lines := map[string]string{}
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(line, ":")
		lines[strings.TrimSpace(name)] = strings.TrimSpace(value)
	}
	id, err := wire.ParseUUID(lines["GPU UUID"])
	n, nerr := strconv.ParseUint(lines["Device Minor"], 10, 16)
	return int(n), wire.FormatUUID(id), errors.Join(err, nerr)
}

// Pair moves what was on GPU Old to GPU New. Both are UUIDs as GPU.UUID.
type Pair = wire.Pair

// ParsePairs reads "OLD=NEW,OLD=NEW…", the form of cuda-checkpoint's --device-map; empty is no
// pairs. It refuses a GPU that is named twice on one side.
func ParsePairs(s string) ([]Pair, error) {
	if s == "" {
		return nil, nil
	}
	var pairs []Pair
	olds, news := map[string]bool{}, map[string]bool{}
	for field := range strings.SplitSeq(s, ",") {
		from, to, _ := strings.Cut(field, "=")
		o, oerr := wire.ParseUUID(from)
		n, nerr := wire.ParseUUID(to)
		if err := cmp.Or(oerr, nerr); err != nil {
			return nil, fmt.Errorf("GPU map: %w", err)
		}
		p := Pair{Old: wire.FormatUUID(o), New: wire.FormatUUID(n)}
		if olds[p.Old] || news[p.New] {
			return nil, fmt.Errorf("GPU map: %q names a GPU a second time", field)
		}
		olds[p.Old], news[p.New] = true, true
		pairs = append(pairs, p)
	}
	return pairs, nil
}
