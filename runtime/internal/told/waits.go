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

// wait is a thread that waits, as it counts itself and as the host does, and the call in which it does.
type wait struct {
	thread, tid int
	call        uint64
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
		if call == restartNumber {
			call = calledAt(pid, f[8])
		}
		if call != pollNumber && call != sleepNumber && call != futexNumber && call != clockNumber {
			continue
		}
		if status, err := proc.ThreadStatus(pid, tid); err == nil && (tid == pid || !strings.HasPrefix(status.Field("Name"), "cuda")) {
			if number, err := status.NSPID(); err == nil {
				found = append(found, wait{number, tid, call})
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
			call := int64(w.call) //nolint:gosec // one of the four
			if w.thread != process {
				call = -call
			}
			fmt.Fprintf(&list, " %d:%d ", w.tid, call)
		}
	}
	return list.String()
}

// calledAt returns the number of the call before an address, "0x7f00", 0 if it is not known.
func calledAt(pid int, address string) uint64 {
	at, err := strconv.ParseInt(address, 0, 64)
	memory, ferr := os.Open(fmt.Sprintf("/proc/%d/mem", pid))
	if err != nil || ferr != nil {
		return 0
	}
	defer memory.Close()
	var code [callBytes]byte
	if _, err = memory.ReadAt(code[:], at-callBytes); err != nil || code[0] != 0xb8 || string(code[5:]) != "\x0f\x05" {
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
