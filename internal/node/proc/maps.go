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

// AllMappings is what Maps is asked for by who needs to know where mappings are, and no paths.
func AllMappings(m *Mapping) bool {
	m.Path = ""
	return true
}

// Maps reads the memory map of a process, ascending, and returns the mappings that are wanted. A
// program may have a million of them, each of a file with a path of 4 kB: so the map is read line
// by line, and wanted should take the path from what it keeps where nobody needs it. A map that is
// not in order, or was not read to its end, is an error: nobody may act upon half of it. The map of
// a process that runs may change between two reads; Maps then begins anew.
func Maps(pid int, wanted func(*Mapping) bool) (mappings []Mapping, err error) {
	for range 10 {
		if mappings, err = readMaps(pid, wanted); err == nil || Ended(err) {
			break
		}
	}
	if err != nil {
		return nil, fmt.Errorf("read the memory map of process %d: %w", pid, err)
	}
	return mappings, nil
}

func readMaps(pid int, wanted func(*Mapping) bool) ([]Mapping, error) {
	in, err := os.Open(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return nil, err
	}
	defer in.Close()
	return ParseMaps(in, wanted)
}

// FindMapping returns the first mapping of a process that is wanted, or the zero Mapping.
func FindMapping(pid int, wanted func(*Mapping) bool) (m Mapping, found bool, err error) {
	first := func(m *Mapping) bool {
		if found || !wanted(m) {
			return false
		}
		found = true
		return true
	}
	all, err := Maps(pid, first)
	if err != nil || len(all) == 0 {
		return Mapping{}, false, err
	}
	return all[0], true, nil
}

// HasMapped reports whether a part of the path of a file that a process has mapped is
// the text given. The process may run.
func HasMapped(pid int, text string) (has bool, err error) {
	err = eachLine(pid, func(line []byte) bool {
		has = bytes.Contains(line, []byte(text))
		return !has
	})
	return has, err
}

// CountMappings returns how many mappings a process has, and counts no more than most.
func CountMappings(pid, most int) (n int, err error) {
	err = eachLine(pid, func([]byte) bool {
		n++
		return n < most
	})
	return n, err
}

// eachLine calls do with the lines of a memory map until it returns false.
func eachLine(pid int, do func(line []byte) bool) error {
	in, err := os.Open(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return err
	}
	defer in.Close()
	lines := linesOf(in)
	for lines.Scan() {
		if !do(lines.Bytes()) {
			return nil
		}
	}
	return lines.Err()
}

// linesOf reads lines, of which the longest has a path of 4096 bytes, each written as four at most.
func linesOf(r io.Reader) *bufio.Scanner {
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 0, 64<<10), 64<<10)
	return lines
}

// ParseMaps reads the text of a memory map line by line, and returns the mappings that are wanted.
// It refuses a line that is not as the kernel writes it.
func ParseMaps(r io.Reader, wanted func(*Mapping) bool) ([]Mapping, error) {
	var mappings []Mapping
	var last uint64
	path := "" // of the mapping before, which often has the next one's
	lines := linesOf(r)
	for lines.Scan() {
		// 7f2c8e5f9000-7f2c8e61b000 rw-p 00000000 00:00 0    [path]
		f := bytes.SplitN(lines.Bytes(), []byte(" "), 6)
		if len(f) < 5 || len(f[1]) != 4 {
			return nil, fmt.Errorf("line %q: not a mapping", lines.Text())
		}
		from, to, _ := strings.Cut(string(f[0]), "-")
		start, serr := strconv.ParseUint(from, 16, 64)
		end, eerr := strconv.ParseUint(to, 16, 64)
		offset, oerr := strconv.ParseUint(string(f[2]), 16, 64)
		inode, ierr := strconv.ParseUint(string(f[4]), 10, 64)
		if serr != nil || eerr != nil || oerr != nil || ierr != nil {
			return nil, fmt.Errorf("line %q: not a mapping", lines.Text())
		}
		if start >= end || start < last {
			return nil, fmt.Errorf("line %q: range out of order", lines.Text())
		}
		last = end
		m := Mapping{Start: start, End: end, Permissions: string(f[1]), Offset: offset, Device: string(f[3]), Inode: inode}
		if len(f) == 6 {
			if text := bytes.TrimLeft(f[5], " "); string(text) != path {
				path = string(text)
			}
			m.Path = path
		}
		if wanted(&m) {
			mappings = append(mappings, m)
		}
	}
	return mappings, lines.Err()
}
