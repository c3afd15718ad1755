// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/gpuckpt/gpuckpt/internal/proc"
)

// RaiseOOMScores makes the kernel as likely to kill the processes of a restored
// container for want of memory as the spec asks for. CRIU restores the oom_score_adj
// that they had, and the new container's may be another: the kubelet computes it from
// a pod's class and the node's memory. A process that had made itself more likely
// stays so.
func (c *Cgroup) RaiseOOMScores(to int) error {
	pids, err := c.Pids()
	if err != nil {
		return err
	}
	for _, pid := range pids {
		if err := raiseOOMScore(pid, to); err != nil {
			return err
		}
	}
	return nil
}

func raiseOOMScore(pid, to int) error {
	path := fmt.Sprintf("/proc/%d/oom_score_adj", pid)
	text, err := os.ReadFile(path)
	if err == nil {
		var adj int
		if adj, err = strconv.Atoi(strings.TrimSpace(string(text))); err == nil && adj < to {
			err = os.WriteFile(path, []byte(strconv.Itoa(to)), 0)
		}
	}
	if proc.Ended(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("set the oom_score_adj of process %d: %w", pid, err)
	}
	return nil
}
