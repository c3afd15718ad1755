// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// CRIU gives processes the oom_score_adj that they had. The new container's may
// be another: the kubelet computes it from a pod's class and the node's memory.
// A process that was less likely to be killed than the new spec has it becomes
// as likely; one that had made itself more likely stays so.

// raiseOOMScores does so for the processes of a restored container.
func (c *container) raiseOOMScores() error {
	spec, err := loadSpec(c.bundle)
	if err != nil || spec.Process.OOMScoreAdj == nil {
		return err
	}
	pids, err := c.cgroup.Load().Pids()
	if err != nil {
		return err
	}
	for _, pid := range pids {
		if err := raiseOOMScore(pid, *spec.Process.OOMScoreAdj); err != nil {
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
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return nil // it has ended
	}
	if err != nil {
		return fmt.Errorf("give process %d the spec's oom_score_adj: %w", pid, err)
	}
	return nil
}
