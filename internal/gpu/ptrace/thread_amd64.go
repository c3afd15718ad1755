// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package ptrace

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// How a system call runs in another process's thread
//
// The thread stands in a ptrace stop outside of any system call, or in one that was interrupted. A
// signal frame with its registers, its vector registers and its signal mask is written below its
// stack, as the kernel writes one to deliver a signal. Then a single PTRACE_SETREGS makes it run: a
// "syscall; ret" somewhere in its code, with the call's arguments; the "ret" takes it to the C
// library's own __restore_rt, which calls rt_sigreturn, which puts back every register. From that
// SETREGS on the thread finishes the call and returns to what it did without further help: a tracer
// that dies at any instant leaves a thread that is as it was, or runs one more system call first.
//
// Sources: arch/x86/kernel/signal_64.c and arch/x86/include/uapi/asm/sigcontext.h for the frame,
// arch/x86/kernel/fpu/signal.c for the vector registers, arch/x86/kernel/signal.c for the restart
// of system calls; CRIU cures its parasite in the same way.

// errNoGadget says that a process's code lacks what a call needs.
var errNoGadget = errors.New("no system call and signal return found in its code")

// Thread is a thread of another process in a ptrace stop. The calling thread
// traces it with PTRACE_O_TRACESYSGOOD.
type Thread struct {
	PID, TID int
	Mem      *os.File // /proc/PID/mem
	Options  int      // of its tracing, beside PTRACE_O_TRACESYSGOOD; calls do without

	step    func(string) // called after everything that is done to the thread
	call    uint64       // the address of a "syscall; ret"
	back    uint64       // the address of a "mov $15, %rax; syscall"
	scratch uint64       // scratchBytes of its stack that a call may use
}

// scratchBytes is the room for what a call reads and writes.
const scratchBytes = 256

// The red zone below a stack pointer is the running function's (System V ABI for AMD64, 3.2.2).
const redZone = 128

// OpenThread prepares system calls in a thread that is in a ptrace stop. It calls step, which may
// be nil, after everything that it does to the thread: a test ends the tracer there.
func OpenThread(pid, tid int, step func(string)) (*Thread, error) {
	if step == nil {
		step = func(string) {}
	}
	t := &Thread{PID: pid, TID: tid, step: step}
	if err := refuseShadowStack(pid, tid); err != nil {
		return nil, err
	}
	var err error
	if t.Mem, err = os.OpenFile(fmt.Sprintf("/proc/%d/mem", pid), os.O_RDWR, 0); err != nil {
		return nil, err
	}
	if t.call, t.back, err = findGadgets(pid, t.Mem); err != nil {
		t.Mem.Close()
		return nil, err
	}
	return t, nil
}

// Close closes what OpenThread opened. It does not detach.
func (t *Thread) Close() { t.Mem.Close() }

// refuseShadowStack refuses a thread whose returns the processor checks: "ret" would be a fault.
func refuseShadowStack(pid, tid int) error {
	status, err := proc.ThreadStatus(pid, tid)
	if err != nil {
		return err
	}
	if strings.Contains(status.Field("x86_Thread_features"), "shstk") {
		return errors.New("its returns are checked by a shadow stack")
	}
	return nil
}

// maxCode bounds the code that is searched, in bytes. The C library's has 2 MiB.
const maxCode = 256 << 20

// findGadgets looks for a "syscall; ret" and a "mov $15, %rax; syscall" in a process's
// code, in libraries with the C library in their name first.
func findGadgets(pid int, mem io.ReaderAt) (call, back uint64, err error) {
	maps, err := proc.Maps(pid, func(m *proc.Mapping) bool {
		code := m.Permissions == "r-xp" && m.Path != "[vsyscall]"
		m.Path = codeIn[rank(*m)]
		return code
	})
	if err != nil {
		return 0, 0, err
	}
	return gadgetsIn(maps, mem)
}

// codeIn are parts of the paths of what is searched, the first first: the C library has both, the
// vdso and the program itself are next best.
var codeIn = []string{"/libc.so", "/libc-", "/ld-musl", ""}

