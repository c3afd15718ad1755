// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package reaper

import (
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// Quiet has frozen processes that are about to be killed say nothing to the other ends of their TCP
// connections, as where CRIU ends what it dumps (TCP_REPAIR): a restore opens the connections again.
// over is called once, with whether the processes were killed; if not, the connections are as before.
func Quiet(pids func() ([]int, error)) (over func(killed bool)) {
	return each(pids, unix.IPPROTO_TCP, unix.TCP_REPAIR)
}

// Reusable has the TCP connections of such processes end as ever, but leave their ports to a restore at
// once: for a minute the kernel keeps a port whose socket had no SO_REUSEADDR from everybody.
func Reusable(pids func() ([]int, error)) (over func(killed bool)) {
	return each(pids, unix.SOL_SOCKET, unix.SO_REUSEADDR)
}

// each switches an option on, of the sockets that lack it.
func each(pids func() ([]int, error), level, option int) (over func(killed bool)) {
	var sockets []int
	all, _ := pids()
	for _, pid := range all {
		sockets = append(sockets, switched(pid, level, option)...)
	}
	return func(killed bool) {
		for _, s := range sockets {
			if !killed {
				_ = unix.SetsockoptInt(s, level, option, 0)
			}
			_ = unix.Close(s)
		}
	}
}

// switched returns the TCP sockets of a process that take an option which they lack.
func switched(pid, level, option int) (sockets []int) {
	_ = proc.EachSocket(pid, func(_, s, protocol int) bool { // on an error it has ended
		is, err := unix.GetsockoptInt(s, level, option)
		takes := protocol == unix.IPPROTO_TCP && err == nil && is == 0 && unix.SetsockoptInt(s, level, option, 1) == nil
		if takes {
			sockets = append(sockets, s)
		}
		return takes
	})
	return sockets
}
