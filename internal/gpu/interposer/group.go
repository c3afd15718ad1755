// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package interposer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// of returns the interposers of the processes that may be taken through steps.
func of(procs cuda.Group) (all []*Interposer, err error) {
	for _, p := range procs.Living() {
		if p.State == cuda.Checkpointed { // somebody else's
			continue
		}
		c, err := Find(p.PID.Host)
		if proc.Ended(err) {
			continue
		}
		if err != nil {
			closeAll(all)
			return nil, err
		}
		if c != nil {
			all = append(all, c)
		}
	}
	return all, nil
}

// eventThread is the name of the driver's thread without which it locks no process.
const eventThread = "cuda-EvtHandlr"

// Threads returns, by their tids, the threads of the processes that must run while their interposers
// save: the interposers' own, and the driver's for the lock.
func Threads(procs cuda.Group) (tids []int) {
	all, _ := of(procs) // who cannot be found does nothing
	defer closeAll(all)
	for _, c := range all {
		tids = append(tids, c.threads()...)
		threads, _ := proc.Threads(c.PID)
		for _, tid := range threads {
			if proc.ThreadName(c.PID, tid) == eventThread {
				tids = append(tids, tid)
			}
		}
	}
	return tids
}

// Savers returns those of Threads that call the driver.
func Savers(procs cuda.Group) (tids []int) {
	all, _ := of(procs)
	defer closeAll(all)
	for _, c := range all {
		tids = append(tids, c.TID)
	}
	return tids
}

// Parked are processes whose calls of the driver wait at their interposers' gates, and of which the
// interposers can save GPU memory, or GPUs' access to each other's memory, or that others can ask for what they share.
type Parked struct {
	Procs cuda.Group
	Bytes uint64        // of GPU memory that they can save
	all   []*Interposer // of each process
	bytes []uint64      // of each
	leave bool          // all of it to the driver
	kept  *Kept         // by the last Save; nil if it is in areas

	shared  bool  // what they share is taken down
	refusal error // it cannot be
}

// Park closes the gates of the processes' interposers, and returns the processes that have something to
// save or to share; nil for none. Half of timeout is for the programs' calls and GPU work to end, and the other
// half if they share: the driver cannot have them as they are. If none has anything, and on an error, all are
// open again, unless the error says that one could not be opened. What the processes share is taken down;
// if it cannot be, a Parked is returned with the error, and it has a Refusal. The processes must not be frozen.
func Park(ctx context.Context, procs cuda.Group, timeout time.Duration) (p *Parked, err error) {
	for had := 0; ; {
		all, ferr := of(procs)
		if ferr != nil || len(all) <= had { // not for ever: programs can have interposers that come and go
			return p, errors.Join(err, ferr)
		}
		// A program that has its interposer from then on may import memory of one that is parked.
		if p, err = park(ctx, procs, all, timeout); !errors.Is(err, errElsewhere) {
			return p, err
		}
		had = len(all)
	}
}

func park(ctx context.Context, procs cuda.Group, all []*Interposer, timeout time.Duration) (*Parked, error) {
	p, err := shut(ctx, procs, all, timeout)
	if err == nil && len(p.all) > 0 {
		return p, nil
	}
	if oerr := openAll(context.WithoutCancel(ctx), all, nil); oerr != nil {
		err = errors.Join(err, fmt.Errorf("on the way back: %w", oerr))
	}
	if err != nil && p.shared {
		return &Parked{refusal: err}, err
	}
	return nil, err
}

// shut closes the gates and takes down what is shared. On an error some of that may be done.
func shut(ctx context.Context, procs cuda.Group, all []*Interposer, timeout time.Duration) (*Parked, error) {
	p, err := new(Parked), closeGates(ctx, all, timeout/2)
	parked, rerr := each(all, (*Interposer).read)
	if errors.Is(err, ErrBusy) && slices.ContainsFunc(parked, func(c control) bool { return c.sharing != 0 }) {
		if err = openAll(ctx, all, nil); err == nil {
			err = closeGates(ctx, all, timeout/2)
		}
		parked, rerr = each(all, (*Interposer).read)
	}
	for i, c := range all {
		now := parked[i]
		p.shared = p.shared || now.sharing != 0
		at := slices.IndexFunc(procs, func(q cuda.Process) bool { return q.PID.Host == c.PID })
		// One that shares events alone has nothing to save, and must be parked all the same.
		if now.bytes > 0 || now.peers > 0 || now.sharing&exports != 0 {
			p.Procs, p.all, p.bytes = append(p.Procs, procs[at]), append(p.all, c), append(p.bytes, now.bytes)
			p.Bytes += now.bytes
		}
	}
	if err := cmp.Or(err, rerr); err != nil {
		return p, err
	}
	p.shared, err = takeDown(context.WithoutCancel(ctx), all)
	return p, err
}