func rank(m proc.Mapping) int {
	return slices.IndexFunc(codeIn, func(name string) bool { return strings.Contains(m.Path, name) })
}

// gadgetsIn reads each mapping of code once, and no more than maxCode of all.
func gadgetsIn(maps []proc.Mapping, mem io.ReaderAt) (call, back uint64, err error) {
	slices.SortStableFunc(maps, func(a, b proc.Mapping) int { return rank(a) - rank(b) })
	left := uint64(maxCode)
	for _, m := range maps {
		code := make([]byte, min(m.End-m.Start, 64<<20, left))
		left -= uint64(len(code))
		n, err := mem.ReadAt(code, int64(m.Start))
		if n == 0 && err != nil {
			continue
		}
		code = code[:n]
		if at := bytes.Index(code, []byte{0x0f, 0x05, 0xc3}); call == 0 && at >= 0 {
			call = m.Start + uint64(at)
		}
		if at := bytes.Index(code, []byte{0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05}); back == 0 && at >= 0 {
			back = m.Start + uint64(at)
		}
		if call != 0 && back != 0 {
			return call, back, nil
		}
	}
	return 0, 0, errNoGadget
}

// longMode is the code segment of 64-bit code (arch/x86/include/asm/segment.h, __USER_CS).
const longMode = 0x33

// suspendSeccomp has the kernel let by what a thread's seccomp filters would refuse: a filter may
// kill the program for a call that is not the program's. It ends with the tracer, at the latest.
func suspendSeccomp(pid, tid int) error {
	status, err := proc.ThreadStatus(pid, tid)
	if proc.Ended(err) {
		return ErrEnded
	}
	if err != nil || status.Number("Seccomp") == 0 {
		return err
	}
	if err := unix.PtraceSetOptions(tid, unix.PTRACE_O_TRACESYSGOOD|unix.PTRACE_O_SUSPEND_SECCOMP); err != nil {
		return fmt.Errorf("suspend its seccomp filters (the kernel needs CONFIG_CHECKPOINT_RESTORE, the shim CAP_SYS_ADMIN): %w", err)
	}
	return nil
}

// Syscall runs one system call in the thread, whose arguments are numbers alone, and returns its
// result. The thread is in a ptrace stop before and after, with the same registers. A system call
// that was interrupted when it stopped is made again when it goes on.
func (t *Thread) Syscall(nr uint64, args ...uint64) (uint64, error) {
	return t.RunCode(t.call, nr, args...)
}

// RunCode is Syscall by code in the thread's process, which makes the system call nr and returns.
func (t *Thread) RunCode(code, nr uint64, args ...uint64) (uint64, error) {
	return t.run(code, nr, func(uint64) (_ []byte, a [6]uint64) {
		copy(a[:], args)
		return nil, a
	})
}

