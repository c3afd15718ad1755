// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"context"
	"fmt"
	"io"
	"math"
	"slices"
	"syscall"
	"time"

	"github.com/gpuckpt/gpuckpt/cuda/internal/wire"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
	"github.com/gpuckpt/gpuckpt/internal/node/worker"
)

// GPU is one device that a helper sees.
type GPU struct {
	UUID     string `json:"uuid"`           // "GPU-…", as nvidia-smi -L prints it
	Name     string `json:"name"`           // "NVIDIA H200"
	Memory   uint64 `json:"memory"`         // bytes
	Index    int    `json:"index"`          // as nvidia-smi counts; CUDA's ordinal in the helper without NVML
	Minor    int    `json:"minor"`          // N of /dev/nvidiaN; -1 if unknown
	PCIBusID string `json:"pci_bus_id"`     // "0000:41:00.0"
	Free     uint64 `json:"free,omitempty"` // bytes of Memory that nobody uses; 0 if unknown
	VGPU     bool   `json:"vgpu,omitempty"` // a virtual GPU (vGPU), which the driver cannot restore to
}

// Info describes the driver and the GPUs that a helper sees.
type Info struct {
	DriverVersion string `json:"driver_version"` // "580.159.03"; empty if unknown
	CUDAVersion   string `json:"cuda_version"`   // "13.0": the newest that the driver serves
	GPUs          []GPU  `json:"gpus"`
	// Partitioned are the GPUs in MIG mode, by bus. CUDA shows instances of
	// them at most, and the driver cannot restore to those. Index is NVML's.
	Partitioned []GPU `json:"partitioned,omitempty"`
}

// Info asks which driver and GPUs there are. Errors are ErrNoDriver, ErrDriverTooOld (below 570),
// an *Error, or the helper's end. GPU.Free is as at the helper's first answer; see InfoNow.
func (h *Helper) Info(ctx context.Context) (Info, error) {
	return ask[Info](ctx, h, wire.Request{Op: wire.OpInfo})
}

// InfoEarly is Info without waiting until the driver has brought the GPUs up, 0.15 to 0.25 s for
// each that nobody has open. It lacks CUDAVersion. If the driver then fails to bring one up, later
// calls return the error. It waits if NVML does not know all.
func (h *Helper) InfoEarly(ctx context.Context) (Info, error) {
	return ask[Info](ctx, h, wire.Request{Op: wire.OpInfo, Early: true})
}

// InfoNow is Info that reads everything anew, which takes some 10 ms.
func (h *Helper) InfoNow(ctx context.Context) (Info, error) {
	return ask[Info](ctx, h, wire.Request{Op: wire.OpInfo, Fresh: true})
}

func ask[T any](ctx context.Context, h *Helper, q wire.Request) (answer T, err error) {
	r, err := h.do(ctx, q, h.opts.CallTimeout)
	if err != nil {
		return answer, err
	}
	if err := worker.Decode(r.Answer, &answer); err != nil {
		return answer, fmt.Errorf("%s: %w: %w", doing(q.Op, q.PID), ErrHelperGarbled, err)
	}
	return answer, nil
}

// Survey is what NVML reports, also of a driver too old for checkpoints or that CUDA cannot use.
type Survey struct {
	DriverVersion string   `json:"driver_version"` // empty if unknown
	Devices       []Device `json:"devices"`
}

// Device is one GPU of a survey; nil pointers and empty texts are unknown. Index is nvidia-smi's.
type Device struct {
	GPU
	Persistence    *bool       `json:"persistence,omitempty"`
	MIG            *bool       `json:"mig,omitempty"`
	Virtualization string      `json:"virtualization,omitempty"` // "none", "passthrough", "vgpu", "host-vgpu", "host-vsga"
	ComputeMode    string      `json:"compute_mode,omitempty"`   // "default", "exclusive-thread", "prohibited", "exclusive-process"
	Users          []DeviceUse `json:"users,omitempty"`
}

// DeviceUse is one process's memory on one GPU in bytes, contexts included; 0 if unknown.
type DeviceUse struct {
	PID   int    `json:"pid"` // as the machine counts
	Bytes uint64 `json:"bytes"`
}

