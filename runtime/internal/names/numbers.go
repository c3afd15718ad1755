// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package names

import (
	"fmt"

	ipcshm "github.com/checkpoint-restore/go-criu/v8/crit/images/ipc-shm"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/memfd"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mm"
	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/internal/criu/image"
)

// The kinds of mappings, of CRIU's image.h.
const (
	anonymousShared = 1 << 8
	systemV         = 1 << 10
)

// Numbers refuses a dump in which a System V segment and other shared memory have one number: CRIU names
// the file with the content of each by it, the segment's id and the other's inode, and keeps one.
func Numbers(dumped *image.Set) error {
	segments := make(map[uint64]bool)
	err := image.EachOf(dumped, "ipcns-shm-*.img", func(m *ipcshm.IpcShmEntry) error {
		segments[uint64(m.GetDesc().GetId())] = true
		return nil
	})
	if err != nil || len(segments) == 0 {
		return err
	}
	twice := func(number uint64) error {
		if !segments[number] {
			return nil
		}
		return fmt.Errorf("a System V segment and other shared memory have the number %d, by which CRIU knows the content of both: have the program make one of them anew: %w",
			number, errdefs.ErrFailedPrecondition)
	}
	err = image.EachOf(dumped, "memfd*.img", func(m *memfd.MemfdInodeEntry) error { return twice(uint64(m.GetShmid())) })
	if err != nil {
		return err
	}
	return image.EachOf(dumped, "mm-*.img", func(m *mm.MmEntry) error {
		for _, v := range m.GetVmas() {
			if v.GetStatus()&(anonymousShared|systemV) == anonymousShared {
				if err := twice(v.GetShmid()); err != nil {
					return err
				}
			}
		}
		return nil
	})
}
