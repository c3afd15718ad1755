// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"os"
	"runtime"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// How a system call runs in another process's thread
//
// The thread stands in a ptrace stop outside of any system call, or in one that
// was interrupted. A signal frame with its registers, its vector registers and
// its signal mask is written below its stack, as the kernel writes one to
// deliver a signal. Then a single PTRACE_SETREGS makes it run: a "syscall; ret"
// somewhere in its code, with the call's arguments; the "ret" takes it to the C
// library's own __restore_rt, which calls rt_sigreturn, which puts back every
// register. From that SETREGS on the thread finishes the call and returns to
// what it did without further help: a tracer that dies at any instant leaves a
// thread that is as it was, or runs one more system call first.
//
// Sources: arch/x86/kernel/signal_64.c and arch/x86/include/uapi/asm/sigcontext.h
// for the frame, arch/x86/kernel/fpu/signal.c for the vector registers,
// arch/x86/kernel/signal.c for the restart of system calls; CRIU cures its
// parasite in the same way.

// errNoGadget says that a process's code lacks what a call needs.
var errNoGadget = errors.New("no system call and signal return found in its code")

// thread is a thread of another process in a ptrace stop, traced by the
// calling thread with PTRACE_O_TRACESYSGOOD.
type thread struct {
	pid, tid int
	mem      *os.File // /proc/PID/mem
	call     uint64   // the address of a "syscall; ret"
	back     uint64   // the address of a "mov $15, %rax; syscall"
	scratch  uint64   // scratchBytes of its stack that a call may use
}

// scratchBytes is the room for what a call reads and writes.
const scratchBytes = 256

// The red zone below a stack pointer belongs to the function that runs
// (System V ABI for AMD64, 3.2.2).
const redZone = 128

// sigFrame is struct rt_sigframe without its siginfo, which rt_sigreturn does
// not read.
type sigFrame struct {
	Pretcode                               uint64
	UcFlags, UcLink                        uint64
	StackSP                                uint64
	StackFlags, _                          int32
	StackSize                              uint64
	R8, R9, R10, R11, R12, R13, R14, R15   uint64
	RDI, RSI, RBP, RBX, RDX, RAX, RCX, RSP uint64
	RIP, EFlags                            uint64
	CS, GS, FS, SS                         uint16
	Err, Trapno, Oldmask, CR2              uint64
	FPState                                uint64
	_                                      [8]uint64
	Sigmask                                uint64
}

const (
	ucFlags = 1 | 2 | 4 // UC_FP_XSTATE, UC_SIGCONTEXT_SS, UC_STRICT_RESTORE_SS
	// badStackFlags make rt_sigreturn leave the alternate signal stack alone:
	// it ignores the EINVAL that these give.
	badStackFlags = 0x7ffffff0

	ntX86XState = 0x202
	xstateMax   = 16 << 10 // AMX makes it 11 KiB
	// XSAVE's area begins with FXSAVE's 512 bytes and a header, of which the first
	// word tells the features that follow.
	xsaveInUse = 512
	xsaveLeast = 576
	// The software-reserved bytes of an FXSAVE area, from 464 on, say that
	// more than FXSAVE's 512 bytes follow.
	fxSwOffset = 464
	fpMagic1   = 0x46505853
	fpMagic2   = 0x46505845

	ptraceGetSigmask = 0x420a
	ptraceSetSigmask = 0x420b
)

// openThread prepares calls in a thread.
func openThread(pid, tid int) (*thread, error) {
	t := &thread{pid: pid, tid: tid}
	if err := t.refuseShadowStack(); err != nil {
		return nil, err
	}
	var err error
	if t.mem, err = os.OpenFile(fmt.Sprintf("/proc/%d/mem", pid), os.O_RDWR, 0); err != nil {
		return nil, err
	}
	if err := t.findGadgets(); err != nil {
		t.mem.Close()
		return nil, err
	}
	return t, nil
}

func (t *thread) close() { t.mem.Close() }

// refuseShadowStack refuses a thread whose returns the processor checks: the
// "ret" into __restore_rt would be a fault.
func (t *thread) refuseShadowStack() error {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/status", t.pid, t.tid))
	if err != nil {
		return err
	}
	if strings.Contains(field(status, "x86_Thread_features:"), "shstk") {
		return errors.New("its returns are checked by a shadow stack")
	}
	return nil
}

