// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package told

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

// saveRemade has a dump make files of processes anew by gpuckpt's plugin: eventfds that are semaphores, or count
// further than 32 bits, which CRIU cuts off, and timers with a time of the day, which CRIU has come later by as long
// as the container is down.
func (t *Told) saveRemade(dir string, dumped *image.Set) error {
	ids := make(map[uint32]string)
	for number, fds := range t.remade {
		if err := filesOf(dumped, number, fds, ids); err != nil {
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
	err = image.EditOf(dumped, "files.img", func(f *fdinfo.FileEntry) error {
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

// remadeOf notes such files among those of a process, by the plugin's words. countTimers has asked the timers.
func (t *Told) remadeOf(number, pid int, files map[int]string) error {
	fds := make(map[int]string)
	for fd, link := range files {
		if link != timerLink && link != eventLink {
			continue
		}
		info, err := proc.Head(fmt.Sprintf("/proc/%d/fdinfo/%d", pid, fd))
		if err != nil && !proc.Ended(err) {
			return err
		}
		_, count, _ := strings.Cut(string(info), "\neventfd-count:")
		count, _, _ = strings.Cut(count, "\n")
		switch {
		case link == timerLink:
			if word := dayTimer(string(info), time.Now()); word != "" {
				fds[fd] = word
			}
		case strings.Contains(string(info), "\neventfd-semaphore: 1\n"):
			fds[fd] = "semaphore"
		case len(strings.TrimSpace(count)) > 8: // in hexadecimal
			fds[fd] = "counter"
		}
	}
	if len(fds) > 0 {
		t.remade[number] = fds
	}
	return nil
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
