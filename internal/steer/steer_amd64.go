// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"fmt"
	"math"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/ptrace"
	"github.com/gpuckpt/gpuckpt/internal/staging"
)

// CanSteer reports whether this build can steer: it knows the machine's registers.
const CanSteer = true

// minArea is the smallest mmap that is taken for a staging area, in bytes. A
// bare CUDA context alone has hundreds of megabytes on real hardware; the
// driver's other populated mappings are pages.
const minArea = 1 << 20

// spinFor is how long a steering looks for the next stop without sleeping. A
// PyTorch process's driver makes thousands of system calls in a checkpoint, most
// of them microseconds apart, and each stops twice.
const spinFor = 100 * time.Microsecond

// lookEvery bounds the time that a stop can go unseen, should its SIGCHLD have
// been merged with another's.
const lookEvery = 2 * time.Millisecond

// steering is the tracing of one driver's thread, by a thread of its own.
type steering struct {
	tuning
	target Target
	stop   chan struct{} // closed to end it
	// stopped is closed when the thread stands still for the end, all its areas
	// filled and in place. Then one of the next two decides.
	stopped chan struct{}
	empty   chan struct{} // closed: empty areas take their place
	aborted chan struct{} // closed, before stop or after: they stay as they are
	done    chan struct{} // closed at its end; what follows is then set
	areas   []*stagingArea
	notes   []string
	err     error

	child chan os.Signal // SIGCHLD, which announces a stop

	ending  bool // stop is closed
	leaving bool // the thread was interrupted for the end

	copies *copyThreads // from the first area on
	// untraced says that the thread's system calls are let by: helped by copy threads
	// it waits for the GPU in thousands of them.
	untraced bool

	filling *stagingArea // the area that is being filled still; nil when none is
	before  uint64       // the target's shared memory when the area was mapped

	// Areas whose files are on a disk.
	through  []*stagingArea // that are filled still
	reserved *os.File       // for the next; nil when there is none
	refused  error          // why the driver did not get one
}

// stagingArea is an area of the process, and the file behind it.
type stagingArea struct {
	*staging.File
	emptied bool // an empty area is in its place in the process
}

// steer seizes the target's thread and returns; the tracing goes on.
func steer(target Target, how tuning) (*steering, error) {
	s := &steering{
		tuning: how, target: target, child: make(chan os.Signal, 1),
		stop: make(chan struct{}), stopped: make(chan struct{}), empty: make(chan struct{}), aborted: make(chan struct{}), done: make(chan struct{}),
	}
	if target.Window > 0 {
		var err error
		if s.reserved, err = staging.Reserve(filepath.Join(target.Dir, s.name()), max(target.Reserve, staging.PageSize)); err != nil {
			return nil, err
		}
		s.step("room reserved")
	}
	signal.Notify(s.child, unix.SIGCHLD)
	seized := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: its end detaches
		if target.Window > 0 || target.CopyThreads > 0 {
			staging.RaisePriority()
		}
		defer close(s.done)
		defer signal.Stop(s.child)
		err := ptrace.Seize(target.PID, target.TID, unix.PTRACE_O_TRACESYSGOOD)
		var t *ptrace.Thread
		if err == nil {
			t, err = ptrace.OpenThread(target.PID, target.TID, s.step)
			if err == nil {
				defer t.Close()
			} else if target.Window == 0 {
				// The driver does without; CRIU dumps the area as ever.
				s.note("not steered: %v", err)
				err = nil
			}
		}
		seized <- err
		if err == nil {
			s.err = errors.Join(s.follow(t), s.refused)
		}
	}()
	if err := <-seized; err != nil {
		s.removeReserved()
		return nil, err
	}
	return s, nil
}

// throttled reports whether the thread must be kept behind anything.
func (s *steering) throttled() bool { return s.filling != nil || len(s.through) > 0 }