// Survey asks NVML, not CUDA. The error is ErrNoDriver without NVML or a driver.
func (h *Helper) Survey(ctx context.Context) (Survey, error) {
	return ask[Survey](ctx, h, wire.Request{Op: wire.OpSurvey})
}

// State returns a process's state. pid, here and below, is as the helper counts (Options.Join). The
// error is ErrNotCUDA if the driver knows no CUDA state of the process. The state alone is
// not enough to tell, as a process is Running that the driver does not serve (the software GPU's, if its
// NVML has no libcuda): ask for its RestoreThread, too, as Find does.
func (h *Helper) State(ctx context.Context, pid int) (State, error) {
	r, err := h.do(ctx, wire.Request{Op: wire.OpState, PID: pid}, h.opts.CallTimeout)
	return State(r.Value), err
}

// RestoreThread returns the thread of a process that serves the driver's checkpoint calls, and must
// be able to run during these. The error is ErrNotCUDA as State's.
func (h *Helper) RestoreThread(ctx context.Context, pid int) (int, error) {
	r, err := h.do(ctx, wire.Request{Op: wire.OpRestoreThread, PID: pid}, h.opts.CallTimeout)
	return r.Value, err
}

// MemoryOn is what a process has of one GPU's memory, in bytes.
type MemoryOn struct {
	Own uint64 `json:"own"` // that it has allocated; none without a context there
	// Imported is mapped, and another process allocated it: by CUDA IPC or by handles of
	// cuMemExportToShareableHandle. The importer alone is known. Memory that a process exports and
	// nobody imports is restored like any other (measured, driver 580).
	Imported uint64 `json:"imported"`
}

// MemoryOn returns what a process has of GPUs' memory. minors are the GPUs to look at, N of
// /dev/nvidiaN, in the answer's order: those that the process has open. The error is ErrNotReported
// if the kernel module does not report it.
func (h *Helper) MemoryOn(ctx context.Context, pid int, minors []int) ([]MemoryOn, error) {
	return ask[[]MemoryOn](ctx, h, wire.Request{Op: wire.OpMemoryOn, PID: pid, Minors: minors})
}

// Reaches returns whether a process reaches memory of one GPU from another: by
// cuCtxEnablePeerAccess, or by memory that several GPUs may access. The helper must count pids as this
// program does. The error is ErrNotReported if the kernel module does not tell. On a node with very many
// clients of the module since its boot it takes seconds.
func (h *Helper) Reaches(ctx context.Context, pid int) (bool, error) {
	r, err := h.do(ctx, wire.Request{Op: wire.OpReaches, PID: pid}, h.opts.CallTimeout)
	return r.Value != 0, err
}

// Lock takes a process from running to locked: it blocks further CUDA calls and waits until the
// work submitted is done. After the timeout the error has the Result NotReady and the process runs
// on. With a timeout of 0 it waits up to Options.CopyTimeout.
func (h *Helper) Lock(ctx context.Context, pid int, timeout time.Duration) error {
	q := wire.Request{Op: wire.OpLock, PID: pid}
	limit := h.opts.CopyTimeout
	if timeout > 0 {
		ms := (timeout + time.Millisecond - 1) / time.Millisecond
		if ms > math.MaxUint32 {
			return fmt.Errorf("lock CUDA process %d: timeout %v is too long", pid, timeout)
		}
		q.TimeoutMS = uint32(ms)
		limit = timeout + h.opts.CallTimeout
	}
	_, err := h.do(ctx, q, limit)
	return err
}

// Checkpoint takes a process from locked to checkpointed: the driver copies all its GPU memory into
// new host memory of the process and releases the GPUs. If the driver refuses (NotSupported:
// managed memory), the process stays locked and runs on after Unlock.
func (h *Helper) Checkpoint(ctx context.Context, pid int) error {
	return h.copies(ctx, wire.Request{Op: wire.OpCheckpoint, PID: pid}, h.whileItWorks(pid))
}

