// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package reaper has the memory of killed processes freed by several threads.
//
// The kernel frees a process's memory on one thread, its last, before anybody is told that it has
// ended. process_mrelease(2) lets others help (Linux 5.15): they walk the mappings in the same order,
// and each takes the next pages while another frees the last. It is refused before the kill, and there
// is nothing left to do some microseconds after it. So Help's threads ask again and again from before
// the kill on.
// Shared memory it leaves out: that is kept beyond the end, and freed then (shared.go).
package reaper

import (
	"context"
	"runtime"
	"sync/atomic"

	"github.com/containerd/log"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/host"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// least is the private memory of a process, in bytes, that is worth the help: the kernel frees so much
// in 7 to 10 ms.
const least = 128 << 20

// most bounds the threads of one process: they wait for each other where they meet. One halves the time
// on two cores.
const most = 4

// Help begins to help with the end of processes that are about to be killed. over is called once, when
// they have ended or the kill has failed. Without help they end as well; the log says how much there was.
func Help(ctx context.Context, pids func() ([]int, error)) (over func()) {
	begun := begin(pids)
	return func() {
		if helped, of := begun(); of > 0 {
			log.G(ctx).WithField("threads", helped).Infof("helped to free the memory of %d processes", of)
		}
	}
}

// begin is Help. over returns how many threads have helped how many processes.
func begin(pids func() ([]int, error)) (over func() (helped, of int)) {
	var fds []int
	all, _ := pids()
	for _, pid := range all {
		if status, err := proc.StatusOf(pid); err == nil && status.Bytes("RssAnon") >= least {
			if fd, err := unix.PidfdOpen(pid, 0); err == nil {
				fds = append(fds, fd)
			}
		}
	}
	let := hold(all)
	if len(fds) == 0 {
		return func() (int, int) { let(); return 0, 0 }
	}
	back := host.AllProcessors()
	var stop atomic.Bool
	var helped atomic.Int64
	left := make(chan struct{})
	threads := min(most, max(runtime.NumCPU()-1, 1))
	for _, fd := range fds {
		for range threads {
			go func() {
				if help(fd, &stop) {
					helped.Add(1)
				}
				left <- struct{}{}
			}()
		}
	}
	return func() (int, int) {
		let()
		stop.Store(true)
		for range len(fds) * threads {
			<-left
		}
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
		back()
		return int(helped.Load()), len(fds)
	}
}

// help frees memory of a process as soon as the kernel lets it, and reports whether it did.
func help(pidfd int, stop *atomic.Bool) bool {
	for !stop.Load() {
		_, _, err := unix.Syscall(unix.SYS_PROCESS_MRELEASE, uintptr(pidfd), 0, 0)
		if err != unix.EINVAL { // it is not killed yet
			return err == 0
		}
		runtime.Gosched()
	}
	return false
}
