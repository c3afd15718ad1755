// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// Process is a process that cannot be taken for another: a pid is used again, not with the same start.
type Process struct {
	PID int `json:"pid"`
	// Start is when it started, in clock ticks since the machine did.
	Start uint64 `json:"start"`
}

// Identify returns which process has a pid now. The error is one of Ended if there is none.
func Identify(pid int) (Process, error) {
	fields, err := stat(pid)
	if err != nil {
		return Process{}, err
	}
	start, err := strconv.ParseUint(fields[22], 10, 64)
	return Process{pid, start}, err
}

// EachStat calls do with the fields of /proc/PID/stat of processes, by their numbers in proc(5).
func EachStat(list func() ([]int, error), do func(pid int, fields []string)) error {
	pids, err := list()
	for _, pid := range pids {
		fields, serr := stat(pid)
		if serr != nil && !Ended(serr) {
			return serr
		}
		if serr == nil {
			do(pid, fields)
		}
	}
	return err
}

// stat returns the fields of /proc/PID/stat by their numbers in proc(5); 0 to 2 are empty: the second
// one, the program's name, may hold spaces and parentheses.
func stat(pid int) ([]string, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return nil, err
	}
	fields := append(make([]string, 3), strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))...)
	if len(fields) < 39 {
		return nil, fmt.Errorf("/proc/%d/stat has %d fields", pid, len(fields))
	}
	return fields, nil
}

// Lives reports whether the process is still there and has not ended.
func (p Process) Lives() bool {
	if now, err := Identify(p.PID); err != nil || now != p {
		return false
	}
	status, err := StatusOf(p.PID)
	return err == nil && !status.Ended()
}