// Restore takes a process from checkpointed to locked. Without pairs it returns to the GPUs it had.
// Pairs must name every GPU that the process could open at the checkpoint, used or not, and lead to
// as many different GPUs. If the driver refuses, the process stays checkpointed.
func (h *Helper) Restore(ctx context.Context, pid int, pairs []Pair) error {
	return h.copies(ctx, wire.Request{Op: wire.OpRestore, PID: pid, Pairs: pairs}, h.whileItWorks(pid))
}

// copies sends a request whose call copies GPU memory by a thread of the process.
func (h *Helper) copies(ctx context.Context, q wire.Request, limit worker.Limit) error {
	_, err := h.within(ctx, q, limit)
	return err
}

// whileTheyWork is the limit of a call in which the driver copies GPU memory of some processes: it may
// stand still for a while when none of them works (decision 0035). They are counted together, because
// the driver may have one wait for another. hosts are their pids on the host, 0 for one that is not
// known, with which the limit is CopyTimeout alone.
func (h *Helper) whileTheyWork(hosts []int) worker.Limit {
	limit := worker.Limit{Most: h.opts.CopyTimeout}
	if len(hosts) == 0 || slices.Contains(hosts, 0) {
		return limit
	}
	limit.Still = h.opts.StallTimeout
	limit.Moved = func() (count uint64, known bool) {
		for _, pid := range hosts {
			n, err := proc.Work(pid)
			if err != nil && !proc.Ended(err) {
				return 0, false
			}
			count, known = count+n, known || err == nil
		}
		return count, known
	}
	return limit
}

// whileItWorks is whileTheyWork for one process, by its pid as the helper counts.
func (h *Helper) whileItWorks(pid int) worker.Limit {
	if h.opts.Join != 0 {
		pid = 0 // the host's is not known
	}
	return h.whileTheyWork([]int{pid})
}

// Unlock takes a process from locked to running.
func (h *Helper) Unlock(ctx context.Context, pid int) error {
	_, err := h.do(ctx, wire.Request{Op: wire.OpUnlock, PID: pid}, h.opts.CallTimeout)
	return err
}

// do sends a request and turns a refusal into an error. After limit the helper is killed.
func (h *Helper) do(ctx context.Context, q wire.Request, limit time.Duration) (wire.Reply, error) {
	return h.within(ctx, q, worker.Limit{Most: limit})
}

// within is do with a limit that may end when nothing moves.
func (h *Helper) within(ctx context.Context, q wire.Request, limit worker.Limit) (wire.Reply, error) {
	doing := doing(q.Op, q.PID)
	// Refuse here what the helper would take as a reason to end.
	if err := q.Check(); err != nil {
		return wire.Reply{}, fmt.Errorf("%s: %w", doing, err)
	}
	var r wire.Reply
	if err := h.worker.Call(ctx, doing, q, &r, limit); err != nil {
		return wire.Reply{}, err
	}
	return r, refusal(q, r)
}

func refusal(q wire.Request, r wire.Reply) error {
	op := q.Op
	switch r.Fault {
	case wire.FaultNoDriver:
		return fmt.Errorf("%w: %s", ErrNoDriver, r.Text)
	case wire.FaultTooOld:
		return fmt.Errorf("%w: found version %s, need 570 or newer", ErrDriverTooOld, r.Text)
	case wire.FaultModule:
		return fmt.Errorf("%s: %w: %s", doing(q.Op, q.PID), ErrNotReported, r.Text)
	case wire.FaultFile:
		return fileError(q, r)
	case wire.FaultInit:
		op = opInit
	default:
		if r.Code == int(Success) {
			return nil
		}
	}
	result := Result(r.Code)
	return &Error{Op: op, PID: q.PID, Result: result, Text: r.Text, Hint: hint(op, result)}
}

// fileError is the error of a copy whose file could not be read or written.
func fileError(q wire.Request, r wire.Reply) error {
	switch {
	case r.Code != 0:
		return fmt.Errorf("%s: %s: %w", doing(q.Op, 0), r.Text, syscall.Errno(r.Code))
	case r.Short:
		return fmt.Errorf("%s: %s: %w", doing(q.Op, 0), r.Text, io.ErrUnexpectedEOF)
	}
	return fmt.Errorf("%s: %s", doing(q.Op, 0), r.Text)
}
