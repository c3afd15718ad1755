// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/log"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/proc"
)

// How a process that is killed does not take the shim with it
//
// runc waits for CRIU by the socket between them, and CRIU for each thread that it
// traces. Neither wait ends by itself when somebody, the kernel for want of memory,
// say, kills the wrong process:
//
//   - A process that CRIU 4.2 restores, near the end. CRIU waits for what it was to do
//     next, or for one of its threads, which the kernel does not let go before CRIU
//     has taken note of all others (trace/hold.go has more of it). A restore has no
//     alarm.
//   - A process that CRIU dumps, while it has a thread make a call. Only the stopping
//     of the threads, before, has an alarm, of ten seconds (criu --timeout).
//   - CRIU itself, while a child of its own looks at what the kernel can do. The child
//     stands in a stop, and keeps the socket open.

// criuLook is the time between two looks. A test has a shorter one.
var criuLook = 500 * time.Millisecond

// criuLooks is in how many looks in a row a process is seen before it is ended: those
// that CRIU is about to reap are gone by then.
const criuLooks = 4

// dumpLooks is the same for what CRIU waits for in a dump. It may have killed the
// processes itself, as runc asked it to, when all is written.
const dumpLooks = 20

const criuKilled = "CRIU was killed"

// criuWatch ends what runc would wait for in vain.
type criuWatch struct {
	stop, done chan struct{}
	ended      []string // for people, what was found; set when done is closed
}

// watchCRIU watches what becomes of the shim's runc and its CRIU, until end is called.
func watchCRIU(ctx context.Context, restoring bool) *criuWatch {
	w := &criuWatch{stop: make(chan struct{}), done: make(chan struct{})}
	go func() {
		defer close(w.done)
		look := time.NewTicker(criuLook)
		defer look.Stop()
		seen := make(map[int]int)
		for {
			select {
			case <-w.stop:
				return
			case <-look.C:
			}
			stuck := stuckCRIU(os.Getpid(), restoring)
			for pid := range seen {
				if stuck[pid] == "" {
					delete(seen, pid)
				}
			}
			for pid, why := range stuck {
				looks := criuLooks
				if !restoring && why != criuKilled {
					looks = dumpLooks
				}
				if seen[pid]++; seen[pid] == looks {
					log.G(ctx).Warnf("CRIU's process %d is ended: %s", pid, why)
					if !slices.Contains(w.ended, why) {
						w.ended = append(w.ended, why)
					}
					_ = unix.Kill(pid, unix.SIGKILL) // or it has ended
				}
			}
		}
	}()
	return w
}

// end ends the watch, and explains why runc failed where runc cannot.
func (w *criuWatch) end(err error) error {
	close(w.stop)
	<-w.done
	switch {
	case err == nil:
		return nil
	case len(w.ended) > 0:
		return fmt.Errorf("%s, for want of memory perhaps (dmesg tells); try again: %w", strings.Join(w.ended, ", "), err)
	case strings.Contains(err.Error(), "exit status 137"): // 128 + SIGKILL
		return fmt.Errorf("runc was killed, for want of memory perhaps (dmesg tells); try again: %w", err)
	case cutOff(err):
		return fmt.Errorf("%s, for want of memory perhaps, or has crashed (dmesg tells); try again: %w", criuKilled, err)
	}
	return err
}

// cutOff says whether runc's error is that its socket to CRIU, a SOCK_SEQPACKET, has
// ended before an answer came.
func cutOff(err error) bool {
	text := err.Error()
	return strings.Contains(text, "unixpacket") && (strings.Contains(text, "EOF") || strings.Contains(text, "reset by peer")) ||
		strings.Contains(text, "readlink /proc/") // runc reads what CRIU has open
}

// stuckCRIU gives those processes of CRIU below a shim that will not end by
// themselves, each with the reason.
func stuckCRIU(shim int, restoring bool) map[int]string {
	stuck := make(map[int]string)
	for _, pid := range children(shim) {
		if forRunc(pid) {
			stuck[pid] = criuKilled
			continue
		}
		// If it is runc: CRIU is its child, and in a restore the container's first
		// process, which is the shim's own in a dump.
		siblings := children(pid)
		if at := slices.IndexFunc(siblings, forRunc); at >= 0 {
			within := siblings
			if !restoring {
				within = children(shim)
			}
			switch lost := lostTo(siblings[at], within, restoring); {
			case lost == 0:
			case isCRIU(lost):
				stuck[siblings[at]] = criuKilled
			default:
				stuck[siblings[at]] = fmt.Sprintf("process %s was killed while CRIU had it", proc.Describe(lost))
			}
		}
	}
	return stuck
}

// lostTo gives one of the processes, or of those below them, that a CRIU waits for in
// vain: it traces a thread that has ended. One that has ended as a whole, and is not
// traced, may be one that had in the checkpoint, but not the container's first. 0 is
// none.
func lostTo(criu int, pids []int, first bool) int {
	for _, pid := range pids {
		threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
		whole := len(threads) > 0
		for _, thread := range threads {
			switch dead, tracer := threadState(thread); {
			case dead && tracer == criu:
				return pid
			case !dead:
				whole = false
			}
		}
		if whole && first {
			return pid
		}
		if lost := lostTo(criu, children(pid), false); lost != 0 {
			return lost
		}
	}
	return 0
}

// threadState reads a status file in /proc: whether the thread has ended, and who
// traces it, 0 for nobody.
func threadState(path string) (dead bool, tracer int) {
	status, _ := os.ReadFile(path) // of one that is gone there is nothing to say
	for line := range strings.Lines(string(status)) {
		switch name, value, _ := strings.Cut(line, ":"); name {
		case "State":
			dead = strings.HasPrefix(strings.TrimSpace(value), "Z")
		case "TracerPid":
			tracer, _ = strconv.Atoi(strings.TrimSpace(value))
		}
	}
	return dead, tracer
}

// isCRIU goes by the name of a process's program.
func isCRIU(pid int) bool {
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	return err == nil && strings.TrimSpace(string(name)) == "criu"
}

// forRunc says whether a process is a CRIU that runc has started, or a child of one:
// its arguments are "criu swrk 3" at first, and then, say, "criu: dump --rpc -t 4711".
func forRunc(pid int) bool {
	args, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return err == nil && isCRIU(pid) && (strings.Contains(string(args), "swrk") || strings.Contains(string(args), "--rpc"))
}

// children lists the children of all of a process's threads.
func children(pid int) (pids []int) {
	lists, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, list := range lists {
		text, err := os.ReadFile(list)
		if err != nil {
			continue // a thread that has ended
		}
		for word := range strings.FieldsSeq(string(text)) {
			if child, err := strconv.Atoi(word); err == nil {
				pids = append(pids, child)
			}
		}
	}
	return pids
}
