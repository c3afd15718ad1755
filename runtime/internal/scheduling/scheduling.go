// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package scheduling brings back what CRIU leaves out of a dump of how threads run: the processors that a
// thread may run on, its timer slack and I/O priority, its personality and memory policy (numactl), and for
// a process whether the kernel merges its memory (KSM) and what of it a core dump has.
//
// Save notes threads whose values are not the defaults in a file of its own beside CRIU's images; as a
// rule there is none. Restore gives them back when CRIU has restored the threads and none of them runs
// yet. It does so from outside, or has the thread do it, and grants nothing: the kernel bounds the
// processors by the cgroup, and a real-time I/O priority is left out.
package scheduling

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/criu/held"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// FileName is the file of a dump.
const FileName = image.ThreadsName

const (
	defaultSlack = 50_000                 // nanoseconds
	maxSlack     = 1_000_000_000_000      // a quarter of an hour
	idleIO       = 3 << ioClass           // a class, and a level in it
	bestEffortIO = 2 << ioClass           // linux/ioprio.h
	middleIO     = bestEffortIO | 4       // what a thread has by default once it has read a file
	ioClass      = 13                     // where the class is
	ofThread     = 1                      // IOPRIO_WHO_PROCESS
	maxLine      = unix.PathMax + 10*1024 // a list of 1,024 processors
	traits       = 0x0ffe00ff             // the bits of a personality (linux/personality.h)
	setMerge     = 67                     // PR_SET_MEMORY_MERGE
	oldFields    = 6                      // of a line that has no memory policy
	fields       = 8                      // of a line
	coreDefault  = 0x33                   // of coredump_filter (mm/util.c)
	coreBits     = 0x1ff                  // all of it
)

// thread is what is noted of one.
type thread struct {
	tid   int          // as the container counts
	cpus  *unix.CPUSet // nil for all that the cgroup has
	slack uint64       // 0 for the default
	io    int          // 0 for the default
	is    uint64       // its personality, 0 for the default
	merge bool         // the memory of its process, of which it is the first thread
	// policy is its memory policy, as /proc/PID/numa_maps has it, "" for the default.
	policy string
	// core is the coredump_filter of its process, of which it is the first thread; 0 for the default.
	core uint64
}

// Save writes the file of a dump whose processes stand still. It returns what the file lacks, for the user.
func Save(dir string, list func() ([]int, error)) (lacks []string, err error) {
	return save(dir, list, policyTime)
}

func save(dir string, list func() ([]int, error), time time.Duration) (lacks []string, err error) {
	pids, err := list()
	if err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, FileName), os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, lines := bufio.NewWriter(f), 0 // a container may have a hundred thousand threads
	policies, late := watch{time}, 0
	for _, pid := range pids {
		all := host.CPUSet(pid)
		tids, err := proc.Threads(pid)
		if err != nil && !proc.Ended(err) {
			return nil, err
		}
		for _, tid := range tids {
			t := look(tid, all)
			policy, looked := policies.policyOf(tid)
			if !looked {
				late++
			}
			if _, _, err := parsePolicy(policy); err == nil && len(policy) <= longestPolicy {
				t.policy = policy
			}
			if tid == pid {
				t.merge, t.core = merges(pid), coreOf(pid)
			}
			if t == (thread{}) {
				continue
			}
			status, err := proc.ThreadStatus(pid, tid)
			if err == nil {
				t.tid, err = status.NSPID()
			}
			if err != nil {
				continue // a thread that has ended
			}
			lines++
			fmt.Fprintf(text, "%d\t%s\t%d\t%d\t%d\t%t\t%s\t%d\n", t.tid, host.CPUList(t.cpus), t.slack, t.io, t.is, t.merge, cmp.Or(t.policy, noPolicy), t.core)
		}
	}
	if late > 0 {
		lacks = []string{fmt.Sprintf("memory policies of %d threads, for which there was no time: the default", late)}
	}
	if lines == 0 {
		return lacks, os.Remove(f.Name())
	}
	return lacks, errors.Join(text.Flush(), f.Close())
}

// look returns what is not the default of a thread. all is what its cgroup lets it run on.
func look(tid int, all *unix.CPUSet) (t thread) {
	var now unix.CPUSet
	if unix.SchedGetaffinity(tid, &now) == nil && all != nil && now != *all {
		t.cpus = &now
	}
	if n, err := strconv.ParseUint(slackOf(tid), 10, 64); err == nil && n != defaultSlack && n <= maxSlack {
		t.slack = n
	}
	io, _, errno := unix.Syscall(unix.SYS_IOPRIO_GET, ofThread, uintptr(tid), 0)
	if class := int(io) &^ (1<<ioClass - 1); errno == 0 && (class == bestEffortIO || class == idleIO) && io != middleIO {
		t.io = int(io)
	}
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/personality", tid))
	if n, err := strconv.ParseUint(strings.TrimSpace(string(text)), 16, 32); err == nil && n&^traits == 0 {
		t.is = n
	}
	return t
}

// coreOf returns what of a process's memory a core dump has, 0 for the default.
func coreOf(pid int) uint64 {
	text, _ := os.ReadFile(coreFile(pid)) // of one that has ended there is none
	if n, err := strconv.ParseUint(strings.TrimSpace(string(text)), 16, 32); err == nil && n != coreDefault && n&^coreBits == 0 {
		return n
	}
	return 0
}