// findGadgets looks through the process's code, libraries with the C library
// in their name first.
func (t *thread) findGadgets() error {
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", t.pid))
	if err != nil {
		return err
	}
	// The C library has both; the vdso and the program itself are next best.
	for _, wanted := range []string{"/libc.so", "/libc-", "/ld-musl", ""} {
		for line := range strings.Lines(string(maps)) {
			if !strings.Contains(line, " r-xp ") || !strings.Contains(line, wanted) || strings.Contains(line, "[vsyscall]") {
				continue
			}
			start, end, ok := addresses(line)
			if !ok {
				continue
			}
			code := make([]byte, min(end-start, 64<<20))
			n, err := t.mem.ReadAt(code, int64(start))
			if n == 0 && err != nil {
				continue
			}
			code = code[:n]
			if at := bytes.Index(code, []byte{0x0f, 0x05, 0xc3}); t.call == 0 && at >= 0 {
				t.call = start + uint64(at)
			}
			if at := bytes.Index(code, []byte{0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05}); t.back == 0 && at >= 0 {
				t.back = start + uint64(at)
			}
			if t.call != 0 && t.back != 0 {
				return nil
			}
		}
	}
	return errNoGadget
}

// addresses reads the range that begins a line of /proc/PID/maps.
func addresses(line string) (start, end uint64, ok bool) {
	span, _, _ := strings.Cut(line, " ")
	from, to, _ := strings.Cut(span, "-")
	start, err := strconv.ParseUint(from, 16, 64)
	if err != nil {
		return 0, 0, false
	}
	end, err = strconv.ParseUint(to, 16, 64)
	return start, end, err == nil
}

// syscall runs one system call in the thread and gives its result. The thread
// is in a ptrace stop before and after, with the same registers; a system call
// that was interrupted when the thread stopped will be made again when it goes
// on. prepare fills what the call reads, given the address of the scratch room;
// nil if it reads nothing.
func (t *thread) syscall(nr uint64, prepare func(scratch uint64) ([]byte, [6]uint64)) (uint64, error) {
	return t.run(t.call, nr, prepare)
}

// run is syscall for code in the thread's process that makes that one system call
// and returns.
func (t *thread) run(code, nr uint64, prepare func(scratch uint64) ([]byte, [6]uint64)) (uint64, error) {
	var was unix.PtraceRegs
	if err := unix.PtraceGetRegs(t.tid, &was); err != nil {
		return 0, fmt.Errorf("read registers: %w", err)
	}
	to := was
	restart(&to)
	if err := t.restartSequence(&to); err != nil {
		return 0, err
	}
	vector, err := t.vectorState()
	if err != nil {
		return 0, err
	}
	mask, err := t.sigmask()
	if err != nil {
		return 0, err
	}
	// From above: the red zone, the vector state (64-byte aligned, as XRSTOR
	// wants it), the frame, the scratch room.
	fpstate := (was.Rsp - redZone - uint64(len(vector))) &^ 63
	frameAt := fpstate - uint64(binary.Size(sigFrame{}))
	t.scratch = (frameAt - scratchBytes) &^ 15
	frame := newFrame(&to, t.back, fpstate, mask)
	var args [6]uint64
	if prepare != nil {
		var data []byte
		data, args = prepare(t.scratch)
		if _, err := t.mem.WriteAt(data, int64(t.scratch)); err != nil && len(data) > 0 {
			return 0, fmt.Errorf("write below its stack: %w", err)
		}
	}
	var b bytes.Buffer
	if err := binary.Write(&b, binary.LittleEndian, frame); err != nil {
		return 0, err
	}
	b.Write(make([]byte, fpstate-frameAt-uint64(b.Len())))
	b.Write(vector)
	if _, err := t.mem.WriteAt(b.Bytes(), int64(frameAt)); err != nil {
		return 0, fmt.Errorf("write below its stack: %w", err)
	}
	step("frame written")

	run := was
	run.Rip, run.Rsp = code, frameAt
	run.Rax, run.Orig_rax = nr, ^uint64(0) // no restart of the interrupted call
	run.Rdi, run.Rsi, run.Rdx, run.R10, run.R8, run.R9 = args[0], args[1], args[2], args[3], args[4], args[5]
	run.Eflags &^= 1 << 10 // the direction flag is clear at a function's call
	if err := unix.PtraceSetRegs(t.tid, &run); err != nil {
		return 0, fmt.Errorf("set registers: %w", err)
	}
	step("registers set")
	// No handler may run until the frame puts the mask back.
	if err := t.setSigmask(^uint64(0)); err != nil {
		return 0, err
	}
	step("signals blocked")
	result, err := t.finish(nr)
	if err != nil {
		return 0, err
	}
	var now unix.PtraceRegs
	if err := unix.PtraceGetRegs(t.tid, &now); err != nil {
		return 0, fmt.Errorf("read registers: %w", err)
	}
	if now.Rip != to.Rip || now.Rsp != to.Rsp || now.Rax != to.Rax {
		return 0, fmt.Errorf("thread returned to %#x with stack %#x, not to %#x with %#x", now.Rip, now.Rsp, to.Rip, to.Rsp)
	}
	if int64(result) < 0 && int64(result) > -4096 {
		return 0, unix.Errno(-int64(result))
	}
	return result, nil
}