// run runs code that makes one system call. prepare returns what the call reads,
// and its arguments, given the address of the scratch room.
func (t *Thread) run(code, nr uint64, prepare func(scratch uint64) ([]byte, [6]uint64)) (uint64, error) {
	was, err := t.Registers()
	if err != nil {
		return 0, err
	}
	if was.Cs != longMode {
		return 0, fmt.Errorf("it runs 32-bit code (code segment %#x)", was.Cs)
	}
	if t.Options != 0 { // a thread that is made by a call of ours runs
		if err := unix.PtraceSetOptions(t.TID, unix.PTRACE_O_TRACESYSGOOD); err != nil {
			return 0, fmt.Errorf("set options of tracing: %w", err)
		}
	}
	// A filter of the program's applies to what the program does by itself.
	defer func() { _ = unix.PtraceSetOptions(t.TID, unix.PTRACE_O_TRACESYSGOOD|t.Options) }() // or it has ended
	if err := suspendSeccomp(t.PID, t.TID); err != nil {
		return 0, err
	}
	to := was
	restart(&to)
	if err := t.restartSequence(&to); err != nil {
		return 0, err
	}
	vector, err := vectorState(t.TID)
	if err != nil {
		return 0, err
	}
	var mask uint64
	if err := signalMask(ptraceGetSigmask, t.TID, &mask); err != nil {
		return 0, err
	}
	// From above: red zone, vector state (64-byte aligned for XRSTOR), frame, scratch.
	fpstate := (was.Rsp - redZone - uint64(len(vector))) &^ 63
	frameAt := fpstate - uint64(binary.Size(sigFrame{}))
	t.scratch = (frameAt - scratchBytes) &^ 15
	frame := newFrame(&to, t.back, fpstate, mask)
	data, args := prepare(t.scratch)
	if _, err := t.Mem.WriteAt(data, int64(t.scratch)); err != nil && len(data) > 0 {
		return 0, fmt.Errorf("write below its stack: %w", err)
	}
	var b bytes.Buffer
	if err := binary.Write(&b, binary.LittleEndian, frame); err != nil {
		return 0, err
	}
	b.Write(make([]byte, fpstate-frameAt-uint64(b.Len())))
	b.Write(vector)
	if _, err := t.Mem.WriteAt(b.Bytes(), int64(frameAt)); err != nil {
		return 0, fmt.Errorf("write below its stack: %w", err)
	}
	t.step("frame written")

	run := was
	run.Rip, run.Rsp = code, frameAt
	run.Rax, run.Orig_rax = nr, ^uint64(0) // no restart of the interrupted call
	run.Rdi, run.Rsi, run.Rdx, run.R10, run.R8, run.R9 = args[0], args[1], args[2], args[3], args[4], args[5]
	run.Eflags &^= 1 << 10 // the direction flag is clear at a function's call
	if err := t.SetRegisters(&run); err != nil {
		return 0, err
	}
	t.step("registers set")
	// No handler may run until the frame puts the mask back.
	all := ^uint64(0)
	if err := signalMask(ptraceSetSigmask, t.TID, &all); err != nil {
		return 0, err
	}
	t.step("signals blocked")
	result, err := t.finish(nr)
	if err != nil {
		return 0, err
	}
	now, err := t.Registers()
	if err != nil {
		return 0, err
	}
	if now.Rip != to.Rip || now.Rsp != to.Rsp || now.Rax != to.Rax {
		return 0, fmt.Errorf("thread returned to %#x with stack %#x, not to %#x with %#x", now.Rip, now.Rsp, to.Rip, to.Rsp)
	}
	if int64(result) < 0 && int64(result) > -4096 {
		return 0, unix.Errno(-int64(result))
	}
	return result, nil
}

// finish lets the thread run to the end of the call and the signal return, and returns the result.
func (t *Thread) finish(nr uint64) (uint64, error) {
	var result uint64
	for i, want := range []uint64{nr, nr, unix.SYS_RT_SIGRETURN, unix.SYS_RT_SIGRETURN} {
		if err := nextSyscallStop(t.TID); err != nil {
			return 0, err
		}
		r, err := t.Registers()
		if err != nil {
			return 0, err
		}
		// After rt_sigreturn there is no number: the frame's registers are back.
		if i < 3 && r.Orig_rax != want {
			return 0, fmt.Errorf("made system call %d in place of %d", int64(r.Orig_rax), want)
		}
		if i == 1 {
			result = r.Rax
		}
		t.step(fmt.Sprintf("stop %d", i))
	}
	return result, nil
}

// nextSyscallStop lets the thread run to the begin or end of a system call. An
// event stop on the way (a group stop, SIGCONT) is none of ours. SIGSTOP cannot be blocked: it stops
// the process, and this thread when it is let go.
func nextSyscallStop(tid int) error {
	signal := 0
	for {
		if err := unix.PtraceSyscall(tid, signal); err != nil {
			return fmt.Errorf("go on: %w", err)
		}
		status, err := waitStop(tid)
		if err != nil {
			return err
		}
		signal = 0
		switch {
		case status.StopSignal() == SyscallStop:
			return nil
		case status>>16 == unix.PTRACE_EVENT_STOP:
		case status.StopSignal() == unix.SIGSTOP && status>>16 == 0:
			signal = int(unix.SIGSTOP)
		default:
			return fmt.Errorf("stopped by signal %d in a call of ours", status.StopSignal())
		}
	}
}
