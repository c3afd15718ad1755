// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package turns has operations take turns where the cgroup of [staging] has a small memory limit.
//
// Each operation has workers in that cgroup. The kernel kills some of them when they take more than
// the limit at once, and their operations fail. So an operation claims memory before it begins, and
// waits while the claims of others leave too little.
//
// The life of a Turn: Take makes a file in a directory that all shims of the node share, locks it
// (flock) and writes the claim into it. Give removes it. A file that nobody has locked is that of a
// shim that has died: whoever finds it removes it.
package turns

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/docker/go-units"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/config"
	"github.com/gpuckpt/gpuckpt/internal/fault"
)

// Dir is where claims lie. It goes with a reboot, as those who have claimed do.
const Dir = "/run/gpuckpt/turns"

const (
	// workers is the memory, in bytes, of an operation's workers: a tracer, a digester, a memory
	// worker, and what the kernel takes for them. Two take 24 MiB (gpustate, tracerMemory).
	workers = 36 << 20
	// within bounds the wait for a turn. An operation that takes longer is as long as its GPU state
	// is large, and a limit that lets one of those in is no small one.
	within = 5 * time.Minute
	// pause is between two looks at the claims of others.
	pause = 20 * time.Millisecond
)

// Who takes a turn.
type Who struct {
	Operation string // "checkpoint", "restore", "suspend", "resume"
	Container string // its id
}

// The steps of a turn, at which a test makes faults. The first begins where there is a wait.
const (
	waits = "wait for a turn"
	gives = "give the turn"
)

// at is where a test may stop, fail or hold a step.
func (w Who) at(step, moment string) error {
	return fault.At(fault.Point{Operation: w.Operation, Step: step, Moment: moment, Container: w.Container})
}

// Turn is a claim of memory; nil is none.
type Turn struct {
	file *os.File
	who  Who
}

// Take claims the memory that an operation takes in the cgroup of [staging] beside GPU state that is
// kept in memory: its workers', and the buffer of write-through, as far as the limit leaves it. It
// waits while others have claimed too much of the limit. Without a cgroup or a limit there is no
// Turn, and no error. The error is errdefs.ErrResourceExhausted after five minutes, or ctx's.
func Take(ctx context.Context, who Who, node config.Staging) (*Turn, error) {
	if node.Cgroup == "" || node.MemoryLimit <= 0 {
		return nil, nil
	}
	limit := uint64(node.MemoryLimit)
	need := uint64(workers)
	if limit > need {
		need += min(uint64(node.Buffer), (limit-need)/4*3) // as gpustate's chooseWindow shares it
	}
	// A path's parts become one name.
	dir := filepath.Join(Dir, strings.ReplaceAll(strings.Trim(filepath.Clean("/"+node.Cgroup), "/"), "/", ":"))
	return who.claim(ctx, dir, limit, need, fault.Bound(within))
}

// TakeBy is Take with the settings of an operation.
func TakeBy(ctx context.Context, who Who, read config.Source) (*Turn, error) {
	view, err := read()
	if err != nil {
		return nil, err
	}
	return Take(ctx, who, view.Staging)
}

// claim is Take with a directory of claims.
func (w Who) claim(ctx context.Context, dir string, limit, need uint64, within time.Duration) (_ *Turn, err error) {
	defer func() {
		if err != nil {
			_ = w.at(gives, fault.End) // there is none
		}
	}()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("take turns in the cgroup of [staging]: %w", err)
	}
	for began, told := time.Now(), false; ; {
		turn, err := try(dir, limit, need)
		if err != nil {
			return nil, err
		}
		if turn != nil {
			turn.who = w
			if err := w.at(waits, fault.End); err != nil {
				turn.Give()
				return nil, fmt.Errorf("%s: %w", waits, err)
			}
			return turn, nil
		}
		if !told {
			told = true
			log.G(ctx).WithField("bytes", need).Info("other operations have the memory of [staging]: waiting for a turn")
			if err := w.at(waits, fault.Begin); err != nil {
				return nil, fmt.Errorf("%s: %w", waits, err)
			}
		}
		if time.Since(began) > within {
			return nil, fmt.Errorf("other operations have had the memory of [staging] for %v, of whose memory_limit of %s this one takes %s: try again, or raise memory_limit: %w",
				within, units.BytesSize(float64(limit)), units.BytesSize(float64(need)), errdefs.ErrResourceExhausted)
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("given up before its turn: %w", ctx.Err())
		case <-time.After(pause):
		}
	}
}

// try returns nil if the claims of others leave too little. Who needs more than the limit has a turn
// alone.
func try(dir string, limit, need uint64) (_ *Turn, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("take turns in the cgroup of [staging]: %w", err)
		}
	}()
	all, err := os.Open(dir) // locked while claims are counted and made
	if err != nil {
		return nil, err
	}
	defer all.Close()
	if locked, err := lock(all); !locked || err != nil {
		return nil, err
	}
	taken, err := claimed(dir)
	if err != nil || taken > 0 && taken+need > limit {
		return nil, err
	}
	f, err := os.CreateTemp(dir, "claim-")
	if err != nil {
		return nil, err
	}
	t := &Turn{file: f}
	if _, err = lock(f); err == nil {
		_, err = f.WriteString(strconv.FormatUint(need, 10))
	}
	if err != nil {
		t.Give()
		return nil, err
	}
	return t, nil
}

// claimed adds up the claims in a directory, and removes those of shims that have died.
func claimed(dir string) (bytes uint64, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0, err
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		f, err := os.Open(path)
		if errors.Is(err, os.ErrNotExist) {
			continue // given back meanwhile
		}
		if err != nil {
			return 0, err
		}
		left, err := lock(f)
		if left {
			_ = os.Remove(path)
		}
		_ = f.Close()
		if left || err != nil {
			continue
		}
		text, err := os.ReadFile(path)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return 0, err
		}
		n, err := strconv.ParseUint(string(text), 10, 64)
		if err != nil {
			return 0, fmt.Errorf("read %s: %w", path, err)
		}
		bytes += n
	}
	return bytes, nil
}

// lock locks a file, unless another has locked it.
func lock(f *os.File) (bool, error) {
	err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return false, nil
	}
	return err == nil, err
}

// Give gives the memory back. It may be called for nil.
func (t *Turn) Give() {
	if t == nil {
		return
	}
	_ = t.who.at(gives, fault.Begin) // a turn is given in any case
	_ = os.Remove(t.file.Name())
	_ = t.file.Close()
	_ = t.who.at(gives, fault.End)
}
