// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package openfiles

import (
	"fmt"
	"strings"

	ipcshm "github.com/checkpoint-restore/go-criu/v8/crit/images/ipc-shm"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/criu/held"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
)

// removed is SHM_DEST of linux/shm.h.
const removed = 0o1000

// Segments are those of System V shared memory that were removed while processes have them attached. CRIU
// makes segments that stay when the last process has ended.
type Segments []uint32

// ReadSegments returns those of a dump.
func ReadSegments(dumped *image.Set) (all Segments, err error) {
	names, err := dumped.Names()
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		if !strings.HasPrefix(name, "ipcns-shm-") {
			continue
		}
		err := dumped.Each(name, func(e *image.Entry) error {
			if m, ok := e.Message.(*ipcshm.IpcShmEntry); ok && m.GetDesc().GetMode()&removed != 0 {
				all = append(all, m.GetDesc().GetId())
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return all, nil
}

// Restore has a process that may do so remove each of them again.
func (all Segments) Restore(list func() ([]int, error), gate held.Gate) error {
	if len(all) == 0 {
		return nil
	}
	pids, err := list()
	if err != nil {
		return err
	}
	processes := held.At(gate)
	for _, id := range all {
		var err error = unix.ESRCH
		for _, pid := range pids {
			if err = processes.Call(pid, unix.SYS_SHMCTL, uint64(id), unix.IPC_RMID, 0); err == nil {
				break
			}
		}
		if err != nil {
			return fmt.Errorf("segment %d of System V shared memory stays when no process has it: %w", id, err)
		}
	}
	return nil
}
