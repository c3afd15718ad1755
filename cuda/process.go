// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// Process is a CUDA process as Find saw it.
type Process struct {
	PID           PID   `json:"pid"`
	State         State `json:"state"`          // when it was found: the state a Group leaves it in
	RestoreThread PID   `json:"restore_thread"` // the thread that serves the driver's calls
	GPUs          []int `json:"gpus"`           // minors of the /dev/nvidiaN it has open, ascending
}

// PID is a process, or a thread, by its numbers in two pid namespaces.
type PID struct {
	Host int `json:"host"` // in this program's own; 0 if unknown
	NS   int `json:"ns"`   // in the innermost one of the process; 0 if unknown
}

// number returns a process's number as the helper counts.
func (h *Helper) number(p PID) int {
	if h.opts.Join != 0 {
		return p.NS
	}
	return p.Host
}

// MayUseCUDA reports from /proc alone whether a process may be a CUDA process: it has libcuda.so
// mapped or a file /dev/nvidia* open.  A process that has ended is none.
func MayUseCUDA(pid int) (bool, error) {
	has, err := HoldsDevice(pid)
	if err == nil && !has {
		has, err = proc.HasMapped(pid, "/libcuda.so")
	}
	if err != nil && !proc.Ended(err) {
		return false, fmt.Errorf("look for CUDA in process %d: %w", pid, err)
	}
	return has, nil
}

// HoldsDevice reports whether a process has a file /dev/nvidia* open: it has a CUDA context, or is
// making one. A process that has ended has none.
func HoldsDevice(pid int) (bool, error) {
	devices, err := deviceFiles(pid)
	if err != nil && !proc.Ended(err) {
		return false, fmt.Errorf("look for GPUs in process %d: %w", pid, err)
	}
	return len(devices) > 0, nil
}

// UsesGraphics reports whether a process has a GPU mapped, and a library of NVIDIA's for graphics. NVML maps
// no GPU, and a child that was forked after CUDA began has no such library.
func UsesGraphics(pid int) (bool, error) {
	library, device := false, false
	_, err := proc.Maps(pid, func(m *proc.Mapping) bool {
		library = library || strings.Contains(m.Path, "/libnvidia-gl") || strings.Contains(m.Path, "/libnvidia-egl")
		device = device || strings.HasPrefix(m.Path, "/dev/nvidia")
		return false
	})
	if err != nil && !proc.Ended(err) {
		return false, fmt.Errorf("look for graphics in process %d: %w", pid, err)
	}
	return library && device, nil
}

// InheritsDevices reports whether every file /dev/nvidia* that a process has open is the very
// file that one of others has open by the same number: the process was forked from it and has
// opened none itself. It is false on a kernel without kcmp. A process that has ended inherits.
func InheritsDevices(pid int, others []int) (bool, error) {
	files, err := proc.OpenFiles(pid, "/dev/nvidia")
	if err != nil && !proc.Ended(err) {
		return false, fmt.Errorf("look for GPUs in process %d: %w", pid, err)
	}
	for fd := range files {
		if !slices.ContainsFunc(others, func(other int) bool { return proc.SameFile(pid, other, fd) }) {
			return false, nil
		}
	}
	return true, nil
}

// Sharing is what a process may have that the driver checkpoints and does not restore.
type Sharing struct {
	// Others says that it maps GPU memory of another process, or shares CUDA events with one.
	Others bool
	// Reaches says that it reaches memory of one GPU from another; see Helper.Reaches.
	Reaches bool
}

