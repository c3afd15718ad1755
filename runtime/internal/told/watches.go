// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package told

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"unsafe"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

const (
	sameWatch  = 7 // KCMP_EPOLL_TFD
	maxWatches = 100_000
	maxLine    = 256 // six numbers
	maxErrors  = 16
	// mostComparisons take a second or so.
	mostComparisons = 1 << 20
	// mostSteps are those of the kernel, which goes through all watches of an epoll to find one: 100,000 in one
	// epoll take some ten seconds.
	mostSteps = 1 << 34
)

// watch is a file that an epoll watches, and that the epoll's process has not open.
type watch struct {
	pid, epoll int // the process and its epoll, as the container counts
	other, fd  int // who has the file, and its descriptor there
	events     uint32
	data       uint64
}

// slot is the kernel's kcmp_epoll_slot: the watch of that number of those that have a descriptor's number.
type slot struct{ epoll, fd, n uint32 }

// watches finds those of a process's epolls, and notes what CRIU is told not to see: the process as this
// one counts, the epoll, and the watch's line in its file of /proc.
func (t *Told) watches(number, pid int, epolls map[int]string, inside map[int]int) error {
	for _, copies := range proc.Copies(pid, epolls) {
		epoll := copies[0]
		// A comparison takes a thousand steps.
		if t.steps += len(inside) << 10; t.steps <= mostSteps && t.sharedBefore(pid, epoll, inside) {
			continue
		}
		rows, err := proc.FileInfo(pid, epoll, "tfd:")
		if err != nil {
			return err
		}
		if t.steps += len(rows) * len(rows); t.steps > mostSteps {
			return fmt.Errorf("process %s has %d files watched by an epoll, which takes the kernel too long to tell: have it spread them over several: %w", proc.Describe(pid), len(rows), errdefs.ErrFailedPrecondition)
		}
		count, hides := make(map[uint32]uint32), make(map[uint32]bool)
		line := 0
		hide := func(w watch, s slot) {
			t.watched, hides[s.fd] = append(t.watched, w), true
			for _, fd := range copies { // CRIU reads one of them
				t.hidden = append(t.hidden, fmt.Sprintf("%d/%d/%d", pid, fd, line))
			}
		}
		for _, row := range rows {
			w, s := watch{pid: number, epoll: epoll}, slot{epoll: uint32(epoll)}
			if n, _ := fmt.Sscanf(row, " %d events: %x data: %x", &s.fd, &w.events, &w.data); n != 3 {
				continue
			}
			line++
			s.n = count[s.fd]
			count[s.fd]++
			has, err := t.findFile(pid, pid, s, int(s.fd))
			if err != nil {
				return err
			}
			if has >= 0 && hides[s.fd] { // CRIU counts watches with one number, as the kernel does
				w.other, w.fd = number, has
				hide(w, s)
			}
			if has >= 0 {
				continue
			}
			for number, other := range inside {
				if other == pid {
					continue
				}
				if has, err = t.findFile(other, pid, s, -1); err != nil {
					return err
				}
				if has >= 0 && len(t.hidden) > maxVariable/4 { // more than CRIU can be told of
					return tooMany()
				}
				if has >= 0 {
					w.other, w.fd = number, has
					hide(w, s)
					break
				}
			}
		}
	}
	return nil
}

// sharedBefore reports whether a process that CRIU dumps before has the same epoll, as after a fork. CRIU then
// looks at the files of that one: a watch that is restored by both would be there twice.
func (t *Told) sharedBefore(pid, epoll int, inside map[int]int) bool {
	for _, other := range inside {
		if t.ranks[other] < t.ranks[pid] && proc.SameFile(pid, other, epoll) {
			return true
		}
	}
	return false
}

// rank notes the order in which CRIU dumps a process and those below it: each before its children.
func (t *Told) rank(pid int) {
	if _, seen := t.ranks[pid]; seen {
		return
	}
	t.ranks[pid] = len(t.ranks)
	for _, child := range proc.Children(pid) {
		t.rank(child)
	}
}

// findFile returns a descriptor of a process that is the file which another's epoll watches, -1 for none.
// As a rule it is the one whose number the watch has, which is tried first. Where that is not so, each file
// may have to be compared with each watch: a container has most comparisons of them.
func (t *Told) findFile(pid, owner int, s slot, first int) (int, error) {
	is := func(fd int) bool {
		r, _, errno := unix.Syscall6(unix.SYS_KCMP, uintptr(pid), uintptr(owner), sameWatch, uintptr(fd), uintptr(unsafe.Pointer(&s)), 0)
		return errno == 0 && r == 0 || errno == unix.ENOSYS // CRIU compares numbers alone then
	}
	if first >= 0 && is(first) {
		return first, nil
	}
	files, err := proc.OpenFiles(pid, "")
	if err != nil && !proc.Ended(err) {
		return -1, err
	}
	if t.compared += 1 + len(files); t.compared > mostComparisons { // a process without files takes time, too
		return -1, tooMany()
	}
	for fd := range files {
		if is(fd) {
			return fd, nil
		}
	}
	return -1, nil
}

func tooMany() error {
	return fmt.Errorf("too many files are watched by epolls of processes that have closed them: close the epolls before a checkpoint: %w", errdefs.ErrFailedPrecondition)
}

func saveWatches(dir string, all []watch) error {
	var text strings.Builder
	for _, w := range all {
		fmt.Fprintf(&text, "%d %d %d %d %d %d\n", w.pid, w.epoll, w.other, w.fd, w.events, w.data)
	}
	if text.Len() == 0 {
		return nil
	}
	return os.WriteFile(filepath.Join(dir, image.WatchesName), []byte(text.String()), 0o600)
}

// Watches are what a dump has noted.
type Watches []watch

// ReadWatches reads the file of a dump, if there is one.
func ReadWatches(dumped *image.Set) (Watches, error) {
	return image.ReadText(dumped, image.WatchesName, parse)
}

func parse(r io.Reader) (all Watches, err error) {
	err = image.Lines(r, image.WatchesName, maxLine, func(line string) bool {
		var w watch
		if _, err := fmt.Sscanf(line, "%d %d %d %d %d %d", &w.pid, &w.epoll, &w.other, &w.fd, &w.events, &w.data); err != nil || w.epoll < 0 || w.fd < 0 || len(all) == maxWatches {
			return false
		}
		all = append(all, w)
		return true
	})
	return all, err
}

// Restore has the epolls of restored processes, which stand still, watch the files again. The watch of a
// file is kept as long as somebody has it open, by whichever number it was added. inside are the
// container's processes, see proc.Inside.
func (all Watches) Restore(inside map[int]int) error {
	var failed []error
	for _, w := range all {
		if err := w.restore(inside); err != nil && len(failed) < maxErrors {
			failed = append(failed, fmt.Errorf("an epoll (file %d of process %d) does not watch file %d of process %d: %w", w.epoll, w.pid, w.fd, w.other, err))
		}
	}
	return errors.Join(failed...)
}

func (w watch) restore(inside map[int]int) error {
	epoll, err := proc.CopyOf(inside[w.pid], w.epoll)
	if err != nil {
		return err
	}
	defer unix.Close(epoll)
	file, err := proc.CopyOf(inside[w.other], w.fd)
	if err != nil {
		return err
	}
	defer unix.Close(file)
	event := unix.EpollEvent{Events: w.events, Fd: int32(uint32(w.data)), Pad: int32(uint32(w.data >> 32))}
	return unix.EpollCtl(epoll, unix.EPOLL_CTL_ADD, file, &event)
}
