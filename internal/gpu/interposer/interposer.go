// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package interposer

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// ErrBusy says that an interposer could not park its program: calls or GPU work did not end in time.
var ErrBusy = errors.New("its calls or its work on the GPU did not end in time")

// errLost says that the GPU memory of a process was kept by a shim that has ended meanwhile.
var errLost = errors.New("its GPU memory was kept on the GPU by a process that has ended, and is lost")

// The control block of interposer/worker.c.
const (
	magic      = "gpuckpt interposer control page\x00"
	version    = 6
	copiers    = 8 // at most, and the thread that answers importers
	controlLen = offInArea + 4
	alignment  = 64
	// maxData bounds what is searched of a mapping; the library's data are some pages.
	maxData = 1 << 20
	// maxMappings bounds how many of its mappings are searched: it has one or two that are written to.
	maxMappings = 16

	offVersion   = 32
	offTID       = 40
	offState     = 44
	offRequest   = 48
	offAnswered  = 52
	offResult    = 56
	offArgument  = 60
	offCancelled = 64
	offPeers     = 68
	offStart     = 72
	offBytes     = 80
	offCopiers   = 88
	offCut       = 120
	offSharing   = 128
	offCount     = 132

	offDescriptors = 136
	offSizes       = offDescriptors + 4*batch
	offInArea      = offSizes + 8*batch
)

type state uint32

const (
	open state = iota
	parking
	parked
	saved
)

const (
	askPark = 1 + iota
	askSave
	askOpen
	askBack
	askLeave
	askRest
	askWake
	askJoin
	askKeep
	askRelease
	askMeet
	askTake
	askReturn
	askPass

	asks = 16 // a request is a number times this, and what is asked for
)

// wake is the signal that an interposer's thread waits for.
const wake = unix.Signal(60)

// The answers of an interposer that is not let by something else than the driver: CUDA_ERROR_ILLEGAL_STATE,
// NOT_FOUND, NOT_READY, NOT_PERMITTED.
const (
	illegalState = 401
	notFound     = 500
	notReady     = 600
	notPermitted = 800
)

// patience bounds the wait for an answer that copies memory; a driver that hangs ends it.
const patience = 10 * time.Minute

// Interposer is one in a process, by the pid and tid that this process counts.
type Interposer struct {
	PID, TID int
	Copiers  []int  // its other threads, which work when it does
	at       uint64 // the control block
	process  *process
}

// control is what a control block says.
type control struct {
	state             state
	request, answered uint32
	result            int32
	peers             uint32
	sharing           sharing
	count             uint32
	start, bytes      uint64
}

// isData reports whether a mapping is of the library's data. It takes the path from it.
func isData(m *proc.Mapping) bool {
	library := strings.HasSuffix(strings.TrimSuffix(m.Path, " (deleted)"), "/"+LibraryName)
	m.Path = ""
	return library && strings.HasPrefix(m.Permissions, "rw")
}

// Find returns the interposer of a process, nil if it has none or one that has made no GPU memory. It
// stays that of this process, whatever becomes of the process's number. Close it, or leave that to the
// collector of garbage.
func Find(pid int) (c *Interposer, err error) {
	p, err := openProcess(pid)
	if err == nil {
		c, err = blockOf(pid, p)
	}
	if err == nil && c != nil && !p.lives() { // all that was read by the number is of this process, or c is not used
		err = unix.ESRCH
	}
	if err == nil && c != nil {
		return c, nil
	}
	p.close()
	if proc.Ended(err) {
		return nil, nil
	}
	return nil, err
}

func blockOf(pid int, p *process) (*Interposer, error) {
	mappings, err := proc.Maps(pid, isData)
	if err != nil {
		return nil, err
	}
	for _, m := range mappings[:min(len(mappings), maxMappings)] {
		data := make([]byte, min(m.End-m.Start, maxData))
		if err := p.access(m.Start, data, false); err != nil {
			return nil, err
		}
		for i := 0; i+controlLen <= len(data); i += alignment {
			if bytes.HasPrefix(data[i:], []byte(magic)) {
				return at(pid, p, m.Start+uint64(i), data[i:])
			}
		}
	}
	return nil, nil
}

func at(pid int, p *process, place uint64, data []byte) (*Interposer, error) {
	inside := int32(binary.LittleEndian.Uint32(data[offTID:])) //nolint:gosec // as it is written
	if inside <= 0 {
		return nil, nil
	}
	if v := binary.LittleEndian.Uint32(data[offVersion:]); v != version {
		if state(binary.LittleEndian.Uint32(data[offState:])) == open {
			return nil, nil // its memory is left to the driver
		}
		return nil, fmt.Errorf("the interposer of process %d is of version %d, and this shim's of %d", pid, v, version)
	}
	c := &Interposer{PID: pid, at: place, process: p}
	var err error
	if c.TID, err = proc.ThreadInside(pid, int(inside)); err != nil {
		return nil, fmt.Errorf("the interposer of process %d: %w", pid, err)
	}
	for i := range copiers {
		inside := int32(binary.LittleEndian.Uint32(data[offCopiers+4*i:])) //nolint:gosec // as it is written
		if inside <= 0 {
			break
		}
		tid, err := proc.ThreadInside(pid, int(inside))
		if err != nil {
			return nil, fmt.Errorf("the interposer of process %d: %w", pid, err)
		}
		c.Copiers = append(c.Copiers, tid)
	}
	return c, nil
}

