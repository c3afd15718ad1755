// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/gpu/ptrace"
	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
)

// stagingArea is an area of the process, and the file behind it.
type stagingArea struct {
	*staging.File
	number  int    // of its file
	before  uint64 // the process's shared memory when the area was mapped
	emptied bool   // an empty area is in its place in the process
}

func (b *stagingArea) describe(pid int) Area {
	return Area{PID: pid, Number: b.number, Start: b.Start, Bytes: b.Length, Path: b.Path(), Offset: b.Offset}
}

// touched returns the most that the driver can have touched of the area, in bytes, if it is the
// last that was mapped: what has become resident since.
func (b *stagingArea) touched(pid int) (uint64, error) {
	shared, err := sharedMemory(pid)
	return shared - min(shared, b.before), err
}

// minArea is the size, in bytes, of the smallest mmap that counts as a staging area. A bare CUDA
// context has hundreds of megabytes; the driver's other populated mappings have a few pages.
const minArea = 1 << 20

// noteArea is the size, in bytes, from which a writable mapping that is no staging
// area gets a note, and maxNotes bounds the notes of one process.
const (
	noteArea = 256 << 20
	maxNotes = 8
)

// mapsStaging reports whether a system call that is about to be made maps a staging area, as
// drivers 580 do it: new, private, anonymous, readable and writable, populated.
func mapsStaging(r *unix.PtraceRegs) bool {
	const prot = unix.PROT_READ | unix.PROT_WRITE
	const flags = unix.MAP_PRIVATE | unix.MAP_ANONYMOUS | unix.MAP_POPULATE
	return r.Orig_rax == unix.SYS_MMAP && r.Rsi >= minArea && r.Rdx == prot && r.R10&^unix.MAP_NORESERVE == flags
}

// begin changes a system call that is about to be made: a staging area is mapped without being
// filled, which changes for the driver only the time that it takes. It returns what the driver had
// asked for, nil for any other call.
func (s *steering) begin(t *ptrace.Thread) (*unix.PtraceRegs, error) {
	r, err := t.Registers()
	if err != nil {
		return nil, err
	}
	if !mapsStaging(&r) {
		if r.Orig_rax == unix.SYS_MMAP && r.Rsi >= noteArea && r.Rdx&unix.PROT_WRITE != 0 && len(s.notes) < maxNotes {
			s.note("left alone: mmap of %d bytes, protection %#x, flags %#x", r.Rsi, r.Rdx, r.R10)
		}
		return nil, nil
	}
	if most := s.exceeded(pages(r.Rsi)); most != nil && s.target.Window == 0 {
		// The container pays for it, and CRIU dumps it.
		return nil, most
	}
	s.step("area found")
	asked := r
	r.R10 &^= unix.MAP_POPULATE
	if placed(&asked) {
		r.Rsi = pages(r.Rsi) + staging.HugePage // of which trim keeps what begins at a huge page
	}
	if err := t.SetRegisters(&r); err != nil {
		return nil, err
	}
	s.step("populate dropped")
	return &asked, nil
}

// exceeded returns an error if an area more would be more than the GPUs can have for the process. The
// thread runs the program's own C library, so what it asks for is not always what the driver needs.
func (s *steering) exceeded(bytes uint64) error {
	total := bytes
	for _, b := range s.areas {
		total += b.Length
	}
	if s.target.Most == 0 || total >= bytes && total <= s.target.Most {
		return nil
	}
	return fmt.Errorf("it asks for %d bytes of host memory, of %d in all, and the GPU memory that it uses needs %d at most", bytes, total, s.target.Most)
}

// pages is what the kernel maps for a length in bytes.
func pages(length uint64) uint64 { return (length + staging.PageSize - 1) &^ (staging.PageSize - 1) }

// finish ends that call: it puts the arguments back and puts a file behind the area.
func (s *steering) finish(t *ptrace.Thread, asked *unix.PtraceRegs) error {
	r, err := t.Registers()
	if err != nil {
		return err
	}
	// A system call leaves its arguments in their registers.
	r.Rsi, r.R10 = asked.Rsi, asked.R10
	if err := t.SetRegisters(&r); err != nil {
		return err
	}
	s.step("arguments put back")
	start, length := r.Rax, pages(asked.Rsi)
	if int64(r.Rax) < 0 && int64(r.Rax) > -4096 {
		return nil // the driver's own business
	}
	if placed(asked) {
		if start, err = trim(t, start, length); err != nil {
			return err
		}
	}
	// One area is filled at a time: its resident pages show how far the driver is.
	if s.filling != nil {
		if err := s.filling.Wait(); err != nil {
			return err
		}
		s.filling = nil
	}
	if s.target.Window > 0 {
		return s.backThrough(t, start, length)
	}
	return s.back(t, start, length)
}