// LeaveToDriver says whether the memory is left to the driver. The driver would
// not restore memory that was shared: that is an error.
func (p *Parked) LeaveToDriver(leave bool) error {
	p.leave = leave
	if leave && p.shared && p.Bytes > 0 {
		return fmt.Errorf("the processes share GPU memory by their interposers, which need room in memory for it: checkpoint to a directory in memory, or raise the limit: %w", errdefs.ErrFailedPrecondition)
	}
	return nil
}

// Savers returns the threads that will map the host memory of interposers that have some to save, by pid.
func (p *Parked) Savers() map[int]int {
	savers := make(map[int]int)
	for i, c := range p.all {
		if p.bytes[i] > 0 && !p.leave {
			savers[c.PID] = c.TID
		}
	}
	return savers
}

// Save has the interposers save the GPU memory, unless it is left to the driver, and returns the bytes.
// With a Keeper the memory stays on the GPUs, if it can; Open must follow before another such Save. The
// processes come locked by the driver and leave so: for the interposers' sake they are unlocked meanwhile.
// All threads but those of Threads must be held. What was saved before is saved anew.
//
// On an error the memory is back on the GPUs and the processes are locked, unless the error says that
// one of this failed as well: Open is the way back then. Save ignores the end of ctx.
func (p *Parked) Save(ctx context.Context, h *cuda.Helper, timeout time.Duration, by *Keeper) (bytes uint64, err error) {
	ctx = context.WithoutCancel(ctx)
	if p.leave {
		return 0, p.Lock(ctx, h, timeout)
	}
	if err := p.Procs.Unlock(ctx, h); err != nil {
		return 0, errors.Join(err, p.Lock(ctx, h, timeout))
	}
	if bytes, err = p.saveAndLock(ctx, h, timeout, by); err == nil {
		return bytes, nil
	}
	back := p.bringBack(ctx)
	if back = errors.Join(back, p.Lock(ctx, h, timeout)); back != nil {
		err = fmt.Errorf("%w; on the way back: %w", err, back)
	}
	return 0, err
}

func (p *Parked) saveAndLock(ctx context.Context, h *cuda.Helper, timeout time.Duration, by *Keeper) (bytes uint64, err error) {
	if err := p.bringBack(ctx); err != nil {
		return 0, err
	}
	if bytes, err = p.save(ctx, by); err != nil {
		return 0, err
	}
	return bytes, p.Lock(ctx, h, timeout)
}

// save has the interposers save or keep the memory of parked processes.
func (p *Parked) save(ctx context.Context, by *Keeper) (uint64, error) {
	if by != nil {
		p.kept = p.export(ctx, by)
	}
	sizes, err := each(p.all, func(c *Interposer) (uint64, error) {
		if p.kept != nil {
			return p.kept.release(ctx, c)
		}
		now, err := c.ask(ctx, "save the GPU memory of", askSave, 0, patience)
		return now.bytes, err
	})
	return sumOf(sizes), err
}

// Has reports whether a process has saved or kept its memory at an address.
func (p *Parked) Has(pid int, start uint64) bool {
	return slices.ContainsFunc(p.all, func(c *Interposer) bool {
		if c.PID != pid {
			return false
		}
		now, err := c.read()
		return err == nil && now.state == saved && now.start == start
	})
}

// bringBack has all parked with their memory.
func (p *Parked) bringBack(ctx context.Context) error {
	if p.kept != nil {
		p.kept.Close()
		if err := p.kept.bringBack(ctx); err != nil {
			return err
		}
		p.kept = nil
		return nil
	}
	return step(ctx, p.all, "bring back the GPU memory of", askBack)
}

// Lock has the driver lock those of the processes that it has not locked.
func (p *Parked) Lock(ctx context.Context, h *cuda.Helper, timeout time.Duration) error {
	loose := slices.DeleteFunc(slices.Clone(p.Procs), func(q cuda.Process) bool {
		state, err := h.State(ctx, q.PID.Host)
		return err == nil && state == cuda.Locked
	})
	return loose.Lock(ctx, h, timeout)
}

// Open has the interposers of processes bring GPU memory back, where it is saved, and let the programs'
// calls reach the driver. One that is open is left alone. On an error programs wait at the gate, with
// their memory safe, and Open can be called again. The processes must be unlocked, and not frozen. Open
// ignores the end of ctx.
func Open(ctx context.Context, procs cuda.Group) error {
	all, err := of(procs)
	if err != nil {
		return err
	}
	defer closeAll(all)
	return openAll(context.WithoutCancel(ctx), all, nil)
}

// Gate holds the threads of restored processes, as gpustate.Gate.
type Gate interface {
	Free(tid int) error
	Hold(tid int) error
}

// Ready returns GPU memory with what a restored process has saved at an address, which is the caller's
// then; nil for none.
type Ready func(ctx context.Context, pid int, start, bytes uint64) []cuda.Memory

