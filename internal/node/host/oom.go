// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"

	"github.com/containerd/containerd/v2/core/events"
	"github.com/containerd/containerd/v2/pkg/oom"
	oomv1 "github.com/containerd/containerd/v2/pkg/oom/v1"
	oomv2 "github.com/containerd/containerd/v2/pkg/oom/v2"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// OOMWatch publishes the OOM events of cgroups as containerd's, at no cost before the first Add.
type OOMWatch struct {
	ctx       context.Context
	publisher events.Publisher

	mu      sync.Mutex
	watcher oom.Watcher
}

// NewOOMWatch returns a watch that ends with ctx.
func NewOOMWatch(ctx context.Context, publisher events.Publisher) *OOMWatch {
	return &OOMWatch{ctx: ctx, publisher: publisher}
}

// Add watches the cgroup of a container until the cgroup is removed.
func (o *OOMWatch) Add(id string, cg *Cgroup) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	open, handle := oomv2.New, any(cg.v2)
	if !cg.Unified() {
		v1, err := cg.v1()
		if err != nil {
			return fmt.Errorf("watch for OOM events: %w", err)
		}
		open, handle = oomv1.New, v1
	}
	if o.watcher == nil {
		w, err := open(o.publisher)
		if err != nil {
			return fmt.Errorf("watch for OOM events: %w", err)
		}
		o.watcher = w
		go w.Run(o.ctx)
	}
	if err := o.watcher.Add(id, handle); err != nil {
		return fmt.Errorf("watch for OOM events: %w", err)
	}
	return nil
}

// RaiseOOMScores raises the oom_score_adj of a restored container's processes to the spec's. CRIU
// restores what they had, and the kubelet computes another from a pod's class and the node's
// memory. A higher one stays.
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

// OOMScore returns the oom_score_adj of this process, which its children get; 0 if it is not known.
func OOMScore() int {
	text, err := os.ReadFile("/proc/self/oom_score_adj")
	if err != nil {
		return 0
	}
	adj, _ := strconv.Atoi(strings.TrimSpace(string(text)))
	return adj
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
