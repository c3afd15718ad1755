// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package told has CRIU take for something else, in a dump, what it refuses:
//
//   - a Unix socket that is connected to a program outside of the container, for one whose other end has
//     closed, as a TCP connection to such a program comes back;
//   - a timer that signals the first thread of its process, which Complete then puts right in the images,
//     and one whose thread has ended, for a timer that signals nobody. One of a thread's processor time counts
//     that of the thread which it signals;
//   - an epoll that watches a file which its process has closed and another one has open, for one that does
//     not. A restore adds the watch again;
//   - a thread in poll(2), asleep or at a futex with a time, for one that calls it again, as on ARM, where the
//     kernel has it so. CRIU has the call fail with EINTR, which a program that gets no signal need not expect.
//     So does the kernel itself with epoll_wait(2), or with recv(2) of a socket with SO_RCVTIMEO.
//     Complete does that for a restore, the library for a program that is left running;
//   - an eventfd or a timer that CRIU would make another of, for a file of gpuckpt's plugin, which Complete then has it
//     be in the images;
//   - what waits to be read from a terminal, where it is too much to be written back, for nothing;
//   - a process whose limits the kernel does not tell it, for one whose limits it does: of another user's,
//     where root has no CAP_SYS_RESOURCE.
//
// Look finds them among processes that stand still. A library in CRIU (internal/criu/plugin, told.c) then
// changes what the kernel answers. Nothing is changed in the processes.
package told

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	criucore "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/containerd/errdefs"
	"github.com/containerd/go-runc"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

const (
	byThread = 4 // SIGEV_THREAD_ID
	// The clock of a thread's processor time, as pthread_getcpuclockid has it and without the thread's number,
	// and what the kernel says of that of who has made the timer (CLOCK_THREAD_CPUTIME_ID).
	ofThread, ownTime = 6, 1<<32 - 2
	// The links in /proc of a timer, an eventfd and an epoll.
	timerLink, eventLink, epollLink = "anon_inode:[timerfd]", "anon_inode:[eventfd]", "anon_inode:[eventpoll]"
	// mostOthers bounds the descriptors of the machine's that are looked at, which takes a second or two:
	// other containers may have any number of them.
	mostOthers = 1 << 20
	// maxVariable bounds a variable of CRIU's environment, in bytes: execve(2) takes 128 KiB.
	maxVariable = 100 << 10
)

// Told is what is found.
type Told struct {
	// Closed are the connections to programs outside, "process 7 (nginx) to 812 (syslogd)".
	Closed []string
	inodes []string
	timers []int                  // processes with such timers, as they count themselves
	waits  map[int][]wait         // threads that wait, by their processes, as both count themselves
	remade map[int]map[int]string // files that gpuckpt's plugin makes, by processes as they count themselves

	watched  []watch
	compared int // files with watches
	steps    int // of the kernel's to compare them
	ranks    map[int]int
	hidden   []string // lines of files in /proc, "PID/FD/LINE"
}

// Look looks at the processes of a container; init is the first one.
func Look(init int, pids func() ([]int, error)) (*Told, error) {
	inside, err := proc.Inside(pids, init)
	if err != nil {
		return nil, err
	}
	t := &Told{waits: make(map[int][]wait), remade: make(map[int]map[int]string), ranks: make(map[int]int)}
	t.rank(init)
	ours := make(map[uint64]int)
	for number, pid := range inside {
		text, err := proc.Text(fmt.Sprintf("/proc/%d/timers", pid))
		if err != nil && !proc.Ended(err) {
			return nil, err
		}
		if strings.Contains(string(text), "/tid.") {
			t.timers = append(t.timers, number)
		}
		t.waits[number] = waiting(pid)
		files, err := proc.OpenFiles(pid, timerLink, eventLink, epollLink, "socket:[")
		if err != nil && !proc.Ended(err) {
			return nil, err
		}
		timers, epolls := make(map[int]string), make(map[int]string)
		for fd, link := range files {
			inode, isSocket := proc.SocketInode(link)
			switch {
			case isSocket:
				ours[inode] = pid
			case link == timerLink:
				timers[fd] = link
			case link == epollLink:
				epolls[fd] = link
			}
		}
		if err := cmp.Or(countTimers(pid, timers), t.watches(number, pid, epolls, inside), t.remadeOf(number, pid, files)); err != nil && !proc.Ended(err) {
			return nil, err
		}
	}
	if len(ours) > 0 {
		err = t.outside(init, ours, mostOthers)
	}
	return t, err
}

