// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package companion

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/containerd/log"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/proc"
)

// Kept is GPU memory of parked processes that stays on the GPUs while the driver checkpoints them: this process holds
// the descriptors by which it lives.
//
//	Save --> away --Open--> returned --Drain--> gone
//
// Away, it is nowhere else. Returned, the programs run on copies of it, and it can be copied to files, or let go of:
// both are of use once. All methods can be called on nil, and beside each other.
type Kept struct {
	all []*kept

	mu       sync.Mutex
	wanted   bool          // somebody will drain it
	returned bool          // the processes have their memory, and perhaps wait at the gate
	open     chan struct{} // closed when they run on it
}

// kept is that of one process.
type kept struct {
	*Companion
	files        []int // by which the memory lives; empty once it is returned
	socket       int   // to the companion; -1 for none
	start, bytes uint64

	to      *os.File // where it is drained to
	offset  uint64
	drained bool
}

// fromCheckpoint is the argument of an askBack to a process that was restored: what is kept is not with it.
const fromCheckpoint = time.Millisecond

// batch is the most descriptors at a time.
const batch = 32

// outOfMemory is CUDA_ERROR_OUT_OF_MEMORY.
const outOfMemory = 2

// Keep has the next Save keep the memory on the GPUs if it can; Open must follow before another Save. It can be
// called on nil.
func (p *Parked) Keep(wanted bool) {
	if p != nil {
		p.keep = wanted && !p.shared && !p.leave && p.Bytes > 0
	}
}

// Kept returns what the last Save has kept, nil for nothing. It can be called on nil.
func (p *Parked) Kept() *Kept {
	if p == nil {
		return nil
	}
	return p.kept
}

// export exports the memory of all, or of none, which is nil.
func (p *Parked) export(ctx context.Context) *Kept {
	k := &Kept{open: make(chan struct{})}
	for _, c := range p.all {
		k.all = append(k.all, &kept{Companion: c, socket: -1})
	}
	err := k.each(func(m *kept) error { return m.export(ctx) })
	if err == nil {
		return k
	}
	log.G(ctx).WithError(err).Info("the GPU memory is copied while the program stands still: it cannot be kept on the GPU")
	k.close()
	return nil
}

func (k *Kept) each(do func(*kept) error) error {
	errs := make([]error, len(k.all))
	var group sync.WaitGroup
	for i, m := range k.all {
		group.Go(func() { errs[i] = do(m) })
	}
	group.Wait()
	return errors.Join(errs...)
}

func (k *Kept) close() {
	for _, m := range k.all {
		m.close()
	}
}

func (m *kept) closeFiles() {
	for _, fd := range m.files {
		unix.Close(fd)
	}
	m.files = nil
}

func (m *kept) close() {
	m.closeFiles()
	if m.socket >= 0 {
		unix.Close(m.socket)
		m.socket = -1
	}
}

// export takes the descriptors of all blocks, a batch at a time.
func (m *kept) export(ctx context.Context) error {
	for {
		now, err := m.ask(ctx, "keep the GPU memory of", askKeep, 0, patience)
		if err != nil || now.count == 0 {
			return err
		}
		fds, err := m.descriptors(now.count)
		m.files = append(m.files, fds...)
		if err != nil {
			return err
		}
	}
}

// descriptors returns duplicates of the descriptors that the companion offers, which are the caller's.
func (m *kept) descriptors(count uint32) (fds []int, err error) {
	if count > batch {
		return nil, fmt.Errorf("the companion of process %d offers %d descriptors", m.PID, count)
	}
	data := make([]byte, 4*count)
	if err := access(m.PID, m.at+offDescriptors, data, false); err != nil {
		return nil, err
	}
	process, err := unix.PidfdOpen(m.PID, 0)
	if err != nil {
		return nil, fmt.Errorf("the companion of process %d: %w", m.PID, err)
	}
	defer unix.Close(process)
	for ; len(data) > 0; data = data[4:] {
		fd, err := unix.PidfdGetfd(process, int(binary.LittleEndian.Uint32(data)), 0)
		if err != nil {
			return fds, fmt.Errorf("take a descriptor of process %d: %w", m.PID, err)
		}
		fds = append(fds, fd)
	}
	return fds, nil
}

