// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"slices"
	"unsafe"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// Why connections are held
//
// CRIU keeps packets away while it dumps, and lets them in when it leaves the processes. A container that ends with
// its checkpoint has them until that is complete. The kernel would acknowledge what comes meanwhile, and no restore
// would have it: nor would the other end send it again. A filter that takes nothing has the other end wait.

// hold is the filter of a connection that is held. The number in it is of no effect, and says whose the filter is.
var hold = [2]unix.SockFilter{{Code: unix.BPF_LD | unix.BPF_IMM, K: 0x67706b74}, {Code: unix.BPF_RET | unix.BPF_K}}

// HoldConnections has the TCP connections of frozen processes take nothing. One that has a filter of its own is left
// as it is.
func HoldConnections(pids []int) {
	eachConnection(pids, func(s int) {
		if _, n := filterOf(s); n == 0 {
			_ = unix.SetsockoptSockFprog(s, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(hold)), Filter: &hold[0]})
		}
	})
}

// ReleaseConnections undoes HoldConnections. It also ends TCP_REPAIR, in which a CRIU that was killed has left
// connections, and which has them send nothing.
func ReleaseConnections(pids []int) {
	eachConnection(pids, func(s int) {
		if filter, _ := filterOf(s); filter == hold {
			_ = unix.SetsockoptInt(s, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0)
		}
		if repair, err := unix.GetsockoptInt(s, unix.IPPROTO_TCP, unix.TCP_REPAIR); err == nil && repair == unix.TCP_REPAIR_ON {
			_ = unix.SetsockoptInt(s, unix.IPPROTO_TCP, unix.TCP_REPAIR, unix.TCP_REPAIR_OFF)
		}
	})
}

// RestoreReleased has a restore of a dump hold no connection.
func RestoreReleased(dumped *image.Set) error {
	held := make([]uint64, 0, len(hold))
	for _, f := range hold {
		held = append(held, uint64(f.Code)<<48|uint64(f.K)) // as CRIU's encode_filter
	}
	return image.EditOf(dumped, "files.img", func(f *fdinfo.FileEntry) error {
		if slices.Equal(f.GetIsk().GetOpts().GetSoFilter(), held) {
			f.Isk.Opts.SoFilter = nil
		}
		return nil
	})
}

// eachConnection calls do with a copy of each socket of the processes that is a TCP connection.
func eachConnection(pids []int, do func(s int)) {
	for _, pid := range pids {
		_ = proc.EachSocket(pid, func(_, s, protocol int) bool { // on an error it has ended
			if protocol != unix.IPPROTO_TCP {
				return false
			}
			if is, err := unix.GetsockoptTCPInfo(s, unix.IPPROTO_TCP, unix.TCP_INFO); err == nil && is.State != unix.BPF_TCP_CLOSE && is.State != unix.BPF_TCP_LISTEN {
				do(s)
			}
			return false
		})
	}
}

// filterOf returns the filter of a socket, if it is as long as hold or shorter, and its length: 0 for none, -1 for
// one that is longer or cannot be read.
func filterOf(s int) (filter [2]unix.SockFilter, n int) {
	size := uint32(len(filter)) // in instructions, not bytes
	if _, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(s), unix.SOL_SOCKET, unix.SO_GET_FILTER,
		uintptr(unsafe.Pointer(&filter)), uintptr(unsafe.Pointer(&size)), 0); errno != 0 { //nolint:gosec // the kernel writes there
		return filter, -1
	}
	return filter, int(size)
}
