// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
)

// Process is a process that cannot be taken for another: a pid is used again, not with the same start.
type Process struct {
	PID int `json:"pid"`
	// Start is when it started, in clock ticks since the machine did.
	Start uint64 `json:"start"`
}

// Identify returns which process has a pid now. The error is one of Ended if there is none.
func Identify(pid int) (Process, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return Process{}, err
	}
	// The second field, the program's name, may hold spaces and parentheses (proc(5)).
	fields := bytes.Fields(data[bytes.LastIndexByte(data, ')')+1:])
	if len(fields) < 20 {
		return Process{}, fmt.Errorf("/proc/%d/stat has %d fields after the name", pid, len(fields))
	}
	start, err := strconv.ParseUint(string(fields[19]), 10, 64)
	return Process{pid, start}, err
}

// Lives reports whether the process is still there and has not ended.
func (p Process) Lives() bool {
	if now, err := Identify(p.PID); err != nil || now != p {
		return false
	}
	status, err := StatusOf(p.PID)
	return err == nil && !status.Ended()
}