// release has the driver have none of a process's memory, and returns the bytes.
func (k *Kept) release(ctx context.Context, c *Companion) (uint64, error) {
	m := k.all[slices.IndexFunc(k.all, func(m *kept) bool { return m.Companion == c })]
	now, err := m.ask(ctx, "release the GPU memory of", askRelease, 0, patience)
	m.start, m.bytes = now.start, now.bytes
	return now.bytes, err
}

// send sends data with descriptors.
func (m *kept) send(data []byte, fds ...int) error {
	if err := unix.Sendmsg(m.socket, data, unix.UnixRights(fds...), nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT); err != nil {
		return fmt.Errorf("send process %d its GPU memory: %w", m.PID, err)
	}
	return nil
}

// meet has a socket to the companion, and returns how many descriptors that has taken before.
func (m *kept) meet(ctx context.Context) (taken uint32, err error) {
	now, err := m.ask(ctx, "give back the GPU memory of", askMeet, 0, patience)
	if err != nil {
		return 0, err
	}
	fds, err := m.descriptors(1)
	if err != nil {
		return 0, err
	}
	if m.socket >= 0 {
		unix.Close(m.socket)
	}
	m.socket = fds[0]
	return now.count, nil
}

// giveBack has the process parked with its memory, a copy of what is kept, which it has mapped beside.
func (m *kept) giveBack(ctx context.Context) error {
	now, err := m.read()
	if err != nil {
		return err
	}
	if now.state != saved || len(m.files) == 0 {
		_, err := m.ask(ctx, "bring back the GPU memory of", askBack, 0, patience)
		return err
	}
	taken, err := m.meet(ctx)
	if err != nil {
		return err
	}
	for int(taken) < len(m.files) {
		if err := m.send([]byte{0}, m.files[taken:min(int(taken)+batch, len(m.files))]...); err != nil {
			return err
		}
		// It may have room for some of them.
		now, err := m.ask(ctx, "give back the GPU memory of", askTake, 0, patience)
		if err != nil && now.count <= taken {
			return err
		}
		taken = max(now.count, taken+1)
	}
	now, err = m.ask(ctx, "copy the GPU memory of", askReturn, 0, patience)
	if err != nil && now.result == outOfMemory && m.to != nil {
		log.G(ctx).WithError(err).Warn("others have taken GPU memory meanwhile: the program stands still while it is copied")
		if err = m.drain(ctx); err == nil {
			_, err = m.ask(ctx, "bring back the GPU memory of", askBack, 0, patience)
		}
	}
	return err
}

// drain copies what is kept to the file, by the process's mapping of it: the process gets no descriptor, by which
// its program could make the file larger.
func (m *kept) drain(ctx context.Context) error {
	if m.drained || m.bytes == 0 {
		return nil
	}
	if m.to == nil {
		return fmt.Errorf("the GPU memory of process %d has no file", m.PID)
	}
	_, err := m.read() // whether it has ended
	if err == nil {
		err = m.mapsFile()
	}
	if err == nil {
		_, err = m.ask(ctx, "copy out the GPU memory of", askDrain, 0, patience)
	}
	m.drained = err == nil
	if proc.Ended(err) {
		return fmt.Errorf("process %d has ended before its GPU memory was copied: the checkpoint is not complete: %w", m.PID, err)
	}
	return err
}

// mapsFile returns nil if the process has the file mapped where it saves its memory, so that what it writes there is
// in the file.
func (m *kept) mapsFile() error {
	var file unix.Stat_t
	if err := unix.Fstat(int(m.to.Fd()), &file); err != nil {
		return err
	}
	all, err := proc.Maps(m.PID)
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(all, func(a proc.Mapping) bool {
		return a.Start <= m.start && m.start+m.bytes <= a.End && a.Permissions == "rw-s" &&
			a.Inode == file.Ino && a.Offset+m.start-a.Start == m.offset
	}) {
		return fmt.Errorf("process %d does not have the file of its GPU memory mapped at %#x: the checkpoint is not complete", m.PID, m.start)
	}
	return nil
}