// Close lets go of the process. It can be called on nil.
func (c *Interposer) Close() {
	if c != nil {
		c.process.close()
	}
}

func closeAll(all []*Interposer) {
	for _, c := range all {
		c.Close()
	}
}

// threads returns all of them.
func (c *Interposer) threads() []int { return append([]int{c.TID}, c.Copiers...) }

func (c *Interposer) read() (control, error) {
	var data [controlLen]byte
	if err := c.process.access(c.at, data[:], false); err != nil {
		return control{}, err
	}
	number := func(at int) uint32 { return binary.LittleEndian.Uint32(data[at:]) }
	return control{
		state: state(number(offState)), request: number(offRequest), answered: number(offAnswered),
		result: int32(number(offResult)), //nolint:gosec // as it is written
		peers:  number(offPeers), sharing: sharing(number(offSharing)), count: number(offCount),
		start: binary.LittleEndian.Uint64(data[offStart:]), bytes: binary.LittleEndian.Uint64(data[offBytes:]),
	}, nil
}

func (c *Interposer) write(offset int, value uint32) error {
	return c.process.access(c.at+uint64(offset), binary.LittleEndian.AppendUint32(nil, value), true) //nolint:gosec // small
}

// argument is what comes with a request: see each ask.
type argument uint32

// within is the argument of an askPark: how long it may take.
func within(limit time.Duration) argument { return argument(limit.Milliseconds()) } //nolint:gosec // minutes at most

// begin writes a request and wakes the thread.
func (c *Interposer) begin(what uint32, with argument) (request uint32, err error) {
	now, err := c.read()
	if err != nil {
		return 0, err
	}
	if now.request != now.answered {
		// The memory of a process that is ending stays longer than the thread that would answer.
		if err := c.process.signal(c.TID, 0); proc.Ended(err) {
			return 0, err
		}
		return 0, fmt.Errorf("the interposer of process %d is busy with an earlier request: %w", c.PID, ErrBusy)
	}
	request = (now.request&^(asks-1) + asks) | what
	if request == what { // 0 would be no number
		request += asks
	}
	if err := c.write(offArgument, uint32(with)); err != nil {
		return 0, err
	}
	if err := c.write(offRequest, request); err != nil {
		return 0, err
	}
	return request, c.process.signal(c.TID, wake)
}

// answer returns what an interposer says, and whether it has answered a request. An error without an answer is that of
// a process that has ended.
func (c *Interposer) answer(doing string, request uint32) (now control, done bool, err error) {
	if now, err = c.read(); err != nil || now.answered != request {
		return now, false, err
	}
	switch {
	case now.result == 0:
		return now, true, nil
	case now.result == notReady:
		err = ErrBusy
	case now.result == notFound && request%asks == askJoin:
		err = errGone
	case now.result == illegalState && request%asks == askBack:
		err = errLost
	case now.result == notPermitted:
		err = errElsewhere
	default:
		return now, true, fmt.Errorf("%s process %d: the driver answers its interposer with error %d", doing, c.PID, now.result)
	}
	return now, true, fmt.Errorf("%s process %d: %w", doing, c.PID, err)
}

// await waits for the answer to a request.
func (c *Interposer) await(ctx context.Context, doing string, request uint32) (control, error) {
	for nap := 100 * time.Microsecond; ; nap = min(2*nap, 5*time.Millisecond) {
		now, done, err := c.answer(doing, request)
		if done || err != nil {
			return now, err
		}
		select {
		case <-time.After(nap):
		case <-ctx.Done():
			return now, fmt.Errorf("%s process %d: its interposer does not answer: %w", doing, c.PID, ctx.Err())
		}
	}
}

// ask is begin and await; a request that has not been answered in time is cancelled, and then given a
// little longer.
func (c *Interposer) ask(ctx context.Context, doing string, what uint32, with argument, limit time.Duration) (control, error) {
	request, err := c.begin(what, with)
	if err != nil {
		return control{}, err
	}
	timely, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	now, err := c.await(timely, doing, request)
	if err == nil || timely.Err() == nil {
		return now, err
	}
	if werr := c.write(offCancelled, request); werr != nil {
		return now, werr
	}
	late, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if now, lerr := c.await(late, doing, request); lerr == nil {
		return now, nil // it was done after all
	}
	return now, err
}
