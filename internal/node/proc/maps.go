// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
)

// Mapping is one line of a memory map, see proc_pid_maps(5).
type Mapping struct {
	Start, End  uint64
	Permissions string // "rw-p"
	Offset      uint64 // in the file
	Device      string // the file's, "fd:00"
	Inode       uint64 // 0 for memory without a file
	Path        string // of the file, or the kernel's name for the range: "[heap]"
}

// Maps reads the memory map of a process, ascending. A map that is not in order,
// or was not read to its end, is an error: nobody may act upon half of it. The map of
// a process that runs may change between two reads; Maps then begins anew.
func Maps(pid int) (mappings []Mapping, err error) {
	for range 10 {
		var text []byte
		if text, err = os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid)); err == nil {
			mappings, err = ParseMaps(bytes.NewReader(text))
		}
		if err == nil || Ended(err) {
			break
		}
	}
	if err != nil {
		return nil, fmt.Errorf("read the memory map of process %d: %w", pid, err)
	}
	return mappings, nil
}

// HasMapped reports whether a part of the path of a file that a process has mapped is
// the text given. The process may run.
func HasMapped(pid int, text string) (bool, error) {
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	return bytes.Contains(maps, []byte(text)), err
}

// ParseMaps reads the text of a memory map. It refuses a line that is not as the
// kernel writes it.
func ParseMaps(r io.Reader) ([]Mapping, error) {
	var mappings []Mapping
	var last uint64
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20) // a path may be long
	for lines.Scan() {
		// 7f2c8e5f9000-7f2c8e61b000 rw-p 00000000 00:00 0    [path]
		f := strings.SplitN(lines.Text(), " ", 6)
		if len(f) < 5 || len(f[1]) != 4 {
			return nil, fmt.Errorf("line %q: not a mapping", lines.Text())
		}
		from, to, _ := strings.Cut(f[0], "-")
		start, serr := strconv.ParseUint(from, 16, 64)
		end, eerr := strconv.ParseUint(to, 16, 64)
		offset, oerr := strconv.ParseUint(f[2], 16, 64)
		inode, ierr := strconv.ParseUint(f[4], 10, 64)
		if serr != nil || eerr != nil || oerr != nil || ierr != nil {
			return nil, fmt.Errorf("line %q: not a mapping", lines.Text())
		}
		if start >= end || start < last {
			return nil, fmt.Errorf("line %q: range out of order", lines.Text())
		}
		last = end
		m := Mapping{Start: start, End: end, Permissions: f[1], Offset: offset, Device: f[3], Inode: inode}
		if len(f) == 6 {
			m.Path = strings.TrimLeft(f[5], " ")
		}
		mappings = append(mappings, m)
	}
	return mappings, lines.Err()
}
