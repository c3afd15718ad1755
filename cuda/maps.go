// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
)

// Area is a range of a process's addresses, End excluded.
type Area struct {
	Start uint64 `json:"start"`
	End   uint64 `json:"end"`
}

// Bytes returns the area's length.
func (a Area) Bytes() uint64 { return a.End - a.Start }

// AnonymousAreas returns the private anonymous rw-p areas of a process, ascending,
// without heap, stack and others that the kernel names. The driver's checkpoint
// puts GPU memory into one new area of this kind.
func AnonymousAreas(pid int) ([]Area, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return nil, fmt.Errorf("read memory map of process %d: %w", pid, err)
	}
	defer f.Close()
	areas, err := parseMaps(f)
	if err != nil {
		return nil, fmt.Errorf("read memory map of process %d: %w", pid, err)
	}
	return areas, nil
}

// NewAreas returns what is in after and was not in before, ascending. Both must be
// ascending, as AnonymousAreas returns them. It compares addresses, not areas: the
// kernel may have joined a new area with an old neighbour.
func NewAreas(before, after []Area) []Area {
	var fresh []Area
	i := 0
	for _, a := range after {
		for i < len(before) && before[i].End <= a.Start {
			i++
		}
		for j := i; j < len(before) && before[j].Start < a.End; j++ {
			if before[j].Start > a.Start {
				fresh = append(fresh, Area{a.Start, before[j].Start})
			}
			a.Start = min(before[j].End, a.End)
		}
		if a.Start < a.End {
			fresh = append(fresh, a)
		}
	}
	return fresh
}

// parseMaps picks the private anonymous rw-p areas out of /proc/PID/maps
// (proc_pid_maps(5)). It refuses a line that is not as the kernel writes it.
func parseMaps(r io.Reader) ([]Area, error) {
	var areas []Area
	var last uint64
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20) // a path may be long
	for lines.Scan() {
		// 7f2c8e5f9000-7f2c8e61b000 rw-p 00000000 00:00 0    [path]
		f := strings.SplitN(lines.Text(), " ", 6)
		if len(f) < 5 || len(f[1]) != 4 {
			return nil, fmt.Errorf("line %q: not a mapping", lines.Text())
		}
		from, to, ok := strings.Cut(f[0], "-")
		if !ok {
			return nil, fmt.Errorf("line %q: no range", lines.Text())
		}
		start, err := strconv.ParseUint(from, 16, 64)
		if err != nil {
			return nil, fmt.Errorf("line %q: %w", lines.Text(), err)
		}
		end, err := strconv.ParseUint(to, 16, 64)
		if err != nil {
			return nil, fmt.Errorf("line %q: %w", lines.Text(), err)
		}
		inode, err := strconv.ParseUint(f[4], 10, 64)
		if err != nil {
			return nil, fmt.Errorf("line %q: %w", lines.Text(), err)
		}
		if start >= end || start < last {
			return nil, fmt.Errorf("line %q: range out of order", lines.Text())
		}
		last = end
		named := len(f) == 6 && strings.TrimSpace(f[5]) != ""
		if f[1] == "rw-p" && inode == 0 && !named {
			areas = append(areas, Area{start, end})
		}
	}
	return areas, lines.Err()
}
