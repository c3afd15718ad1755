// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/internal/node/config"
)

const long = time.Minute

var who = Who{Operation: "checkpoint", Container: "c"}

// Of many that claim at once, never more than the limit has room for have a turn, and each has one.
func TestClaims(t *testing.T) {
	dir := t.TempDir()
	var now, most atomic.Int64
	var all sync.WaitGroup
	for range 12 {
		all.Go(func() {
			turn, err := claimed(t.Context(), dir, 100, 45, long)
			if err != nil {
				t.Error(err)
				return
			}
			n := now.Add(1)
			for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
			}
			time.Sleep(2 * pause) // others try meanwhile
			now.Add(-1)
			turn.Give()
		})
	}
	all.Wait()
	if m := most.Load(); m > 2 {
		t.Errorf("%d had a turn at once, and there is room for 2", m)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left are %v, error %v", left, err)
	}
}

// Who needs more than there is waits for all others, and is alone then. A wait ends with its bound,
// and with its client.
func TestClaimOfMore(t *testing.T) {
	dir := t.TempDir()
	first, err := claimed(t.Context(), dir, 100, 10, long)
	if err != nil {
		t.Fatal(err)
	}
	_, err = claimed(t.Context(), dir, 100, 200, 0)
	if !errors.Is(err, errdefs.ErrResourceExhausted) || !strings.Contains(err.Error(), "memory_limit of 100B this one takes 200B") {
		t.Errorf("error %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err = claimed(ctx, dir, 100, 200, long); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	first.Give()
	large, err := claimed(t.Context(), dir, 100, 200, long)
	if err != nil {
		t.Fatal(err)
	}
	if _, err = claimed(t.Context(), dir, 100, 10, 0); !errors.Is(err, errdefs.ErrResourceExhausted) {
		t.Errorf("beside one that takes all: error %v", err)
	}
	large.Give()
	last, err := claimed(t.Context(), dir, 100, 10, 0)
	if err != nil {
		t.Fatal(err)
	}
	last.Give()
}

// What a shim that died has claimed is free again: the kernel ends its lock.
func TestClaimOfTheDead(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "claim-1"), []byte("100"), 0o600); err != nil {
		t.Fatal(err)
	}
	turn, err := claimed(t.Context(), dir, 100, 100, 0)
	if err != nil {
		t.Fatal(err)
	}
	turn.Give()
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left are %v, error %v", left, err)
	}
}

// Without a limit nobody takes a turn.
func TestNoTurns(t *testing.T) {
	for _, node := range []config.Staging{{}, {Cgroup: "gpuckpt"}, {MemoryLimit: 1 << 20}} {
		turn, err := TakeMemory(t.Context(), who, func() (config.View, error) { return config.View{Node: config.Node{Staging: node}}, nil })
		if turn != nil || err != nil {
			t.Errorf("%+v: a turn %v, error %v", node, turn, err)
		}
		turn.Give()
	}
}

// claimed is TakeMemory with a directory of claims.
func claimed(ctx context.Context, dir string, limit, need uint64, within time.Duration) (*Memory, error) {
	m := &Memory{who: who, dir: dir, limit: limit, need: need, within: within}
	return m, m.Take(ctx)
}
