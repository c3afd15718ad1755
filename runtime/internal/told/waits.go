// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package told

import (
	"encoding/binary"
	"fmt"
	"os"
	"strconv"
	"strings"

	corex86 "github.com/checkpoint-restore/go-criu/v8/crit/images/core-x86"
	criucore "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// Calls of x86-64 that wait for a time, and that CRIU has fail: poll(2), the sleeps of libraries, and futex(2),
// by which sem_timedwait(3) waits. One that was interrupted before goes on as restart_syscall(2).
const (
	pollNumber, sleepNumber, futexNumber, clockNumber, restartNumber = 7, 35, 202, 230, 219
	callBytes                                                        = 7 // mov $N,%eax; syscall
)

// Where a call has the time that it may last: nowhere, in one of its arguments, or in an option of its socket.
const (
	never = iota
	inMilliseconds
	inTimespec
	receiving = unix.SO_RCVTIMEO
	sending   = unix.SO_SNDTIMEO
)

// Calls of x86-64 that the kernel has fail with EINTR also where no handler of a signal runs, as signal(7) has it.
var failing = map[uint64]struct{ where, argument int }{
	232: {inMilliseconds, 4}, 281: {inMilliseconds, 4}, 441: {inTimespec, 4}, // epoll_wait, epoll_pwait, epoll_pwait2
	65: {never, 0}, 220: {inTimespec, 4}, 128: {inTimespec, 3}, // semop, semtimedop, rt_sigtimedwait
	208: {inTimespec, 5}, 333: {inTimespec, 5}, // io_getevents, io_pgetevents
	0: {receiving, 1}, 19: {receiving, 1}, 45: {receiving, 1}, 47: {receiving, 1}, 299: {receiving, 1}, // read, readv, recvfrom, recvmsg, recvmmsg
	43: {receiving, 1}, 288: {receiving, 1}, 42: {sending, 1}, // accept, accept4, connect
	1: {sending, 1}, 20: {sending, 1}, 44: {sending, 1}, 46: {sending, 1}, 307: {sending, 1}, // write, writev, sendto, sendmsg, sendmmsg
}

// wait is a thread that waits, as it counts itself and as the host does, and the call in which it does. anew is
// whether the kernel cannot go on with the call, and long whether it might then last for more than a minute.
type wait struct {
	thread, tid int
	call        uint64
	anew, long  bool
}

// waiting returns the threads of a process that wait. CUDA's own, such as cuda-EvtHandlr, are left to CRIU: so
// they were tried on real GPUs.
func waiting(pid int) (found []wait) {
	tids, _ := proc.Threads(pid)
	for _, tid := range tids {
		text, _ := proc.Text(fmt.Sprintf("/proc/%d/task/%d/syscall", pid, tid))
		f := strings.Fields(string(text))
		if len(f) != 9 { // it runs
			continue
		}
		call, _ := strconv.ParseUint(f[0], 10, 64)
		anew, long := fails(pid, call, f)
		if call == restartNumber {
			call = calledAt(pid, f[8])
		}
		if !anew && call != pollNumber && call != sleepNumber && call != futexNumber && call != clockNumber {
			continue
		}
		if status, err := proc.ThreadStatus(pid, tid); err == nil && (tid == pid || !strings.HasPrefix(status.Field("Name"), "cuda")) {
			if number, err := status.NSPID(); err == nil {
				found = append(found, wait{number, tid, call, anew, long})
			}
		}
	}
	return found
}

// running returns the list of threads that wait, for the library in CRIU. Threads that it has no room for get EINTR.
func (t *Told) running() string {
	var list strings.Builder
	for process, threads := range t.waits {
		for _, w := range threads {
			if list.Len() > maxVariable/4 {
				return list.String()
			}
			if w.long {
				continue
			}
			call := int64(w.call) //nolint:gosec // one of these
			if w.thread != process && !w.anew {
				call = -call
			}
			fmt.Fprintf(&list, " %d:%d ", w.tid, call)
		}
	}
	return list.String()
}

// fails reports whether a call, of which the file syscall has the fields, is one that fails, and whether it might last
// for more than a minute.
func fails(pid int, call uint64, fields []string) (anew, long bool) {
	at, anew := failing[call]
	argument, _ := strconv.ParseUint(fields[at.argument], 0, 64)
	var seconds int64
	switch at.where {
	case inMilliseconds:
		seconds = int64(int32(argument)) / 1000 //nolint:gosec // below 0 it has no end
	case inTimespec:
		var text [8]byte
		if argument != 0 && read(pid, fields[at.argument], 0, text[:]) == nil {
			seconds = int64(binary.LittleEndian.Uint64(text[:])) //nolint:gosec // as the kernel has it
		}
	case receiving, sending:
		fd := int(int32(argument)) //nolint:gosec // as the kernel has it
		// To close a copy of a file may take long: what is to be written goes to its server (NFS, FUSE).
		if link, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", pid, fd)); !strings.HasPrefix(link, "socket:[") {
			return false, false
		}
		file, err := proc.CopyOf(pid, fd)
		if err != nil {
			return false, false
		}
		defer unix.Close(file)
		t, err := unix.GetsockoptTimeval(file, unix.SOL_SOCKET, at.where)
		if err != nil || *t == (unix.Timeval{}) {
			return false, false // a call that the kernel makes again
		}
		seconds = t.Sec
	}
	return anew, seconds >= 60
}

// read reads a process's memory so far from an address, "0x7f00".
func read(pid int, address string, from int64, to []byte) error {
	at, err := strconv.ParseInt(address, 0, 64)
	if err != nil {
		return err
	}
	memory, err := os.Open(fmt.Sprintf("/proc/%d/mem", pid))
	if err != nil {
		return err
	}
	defer memory.Close()
	_, err = memory.ReadAt(to, at+from)
	return err
}

// calledAt returns the number of the call before an address, 0 if it is not known.
func calledAt(pid int, address string) uint64 {
	var code [callBytes]byte
	if read(pid, address, -callBytes, code[:]) != nil || code[0] != 0xb8 || string(code[5:]) != "\x0f\x05" {
		return 0
	}
	return uint64(binary.LittleEndian.Uint32(code[1:]))
}

// waitOn has threads of a process call again what CRIU found them in. A signal that waits, or that a timer
// of the process sends, may be what the program means to be interrupted by: whichever thread takes it, all are
// left then.
func waitOn(dumped *image.Set, process int, threads []wait) error {
	name := func(number int) string { return fmt.Sprintf("core-%d.img", number) }
	if len(threads) == 0 || !dumped.Has(name(process)) {
		return nil // it has ended meanwhile
	}
	wakes := false
	err := image.EachOf(dumped, name(process), func(c *criucore.CoreEntry) error {
		wakes = wakesUp(c.GetTc())
		return nil
	})
	if err != nil || wakes {
		return err
	}
	for _, w := range threads {
		if !dumped.Has(name(w.thread)) {
			continue
		}
		err := image.EditOf(dumped, name(w.thread), func(c *criucore.CoreEntry) error {
			callAgain(c, w.call)
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// wakesUp reports whether a signal waits for a process, or a timer may send it one.
func wakesUp(p *criucore.TaskCoreEntry) bool {
	timers := p.GetTimers()
	return len(p.GetSignalsS().GetSignals())+len(timers.GetPosix()) > 0 || timers.GetReal().GetVsec()|timers.GetReal().GetVusec() != 0
}

// callAgain has a thread make its call again. A sleep then lasts as long as it was to, or as it still had to where
// the kernel writes that over its time. A program that has it written elsewhere asks for less itself.
func callAgain(c *criucore.CoreEntry, call uint64) {
	r := c.GetThreadInfo().GetGpregs()
	is := r.GetOrigAx()
	switch {
	case r.GetMode() != corex86.UserX86RegsMode_NATIVE, int64(r.GetAx()) != -int64(unix.EINTR), is != call && is != restartNumber: //nolint:gosec // as CRIU writes it
	case call == sleepNumber && r.GetSi() != 0 && r.GetSi() != r.GetDi(), call == clockNumber && r.GetR10() != 0 && r.GetR10() != r.GetDx():
	case len(c.GetThreadCore().GetSignalsP().GetSignals()) > 0:
	default:
		r.Ax, r.Ip = new(call), new(r.GetIp()-2) // the instruction's two bytes
	}
}
