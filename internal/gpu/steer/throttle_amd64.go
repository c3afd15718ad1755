// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"fmt"
	"os"
	"slices"

	"github.com/gpuckpt/gpuckpt/internal/gpu/ptrace"
	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
)

// near reports whether the thread must be stopped because it may be about to write to what is not
// filled yet, which its cgroup would have to pay for. The driver writes from the area's begin to
// its end, and has not touched more than has become resident. At the speed of the bus, 60 GB/s, it
// takes 12 ms for three quarters of the largest lead.
func (s *steering) near() (bool, error) {
	for _, b := range s.through {
		if b.WriteThrough().Near() {
			return true, nil
		}
	}
	if s.filling == nil {
		return false, nil
	}
	select {
	case <-s.filling.Filled():
		if s.filling.Wait() == nil {
			s.filling = nil
			return false, nil
		}
		return true, nil // keepBehind knows what to do
	default:
	}
	touched, err := s.filling.touched(s.target.PID)
	frontier, _ := s.filling.FilledTo()
	return touched+s.filling.Lead()/4*3 > frontier, err
}

// keepBehind holds the thread, which is in a stop, until filling is well ahead of it.
// If filling has failed, the rest of the area becomes what the driver had asked for;
// the area is lost for steering, and leave says so. atCall is true at the begin of a
// system call, where that is not possible: it is done at the next stop.
func (s *steering) keepBehind(t *ptrace.Thread, atCall bool) error {
	near, err := s.near()
	if err != nil || !near {
		return err
	}
	for i := 0; i < len(s.through); i++ {
		b := s.through[i]
		if !b.WriteThrough().Near() || b.WriteThrough().Await() == nil || atCall {
			continue
		}
		s.through = slices.Delete(s.through, i, i+1)
		i--
		if err := s.putRestBack(t, b); err != nil {
			return err
		}
	}
	if s.filling == nil {
		return nil
	}
	touched, err := s.filling.touched(s.target.PID)
	if err != nil {
		return err
	}
	if err := s.filling.AwaitFilled(touched + s.filling.Lead()); err == nil || atCall {
		return nil
	}
	b := s.filling
	s.filling = nil
	return s.putRestBack(t, b)
}

// putRestBack replaces what is not filled of an area by what the driver had asked for.
func (s *steering) putRestBack(t *ptrace.Thread, b *stagingArea) error {
	if err := s.stopCopies(t); err != nil { // they may be writing there
		return err
	}
	frontier, _ := b.FilledTo()
	from := max(b.Start, b.Start-b.Offset+frontier)
	if from >= b.Start+b.Length {
		return nil
	}
	// A driver that goes elsewhere, or was not stopped in time, may have been there.
	written, err := b.WrittenBeyond(from - b.Start + b.Offset)
	if err != nil || written {
		return err
	}
	if err := t.MapEmpty(from, b.Start+b.Length-from); err != nil {
		return fmt.Errorf("put back the unfilled part of an area: %w", err)
	}
	s.step("rest put back")
	return nil
}

func (s *steering) stopCopies(t *ptrace.Thread) error {
	if s.copies == nil {
		return nil
	}
	s.notes = append(s.notes, s.copies.note(t))
	if err := s.copies.stop(t); err != nil {
		return fmt.Errorf("process %d: %w", s.target.PID, err)
	}
	s.copies, s.untraced = nil, false
	return nil
}

// sharedMemory returns the resident bytes of files and shared memory in a process.
func sharedMemory(pid int) (uint64, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		return 0, err
	}
	var size, resident, shared uint64
	if _, err := fmt.Sscan(string(data), &size, &resident, &shared); err != nil {
		return 0, fmt.Errorf("read the memory of process %d: %w", pid, err)
	}
	return shared * staging.PageSize, nil
}