// back puts a file behind an area, with the first part of it filled.
func (s *steering) back(t *ptrace.Thread, start, length uint64) error {
	path := ""
	if s.target.Dir != "" {
		path = filepath.Join(s.target.Dir, s.name())
	}
	file, err := s.filler.NewFile(path, start, length)
	if err != nil {
		return err
	}
	b := &stagingArea{File: file, number: s.number()}
	if s.copies == nil && s.target.CopyThreads > 0 {
		if s.copies, err = newCopyThreads(t, s.target.CopyThreads, s.step); err != nil {
			s.note("the driver copies by itself: %v", err)
		}
	}
	lead := b.Lead()
	if s.target.CopyThreads > 0 && length < s.throttledArea {
		// Copy threads would be at its end before the thread could be stopped. It takes 25 ms to
		// fill the largest of these (43 GB/s, H200's host).
		lead = math.MaxUint64
	}
	if err := b.AwaitFilled(lead); err != nil {
		b.Remove()
		return err
	}
	if err := s.mapArea(t, b); err != nil {
		return err
	}
	behind := ""
	if s.target.CopyTo != "" {
		behind = filepath.Join(s.target.CopyTo, s.name())
	}
	if behind != "" || s.target.Dir != "" { // else the state stays in memory, and nobody asks for its digests
		b.StartWriteBehind(behind, func() (uint64, error) {
			touched, err := b.touched(s.target.PID)
			return min(touched, length), err
		})
	}
	s.areas = append(s.areas, b)
	s.filling = b
	s.untraced = s.copies != nil && s.copies.swapped && length >= s.untracedArea
	return nil
}

// mapArea maps an area's file over it. On an error the file is gone, but for a mapping that may be there.
func (s *steering) mapArea(t *ptrace.Thread, b *stagingArea) (err error) {
	s.step("file made")
	if b.before, err = sharedMemory(s.target.PID); err == nil {
		err = t.MapFile(b.Handle, b.Start, b.Length, b.Offset, unix.MAP_SHARED)
	}
	if err != nil {
		b.Unlink()
		b.Handle.Close()
		return err
	}
	s.step("file mapped")
	return nil
}

// number and name are those of the next area's file.
func (s *steering) number() int  { return s.target.First + len(s.areas) }
func (s *steering) name() string { return fmt.Sprintf("%s%d", s.target.Name, s.number()) }

// backThrough is back for an area whose file is on a disk. If that fails, for want of room for
// example, the driver does not get its area, since there is no other memory. It then answers an
// error of its own, and the end of the steering says why.
func (s *steering) backThrough(t *ptrace.Thread, start, length uint64) error {
	b, err := s.mapThrough(t, start, length)
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
	if err == nil {
		r.Rax = ^uint64(unix.ENOMEM) + 1
		if err = t.SetRegisters(&r); err == nil {
			s.step("mmap refused")
		}
	}
	return err
}

func (s *steering) mapThrough(t *ptrace.Thread, start, length uint64) (*stagingArea, error) {
	if err := s.exceeded(length); err != nil {
		return nil, err
	}
	if s.reserved == nil {
		if err := s.reserve(length); err != nil {
			return nil, err
		}
	}
	f := s.reserved
	s.reserved = nil
	file, err := s.filler.NewWriteThrough(f, s.target.PID, s.target.Window, start, length)
	if err != nil {
		return nil, err
	}
	b := &stagingArea{File: file, number: s.number()}
	return b, s.mapArea(t, b)
}

func (s *steering) reserve(bytes uint64) (err error) {
	s.reserved, err = staging.Reserve(filepath.Join(s.target.Dir, s.name()), bytes)
	return err
}

// removeReserved gives up the room that no area was made of.
func (s *steering) removeReserved() {
	if s.reserved != nil {
		s.reserved.Close()
		_ = os.Remove(s.reserved.Name())
		s.reserved = nil
	}
}
