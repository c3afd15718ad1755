// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/containerd/log"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/fault"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// Why a killed process must not block the shim
//
// runc waits for CRIU by the socket between them, and CRIU waits for each thread that
// it traces. Neither wait ends by itself when somebody kills the wrong process, for
// example the kernel when it is out of memory:
//
//   - A process that CRIU 4.2 restores, near the end. CRIU waits for the process's
//     next step, or for one of its threads, which the kernel does not let go before
//     CRIU has taken note of all others. A restore has no alarm.
//   - A process that CRIU dumps, while CRIU has a thread make a system call. Only the
//     stopping of the threads, before that, has an alarm, of ten seconds (criu
//     --timeout).
//   - CRIU itself, while a child of CRIU's looks at what the kernel can do. The child
//     is stopped, and keeps the socket open.
//
// Nor does it end where CRIU or runc is stopped, or waits for a file system that does not answer. A
// restore has a time by its size. How much a dump will write nobody knows before, so there the watch
// looks for work: processes that take no time of a processor do none.

// interval is the time between two looks of a Watch.
const interval = 500 * time.Millisecond

// looks is how often in a row a process is seen before it is ended: a process that
// CRIU is about to reap is gone by then. dumpLooks is the same for a process that
// CRIU waits for in a dump, which CRIU may have killed itself, as runc asked it to,
// when all is written.
const (
	looks     = 4
	dumpLooks = 20
)

const criuKilled = "CRIU was killed"

// Watch ends what runc would wait for in vain.
type Watch struct {
	stop, done chan struct{}
	before     []int    // the shim's children when the watch of a restore began
	ended      []string // what was found, for people; set when done is closed
	idle       time.Duration
	hung       bool // as ended
	kernel     kernelLog
}

// StartWatch watches the runc of this process and its CRIU until Stop is called. In a dump of the container
// of this id it ends both if they do nothing for as long as idle.
func StartWatch(ctx context.Context, id string, restoring bool, idle time.Duration) *Watch {
	return startWatch(ctx, id, restoring, fault.Bound(idle), interval)
}

func startWatch(ctx context.Context, id string, restoring bool, idle, interval time.Duration) *Watch {
	w := &Watch{idle: idle, stop: make(chan struct{}), done: make(chan struct{}), kernel: openKernelLog()}
	if restoring {
		w.before = proc.Children(os.Getpid())
	}
	go func() {
		defer close(w.done)
		look := time.NewTicker(interval)
		defer look.Stop()
		seen := make(map[int]int)
		work, since := uint64(0), time.Now()
		for {
			select {
			case <-w.stop:
				return
			case <-look.C:
			}
			if now := workBelow(os.Getpid(), id); restoring || now != work {
				work, since = now, time.Now()
			} else if time.Since(since) > w.idle {
				log.G(ctx).Warnf("CRIU and runc have done nothing for %v, and are ended", w.idle)
				w.hung = true
				endDump(os.Getpid(), id)
				since = time.Now()
			}
			stuck := stuckCRIU(os.Getpid(), restoring)
			for pid := range seen {
				if stuck[pid] == "" {
					delete(seen, pid)
				}
			}
			for pid, why := range stuck {
				enough := looks
				if !restoring && why != criuKilled {
					enough = dumpLooks
				}
				if seen[pid]++; seen[pid] == enough {
					log.G(ctx).Warnf("CRIU's process %d is ended: %s", pid, why)
					if !slices.Contains(w.ended, why) {
						w.ended = append(w.ended, why)
					}
					_ = proc.Signal(pid, unix.SIGKILL, forRunc) // or it has ended
				}
			}
		}
	}()
	return w
}

// Stop ends the watch, and explains runc's error where runc cannot.
func (w *Watch) Stop(err error) error {
	close(w.stop)
	<-w.done
	defer w.kernel.close()
	switch {
	case err == nil:
		return nil
	case w.hung:
		return fmt.Errorf("%w: it and runc did nothing for %v in the dump: see its log, and raise stall_timeout in %s if a disk was as slow: %w", ErrHangs, w.idle, config.Path, err)
	case len(w.ended) > 0:
		return fmt.Errorf("%s, %s: %w", strings.Join(w.ended, ", "), w.why(), err)
	case strings.Contains(err.Error(), "exit status 137"): // 128 + SIGKILL
		return fmt.Errorf("runc was killed, possibly out of memory (see dmesg); try again: %w", err)
	case cutOff(err):
		return fmt.Errorf("%s or has crashed, %s: %w", criuKilled, w.why(), err)
	}
	return err
}