// follow watches the thread's system calls until the steering is ended. Without
// t, which is the same thread, it changes nothing.
func (s *steering) follow(t *ptrace.Thread) error {
	var pending *unix.PtraceRegs // the mmap that the thread is in, at its begin
	inside := false
	for {
		status, err := s.next()
		if errors.Is(err, ptrace.ErrEnded) {
			return nil
		}
		if err != nil {
			return err
		}
		deliver := 0
		if s.throttled() && t != nil {
			atCall := status.StopSignal() == ptrace.SyscallStop && !inside
			if err := s.keepBehind(t, atCall); err != nil {
				return err
			}
		}
		switch sig := status.StopSignal(); {
		case sig == ptrace.SyscallStop && !inside:
			inside = true
			if t != nil {
				pending, err = s.begin(t)
			}
		case sig == ptrace.SyscallStop:
			inside = false
			if pending != nil {
				err = s.finish(t, pending)
			}
			pending = nil
			if s.leaving && err == nil {
				return s.leave(t)
			}
		case status>>16 == unix.PTRACE_EVENT_STOP:
			if s.leaving {
				return s.leave(t)
			}
			if s.target.Sweep && t != nil {
				s.target.Sweep = false
				err = t.Sweep()
			}
		default:
			deliver = int(sig)
		}
		if err != nil {
			s.note("left alone: %v", err)
			pending = nil
		}
		goOn := unix.PtraceSyscall
		if s.untraced {
			goOn = unix.PtraceCont
		}
		if err := goOn(s.target.TID, deliver); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("let thread %d go on: %w", s.target.TID, err)
		}
		if s.leaving {
			// Any stop uses up the interrupt that came before it.
			if err := s.interrupt(); err != nil {
				return err
			}
		}
	}
}

func (s *steering) interrupt() error {
	if err := unix.PtraceInterrupt(s.target.TID); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("interrupt thread %d: %w", s.target.TID, err)
	}
	return nil
}

// next waits for the thread's next stop, or asks for one when it is time to end.
func (s *steering) next() (unix.WaitStatus, error) {
	for began := time.Now(); ; {
		var status unix.WaitStatus
		pid, err := unix.Wait4(s.target.TID, &status, unix.WALL|unix.WNOHANG, nil)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return 0, fmt.Errorf("wait for thread %d: %w", s.target.TID, err)
		case pid != 0 && !status.Stopped():
			return 0, ptrace.ErrEnded
		case pid != 0:
			return status, nil
		}
		stop := s.stop
		if s.leaving {
			stop = nil // it has been seen
		} else if time.Since(began) < spinFor {
			continue
		}
		select {
		case <-stop:
			s.leaving = true
			if err := s.interrupt(); err != nil {
				return 0, err
			}
		case <-s.child:
		case <-time.After(lookEvery):
			if s.leaving {
				continue
			}
			look, err := s.nearEnd()
			if err == nil && !look && s.throttled() {
				look, err = s.near()
			}
			if err == nil && look {
				err = s.interrupt()
			}
			if err != nil {
				return 0, err
			}
		}
	}
}

// nearEnd reports that the driver is about to be done with an area, during which its
// system calls were let by: they are traced again from here on.
func (s *steering) nearEnd() (bool, error) {
	if !s.untraced {
		return false, nil
	}
	shared, err := sharedMemory(s.target.PID)
	if err != nil {
		return false, err
	}
	last := s.areas[len(s.areas)-1]
	s.untraced = shared-min(shared, s.before)+s.untracedLeft < last.Length
	return !s.untraced, nil
}

// note adds a line for the log.
func (s *steering) note(format string, args ...any) {
	s.notes = append(s.notes, fmt.Sprintf("process %d: ", s.target.PID)+fmt.Sprintf(format, args...))
}

// noteArea is the size, in bytes, from which a writable mapping that is no
// staging area is worth a note, and maxNotes bounds those of one process.
const (
	noteArea = 256 << 20
	maxNotes = 8
)

// mapsStaging reports whether a system call that is about to be made maps a staging
// area, as drivers 580 do it: new, private, anonymous, readable and writable,
// populated. What other drivers may do is left alone.
func mapsStaging(r *unix.PtraceRegs) bool {
	const prot = unix.PROT_READ | unix.PROT_WRITE
	const flags = unix.MAP_PRIVATE | unix.MAP_ANONYMOUS | unix.MAP_POPULATE
	return r.Orig_rax == unix.SYS_MMAP && r.Rsi >= minArea && r.Rdx == prot && r.R10&^unix.MAP_NORESERVE == flags
}

// begin is the begin of a system call: a staging area is mapped without being
// filled. That alone changes nothing for the driver but the time it takes.
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
	s.step("area found")
	asked := r
	r.R10 &^= unix.MAP_POPULATE
	if r.Rdi == 0 {
		at, err := alignedGap(s.target.PID, pages(r.Rsi))
		if err != nil {
			return nil, err
		}
		r.Rdi = at // a wish: the kernel may choose another place
	}
	if err := t.SetRegisters(&r); err != nil {
		return nil, err
	}
	s.step("populate dropped")
	return &asked, nil
}