// OpenHeld is Open while a gate holds all threads of the processes. A process for which no memory is
// ready fills its own from the area.
func OpenHeld(ctx context.Context, procs cuda.Group, gate Gate, ready Ready) error {
	all, err := of(procs)
	if err != nil {
		return err
	}
	defer closeAll(all)
	all = slices.DeleteFunc(all, func(c *Interposer) bool {
		now, err := c.read()
		return err == nil && now.state == open
	})
	var threads []int
	for _, c := range all {
		threads = append(threads, c.threads()...)
	}
	for _, tid := range threads {
		if err := gate.Free(tid); err != nil {
			return err
		}
	}
	if err := openAll(ctx, all, ready); err != nil {
		return err
	}
	for _, tid := range threads {
		if err := gate.Hold(tid); err != nil {
			return err
		}
	}
	return nil
}

// openAll opens those that are parked or saved. ready is not nil for restored processes: one that ends, and memory
// that was lost with one, is an error. On an error those are open whose memory and sharing are back, and openAll can be
// called again.
func openAll(ctx context.Context, all []*Interposer, ready Ready) error {
	strict := ready != nil
	inAll := func(all []*Interposer, do func(*Interposer) error) error {
		return inAll(all, func(c *Interposer) error {
			if err := do(c); strict || !proc.Ended(err) {
				return err
			}
			return nil
		})
	}
	var mutex sync.Mutex
	var closed []*Interposer
	err := inAll(all, func(c *Interposer) error {
		now, err := c.settled(ctx)
		if err == nil && (now.state == parked || now.state == saved) {
			mutex.Lock()
			closed = append(closed, c)
			mutex.Unlock()
		}
		return err
	})
	err = errors.Join(err, inAll(closed, func(c *Interposer) error {
		if strict {
			return c.refill(ctx, ready)
		}
		_, err := c.ask(ctx, "bring back the GPU memory of", askBack, 0, patience)
		return err
	}))
	if err == nil {
		err = together(ctx, closed, strict, inAll)
	}
	return errors.Join(err, inAll(closed, func(c *Interposer) error {
		now, err := c.read()
		if err != nil || now.state != parked || now.sharing&apart != 0 {
			return err
		}
		_, err = c.ask(ctx, "let go on", askOpen, 0, patience)
		return err
	}))
}

// refill has a restored process parked with its memory.
func (c *Interposer) refill(ctx context.Context, ready Ready) error {
	now, err := c.read()
	if err != nil {
		return err
	}
	if now.state == saved && now.sharing == 0 {
		if memory := ready(ctx, c.PID, now.start, now.bytes); len(memory) > 0 {
			if err := c.takeReady(ctx, memory); err == nil || proc.Ended(err) {
				return err
			}
			log.G(ctx).WithError(err).Warn("the process fills its GPU memory itself: it has not taken what was ready")
		}
	}
	_, err = c.ask(ctx, "bring back the GPU memory of", askBack, fromCheckpoint, patience)
	return err
}

// takeReady has a restored process take memory, and gives each piece up when it has.
func (c *Interposer) takeReady(ctx context.Context, memory []cuda.Memory) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	defer func() { cuda.CloseMemory(memory) }()
	socket, _, err := c.meet(ctx)
	if err != nil {
		return err
	}
	defer socket.Close()
	for len(memory) > 0 {
		n := ofBatch(memory)
		_, err := c.take(ctx, socket, memory[:n], 0)
		if err = inTime(ctx, "give back the GPU memory of", c.PID, err); err != nil {
			return err
		}
		cuda.CloseMemory(memory[:n])
		memory = memory[n:]
	}
	_, err = c.ask(ctx, "give back the GPU memory of", askReturn, 0, patience)
	return err
}

// settled returns what an interposer says when it is busy with nothing, or parks: a park that is
// cancelled opens the gate by itself, and may wait for the GPU as long as that works. Who asked for it may have ended
// before it was cancelled.
func (c *Interposer) settled(ctx context.Context) (control, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		now, err := c.read()
		if err == nil && now.request != now.answered && now.state == parking {
			if err = c.write(offCancelled, now.request); err == nil {
				now, err = c.read() // it may have been done first
			}
		}
		if err != nil || now.request == now.answered || now.state == parking {
			return now, err
		}
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return now, fmt.Errorf("the interposer of process %d is still busy: %w", c.PID, ctx.Err())
		}
	}
}

// each calls do for all at once.
func each[M, T any](all []M, do func(M) (T, error)) ([]T, error) {
	values, errs := make([]T, len(all)), make([]error, len(all))
	var group sync.WaitGroup
	for i, c := range all {
		group.Go(func() { values[i], errs[i] = do(c) })
	}
	group.Wait()
	return values, errors.Join(errs...)
}

func sumOf(bytes []uint64) (sum uint64) {
	for _, n := range bytes {
		sum += n
	}
	return sum
}