// why returns what the kernel says of the end of a CRIU, and what to do.
func (w *Watch) why() string {
	switch said, limit := w.kernel.ofCRIU(); {
	case limit:
		return fmt.Sprintf("the kernel says %q: raise the memory limit of the container, or make room on the node", said)
	case said != "":
		return fmt.Sprintf("the kernel says %q: what CRIU read is damaged, or CRIU has a fault: take another checkpoint, and report this one with CRIU's version", said)
	}
	return "possibly out of memory (see dmesg); try again"
}

// cutOff reports whether runc's error is that its socket to CRIU, a SOCK_SEQPACKET,
// has ended before an answer came, or a question.
func cutOff(err error) bool {
	text := err.Error()
	return strings.Contains(text, "unixpacket") && (strings.Contains(text, "EOF") || strings.Contains(text, "reset by peer") || strings.Contains(text, "broken pipe")) ||
		strings.Contains(text, "readlink /proc/") // runc reads what CRIU has open
}

// dumping are the runc below a shim that dumps the container of this id, and its CRIU.
func dumping(shim int, id string) (pids []int) {
	for _, pid := range proc.Children(shim) {
		args, _ := proc.Arguments(pid)
		if len(args) > 0 && args[len(args)-1] == id && slices.Contains(args, "checkpoint") {
			below := slices.DeleteFunc(proc.Children(pid), func(child int) bool { return !forRunc(child) })
			pids = append(append(pids, pid), below...)
		}
	}
	return pids
}

// workBelow is the processors' time that these have taken, in ticks, with all that they have started:
// what packs a tmpfs works for minutes while CRIU waits for it.
func workBelow(shim int, id string) (ticks uint64) {
	for _, pid := range dumping(shim, id) {
		ticks += workOf(pid)
	}
	return ticks
}

func workOf(pid int) uint64 {
	ticks := proc.Ticks(pid)
	for _, child := range proc.Children(pid) {
		ticks += workOf(child)
	}
	return ticks
}

func endDump(shim int, id string) {
	for _, pid := range slices.Backward(dumping(shim, id)) {
		_ = proc.Signal(pid, unix.SIGKILL, func(pid int) bool { return forRunc(pid) || proc.IsChild(pid) }) // or it has ended
	}
}

// stuckCRIU returns the processes of CRIU below a shim that will not end by
// themselves, each with the reason.
func stuckCRIU(shim int, restoring bool) map[int]string {
	stuck := make(map[int]string)
	for _, pid := range proc.Children(shim) {
		if forRunc(pid) {
			stuck[pid] = criuKilled
			continue
		}
		// If it is runc: CRIU is its child, and in a restore the container's first
		// process, which is the shim's own in a dump.
		siblings := proc.Children(pid)
		if at := slices.IndexFunc(siblings, forRunc); at >= 0 {
			within := siblings
			if !restoring {
				within = proc.Children(shim)
			}
			switch lost := stuckOn(siblings[at], within, restoring); {
			case lost == 0:
			case proc.Command(lost) == "criu":
				stuck[siblings[at]] = criuKilled
			default:
				stuck[siblings[at]] = fmt.Sprintf("process %s was killed while CRIU had it", proc.Describe(lost))
			}
		}
	}
	return stuck
}

// stuckOn returns one of the processes, or of those below them, that a CRIU waits for
// in vain, 0 for none: one with a thread that has ended and that CRIU traces. first
// reports whether the processes are the container's first, of which one may also have
// ended as a whole without a tracer; another may have been a zombie in the checkpoint.
func stuckOn(criu int, pids []int, first bool) int {
	for _, pid := range pids {
		threads, _ := proc.Threads(pid) // one that is gone has none
		whole := len(threads) > 0
		for _, tid := range threads {
			switch status, _ := proc.ThreadStatus(pid, tid); {
			case status.Ended() && status.Tracer() == criu:
				return pid
			case !status.Ended():
				whole = false
			}
		}
		if whole && first {
			return pid
		}
		if lost := stuckOn(criu, proc.Children(pid), false); lost != 0 {
			return lost
		}
	}
	return 0
}

// forRunc reports whether a process is a CRIU that runc has started, or a child of
// one. Its arguments are "criu swrk 3" at first, and later, for example, "criu: dump
// --rpc -t 4711".
func forRunc(pid int) bool {
	args, _ := proc.Arguments(pid)
	text := strings.Join(args, " ")
	return proc.Command(pid) == "criu" && (strings.Contains(text, "swrk") || strings.Contains(text, "--rpc"))
}