// SharingOf looks for what a process shares. The helper must count pids as this program does (no
// Options.Join). The error is ErrNotReported if the driver cannot be asked.
//
// The kernel module knows the importer of memory; see MemoryOn. For events the driver maps a file into
// both processes (measured, driver 580): /dev/shm/cuda.shm.UID.PID.N with the exporter's pid in
// hexadecimal digits.
func SharingOf(ctx context.Context, h *Helper, p Process) (s Sharing, err error) {
	if s.Others, err = proc.HasMapped(p.PID.Host, "/cuda.shm."); err != nil && !proc.Ended(err) {
		return s, fmt.Errorf("look for CUDA IPC in process %d: %w", p.PID.Host, err)
	}
	has, err := h.MemoryOn(ctx, p.PID.Host, p.GPUs)
	gpus := 0 // with a context
	for _, m := range has {
		s.Others = s.Others || m.Imported > 0
		if m.Own > 0 {
			gpus++
		}
	}
	if gpus > 1 && err == nil {
		s.Reaches, err = h.Reaches(ctx, p.PID.Host)
	}
	return s, err
}

// Find returns those processes for which the driver answers, in the order of pids, without those
// that end meanwhile. The helper must count pids as this program does (no Options.Join).
func Find(ctx context.Context, h *Helper, pids []int) (Group, error) {
	found := make([]*Process, len(pids))
	err := sum(atOnce(len(pids), func(i int) (err error) {
		found[i], err = inspect(ctx, h, pids[i])
		return err
	}))
	if err != nil {
		return nil, fmt.Errorf("find CUDA processes: %w", err)
	}
	var processes Group
	for _, p := range found {
		if p != nil {
			processes = append(processes, *p)
		}
	}
	return processes, nil
}

// inspect returns nil for a process without CUDA, or one that has ended.
func inspect(ctx context.Context, h *Helper, pid int) (*Process, error) {
	if may, err := MayUseCUDA(pid); err != nil || !may {
		return nil, err
	}
	p := &Process{PID: PID{Host: pid}}
	var err error
	if p.State, err = h.State(ctx, pid); err == nil {
		p.RestoreThread.Host, err = h.RestoreThread(ctx, pid)
	}
	if errors.Is(err, ErrNotCUDA) {
		return nil, nil
	}
	if err != nil {
		// A process that is ending makes the driver answer all sorts of things.
		if _, gerr := NSPID(pid); proc.Ended(gerr) {
			return nil, nil
		}
		return nil, err
	}
	// The driver's answer comes from the process itself, which may name any thread of the machine.
	if _, serr := os.Stat(fmt.Sprintf("/proc/%d/task/%d", pid, p.RestoreThread.Host)); serr != nil {
		if _, gerr := NSPID(pid); proc.Ended(gerr) {
			return nil, nil
		}
		return nil, fmt.Errorf("process %d names %d as the driver's thread, which is none of its threads", pid, p.RestoreThread.Host)
	}
	if p.PID.NS, err = NSPID(pid); err == nil {
		p.RestoreThread.NS, err = NSPID(p.RestoreThread.Host)
	}
	if err == nil {
		p.GPUs, err = deviceFiles(pid)
	}
	if proc.Ended(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("inspect process %d: %w", pid, err)
	}
	p.GPUs = slices.DeleteFunc(p.GPUs, func(minor int) bool { return minor < 0 })
	return p, nil
}

// deviceFiles returns the minors of the /dev/nvidiaN that a process has open,
// ascending, each once, and -1 for any other /dev/nvidia*.
func deviceFiles(pid int) ([]int, error) {
	const prefix = "/dev/nvidia"
	files, err := proc.OpenFiles(pid, prefix)
	if err != nil {
		return nil, err
	}
	var minors []int
	for _, path := range files {
		minor, err := strconv.Atoi(path[len(prefix):])
		if err != nil {
			minor = -1 // nvidiactl, nvidia-uvm, nvidia-caps/…
		}
		minors = append(minors, minor)
	}
	slices.Sort(minors)
	return slices.Compact(minors), nil
}

// NSPID returns the number of a process or thread in its innermost pid namespace.
func NSPID(pid int) (int, error) {
	status, err := proc.StatusOf(pid)
	if err != nil {
		return 0, err
	}
	return status.NSPID()
}