func coreFile(pid int) string { return fmt.Sprintf("/proc/%d/coredump_filter", pid) }

// merges reports whether the kernel merges all memory of a process that is alike. Before Linux 6.16 it
// does not say so.
func merges(pid int) bool {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/ksm_stat", pid))
	return strings.Contains(string(text), "ksm_merge_any: yes")
}

func slackOf(tid int) string {
	text, _ := os.ReadFile(slackFile(tid)) // without CAP_SYS_NICE there is none
	return strings.TrimSpace(string(text))
}

func slackFile(tid int) string { return fmt.Sprintf("/proc/%d/timerslack_ns", tid) }

// Threads are what a dump has noted.
type Threads []thread

// Read reads the file of a dump, if there is one.
func Read(dumped *image.Set) (Threads, error) {
	return image.ReadText(dumped, FileName, parse)
}

func parse(r io.Reader) (all Threads, err error) {
	err = image.Lines(r, FileName, maxLine, func(line string) bool {
		var t thread
		var cpus string
		if strings.Count(line, "\t") == oldFields-1 { // of a release before November 26, 2026
			line += "\t" + noPolicy + "\t0"
		}
		n, err := fmt.Sscanf(line, "%d\t%s\t%d\t%d\t%d\t%t\t%s\t%d", &t.tid, &cpus, &t.slack, &t.io, &t.is, &t.merge, &t.policy, &t.core)
		if t.policy == noPolicy {
			t.policy = ""
		}
		if err == nil && t.policy != "" {
			_, _, err = parsePolicy(t.policy)
		}
		if err == nil {
			t.cpus, err = host.ParseCPUs(cpus)
		}
		class := t.io &^ (1<<ioClass - 1)
		if err != nil || n != fields || len(all) == criu.MaxThreads || t.core&^coreBits != 0 ||
			t.slack > maxSlack || t.is&^traits != 0 || t.io != 0 && class != bestEffortIO && class != idleIO {
			return false
		}
		all = append(all, t)
		return true
	})
	return all, err
}

// Restore gives threads what they had. The error names what a thread does not get here, and is no
// reason to end it: processors that this node or its cgroup does not have, above all.
func (all Threads) Restore(list func() ([]int, error), gate held.Gate) error {
	if len(all) == 0 {
		return nil
	}
	pids, err := list()
	if err != nil {
		return err
	}
	inside := make(map[int]int)
	process, processes := make(map[int]int), held.At(gate)
	cpus := make(map[int]*unix.CPUSet)
	for _, pid := range pids {
		tids, err := proc.Threads(pid)
		if err != nil {
			return err
		}
		here := host.CPUSet(pid)
		for _, tid := range tids {
			status, err := proc.ThreadStatus(pid, tid)
			if err != nil {
				return err
			}
			n, err := status.NSPID()
			if err != nil {
				return err
			}
			inside[n], process[tid], cpus[tid] = tid, pid, here
		}
	}
	var failed []error
	for _, t := range all {
		tid, there := inside[t.tid]
		if !there {
			continue // it had ended, and waited to be asked for its status
		}
		lacks := func(what string, err error) {
			if err != nil {
				failed = append(failed, fmt.Errorf("%s: %w", what, err))
			}
		}
		thread := fmt.Sprintf("thread %d ", t.tid)
		if t.cpus != nil {
			lacks(thread+"runs on all processors", pin(tid, t.cpus, cpus[tid]))
		}
		if t.slack != 0 {
			lacks(thread+"has the default timer slack", setNumber(slackFile(tid), t.slack))
		}
		if t.io != 0 {
			if _, _, errno := unix.Syscall(unix.SYS_IOPRIO_SET, ofThread, uintptr(tid), uintptr(t.io)); errno != 0 {
				lacks(thread+"has the default I/O priority", errno)
			}
		}
		if t.is != 0 {
			lacks(thread+"has the default personality", gate.Call(tid, unix.SYS_PERSONALITY, t.is))
		}
		if t.policy != "" {
			lacks(thread+"has the default memory policy and not "+t.policy, setPolicy(process[tid], tid, t.policy, processes, gate))
		}
		if t.core != 0 {
			lacks(fmt.Sprintf("core dumps of process %d have the default", t.tid), setNumber(coreFile(tid), t.core))
		}
		if t.merge {
			lacks(fmt.Sprintf("the memory of process %d is not merged", t.tid), gate.Call(tid, unix.SYS_PRCTL, setMerge, 1))
		}
	}
	return errors.Join(failed[:min(len(failed), 16)]...)
}

func setNumber(file string, n uint64) error {
	return os.WriteFile(file, strconv.AppendUint(nil, n, 10), 0)
}

// pin lets a thread run on some of the processors of its cgroup alone.
func pin(tid int, to, all *unix.CPUSet) error {
	for cpu := range 64 * len(to) {
		if to.IsSet(cpu) && all != nil && !all.IsSet(cpu) {
			return fmt.Errorf("its cgroup does not have processor %d", cpu)
		}
	}
	return unix.SchedSetaffinity(tid, to)
}