// pages is what the kernel maps for a length in bytes.
func pages(length uint64) uint64 { return (length + staging.PageSize - 1) &^ (staging.PageSize - 1) }

// finish is the end of that call: the area gets its file, the first part of it
// filled.
func (s *steering) finish(t *ptrace.Thread, asked *unix.PtraceRegs) error {
	r, err := t.Registers()
	if err != nil {
		return err
	}
	// A system call leaves its arguments in their registers.
	r.Rdi, r.R10 = asked.Rdi, asked.R10
	if err := t.SetRegisters(&r); err != nil {
		return err
	}
	s.step("arguments put back")
	start, length := r.Rax, pages(asked.Rsi)
	if int64(r.Rax) < 0 && int64(r.Rax) > -4096 {
		return nil // the driver's own business
	}
	// One area is filled at a time: what is resident tells how far the driver is.
	if s.filling != nil {
		if err := s.filling.Wait(); err != nil {
			return err
		}
		s.filling = nil
	}
	path := ""
	if s.target.Dir != "" {
		path = filepath.Join(s.target.Dir, s.name())
	}
	if s.target.Window > 0 {
		return s.finishThrough(t, path, start, length)
	}
	file, err := s.filler.NewFile(path, start, length)
	if err != nil {
		return err
	}
	b := &stagingArea{File: file}
	if s.copies == nil && s.target.CopyThreads > 0 {
		if s.copies, err = newCopyThreads(t, s.target.CopyThreads, s.step); err != nil {
			s.note("the driver copies by itself: %v", err)
		}
	}
	lead := b.Lead()
	if s.target.CopyThreads > 0 && length < s.throttledArea {
		// Copy threads would be at its end before the thread could be stopped. It takes
		// 25 ms to fill the largest of these (43 GB/s, H200's host).
		lead = math.MaxUint64
	}
	if err := b.AwaitFilled(lead); err != nil {
		b.Remove()
		return err
	}
	s.step("file made")
	if s.before, err = sharedMemory(s.target.PID); err != nil {
		b.Remove()
		return err
	}
	if err := t.MapFile(b.File.File, start, length, b.Offset, unix.MAP_SHARED); err != nil {
		b.Remove()
		return err
	}
	s.step("file mapped")
	if s.target.CopyTo != "" {
		before, pid := s.before, s.target.PID
		b.StartWriteBehind(filepath.Join(s.target.CopyTo, s.name()), func() (uint64, error) {
			shared, err := sharedMemory(pid)
			return min(shared-min(shared, before), length), err
		})
	}
	s.areas = append(s.areas, b)
	s.filling = b
	s.untraced = s.copies != nil && s.copies.swapped && length >= s.untracedArea
	return nil
}

// name is that of the next area's file.
func (s *steering) name() string { return fmt.Sprintf("%s%d", s.target.Name, len(s.areas)) }

// leave puts an empty area in the place of each steered one, unless they are given
// up, and lets the thread go. It does so only where the process has all of
// the area mapped to our file.
func (s *steering) leave(t *ptrace.Thread) error {
	if s.copies != nil {
		s.notes = append(s.notes, s.copies.note(t))
		if err := s.copies.stop(t); err != nil {
			return fmt.Errorf("process %d: %w", s.target.PID, err)
		}
	}
	if err := s.standStill(); err != nil {
		return err
	}
	select {
	case <-s.aborted:
	case <-s.empty:
		for _, b := range s.areas {
			if err := t.MapEmpty(b.Start, b.Length); err != nil {
				return err
			}
			b.emptied = true
			s.step("area emptied")
		}
	}
	if t == nil {
		t = &ptrace.Thread{TID: s.target.TID}
	}
	return t.Detach()
}

// standStill waits until all areas are filled and in place, and says so.
func (s *steering) standStill() error {
	select {
	case <-s.aborted:
		return nil
	default:
	}
	for _, b := range s.areas {
		if err := b.Wait(); err != nil {
			return err
		}
		if err := mapsFile(s.target.PID, b); err != nil {
			return err
		}
	}
	close(s.stopped)
	s.step("stopped")
	return nil
}

// end begins the end of a steering, once.
func (s *steering) end() {
	if !s.ending {
		s.ending = true
		close(s.stop)
	}
}
