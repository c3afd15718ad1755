// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/gpu/ptrace"
	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
)

// CanSteer reports whether this build can steer: it knows the machine's registers.
const CanSteer = true

// spinFor is how long a steering looks for the next stop without sleeping. A PyTorch process's
// driver makes thousands of system calls in a checkpoint, mostly microseconds apart.
const spinFor = 100 * time.Microsecond

// lookEvery bounds how long a stop goes unseen whose SIGCHLD was merged with another's.
const lookEvery = 2 * time.Millisecond

// steering is the tracing of one driver's thread, by a thread of the tracer's own.
type steering struct {
	tuning
	target Target
	stop   chan struct{} // closed to end it
	// stopped is closed when the thread stands still for the end, all its areas filled and in
	// place. Then one of the next two decides.
	stopped chan struct{}
	empty   chan struct{} // closed: empty areas take their place
	aborted chan struct{} // closed, before stop or after: they stay as they are
	done    chan struct{} // closed at its end; what follows is then set
	areas   []*stagingArea
	notes   []string
	err     error

	child chan os.Signal // SIGCHLD, which announces a stop

	made []int // threads and processes that the thread has made, which stand still

	end     func() // closes stop, once
	leaving bool   // the thread was interrupted for the end

	copies *copyThreads // from the first area on
	// untraced says that the thread's system calls are let by: helped by copy threads it waits for
	// the GPU in thousands of them.
	untraced bool

	filling *stagingArea // the area that is being filled still; nil when none is

	// Areas whose files are on a disk.
	through  []*stagingArea // that are filled still
	reserved *os.File       // for the next; nil when there is none
	refused  error          // why the driver did not get one
}

// steer seizes the target's thread and returns; the tracing goes on.
func steer(target Target, how tuning) (*steering, error) {
	s := &steering{
		tuning: how, target: target, child: make(chan os.Signal, 1),
		stop: make(chan struct{}), stopped: make(chan struct{}), empty: make(chan struct{}), aborted: make(chan struct{}), done: make(chan struct{}),
	}
	s.end = sync.OnceFunc(func() { close(s.stop) })
	if target.Window > 0 {
		if err := s.reserve(max(target.Reserve, staging.PageSize)); err != nil {
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
		err := ptrace.Seize(target.PID, target.TID, unix.PTRACE_O_TRACESYSGOOD|ptrace.New)
		var t *ptrace.Thread
		if err == nil {
			t, err = ptrace.OpenThread(target.PID, target.TID, s.step)
			if err == nil {
				t.Options = ptrace.New
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

func (s *steering) throttled() bool { return s.filling != nil || len(s.through) > 0 }

// follow watches the thread's system calls until the steering ends. If t is nil it changes nothing.
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
		made := status>>16 == unix.PTRACE_EVENT_CLONE || status>>16 == unix.PTRACE_EVENT_FORK || status>>16 == unix.PTRACE_EVENT_VFORK
		if s.throttled() && t != nil {
			atCall := made || status.StopSignal() == ptrace.SyscallStop && !inside
			if err := s.keepBehind(t, atCall); err != nil {
				return err
			}
		}
		switch sig := status.StopSignal(); {
		case made:
			var tid uint
			if tid, err = unix.PtraceGetEventMsg(s.target.TID); err == nil {
				s.made = append(s.made, int(tid)) //nolint:gosec // a thread's number
				s.note("the driver's thread has made thread or process %d, which is held", tid)
			}
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
			if err := ptrace.Interrupt(s.target.TID); err != nil {
				return err
			}
		}
	}
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
		for _, tid := range s.made { // one that is killed is not gone before its tracer has waited for it
			_, _ = unix.Wait4(tid, nil, unix.WALL|unix.WNOHANG, nil)
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
			if err := ptrace.Interrupt(s.target.TID); err != nil {
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
				err = ptrace.Interrupt(s.target.TID)
			}
			if err != nil {
				return 0, err
			}
		}
	}
}

// nearEnd reports whether the driver is about to be done with an area during which its
// system calls were let by. They are traced again from here on.
func (s *steering) nearEnd() (bool, error) {
	if !s.untraced {
		return false, nil
	}
	last := s.areas[len(s.areas)-1]
	touched, err := last.touched(s.target.PID)
	if err != nil {
		return false, err
	}
	s.untraced = touched+s.untracedLeft < last.Length
	return !s.untraced, nil
}

func (s *steering) note(format string, args ...any) {
	s.notes = append(s.notes, fmt.Sprintf("process %d: ", s.target.PID)+fmt.Sprintf(format, args...))
}

// leave puts an empty area in the place of each steered one, unless they are given up, and lets the
// thread go. An area that the process has not mapped whole to our file is an error.
func (s *steering) leave(t *ptrace.Thread) error {
	if err := s.stopCopies(t); err != nil {
		return err
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

// stop has all steered threads stand still, and returns their areas.
func stop(all []*steering) (areas []Area, err error) {
	for _, s := range all {
		s.end()
	}
	for _, s := range all {
		select {
		case <-s.stopped:
			for _, b := range s.areas {
				areas = append(areas, b.describe(s.target.PID))
			}
		case <-s.done: // it failed, or the process has ended
			err = errors.Join(err, s.err)
		}
	}
	return areas, err
}

// commit ends all steering, at once, and adds the areas' files to kept.
func commit(all []*steering, kept []*os.File) (r reply, _ []*os.File, err error) {
	if _, err := stop(all); err != nil {
		_, kept, aerr := abort(all, kept)
		return r, kept, errors.Join(err, aerr)
	}
	for _, s := range all {
		close(s.empty)
	}
	for _, s := range all {
		<-s.done
		err = errors.Join(err, s.err)
		r.Notes = append(r.Notes, s.notes...)
		s.removeReserved()
		for _, b := range s.areas {
			if !b.emptied { // the process needs what is in it
				b.Unlink()
				kept = append(kept, b.Handle)
				continue
			}
			if w := b.WriteThrough(); w != nil && w.Undropped() != nil {
				r.Notes = append(r.Notes, w.Undropped().Error())
			}
			kept = append(kept, b.Handle)
			a := b.describe(s.target.PID)
			a.Written = b.StopWriteBehind()
			r.Areas = append(r.Areas, a)
		}
	}
	return r, kept, err
}

// abort ends all steering and gives up the files' names. It adds the areas' files to kept: the processes
// may need what is in them.
func abort(all []*steering, kept []*os.File) (r reply, _ []*os.File, err error) {
	for _, s := range all {
		close(s.aborted)
		s.end()
	}
	for _, s := range all {
		<-s.done
		err = errors.Join(err, s.err)
		s.removeReserved()
		for _, b := range s.areas {
			if w := b.WriteThrough(); w != nil {
				err = errors.Join(err, w.Failed())
			}
			b.Unlink()
			kept = append(kept, b.Handle)
			r.Areas = append(r.Areas, b.describe(s.target.PID))
		}
	}
	return r, kept, err
}
