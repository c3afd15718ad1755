// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package names

import (
	"fmt"
	"strings"

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
	all, err := dumped.Names()
	if err != nil {
		return err
	}
	segments := make(map[uint64]bool)
	for _, name := range all {
		if strings.HasPrefix(name, "ipcns-shm-") {
			err := dumped.Each(name, func(e *image.Entry) error {
				if m, ok := e.Message.(*ipcshm.IpcShmEntry); ok {
					segments[uint64(m.GetDesc().GetId())] = true
				}
				return nil
			})
			if err != nil {
				return err
			}
		}
	}
	if len(segments) == 0 {
		return nil
	}
	twice := func(number uint64) error {
		if !segments[number] {
			return nil
		}
		return fmt.Errorf("a System V segment and other shared memory have the number %d, by which CRIU knows the content of both: have the program make one of them anew: %w",
			number, errdefs.ErrFailedPrecondition)
	}
	for _, name := range all {
		if name != "memfd.img" && !strings.HasPrefix(name, "mm-") {
			continue
		}
		err := dumped.Each(name, func(e *image.Entry) error {
			switch m := e.Message.(type) {
			case *memfd.MemfdInodeEntry:
				return twice(uint64(m.GetShmid()))
			case *mm.MmEntry:
				for _, v := range m.GetVmas() {
					if v.GetStatus()&(anonymousShared|systemV) == anonymousShared {
						if err := twice(v.GetShmid()); err != nil {
							return err
						}
					}
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}
