// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package adapt

import (
	"fmt"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mnt"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/regfile"
	remap "github.com/checkpoint-restore/go-criu/v8/crit/images/remap-file-path"
	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/criu/tmpfs"
)

// CheckRemoved refuses a dump whose processes run on, with a file that a restore would not find: it
// was removed by the name that it is open by, and has another name. CRIU puts a link beside where
// it was, has no content of it, and removes the link when the dump is done. What is in a tmpfs of
// the container has been saved by then, link and all.
func CheckRemoved(dumped *image.Set) error {
	if !dumped.Has("remap-fpath.img") {
		return nil
	}
	linked := make(map[uint32]bool)
	err := dumped.Each("remap-fpath.img", func(e *image.Entry) error {
		if r, ok := e.Message.(*remap.RemapFilePathEntry); ok && r.GetRemapType() == remap.RemapType_LINKED {
			linked[r.GetOrigId()] = true
		}
		return nil
	})
	if err != nil || len(linked) == 0 {
		return err
	}
	saved := make(map[int32]bool) // mounts whose content is in the dump
	var removed []*regfile.RegFileEntry
	err = each(dumped, func(e *image.Entry) {
		switch m := e.Message.(type) {
		case *mnt.MntEntry:
			outside := m.GetExtMount() || m.GetExtKey() != ""
			if !outside && m.GetFstype() == uint32(mnt.Fstype_TMPFS) || m.GetExtKey() == "/dev/shm" && dumped.Has(tmpfs.ShmImage) {
				saved[int32(m.GetMntId())] = true
			}
		case *fdinfo.FileEntry:
			if r := m.GetReg(); r != nil && linked[r.GetId()] {
				removed = append(removed, r)
			}
		}
	})
	if err != nil {
		return err
	}
	for _, r := range removed {
		if !saved[r.GetMntId()] {
			return fmt.Errorf("%s was removed while it is open, and has another name: a restore would not find it; close the file, or keep it in /dev/shm: %w",
				r.GetName(), errdefs.ErrFailedPrecondition)
		}
	}
	return nil
}
