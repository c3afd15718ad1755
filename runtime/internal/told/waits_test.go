// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package told

import (
	"os"
	"strconv"
	"testing"

	corex86 "github.com/checkpoint-restore/go-criu/v8/crit/images/core-x86"
	criucore "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/siginfo"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/timer"
	"golang.org/x/sys/unix"
)

func TestCallAgain(t *testing.T) {
	signals := &siginfo.SignalQueueEntry{Signals: []*siginfo.SiginfoEntry{{}}}
	for name, test := range map[string]struct {
		change func(*criucore.CoreEntry)
		again  bool
	}{
		"a process":       {func(*criucore.CoreEntry) {}, true},
		"another thread":  {func(c *criucore.CoreEntry) { c.Tc = nil }, true},
		"before":          {func(c *criucore.CoreEntry) { c.ThreadInfo.Gpregs.OrigAx = new(uint64(219)) }, true},
		"no call":         {func(c *criucore.CoreEntry) { c.ThreadInfo.Gpregs.OrigAx = new(^uint64(0)) }, false},
		"it has returned": {func(c *criucore.CoreEntry) { c.ThreadInfo.Gpregs.Ax = new(uint64(1)) }, false},
		"32 bits":         {func(c *criucore.CoreEntry) { c.ThreadInfo.Gpregs.Mode = corex86.UserX86RegsMode_COMPAT.Enum() }, false},
		"a thread's":      {func(c *criucore.CoreEntry) { c.ThreadCore.SignalsP = signals }, false},
		"another call":    {func(c *criucore.CoreEntry) { c.ThreadInfo.Gpregs.OrigAx = new(uint64(35)) }, false},
	} {
		r := &corex86.UserX86RegsEntry{OrigAx: new(uint64(7)), Ax: new(^uint64(3)), Ip: new(uint64(100))} // EINTR
		c := &criucore.CoreEntry{
			ThreadInfo: &corex86.ThreadInfoX86{Gpregs: r}, ThreadCore: &criucore.ThreadCoreEntry{},
			Tc: &criucore.TaskCoreEntry{Timers: &timer.TaskTimersEntry{Real: &timer.ItimerEntry{}}},
		}
		test.change(c)
		ax := r.GetAx()
		if callAgain(c, 7); test.again && (r.GetAx() != 7 || r.GetIp() != 98) || !test.again && (r.GetAx() != ax || r.GetIp() != 100) {
			t.Errorf("%s: %d at %d", name, int64(r.GetAx()), r.GetIp())
		}
	}
}

// A sleep is begun anew, but for a program that is told how much of it is left.
func TestSleepAgain(t *testing.T) {
	for name, test := range map[string]struct {
		call       uint64
		di, si, dx uint64
		r10        uint64
		again      bool
	}{
		"usleep":              {call: 35, di: 50, again: true},
		"it is told at once":  {call: 35, di: 50, si: 50, again: true},
		"it is told":          {call: 35, di: 50, si: 60},
		"by a clock":          {call: 230, di: 1, dx: 50, again: true},
		"sleep":               {call: 230, di: 1, dx: 50, r10: 50, again: true},
		"told of the clock's": {call: 230, di: 1, dx: 50, r10: 60},
	} {
		for _, is := range []uint64{test.call, 219} {
			r := &corex86.UserX86RegsEntry{OrigAx: new(is), Ax: new(^uint64(3)), Ip: new(uint64(100)), Di: new(test.di), Si: new(test.si), Dx: new(test.dx), R10: new(test.r10)}
			callAgain(&criucore.CoreEntry{ThreadInfo: &corex86.ThreadInfoX86{Gpregs: r}, ThreadCore: &criucore.ThreadCoreEntry{}}, test.call)
			if again := r.GetAx() == test.call && r.GetIp() == 98; again != test.again {
				t.Errorf("%s: %d at %d", name, int64(r.GetAx()), r.GetIp())
			}
		}
	}
}

func TestWakesUp(t *testing.T) {
	for name, test := range map[string]struct {
		p     *criucore.TaskCoreEntry
		wakes bool
	}{
		"nothing":  {&criucore.TaskCoreEntry{Timers: &timer.TaskTimersEntry{Real: &timer.ItimerEntry{}}}, false},
		"a signal": {&criucore.TaskCoreEntry{SignalsS: &siginfo.SignalQueueEntry{Signals: []*siginfo.SiginfoEntry{{}}}}, true},
		"an alarm": {&criucore.TaskCoreEntry{Timers: &timer.TaskTimersEntry{Real: &timer.ItimerEntry{Vsec: new(uint64(9))}}}, true},
		"a timer":  {&criucore.TaskCoreEntry{Timers: &timer.TaskTimersEntry{Posix: []*timer.PosixTimerEntry{{}}}}, true},
	} {
		if wakesUp(test.p) != test.wakes {
			t.Errorf("%s: %v", name, !test.wakes)
		}
	}
}

// CRIU is told of threads that wait: of the first one with its call, of as many as a variable takes.
func TestRunning(t *testing.T) {
	found := Told{waits: map[int][]wait{1: {
		{1, 501, pollNumber, false, false}, {2, 502, futexNumber, false, false},
		{3, 503, 47, true, false}, {4, 504, 47, true, true},
	}}}
	if got := found.running(); got != " 501:7  502:-202  503:47 " {
		t.Errorf("%q", got)
	}
	for i := range maxVariable {
		found.waits[1] = append(found.waits[1], wait{5 + i, 505 + i, sleepNumber, false, false})
	}
	if n := len(found.running()); n < maxVariable/4 || n > maxVariable/2 {
		t.Errorf("a list of %d bytes", n)
	}
}

// Of what a thread reads from, sockets alone are copied. To close a copy of another file tells its file system so: here
// it ends this process's lock.
func TestSocketsAloneAreCopied(t *testing.T) {
	file, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	lock := unix.Flock_t{Type: unix.F_WRLCK}
	if err := unix.FcntlFlock(file.Fd(), unix.F_SETLK, &lock); err != nil {
		t.Fatal(err)
	}
	if anew, _ := fails(os.Getpid(), unix.SYS_READ, []string{"0", strconv.Itoa(int(file.Fd()))}); anew {
		t.Error("reading a file is made again")
	}
	socket, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(socket)
	for _, limit := range []int64{0, 9, 90} {
		err := unix.SetsockoptTimeval(socket, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: limit})
		anew, long := fails(os.Getpid(), unix.SYS_READ, []string{"0", strconv.Itoa(socket)})
		if err != nil || anew != (limit > 0) || long != (limit > 60) {
			t.Errorf("a socket with %d seconds: %v, %v, %v", limit, anew, long, err)
		}
	}
	if err := unix.FcntlFlock(file.Fd(), unix.F_OFD_GETLK, &lock); err != nil || lock.Type != unix.F_WRLCK {
		t.Errorf("the lock is %d, %v", lock.Type, err)
	}
}
