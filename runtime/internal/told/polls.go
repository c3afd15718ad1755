// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package told

import (
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

// poll(2) on x86-64, as it is called: mov $7,%eax; syscall. One that was interrupted before goes on as the
// call restart_syscall(2).
const (
	pollNumber, restartNumber = 7, 219
	pollCode                  = "\xb8\x07\x00\x00\x00\x0f\x05"
)

// inPoll returns the threads of a process that are in poll(2), as they count themselves. CUDA's own, such as
// cuda-EvtHandlr, are left to CRIU: so they were tried on real GPUs.
func inPoll(pid int) (found []int) {
	tids, _ := proc.Threads(pid)
	for _, tid := range tids {
		text, _ := proc.Text(fmt.Sprintf("/proc/%d/task/%d/syscall", pid, tid))
		f := strings.Fields(string(text))
		if len(f) != 9 { // it runs
			continue
		}
		if call, _ := strconv.Atoi(f[0]); call != pollNumber && (call != restartNumber || !isPoll(pid, f[8])) {
			continue
		}
		if status, err := proc.ThreadStatus(pid, tid); err == nil && (tid == pid || !strings.HasPrefix(status.Field("Name"), "cuda")) {
			if number, err := status.NSPID(); err == nil {
				found = append(found, number)
			}
		}
	}
	return found
}

// isPoll reports whether a call of poll(2) is before an address, "0x7f00".
func isPoll(pid int, address string) bool {
	at, err := strconv.ParseInt(address, 0, 64)
	memory, ferr := os.Open(fmt.Sprintf("/proc/%d/mem", pid))
	if err != nil || ferr != nil {
		return false
	}
	defer memory.Close()
	var code [len(pollCode)]byte
	_, err = memory.ReadAt(code[:], at-int64(len(code)))
	return err == nil && string(code[:]) == pollCode
}

// pollOn has threads of a process call poll(2) again that CRIU found in it. A signal that waits, or that a timer
// of the process sends, may be what the program means to be interrupted by: whichever thread takes it, all are
// left then.
func pollOn(dumped *image.Set, process int, threads []int) error {
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
	for _, number := range threads {
		if !dumped.Has(name(number)) {
			continue
		}
		err := image.EditOf(dumped, name(number), func(c *criucore.CoreEntry) error {
			pollAgain(c)
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

func pollAgain(c *criucore.CoreEntry) {
	r := c.GetThreadInfo().GetGpregs()
	call := int64(r.GetOrigAx())
	switch {
	case r.GetMode() != corex86.UserX86RegsMode_NATIVE, int64(r.GetAx()) != -int64(unix.EINTR), call != pollNumber && call != restartNumber:
	case len(c.GetThreadCore().GetSignalsP().GetSignals()) > 0:
	default:
		r.Ax, r.Ip = new(uint64(pollNumber)), new(r.GetIp()-2) // the instruction's two bytes
	}
}
