// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package openfiles

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	criucore "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	extfile "github.com/checkpoint-restore/go-criu/v8/crit/images/ext-file"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"

	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

const filesImage = "files.img"

// saveSemaphores has a dump make eventfds of processes anew by gpuckpt's plugin, if they are semaphores.
// inside are the processes, by their own count.
func saveSemaphores(dir string, dumped *image.Set, inside map[int]int) error {
	ids := make(map[uint32]bool)
	for number, pid := range inside {
		fds, err := semaphores(pid)
		if err == nil && len(fds) > 0 {
			err = filesOf(dumped, number, fds, ids)
		}
		if err != nil {
			return err
		}
	}
	if len(ids) == 0 {
		return nil
	}
	if err := retype(dumped, ids); err != nil {
		return err
	}
	var lines strings.Builder
	err := dumped.Edit(filesImage, func(e *image.Entry) error {
		f, ok := e.Message.(*fdinfo.FileEntry)
		if !ok || f.GetEfd() == nil || !ids[f.GetId()] {
			return nil
		}
		fmt.Fprintf(&lines, "%d\t%d\tsemaphore %d\n", f.GetId(), f.GetEfd().GetFlags(), f.GetEfd().GetCounter())
		f.Type, f.Ext = fdinfo.FdTypes_EXT.Enum(), &extfile.ExtFileEntry{Id: f.Id, Fown: f.GetEfd().GetFown()}
		f.Efd = nil
		return nil
	})
	if err != nil {
		return err
	}
	to, err := os.OpenFile(filepath.Join(dir, image.FilesName), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer to.Close()
	_, err = to.WriteString(lines.String())
	return err
}

// retype has all descriptors of files be of the type that CRIU leaves to plugins.
func retype(dumped *image.Set, ids map[uint32]bool) error {
	names, err := dumped.Names()
	if err != nil {
		return err
	}
	for _, name := range names {
		if !strings.HasPrefix(name, "fdinfo-") {
			continue
		}
		err := dumped.Edit(name, func(e *image.Entry) error {
			if m, ok := e.Message.(*fdinfo.FdinfoEntry); ok && ids[m.GetId()] && m.GetType() == fdinfo.FdTypes_EVENTFD {
				m.Type = fdinfo.FdTypes_EXT.Enum()
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// semaphores returns the descriptors of a process that are semaphores.
func semaphores(pid int) (fds map[int]bool, err error) {
	files, err := proc.OpenFiles(pid, "anon_inode:[eventfd]")
	if err != nil && !proc.Ended(err) {
		return nil, err
	}
	fds = make(map[int]bool)
	for fd := range files {
		info, err := proc.Head(fmt.Sprintf("/proc/%d/fdinfo/%d", pid, fd))
		if err != nil && !proc.Ended(err) {
			return nil, err
		}
		if strings.Contains(string(info), "\neventfd-semaphore: 1\n") {
			fds[fd] = true
		}
	}
	return fds, nil
}

// filesOf adds the ids that a dump has for files of a process.
func filesOf(dumped *image.Set, number int, fds map[int]bool, ids map[uint32]bool) error {
	table := uint32(0)
	err := dumped.Each(fmt.Sprintf("ids-%d.img", number), func(e *image.Entry) error {
		if m, ok := e.Message.(*criucore.TaskKobjIdsEntry); ok {
			table = m.GetFilesId()
		}
		return nil
	})
	if err != nil {
		return err
	}
	return dumped.Each(fmt.Sprintf("fdinfo-%d.img", table), func(e *image.Entry) error {
		if m, ok := e.Message.(*fdinfo.FdinfoEntry); ok && fds[int(m.GetFd())] {
			ids[m.GetId()] = true
		}
		return nil
	})
}
