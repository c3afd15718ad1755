// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package ptrace

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// sigFrame is struct rt_sigframe without its siginfo, which rt_sigreturn does not read.
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
	// badStackFlags have rt_sigreturn leave the alternate signal stack, ignoring EINVAL.
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

// Results of a system call that the kernel means to make again (include/linux/errno.h).
const (
	eRestartSys          = -512
	eRestartNoIntr       = -513
	eRestartNoHand       = -514
	eRestartRestartBlock = -516
)

// restart makes registers, taken while a system call was being interrupted, those with which the
// thread makes it again, as the kernel would. A call with a timeout (-516) starts anew, not with
// what is left of it: rt_sigreturn forgets that.
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
func (t *Thread) restartSequence(r *unix.PtraceRegs) error {
	var area struct {
		At                        uint64
		Size, Signature, Flags, _ uint32
	}
	_, _, errno := unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_GET_RSEQ_CONFIGURATION, uintptr(t.TID), unsafe.Sizeof(area), uintptr(unsafe.Pointer(&area)), 0, 0)
	if errno == unix.EIO || errno == 0 && area.At == 0 { // a kernel without, a thread without
		return nil
	}
	if errno != 0 {
		return fmt.Errorf("read where its restartable sequences are: %w", errno)
	}
	at, err := t.Read64(area.At + 8) // rseq_cs
	if err != nil || at == 0 {
		return err
	}
	var sequence struct {
		Version, Flags           uint32
		Start, PostCommit, Abort uint64
	}
	b := make([]byte, binary.Size(sequence))
	if err := t.read(at, b); err != nil {
		return err
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

// vectorState returns the thread's x87, SSE, AVX… registers as rt_sigreturn reads them.
func vectorState(tid int) ([]byte, error) {
	state := make([]byte, xstateMax)
	iov := unix.Iovec{Base: &state[0]}
	iov.SetLen(len(state))
	_, _, errno := unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_GETREGSET, uintptr(tid), ntX86XState, uintptr(unsafe.Pointer(&iov)), 0, 0)
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
	// PTRACE_GETREGSET has the features in use where the frame wants its own description.
	features := binary.LittleEndian.Uint64(state[fxSwOffset:])
	sw := state[fxSwOffset:512]
	clear(sw)
	binary.LittleEndian.PutUint32(sw[0:], fpMagic1)
	binary.LittleEndian.PutUint32(sw[4:], uint32(size+4))
	binary.LittleEndian.PutUint64(sw[8:], features)
	binary.LittleEndian.PutUint32(sw[16:], uint32(size))
	return binary.LittleEndian.AppendUint32(state, fpMagic2), nil
}

// xsaveEnd returns the size of what XSAVE stores of these features, bits as in its
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

func cpuid(leaf, sub uint32) (eax, ebx, ecx, edx uint32)

// signalMask makes a request of ptrace that reads or sets a thread's signal mask.
func signalMask(request uintptr, tid int, mask *uint64) error {
	if _, _, errno := unix.Syscall6(unix.SYS_PTRACE, request, uintptr(tid), 8, uintptr(unsafe.Pointer(mask)), 0, 0); errno != 0 {
		return fmt.Errorf("read or set the signal mask: %w", errno)
	}
	return nil
}
