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

// saveEventfds has a dump make eventfds of processes anew by gpuckpt's plugin, if they are semaphores, or count
// further than 32 bits, which CRIU cuts off. inside are the processes, by their own count.
func saveEventfds(dir string, dumped *image.Set, inside map[int]int) error {
	ids := make(map[uint32]string)
	for number, pid := range inside {
		fds, err := eventfds(pid)
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
	// All descriptors of them are of the type that CRIU leaves to plugins.
	err := image.EditOf(dumped, "fdinfo-*.img", func(m *fdinfo.FdinfoEntry) error {
		if ids[m.GetId()] != "" && m.GetType() == fdinfo.FdTypes_EVENTFD {
			m.Type = fdinfo.FdTypes_EXT.Enum()
		}
		return nil
	})
	if err != nil {
		return err
	}
	var lines strings.Builder
	err = image.EditOf(dumped, filesImage, func(f *fdinfo.FileEntry) error {
		if f.GetEfd() == nil || ids[f.GetId()] == "" {
			return nil
		}
		fmt.Fprintf(&lines, "%d\t%d\t%s %d\n", f.GetId(), f.GetEfd().GetFlags(), ids[f.GetId()], f.GetEfd().GetCounter())
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

// eventfds returns the descriptors of a process that are semaphores, or far counters, by the plugin's words.
func eventfds(pid int) (fds map[int]string, err error) {
	files, err := proc.OpenFiles(pid, "anon_inode:[eventfd]")
	if err != nil && !proc.Ended(err) {
		return nil, err
	}
	fds = make(map[int]string)
	for fd := range files {
		info, err := proc.Head(fmt.Sprintf("/proc/%d/fdinfo/%d", pid, fd))
		if err != nil && !proc.Ended(err) {
			return nil, err
		}
		_, count, _ := strings.Cut(string(info), "\neventfd-count:")
		count, _, _ = strings.Cut(count, "\n")
		switch {
		case strings.Contains(string(info), "\neventfd-semaphore: 1\n"):
			fds[fd] = "semaphore"
		case len(strings.TrimSpace(count)) > 8: // in hexadecimal
			fds[fd] = "counter"
		}
	}
	return fds, nil
}

// filesOf adds the ids that a dump has for files of a process.
func filesOf(dumped *image.Set, number int, fds map[int]string, ids map[uint32]string) error {
	table := uint32(0)
	err := image.EachOf(dumped, fmt.Sprintf("ids-%d.img", number), func(m *criucore.TaskKobjIdsEntry) error {
		table = m.GetFilesId()
		return nil
	})
	if err != nil {
		return err
	}
	return image.EachOf(dumped, fmt.Sprintf("fdinfo-%d.img", table), func(m *fdinfo.FdinfoEntry) error {
		if word := fds[int(m.GetFd())]; word != "" {
			ids[m.GetId()] = word
		}
		return nil
	})
}
