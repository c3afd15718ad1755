// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// finishThrough is finish for an area whose file is on a disk. Where it cannot
// be, for want of room say, the driver does not get its area: there is no memory
// that it could have in its place. It answers what is then its own error, and
// the end of the steering says why.
func (s *steering) finishThrough(t *thread, path string, start, length uint64) error {
	b, err := s.mapThrough(t, path, start, length)
	if err == nil {
		s.areas = append(s.areas, b)
		s.through = append(s.through, b)
		return nil
	}
	s.refused = errors.Join(s.refused, fmt.Errorf("process %d: %w", s.target.PID, err))
	if _, err := t.plain(unix.SYS_MUNMAP, start, length); err != nil {
		return fmt.Errorf("take the area back: %w", err)
	}
	step("area taken back")
	var r unix.PtraceRegs
	if err := unix.PtraceGetRegs(t.tid, &r); err != nil {
		return fmt.Errorf("read registers: %w", err)
	}
	r.Rax = ^uint64(unix.ENOMEM) + 1
	if err := unix.PtraceSetRegs(t.tid, &r); err != nil {
		return fmt.Errorf("set registers: %w", err)
	}
	step("mmap refused")
	return nil
}

func (s *steering) mapThrough(t *thread, path string, start, length uint64) (*backing, error) {
	f := s.reserved
	s.reserved = nil
	if f == nil {
		var err error
		if f, err = reserve(path, length); err != nil {
			return nil, err
		}
	}
	b, err := newThrough(f, s.target.PID, s.target.Window, start, length)
	if err != nil {
		return nil, err
	}
	step("file made")
	if err := t.mapFile(b.file, start, length, b.offset, unix.MAP_SHARED); err != nil {
		b.remove()
		return nil, err
	}
	step("file mapped")
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