// countTimers has the kernel count how often the time of each timer (timerfd) has come that repeats and was not
// read since. It does so when it is asked what is left, and tells a reader of fdinfo, such as CRIU, of once, and not how
// the timer goes on.
func countTimers(pid int, timers map[int]string) error {
	return proc.EachCopy(pid, timers, func(_, timer int) (keep bool) {
		_ = unix.TimerfdGettime(timer, new(unix.ItimerSpec)) // which it can
		return false
	})
}

// outside finds those of the container's sockets whose other ends other processes have. An end that
// nobody has is on its way through a socket, and CRIU finds it there. left is how many descriptors and
// processes of the machine are looked at.
func (t *Told) outside(init int, ours map[uint64]int, left int) error {
	peers, err := host.UnixPeers(fmt.Sprintf("/proc/%d/ns/net", init))
	if err != nil {
		return err
	}
	wanted := make(map[uint64][]uint64)
	for inode, peer := range peers {
		if ours[inode] != 0 && ours[peer] == 0 {
			wanted[peer] = append(wanted[peer], inode)
		}
	}
	if len(wanted) == 0 {
		return nil
	}
	others, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return err
	}
	for _, dir := range others {
		pid, _ := strconv.Atoi(filepath.Base(dir))
		files, _ := proc.CountFiles(pid, left) // of one that has ended there are none
		if left -= files + 1; left <= 0 || len(wanted) == 0 {
			break // CRIU refuses what is not found
		}
		held, err := proc.Sockets(pid)
		if err != nil {
			continue // it has ended, or has too many
		}
		for _, peer := range held {
			for _, inode := range wanted[peer] {
				t.inodes = append(t.inodes, strconv.FormatUint(inode, 10))
				t.Closed = append(t.Closed, fmt.Sprintf("process %s to %s", proc.Describe(ours[inode]), proc.Describe(pid)))
			}
			delete(wanted, peer)
		}
	}
	slices.Sort(t.Closed)
	return nil
}

// Environment returns a context with which CRIU is told so.
func (t *Told) Environment(ctx context.Context) (context.Context, error) {
	closed, hidden := strings.Join(t.inodes, " "), strings.Join(t.hidden, " ")
	if max(len(closed), len(hidden)) > maxVariable {
		return ctx, fmt.Errorf("%d Unix sockets are connected to programs outside, and epolls watch %d files that their processes have closed: CRIU can be told of some thousands; close some before a checkpoint: %w",
			len(t.inodes), len(t.hidden), errdefs.ErrFailedPrecondition)
	}
	self, err := os.Executable()
	if err != nil {
		return ctx, err
	}
	library, err := criu.FindPlugin(self)
	if err != nil {
		return ctx, err
	}
	return runc.WithExtraEnv(ctx, "LD_PRELOAD="+library, "GPUCKPT_CLOSED="+closed,
		"GPUCKPT_TIMERS=1", "GPUCKPT_HIDDEN="+hidden, "GPUCKPT_WAITS="+t.running()), nil
}

// Complete puts into the directory of CRIU's images what CRIU was not told.
func (t *Told) Complete(dir string, dumped *image.Set) error {
	for _, number := range t.timers {
		err := image.EditOf(dumped, fmt.Sprintf("core-%d.img", number), func(m *criucore.CoreEntry) error {
			for _, timer := range m.GetTc().GetTimers().GetPosix() {
				if timer.GetItSigevNotify() == byThread && timer.NotifyThreadId == nil {
					timer.NotifyThreadId = new(int32(number))
				}
				// CRIU has the first thread make the timer again, whose own time it would count.
				if id := timer.GetNotifyThreadId(); timer.GetClockId() == ownTime && timer.GetItSigevNotify() == byThread {
					timer.ClockId = new(uint32(^id<<3 | ofThread)) //nolint:gosec // below 0, as the kernel has it
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	for process, threads := range t.waits {
		if err := waitOn(dumped, process, threads); err != nil {
			return err
		}
	}
	return cmp.Or(t.saveRemade(dir, dumped), saveWatches(dir, t.watched))
}
