// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/ptrace"
	"github.com/gpuckpt/gpuckpt/internal/staging"
)

// finishThrough is finish for an area whose file is on a disk. If that fails, for
// want of room for example, the driver does not get its area: there is no memory
// that it could have instead. The driver then answers an error of its own, and the
// end of the steering says why.
func (s *steering) finishThrough(t *ptrace.Thread, path string, start, length uint64) error {
	b, err := s.mapThrough(t, path, start, length)
	if err == nil {
		s.areas = append(s.areas, b)
		s.through = append(s.through, b)
		return nil
	}
	s.refused = errors.Join(s.refused, fmt.Errorf("process %d: %w", s.target.PID, err))
	if _, err := t.Syscall(unix.SYS_MUNMAP, start, length); err != nil {
		return fmt.Errorf("take the area back: %w", err)
	}
	s.step("area taken back")
	r, err := t.Registers()
	if err != nil {
		return err
	}
	r.Rax = ^uint64(unix.ENOMEM) + 1
	if err := t.SetRegisters(&r); err != nil {
		return err
	}
	s.step("mmap refused")
	return nil
}

func (s *steering) mapThrough(t *ptrace.Thread, path string, start, length uint64) (*stagingArea, error) {
	f := s.reserved
	s.reserved = nil
	if f == nil {
		var err error
		if f, err = staging.Reserve(path, length); err != nil {
			return nil, err
		}
	}
	file, err := s.filler.NewWriteThrough(f, s.target.PID, s.target.Window, start, length)
	if err != nil {
		return nil, err
	}
	b := &stagingArea{File: file}
	s.step("file made")
	if err := t.MapFile(b.File.File, start, length, b.Offset, unix.MAP_SHARED); err != nil {
		b.Remove()
		return nil, err
	}
	s.step("file mapped")
	return b, nil
}

// removeReserved gives up the room that no area was made of.
func (s *steering) removeReserved() {
	if s.reserved != nil {
		s.reserved.Close()
		_ = os.Remove(s.reserved.Name())
		s.reserved = nil
	}
}
