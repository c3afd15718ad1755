// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package held has processes that a CRIU holds at the gate make system calls, before they run on. So
// they get nothing that they could not get by themselves.
package held

import (
	"errors"
	"fmt"
	"os"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// Gate is where a CRIU holds restored processes: criu.Gate.
type Gate interface {
	// Call has a held thread make a system call of at most six arguments.
	Call(tid int, nr uint64, args ...uint64) error
}

// Thread returns a thread of a process that can make a call: the first one may have ended.
func Thread(pid int) (int, error) {
	tids, err := proc.Threads(pid)
	if err != nil {
		return 0, err
	}
	for _, tid := range tids {
		if status, err := proc.ThreadStatus(pid, tid); err == nil && !status.Ended() {
			return tid, nil
		}
	}
	return 0, fmt.Errorf("process %d has no thread", pid)
}

// Lend has a process's memory hold data while do is called with its address. The process must
// stand still.
func Lend(pid int, data []byte, do func(at uint64) error) error {
	maps, err := proc.Maps(pid, func(m *proc.Mapping) bool { return proc.AllMappings(m) && m.Permissions == "rw-p" })
	if err != nil {
		return err
	}
	mem, err := os.OpenFile(fmt.Sprintf("/proc/%d/mem", pid), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer mem.Close()
	was := make([]byte, len(data))
	for _, m := range maps {
		if _, err := mem.ReadAt(was, int64(m.Start)); err != nil {
			continue // a guard page, or beyond the end of a file
		}
		if _, err := mem.WriteAt(data, int64(m.Start)); err != nil {
			continue
		}
		err := do(m.Start)
		_, back := mem.WriteAt(was, int64(m.Start))
		return errors.Join(err, back)
	}
	return fmt.Errorf("process %d has no memory to write to", pid)
}
