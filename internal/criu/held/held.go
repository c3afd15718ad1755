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

// Processes make calls. They are looked at once each: one may have a hundred thousand threads and as many
// sockets, and each socket needs calls.
type Processes struct {
	gate Gate
	tids map[int]int    // a thread of each process that can make a call: the first one may have ended
	lent map[int]uint64 // where each process has memory to lend
}

// At returns the processes that stand at a gate.
func At(gate Gate) *Processes {
	return &Processes{gate, make(map[int]int), make(map[int]uint64)}
}

// Call has a process make a system call.
func (p *Processes) Call(pid int, nr uint64, args ...uint64) error {
	tid, known := p.tids[pid]
	if !known {
		var err error
		if tid, err = thread(pid); err != nil {
			return err
		}
		p.tids[pid] = tid
	}
	return p.gate.Call(tid, nr, args...)
}

func thread(pid int) (int, error) {
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

// Lend has a process's memory hold data while do is called with its address. At most a page fits.
func (p *Processes) Lend(pid int, data []byte, do func(at uint64) error) error {
	mem, err := os.OpenFile(fmt.Sprintf("/proc/%d/mem", pid), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer mem.Close()
	was := make([]byte, len(data))
	holds := func(at uint64) bool {
		if _, err := mem.ReadAt(was, int64(at)); err != nil { //nolint:gosec // an address of user space
			return false // a guard page, or beyond the end of a file
		}
		_, err := mem.WriteAt(data, int64(at)) //nolint:gosec // an address of user space
		return err == nil
	}
	at, known := p.lent[pid]
	if known {
		known = holds(at)
	} else {
		var m proc.Mapping
		m, known, err = proc.FindMapping(pid, func(m *proc.Mapping) bool { return m.Permissions == "rw-p" && holds(m.Start) })
		if err != nil {
			return err
		}
		at = m.Start
	}
	if !known {
		return fmt.Errorf("process %d has no memory to write to", pid)
	}
	p.lent[pid] = at
	err = do(at)
	_, back := mem.WriteAt(was, int64(at)) //nolint:gosec // an address of user space
	return errors.Join(err, back)
}