// finish lets the thread run through the call and the signal return, stop by
// stop, and gives the call's result.
func (t *thread) finish(nr uint64) (uint64, error) {
	var result uint64
	for i, want := range []uint64{nr, nr, unix.SYS_RT_SIGRETURN, unix.SYS_RT_SIGRETURN} {
		if err := t.nextSyscallStop(); err != nil {
			return 0, err
		}
		var r unix.PtraceRegs
		if err := unix.PtraceGetRegs(t.tid, &r); err != nil {
			return 0, fmt.Errorf("read registers: %w", err)
		}
		// After rt_sigreturn there is no number: the frame's registers are back.
		if i < 3 && r.Orig_rax != want {
			return 0, fmt.Errorf("made system call %d in place of %d", int64(r.Orig_rax), want)
		}
		if i == 1 {
			result = r.Rax
		}
		step(fmt.Sprintf("stop %d", i))
	}
	return result, nil
}

// nextSyscallStop lets the thread run to the begin or end of a system call. An
// event stop on the way (a group stop, SIGCONT) is none of ours.
func (t *thread) nextSyscallStop() error {
	for {
		if err := unix.PtraceSyscall(t.tid, 0); err != nil {
			return fmt.Errorf("go on: %w", err)
		}
		status, err := waitStop(t.tid)
		if err != nil {
			return err
		}
		switch {
		case status.StopSignal() == syscallStop:
			return nil
		case status>>16 == unix.PTRACE_EVENT_STOP:
		default:
			return fmt.Errorf("stopped by signal %d in a call of ours", status.StopSignal())
		}
	}
}

// syscallStop is the signal of a stop at a system call, with
// PTRACE_O_TRACESYSGOOD.
const syscallStop = unix.SIGTRAP | 0x80

// waitStop waits for the thread's next stop. What else the calling thread traces
// stands still, and has nothing to say but that it was killed. That is heard, too:
// a process's first thread has not ended before all others are known to have.
func waitStop(tid int) (unix.WaitStatus, error) {
	for {
		var status unix.WaitStatus
		who, err := unix.Wait4(-1, &status, unix.WALL|unix.WNOTHREAD, nil)
		switch {
		case errors.Is(err, unix.EINTR), err == nil && who != tid:
			continue
		case err != nil:
			return 0, fmt.Errorf("wait for the thread: %w", err)
		case !status.Stopped():
			return 0, errEnded
		}
		return status, nil
	}
}

// Results of a system call that the kernel means to make again
// (include/linux/errno.h).
const (
	eRestartSys          = -512
	eRestartNoIntr       = -513
	eRestartNoHand       = -514
	eRestartRestartBlock = -516
)

// restart makes registers, taken while a system call was being interrupted,
// those with which the thread makes it again, as the kernel would. For a call
// with a timeout (-516) the kernel would go on with what is left of it; here it
// starts anew, since rt_sigreturn forgets what was left.
func restart(r *unix.PtraceRegs) {
	if int64(r.Orig_rax) < 0 {
		return
	}
	switch int64(r.Rax) {
	case eRestartSys, eRestartNoIntr, eRestartNoHand, eRestartRestartBlock:
		r.Rax = r.Orig_rax
		r.Rip -= 2 // the length of "syscall"
	}
	r.Orig_rax = ^uint64(0)
}

// restartSequence makes registers within a restartable sequence those with which the
// thread begins it anew, as the kernel does after each interruption: but it looks when
// the thread goes on, and finds it in the call. See include/uapi/linux/rseq.h and
// kernel/rseq.c.
func (t *thread) restartSequence(r *unix.PtraceRegs) error {
	var area struct {
		At                        uint64
		Size, Signature, Flags, _ uint32
	}
	_, _, errno := unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_GET_RSEQ_CONFIGURATION, uintptr(t.tid), unsafe.Sizeof(area), uintptr(unsafe.Pointer(&area)), 0, 0)
	if errno == unix.EIO || errno == 0 && area.At == 0 { // a kernel without, a thread without
		return nil
	}
	if errno != 0 {
		return fmt.Errorf("read where its restartable sequences are: %w", errno)
	}
	at, err := t.read64(area.At + 8) // rseq_cs
	if err != nil || at == 0 {
		return err
	}
	var sequence struct {
		Version, Flags           uint32
		Start, PostCommit, Abort uint64
	}
	b := make([]byte, binary.Size(sequence))
	if _, err := t.mem.ReadAt(b, int64(at)); err != nil {
		return fmt.Errorf("read a restartable sequence of process %d: %w", t.pid, err)
	}
	if _, err := binary.Decode(b, binary.LittleEndian, &sequence); err != nil {
		return err
	}
	if r.Rip-sequence.Start < sequence.PostCommit {
		r.Rip = sequence.Abort
	}
	return nil
}