// bringBack has all processes parked with their memory. It can be called again.
func (k *Kept) bringBack(ctx context.Context) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.returned {
		return nil
	}
	err := k.each(func(m *kept) error {
		err := m.giveBack(ctx)
		if err == nil || proc.Ended(err) {
			m.closeFiles()
			return nil
		}
		return err
	})
	k.returned = err == nil
	return err
}

// opened says that the processes run. What nobody wants is let go of.
func (k *Kept) opened(ctx context.Context) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.isOpen() {
		return
	}
	close(k.open)
	if !k.wanted {
		k.drop(ctx)
	}
}

func (k *Kept) isOpen() bool {
	select {
	case <-k.open:
		return true
	default:
		return false
	}
}

// drop lets go of what is kept. A companion whose socket ends does so by itself.
func (k *Kept) drop(ctx context.Context) {
	err := k.each(func(m *kept) error {
		defer m.close()
		if m.drained || m.bytes == 0 {
			return nil
		}
		_, err := m.ask(ctx, "let go of the kept GPU memory of", askDrop, 0, patience)
		if proc.Ended(err) {
			return nil
		}
		return err
	})
	if err != nil {
		log.G(ctx).WithError(err).Warn("kept GPU memory")
	}
}

// Fills reports whether Drain makes a process write what it kept to the host memory at an address: to the file that is
// mapped there, shared, before Open.
func (k *Kept) Fills(pid int, start uint64) bool {
	return k != nil && slices.ContainsFunc(k.all, func(m *kept) bool { return m.PID == pid && m.start == start && m.bytes > 0 })
}

// Into says where Drain copies the memory of a process that saved it at an address: to a file, from an offset on. The
// file must stay open until Close.
func (k *Kept) Into(pid int, start uint64, file *os.File, offset uint64) {
	if k == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.wanted = true
	for _, m := range k.all {
		if m.PID == pid && m.start == start {
			m.to, m.offset = file, offset
		}
	}
}

// Drain waits until the programs run, or over is closed, and copies it out while the programs run; it returns the
// bytes. On an error files may be there in part.
func (k *Kept) Drain(ctx context.Context, over <-chan struct{}) (bytes uint64, err error) {
	if k == nil {
		return 0, nil
	}
	select {
	case <-k.open:
	case <-over:
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	if !k.isOpen() {
		return 0, errors.New("the GPU memory is not back: nothing can be copied")
	}
	ctx = context.WithoutCancel(ctx) // a companion that copies cannot be stopped
	for _, m := range k.all {
		bytes += m.bytes
	}
	return bytes, k.each(func(m *kept) error { return m.drain(ctx) })
}

// Close lets go of what was not drained, when it is returned.
func (k *Kept) Close(ctx context.Context) {
	if k == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	wanted := k.wanted
	k.wanted = false
	if wanted && k.isOpen() {
		k.drop(ctx)
	}
}

// Open is the function Open for processes of which some may be parked by p: also those whose memory is kept. It can be
// called on nil.
func (p *Parked) Open(ctx context.Context, procs cuda.Group) error {
	ctx = context.WithoutCancel(ctx)
	k := p.Kept()
	if k == nil {
		return Open(ctx, procs)
	}
	err := k.bringBack(ctx)
	if err == nil {
		err = Open(ctx, procs)
	}
	if err == nil {
		k.opened(ctx)
	}
	return err
}

// Forget gives up what is kept, for processes that have ended. It can be called on nil.
func (p *Parked) Forget() {
	if k := p.Kept(); k != nil && !k.returned {
		for _, m := range k.all {
			m.close()
		}
	}
}
