// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package openfiles

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	ipcshm "github.com/checkpoint-restore/go-criu/v8/crit/images/ipc-shm"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/criu/held"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// removed is SHM_DEST of linux/shm.h.
const removed = 0o1000

// Segments are those of System V shared memory that were removed while processes have them attached. CRIU
// makes segments that stay when the last process has ended.
type Segments []uint32

// ReadSegments returns those of a dump.
func ReadSegments(dumped *image.Set) (all Segments, err error) {
	err = image.EachOf(dumped, "ipcns-shm-*.img", func(m *ipcshm.IpcShmEntry) error {
		if m.GetDesc().GetMode()&removed != 0 {
			all = append(all, m.GetDesc().GetId())
		}
		return nil
	})
	return all, err
}

// Restore has a process that may do so remove each of them again. The error names those that stay; init is the
// container's first process.
func (all Segments) Restore(init int, list func() ([]int, error), gate held.Gate) error {
	if len(all) == 0 {
		return nil
	}
	inside, err := proc.Inside(list, init)
	if err != nil {
		return err
	}
	pids := slices.Sorted(maps.Values(inside))
	processes := held.At(gate)
	var stay []error
	for _, id := range all {
		var err error = unix.ESRCH
		for i, pid := range pids {
			if err = processes.Call(pid, unix.SYS_SHMCTL, uint64(id), unix.IPC_RMID, 0); err == nil {
				pids[0], pids[i] = pid, pids[0] // it may remove the next one as well
				break
			}
		}
		if err != nil {
			stay = append(stay, fmt.Errorf("segment %d of System V shared memory stays when no process has it: %w", id, err))
		}
	}
	return errors.Join(stay...)
}
