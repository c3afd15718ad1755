// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package openfiles

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	criucore "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	extfile "github.com/checkpoint-restore/go-criu/v8/crit/images/ext-file"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

const filesImage = "files.img"

// saveRemade has a dump make files of processes anew by gpuckpt's plugin: eventfds that are semaphores, or count
// further than 32 bits, which CRIU cuts off, and timers with a time of the day, which CRIU has come later by as long
// as the container is down. inside are the processes, by their own count.
func saveRemade(dir string, dumped *image.Set, inside map[int]int) error {
	ids := make(map[uint32]string)
	for number, pid := range inside {
		fds, err := remade(pid)
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
		if ids[m.GetId()] != "" && (m.GetType() == fdinfo.FdTypes_EVENTFD || m.GetType() == fdinfo.FdTypes_TIMERFD) {
			m.Type = fdinfo.FdTypes_EXT.Enum()
		}
		return nil
	})
	if err != nil {
		return err
	}
	var lines strings.Builder
	err = image.EditOf(dumped, filesImage, func(f *fdinfo.FileEntry) error {
		e, t := f.GetEfd(), f.GetTfd()
		if e == nil && t == nil || ids[f.GetId()] == "" {
			return nil
		}
		words := ids[f.GetId()]
		if e != nil {
			words = fmt.Sprint(words, " ", e.GetCounter())
		}
		fmt.Fprintf(&lines, "%d\t%d\t%s\n", f.GetId(), e.GetFlags()|t.GetFlags(), words) // of one of them
		f.Type, f.Ext = fdinfo.FdTypes_EXT.Enum(), &extfile.ExtFileEntry{Id: f.Id, Fown: cmp.Or(e.GetFown(), t.GetFown())}
		f.Efd, f.Tfd = nil, nil
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

// remade returns the descriptors of a process that are such files, by the plugin's words.
func remade(pid int) (fds map[int]string, err error) {
	const timer = "anon_inode:[timerfd]"
	files, err := proc.OpenFiles(pid, "anon_inode:[eventfd]", timer)
	if err != nil && !proc.Ended(err) {
		return nil, err
	}
	// The kernel does not describe how a timer goes on that has come, and repeats, before it is asked what is left.
	err = proc.EachCopy(pid, files, func(_, file int) (keep bool) {
		_ = unix.TimerfdGettime(file, new(unix.ItimerSpec)) // or it is an eventfd
		return false
	})
	if err != nil && !proc.Ended(err) {
		return nil, err
	}
	fds = make(map[int]string)
	for fd, link := range files {
		info, err := proc.Head(fmt.Sprintf("/proc/%d/fdinfo/%d", pid, fd))
		if err != nil && !proc.Ended(err) {
			return nil, err
		}
		_, count, _ := strings.Cut(string(info), "\neventfd-count:")
		count, _, _ = strings.Cut(count, "\n")
		switch {
		case link == timer:
			if word := dayTimer(string(info), time.Now()); word != "" {
				fds[fd] = word
			}
		case strings.Contains(string(info), "\neventfd-semaphore: 1\n"):
			fds[fd] = "semaphore"
		case len(strings.TrimSpace(count)) > 8: // in hexadecimal
			fds[fd] = "counter"
		}
	}
	return fds, nil
}

// dayTimer returns the plugin's words for a timer with a time of the day, which is to come, by the kernel's
// description of it: how it is set, when it comes, how often, and how often it has come.
func dayTimer(info string, now time.Time) string {
	_, info, _ = strings.Cut(info, "\nclockid: ")
	var clock, ticks, flags, sec, nsec, isec, insec int64
	n, _ := fmt.Sscanf(info, "%d\nticks: %d\nsettime flags: %o\nit_value: (%d, %d)\nit_interval: (%d, %d)", &clock, &ticks, &flags, &sec, &nsec, &isec, &insec)
	if n != 7 || clock != unix.CLOCK_REALTIME || flags&unix.TFD_TIMER_ABSTIME == 0 || sec == 0 && nsec == 0 {
		return ""
	}
	comes := now.Add(time.Duration(nsec)).Unix() + sec // a Duration has 292 years
	return fmt.Sprintf("timer %d %d %d %d %d %d", flags, comes, now.Add(time.Duration(nsec)).Nanosecond(), isec, insec, ticks)
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
