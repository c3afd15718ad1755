// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// mapAll maps files over areas; each process's in turn, the processes at once.
func mapAll(mappings []Mapping) error {
	byProcess := make(map[int][]Mapping)
	for _, m := range mappings {
		byProcess[m.PID] = append(byProcess[m.PID], m)
	}
	errs := make(chan error)
	for _, ms := range byProcess {
		go func() {
			runtime.LockOSThread() // never unlocked: its end detaches
			errs <- mapInto(ms)
		}()
	}
	var err error
	for range byProcess {
		err = errors.Join(err, <-errs)
	}
	return err
}

// openMapped opens a file for reading, which is enough for a private mapping. A
// link is refused, but for one of the kernel's to somebody's open file: a
// container may have put it there.
func openMapped(path string) (*os.File, error) {
	flags := os.O_RDONLY | unix.O_NONBLOCK // no FIFO is waited for either
	if descriptor, _ := filepath.Match("/proc/*/fd/*", path); !descriptor {
		flags |= unix.O_NOFOLLOW
	}
	return os.OpenFile(path, flags, 0)
}

// mapInto maps files over areas of one process.
func mapInto(mappings []Mapping) error {
	pid, tid := mappings[0].PID, mappings[0].TID
	t, err := stopThread(pid, tid)
	if err != nil {
		return fmt.Errorf("process %d: %w", pid, err)
	}
	defer t.close()
	for _, m := range mappings {
		if m.Path == "" {
			if hugeZeros() {
				t.preferHuge(m.Start, m.Bytes)
			}
			continue
		}
		f, err := openMapped(m.Path)
		if err != nil {
			return err
		}
		if err := longEnough(f, m.Offset+m.Bytes); err != nil {
			f.Close()
			return err
		}
		err = t.mapFile(f, m.Start, m.Bytes, m.Offset, unix.MAP_PRIVATE|unix.MAP_NORESERVE)
		f.Close()
		if err != nil {
			return fmt.Errorf("process %d: %w", pid, err)
		}
	}
	return t.detach()
}

// hugeZeros says whether the kernel has a huge page of zeros for what was never
// written. Without, a huge page of memory would be made for each that is read, and
// charged to the container. See Documentation/admin-guide/mm/transhuge.rst.
func hugeZeros() bool {
	setting, err := os.ReadFile("/sys/kernel/mm/transparent_hugepage/use_zero_page")
	return err == nil && strings.TrimSpace(string(setting)) == "1"
}

// stopThread seizes a thread and waits until it stands still for calls.
func stopThread(pid, tid int) (*thread, error) {
	if err := seize(pid, tid, unix.PTRACE_O_TRACESYSGOOD); err != nil {
		return nil, err
	}
	if err := awaitInterrupt(tid); err != nil {
		return nil, err
	}
	return openThread(pid, tid)
}

// awaitInterrupt waits until a thread that is being interrupted has stopped for
// that. A signal that comes first is delivered, and uses up the interrupt.
func awaitInterrupt(tid int) error {
	for {
		status, err := waitStop(tid)
		if err != nil {
			return err
		}
		if status>>16 == unix.PTRACE_EVENT_STOP {
			return nil
		}
		if err := unix.PtraceCont(tid, int(status.StopSignal())); err != nil {
			return fmt.Errorf("let thread %d go on: %w", tid, err)
		}
		if err := unix.PtraceInterrupt(tid); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("interrupt thread %d: %w", tid, err)
		}
	}
}

func (t *thread) detach() error {
	if err := unix.PtraceDetach(t.tid); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("detach from thread %d: %w", t.tid, err)
	}
	return nil
}
