// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package scheduling

import (
	"encoding/binary"
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/criu/held"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
)

// What linux/mempolicy.h has, which golang.org/x/sys lacks.
var (
	policies = map[string]uint64{"prefer": 1, "bind": 2, "interleave": 3, "local": 4, "prefer (many)": 5, "weighted interleave": 6}
	modes    = map[string]uint64{"static": 1 << 15, "relative": 1 << 14}
)

const (
	noPolicy      = "default"
	longestPolicy = 1024
	mostNodes     = 1024
)

// policyTime bounds the time of a processor that looking for policies takes, of all threads together: some
// 10 µs each as a rule. But a program decides what is mapped first, and how many pages it has.
const policyTime = time.Second

// watch takes the time of a thread of this program.
type watch struct{ left time.Duration }

// policyOf returns a thread's policy, if there is time left for it.
func (w *watch) policyOf(tid int) (policy string, looked bool) {
	if w.left <= 0 {
		return noPolicy, false
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	began := processorTime()
	policy = policyOf(tid)
	w.left -= processorTime() - began
	return policy, true
}

// processorTime returns what this thread has taken of the processors.
func processorTime() time.Duration {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &now) // which there is
	return time.Duration(now.Nano())
}

// policyOf returns a thread's memory policy, "bind=static:0-1", with "_" for spaces. The kernel shows it at
// mappings that have none of their own, and the first one is the program's as a rule. To read on would take
// long: the kernel looks at all pages of what is read.
func policyOf(tid int) string {
	f, err := os.Open(fmt.Sprintf("/proc/%d/task/%d/numa_maps", tid, tid))
	if err != nil {
		return noPolicy // a kernel without NUMA, or a thread that has ended
	}
	defer f.Close()
	line := make([]byte, 256)
	n, _ := f.Read(line)
	_, rest, _ := strings.Cut(string(line[:n]), " ")
	for _, behind := range []string{" file=", " anon=", " heap", " stack", " dirty=", " mapped=", " huge"} {
		rest, _, _ = strings.Cut(rest, behind)
	}
	rest, _, _ = strings.Cut(rest, "\n")
	return strings.ReplaceAll(strings.TrimSpace(rest), " ", "_")
}

// parsePolicy returns what set_mempolicy(2) takes: a mode, and a mask of nodes.
func parsePolicy(text string) (mode uint64, nodes []byte, err error) {
	name, list, _ := strings.Cut(strings.ReplaceAll(text, "_", " "), ":")
	name, flag, flagged := strings.Cut(name, "=")
	mode, known := policies[name]
	bit, ok := modes[flag]
	if !known || flagged && !ok {
		return 0, nil, fmt.Errorf("%q is no memory policy", text)
	}
	nodes = make([]byte, mostNodes/8)
	if list == "" {
		return mode | bit, nodes, nil
	}
	set, err := host.ParseCPUs(list)
	if err != nil {
		return 0, nil, fmt.Errorf("%q is no memory policy: %w", text, err)
	}
	for i, word := range set {
		binary.NativeEndian.PutUint64(nodes[8*i:], uint64(word))
	}
	return mode | bit, nodes, nil
}

// setPolicy has a thread of a process set a memory policy.
func setPolicy(pid, tid int, text string, processes *held.Processes, gate held.Gate) error {
	mode, nodes, err := parsePolicy(text)
	if err != nil {
		return err
	}
	return processes.Lend(pid, nodes, func(at uint64) error {
		return gate.Call(tid, unix.SYS_SET_MEMPOLICY, mode, at, mostNodes)
	})
}
