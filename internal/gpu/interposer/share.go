// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package interposer

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"
)

// errGone says that memory of a process that has ended was shared with another one, which has lost it.
var errGone = errors.New("the process that shared GPU memory with it has ended, and that memory is lost")

// errElsewhere says that memory or an event is shared with a process that is not parked with this one.
var errElsewhere = errors.New("GPU memory or an event is shared with a process outside of the container, or with one that has no interposer, or its owner has freed it")

// sharing is how a program shares GPU memory by its interposer.
type sharing uint32

const (
	imports sharing = 1 << iota // it has memory or events of another process's mapped
	exports                     // other processes can ask for its memory and events
	apart                       // the one or the other is taken down
	unknown                     // it shares in a way that its interposer does not bring back
	hosts                       // it has host memory of cuMemCreate
)

// takeDown takes down what the parked processes share: first all imports, then what exporters answer by. A
// process has memory of theirs that is not among them: that is an error, and so is what an interposer does not
// know. It reports whether there was something. On an error together is the way back.
func takeDown(ctx context.Context, all []*Interposer) (shared bool, err error) {
	for _, c := range all {
		now, err := c.read()
		if err != nil {
			return shared, err
		}
		if now.sharing&unknown != 0 {
			return true, fmt.Errorf("process %d shares GPU memory or events in a way that its interposer does not bring back: pools, fabric handles, multicast, external memory, or events of CUDA IPC that the driver has made (as GPUCKPT_INTERPOSER_EVENTS=off in its environment has it)", c.PID)
		}
		if now.sharing&hosts != 0 {
			return true, fmt.Errorf("process %d has host memory of the driver (cuMemCreate), which the driver does not restore: set NCCL_CUMEM_HOST_ENABLE=0 for NCCL", c.PID)
		}
		shared = shared || now.sharing&(imports|exports) != 0
	}
	if !shared {
		return false, nil
	}
	cut := make([]byte, 8)
	if _, err := rand.Read(cut); err != nil {
		return true, err
	}
	number := binary.LittleEndian.Uint64(cut) | 1 // 0 would be none
	if err := inAll(all, func(c *Interposer) error {
		return c.process.access(c.at+offCut, binary.LittleEndian.AppendUint64(nil, number), true)
	}); err != nil {
		return true, err
	}
	if err := step(ctx, all, "unmap the GPU memory and events that are shared with", askLeave); err != nil {
		return true, err
	}
	return true, step(ctx, all, "end the sharing of GPU memory and events by", askRest)
}

// together undoes takeDown: exporters answer, and then importers have their memory again. Memory that is
// lost with a process is an error if strict, and logged otherwise: the program's next use of it fails. inAll
// says which errors count.
func together(ctx context.Context, all []*Interposer, strict bool, inAll func([]*Interposer, func(*Interposer) error) error) error {
	apartThen := func(do func(*Interposer) error) error {
		return inAll(all, func(c *Interposer) error {
			now, err := c.read()
			if err != nil || now.sharing&apart == 0 {
				return err
			}
			return do(c)
		})
	}
	if err := apartThen(func(c *Interposer) error {
		_, err := c.ask(ctx, "share again the GPU memory and events of", askWake, 0, patience)
		return err
	}); err != nil {
		return err
	}
	return apartThen(func(c *Interposer) error {
		_, err := c.ask(ctx, "map the GPU memory and events that are shared with", askJoin, 0, patience)
		if errors.Is(err, errGone) && !strict {
			log.G(ctx).WithError(err).Warn("shared GPU memory is lost")
			return nil
		}
		return err
	})
}

// step has all do the same and returns when all have.
func step(ctx context.Context, all []*Interposer, doing string, what uint32) error {
	return inAll(all, func(c *Interposer) error {
		_, err := c.ask(ctx, doing, what, 0, patience)
		return err
	})
}

func inAll[M any](all []M, do func(M) error) error {
	_, err := each(all, func(c M) (struct{}, error) { return struct{}{}, do(c) })
	return err
}

// Refusal returns why the processes cannot be checkpointed because of memory or events that they share by
// their interposers, or nil. It can be called on nil.
func (p *Parked) Refusal() error {
	if p == nil || p.refusal == nil {
		return nil
	}
	return fmt.Errorf("the processes share GPU memory or events by their interposers, and that cannot be taken down now: %w: %w", p.refusal, errdefs.ErrFailedPrecondition)
}
