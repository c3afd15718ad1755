// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/docker/go-units"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/fault"
)

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

// Who claims memory.
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

// Memory is a claim of memory in the cgroup of [staging]; nil is none.
type Memory struct {
	who         Who
	dir         string // of claims
	limit, need uint64
	within      time.Duration

	mu   sync.Mutex
	file *os.File // nil while it is given back
}

// TakeMemory claims the memory that an operation takes in the cgroup of [staging] beside GPU state that
// is kept in memory: its workers', and the buffer of write-through, as far as the limit leaves it. The
// kernel would kill some of the workers if the operations of a node took more than the limit at once.
// TakeMemory waits while others have claimed too much. Without a cgroup or a limit there is no claim,
// and no error. The error is errdefs.ErrResourceExhausted after five minutes, or ctx's.
func TakeMemory(ctx context.Context, who Who, read config.Source) (*Memory, error) {
	view, err := read()
	if err != nil {
		return nil, err
	}
	node := view.Staging
	if node.Cgroup == "" || node.MemoryLimit <= 0 {
		return nil, nil
	}
	limit := uint64(node.MemoryLimit)
	need := uint64(workers)
	if limit > need {
		need += min(node.Buffer(), (limit-need)/4*3) // as gpustate's chooseWindow shares it
	}
	m := &Memory{who: who, dir: folder("memory", node.Cgroup), limit: limit, need: need, within: fault.Bound(within)}
	if err := m.Take(ctx); err != nil {
		return nil, err
	}
	return m, nil
}

// Take claims the memory again that Give has given back, as TakeMemory does. It may be called for nil.
func (m *Memory) Take(ctx context.Context) (err error) {
	if m == nil {
		return nil
	}
	defer func() {
		if err != nil {
			_ = m.who.at(gives, fault.End) // there is none
		}
	}()
	if err := os.MkdirAll(m.dir, 0o700); err != nil {
		return fmt.Errorf("take turns in the cgroup of [staging]: %w", err)
	}
	for began, told := time.Now(), false; ; {
		f, err := try(m.dir, m.limit, m.need)
		if err != nil {
			return fmt.Errorf("take turns in the cgroup of [staging]: %w", err)
		}
		if f != nil {
			m.mu.Lock()
			m.file = f
			m.mu.Unlock()
			if err := m.who.at(waits, fault.End); err != nil {
				m.Give()
				return fmt.Errorf("%s: %w", waits, err)
			}
			return nil
		}
		if !told {
			told = true
			log.G(ctx).WithField("bytes", m.need).Info("other operations have the memory of [staging]: waiting for a turn")
			if err := m.who.at(waits, fault.Begin); err != nil {
				return fmt.Errorf("%s: %w", waits, err)
			}
		}
		if time.Since(began) > m.within {
			return fmt.Errorf("other operations have had the memory of [staging] for %v, of whose memory_limit of %s this one takes %s: try again, or raise memory_limit: %w",
				m.within, units.BytesSize(float64(m.limit)), units.BytesSize(float64(m.need)), errdefs.ErrResourceExhausted)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("given up before its turn: %w", ctx.Err())
		case <-time.After(pause):
		}
	}
}

// try returns nil if the claims of others leave too little. Who needs more than the limit has a turn
// alone.
func try(dir string, limit, need uint64) (*os.File, error) {
	all, err := os.Open(dir) // locked while claims are counted and made
	if err != nil {
		return nil, err
	}
	defer all.Close()
	err = unix.Flock(int(all.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	others, err := claims(dir)
	if err != nil {
		return nil, err
	}
	taken := uint64(0)
	for path, text := range others {
		n, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", path, err)
		}
		taken += n
	}
	if taken > 0 && taken+need > limit {
		return nil, nil
	}
	return claim(dir, strconv.FormatUint(need, 10))
}

// Give gives the memory back. It may be called again, and for nil.
func (m *Memory) Give() {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.file == nil {
		return
	}
	_ = m.who.at(gives, fault.Begin) // a turn is given in any case
	give(m.file)
	m.file = nil
	_ = m.who.at(gives, fault.End)
}