func newFrame(r *unix.PtraceRegs, back, fpstate, mask uint64) *sigFrame {
	return &sigFrame{
		Pretcode: back, UcFlags: ucFlags, StackFlags: badStackFlags,
		R8: r.R8, R9: r.R9, R10: r.R10, R11: r.R11, R12: r.R12, R13: r.R13, R14: r.R14, R15: r.R15,
		RDI: r.Rdi, RSI: r.Rsi, RBP: r.Rbp, RBX: r.Rbx, RDX: r.Rdx, RAX: r.Rax, RCX: r.Rcx, RSP: r.Rsp,
		RIP: r.Rip, EFlags: r.Eflags, CS: uint16(r.Cs), SS: uint16(r.Ss),
		FPState: fpstate, Sigmask: mask,
	}
}

// vectorState gives the thread's x87, SSE, AVX… registers in the form that
// rt_sigreturn reads.
func (t *thread) vectorState() ([]byte, error) {
	state := make([]byte, xstateMax)
	iov := unix.Iovec{Base: &state[0]}
	iov.SetLen(len(state))
	_, _, errno := unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_GETREGSET, uintptr(t.tid), ntX86XState, uintptr(unsafe.Pointer(&iov)), 0, 0)
	runtime.KeepAlive(state)
	if errno != 0 {
		return nil, fmt.Errorf("read vector registers: %w", errno)
	}
	size := int(iov.Len)
	if size < xsaveLeast || size == xstateMax {
		return nil, fmt.Errorf("read vector registers: %d bytes", size)
	}
	// They come with room for all that the processor has. The thread's own frames
	// have none for what it has not asked for (AMX), and of one that is larger
	// rt_sigreturn takes no more than FXSAVE's, without a word.
	if size = xsaveEnd(binary.LittleEndian.Uint64(state[xsaveInUse:])); size > int(iov.Len) {
		return nil, fmt.Errorf("read vector registers: %d bytes of %d", iov.Len, size)
	}
	state = state[:size:size]
	// PTRACE_GETREGSET puts the features in use where the frame wants its own
	// description: take them, then write that.
	features := binary.LittleEndian.Uint64(state[fxSwOffset:])
	sw := state[fxSwOffset:512]
	clear(sw)
	binary.LittleEndian.PutUint32(sw[0:], fpMagic1)
	binary.LittleEndian.PutUint32(sw[4:], uint32(size+4))
	binary.LittleEndian.PutUint64(sw[8:], features)
	binary.LittleEndian.PutUint32(sw[16:], uint32(size))
	return binary.LittleEndian.AppendUint32(state, fpMagic2), nil
}

// xsaveEnd gives the size of what XSAVE stores of these features, bits as in its
// header. See the Intel SDM, volume 1, 13.4 and 13.5: beyond the first two, leaf 13 of
// CPUID tells size and offset of each.
func xsaveEnd(features uint64) int {
	end := xsaveLeast
	for rest := features &^ 3; rest != 0; rest &= rest - 1 {
		size, offset, _, _ := cpuid(13, uint32(bits.TrailingZeros64(rest)))
		end = max(end, int(offset+size))
	}
	return end
}

// cpuid is the processor's instruction.
func cpuid(leaf, sub uint32) (eax, ebx, ecx, edx uint32)

func (t *thread) sigmask() (uint64, error) {
	var mask uint64
	_, _, errno := unix.Syscall6(unix.SYS_PTRACE, ptraceGetSigmask, uintptr(t.tid), 8, uintptr(unsafe.Pointer(&mask)), 0, 0)
	if errno != 0 {
		return 0, fmt.Errorf("read the signal mask: %w", errno)
	}
	return mask, nil
}

func (t *thread) setSigmask(mask uint64) error {
	_, _, errno := unix.Syscall6(unix.SYS_PTRACE, ptraceSetSigmask, uintptr(t.tid), 8, uintptr(unsafe.Pointer(&mask)), 0, 0)
	if errno != 0 {
		return fmt.Errorf("block signals: %w", errno)
	}
	return nil
}

// plain runs a call whose arguments are numbers alone.
func (t *thread) plain(nr uint64, args ...uint64) (uint64, error) {
	return t.syscall(nr, func(uint64) ([]byte, [6]uint64) {
		var a [6]uint64
		copy(a[:], args)
		return nil, a
	})
}
