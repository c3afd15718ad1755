// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package openfiles

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"

	ipcmsg "github.com/checkpoint-restore/go-criu/v8/crit/images/ipc-msg"
	ipcshm "github.com/checkpoint-restore/go-criu/v8/crit/images/ipc-shm"
	ipcvar "github.com/checkpoint-restore/go-criu/v8/crit/images/ipc-var"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/criu/held"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
)

// removed is SHM_DEST of linux/shm.h.
const removed = 0o1000

// The kernel's msqid64_ds, and where in it msg_qbytes is.
const (
	queueBytes = 120
	queueRoom  = 88
)

// SystemV is what CRIU leaves out of System V IPC: that a segment of shared memory was removed while processes
// have it attached, and stays when the last one has ended; and that a queue takes less than others.
type SystemV struct {
	removed []uint32
	rooms   map[uint32]uint32 // what queues take, by their ids
}

// ReadSystemV returns that of a dump.
func ReadSystemV(dumped *image.Set) (all SystemV, err error) {
	err = image.EachOf(dumped, "ipcns-shm-*.img", func(m *ipcshm.IpcShmEntry) error {
		if m.GetDesc().GetMode()&removed != 0 {
			all.removed = append(all.removed, m.GetDesc().GetId())
		}
		return nil
	})
	most := uint32(0)
	verr := image.EachOf(dumped, "ipcns-var-*.img", func(m *ipcvar.IpcVarEntry) error { most = m.GetMsgCtlmnb(); return nil })
	all.rooms = make(map[uint32]uint32)
	merr := image.EachOf(dumped, "ipcns-msg-*.img", func(m *ipcmsg.IpcMsgEntry) error {
		if m.GetQbytes() < most {
			all.rooms[m.GetDesc().GetId()] = m.GetQbytes()
		}
		return nil
	})
	return all, errors.Join(err, verr, merr)
}

// Restore removes each segment again and bounds each queue, by a process that may. The error names those of which
// it did not; inside are the container's processes, see proc.Inside.
func (all SystemV) Restore(inside map[int]int, gate held.Gate) error {
	if len(all.removed)+len(all.rooms) == 0 {
		return nil
	}
	pids := slices.Sorted(maps.Values(inside))
	processes := held.At(gate)
	byOne := func(do func(pid int) error) (err error) {
		err = unix.ESRCH
		for i, pid := range pids {
			if err = do(pid); err == nil {
				pids[0], pids[i] = pid, pids[0] // it may do the next one as well
				break
			}
		}
		return err
	}
	var failed []error
	for _, id := range all.removed {
		if len(failed) == maxErrors { // there may be very many, and as many processes
			break
		}
		err := byOne(func(pid int) error { return processes.Call(pid, unix.SYS_SHMCTL, uint64(id), unix.IPC_RMID, 0) })
		if err != nil {
			failed = append(failed, fmt.Errorf("segment %d of System V shared memory stays when no process has it: %w", id, err))
		}
	}
	for id, room := range all.rooms {
		if len(failed) == maxErrors {
			break
		}
		err := byOne(func(pid int) error {
			return processes.Lend(pid, make([]byte, queueBytes), func(at uint64) error { return bound(processes, pid, id, room, at) })
		})
		if err != nil {
			failed = append(failed, fmt.Errorf("message queue %d of System V takes more than %d bytes: %w", id, room, err))
		}
	}
	return errors.Join(failed...)
}

// bound has a process bound a queue; at is where the process has memory for the kernel's structure.
func bound(processes *held.Processes, pid int, id, room uint32, at uint64) error {
	const stat, set = 2, 1 // IPC_STAT and IPC_SET
	if err := processes.Call(pid, unix.SYS_MSGCTL, uint64(id), stat, at); err != nil {
		return err
	}
	word := binary.NativeEndian.AppendUint64(nil, uint64(room))
	_, err := unix.ProcessVMWritev(pid, []unix.Iovec{{Base: &word[0], Len: 8}}, []unix.RemoteIovec{{Base: uintptr(at) + queueRoom, Len: 8}}, 0)
	if err != nil {
		return err
	}
	return processes.Call(pid, unix.SYS_MSGCTL, uint64(id), set, at)
}
