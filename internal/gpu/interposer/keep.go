// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package interposer

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/containerd/log"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// Mover is what is needed of a cuda.Mover.
type Mover interface {
	CopyOut(ctx context.Context, memory []cuda.Memory, to *os.File) (cuda.Parts, error)
	Kill()
	Close() error
}

// Keeper is what Save needs to keep memory on the GPUs.
type Keeper struct {
	// Mover returns a mover, which is the Kept's then.
	Mover func(context.Context) (Mover, error)
	// File returns an empty file for so much memory of a process. The Kept has a duplicate.
	File func(pid int, bytes uint64) (*os.File, error)
	// Undo is called after File if the memory is not kept.
	Undo func()
}

// Kept is GPU memory of parked processes that stays on the GPUs while the driver checkpoints them: this process holds
// the descriptors by which it lives. A mover copies it to files meanwhile.
//
//	Save --> away --Open--> returned
//
// Away, it is nowhere else. All methods can be called beside each other, and InArea and Close on nil.
type Kept struct {
	all   []*kept
	mover Mover

	copied chan struct{} // closed when all is copied, or will not be; then err is set
	err    error

	back     sync.Mutex // one bringBack at a time
	mu       sync.Mutex
	wanted   bool // somebody waits for the copy
	returned bool // the processes have their memory, and perhaps wait at the gate
}

// kept is that of one process.
type kept struct {
	*Interposer
	memory       []cuda.Memory // by which it lives, but for what the process has taken
	given        uint32        // pieces that it has taken
	socket       *os.File      // to the interposer; nil for none
	start, bytes uint64        // as the process has them once it is away

	copies []cuda.Memory // duplicates of memory, for the mover
	to     *os.File      // a duplicate
	file   unix.Stat_t
	parts  cuda.Parts // once copied
}

const (
	// fromCheckpoint is the argument of an askBack: what was saved or kept is in the file that is mapped to the area.
	fromCheckpoint argument = 1
	// beside is the argument of an askTake: the GPU must have room for all of the memory once more.
	beside argument = 1
)

// batch is the most descriptors at a time, and batchBytes the most memory, unless one has more, where a GPU has no room
// for all: so much it must have free.
const (
	batch      = 32
	batchBytes = 1 << 30
	// maxPieces bounds what a program can have this process hold open: 512 GiB in pieces of 2 MiB.
	maxPieces = 1 << 18
)

// A piece of GPU memory is a multiple of pieceUnit bytes, and at most maxPiece: the sum of all is a file's size.
const (
	pieceUnit = 2 << 20
	maxPiece  = 1 << 40
)

// outOfMemory is CUDA_ERROR_OUT_OF_MEMORY.
const outOfMemory = 2

// CanKeep reports whether there is memory that a Save could keep.
func (p *Parked) CanKeep() bool { return !p.shared && !p.leave && p.Bytes > 0 }

// Kept returns what the last Save has kept, nil for nothing. It can be called on nil.
func (p *Parked) Kept() *Kept {
	if p == nil {
		return nil
	}
	return p.kept
}

// export exports the memory of all, or of none, which is nil, and has the mover begin.
func (p *Parked) export(ctx context.Context, by *Keeper) *Kept {
	k := &Kept{copied: make(chan struct{})}
	for _, c := range p.all {
		k.all = append(k.all, &kept{Interposer: c})
	}
	if err := k.exportAll(ctx, by); err != nil {
		log.G(ctx).WithError(err).Info("the GPU memory is copied while the program stands still: it cannot be kept on the GPU")
		for _, m := range k.all {
			m.close()
			m.endCopy()
		}
		by.Undo()
		return nil
	}
	go k.copy(ctx)
	return k
}

// exportAll exports the memory of all, and makes what copies it.
func (k *Kept) exportAll(ctx context.Context, by *Keeper) error {
	err := inAll(k.all, func(m *kept) error {
		if err := m.export(ctx, maxPieces); err != nil || len(m.memory) == 0 {
			return err
		}
		return m.prepare(by)
	})
	if err != nil {
		return err
	}
	k.mover, err = by.Mover(ctx)
	return err
}

// closeMemory gives up this process's hold on the memory.
func (m *kept) closeMemory() {
	cuda.CloseMemory(m.memory)
	m.memory = nil
}

func (m *kept) close() {
	m.closeMemory()
	m.hangUp()
}

// hangUp ends the socket to the interposer, which takes it that the GPU has the memory once.
func (m *kept) hangUp() {
	if m.socket != nil {
		m.socket.Close()
		m.socket = nil
	}
}

// export takes the descriptors of all blocks, a batch at a time, and at most so many more than a batch.
func (m *kept) export(ctx context.Context, most int) error {
	const doing = "keep the GPU memory of"
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		now, err := m.ask(ctx, doing, askKeep, 0, patience)
		if err = inTime(ctx, doing, m.PID, err); err != nil || now.count == 0 {
			return err
		}
		if len(m.memory) > most {
			return fmt.Errorf("the interposer of process %d offers more than %d pieces of GPU memory", m.PID, most)
		}
		memory, err := m.pieces(now.count)
		m.memory = append(m.memory, memory...)
		if err != nil {
			return err
		}
	}
}

// inTime returns err, or that an interposer has had its time for something of several requests: an answer that comes after
// the end of ctx is one.
func inTime(ctx context.Context, doing string, pid int, err error) error {
	if err == nil && ctx.Err() != nil {
		err = fmt.Errorf("%s process %d: its interposer is slow: %w", doing, pid, ctx.Err())
	}
	return err
}

// prepare makes what the mover needs: descriptors and a file of its own, since the program may have its memory, and the
// checkpoint may fail, before it is done.
func (m *kept) prepare(by *Keeper) (err error) {
	for _, piece := range m.memory {
		f, err := duplicate(piece.File)
		if err != nil {
			return err
		}
		m.copies = append(m.copies, cuda.Memory{File: f, Bytes: piece.Bytes})
		m.bytes += piece.Bytes
	}
	file, err := by.File(m.PID, m.bytes)
	if err != nil {
		return err
	}
	if m.to, err = duplicate(file); err == nil {
		err = unix.Fstat(int(m.to.Fd()), &m.file)
	}
	return err
}

func duplicate(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("keep a file for GPU memory: %w", err)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

func (m *kept) endCopy() {
	cuda.CloseMemory(m.copies)
	m.copies = nil
	if m.to != nil {
		m.to.Close()
		m.to = nil
	}
}

// copy has the mover copy all memory to the files. Then the memory is nobody's but the programs'.
func (k *Kept) copy(ctx context.Context) {
	began, bytes, digested := time.Now(), uint64(0), true
	for _, m := range k.all {
		if k.err == nil && m.to != nil {
			if m.parts, k.err = k.mover.CopyOut(ctx, m.copies, m.to); k.err != nil {
				k.err = fmt.Errorf("copy the GPU memory of process %d: %w", m.PID, k.err)
			}
			bytes, digested = bytes+m.bytes, digested && m.parts != nil
		}
		m.endCopy()
	}
	k.mu.Lock()
	close(k.copied)
	for _, m := range k.all {
		if k.returned { // else bringBack does
			m.hangUp()
		}
	}
	k.mu.Unlock()
	if k.err == nil {
		log.G(ctx).WithField("bytes", bytes).WithField("took", time.Since(began)).WithField("digested", digested).Info("the GPU memory that was kept is copied")
	}
	if err := k.mover.Close(); err != nil { // the driver takes 0.1 s or more to come down
		log.G(ctx).WithError(err).Warn("end of the process that copied GPU memory")
	}
}

func (k *Kept) isCopied() bool {
	select {
	case <-k.copied:
		return true
	default:
		return false
	}
}

// release has the driver have none of a process's memory, and returns the bytes.
func (k *Kept) release(ctx context.Context, c *Interposer) (uint64, error) {
	m := k.of(c.PID)
	now, err := m.ask(ctx, "release the GPU memory of", askRelease, 0, patience)
	m.start = now.start
	if err == nil && now.bytes != m.bytes {
		err = fmt.Errorf("the interposer of process %d has released %d bytes of GPU memory, and kept %d", m.PID, now.bytes, m.bytes)
	}
	return now.bytes, err
}

// take has a parked process whose memory is saved take the next pieces of it, at most a batch. What it
// has taken it has copied.
func (c *Interposer) take(ctx context.Context, socket *os.File, memory []cuda.Memory, how argument) (control, error) {
	var sizes []byte
	var fds []int
	for _, piece := range memory {
		sizes, fds = binary.LittleEndian.AppendUint64(sizes, piece.Bytes), append(fds, int(piece.File.Fd()))
	}
	if err := unix.Sendmsg(int(socket.Fd()), sizes, unix.UnixRights(fds...), nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT); err != nil {
		return control{}, fmt.Errorf("send process %d its GPU memory: %w", c.PID, err)
	}
	return c.ask(ctx, "give back the GPU memory of", askTake, how, patience)
}

// ofBatch returns how many of the pieces are handed over at once where there is little room.
func ofBatch(memory []cuda.Memory) (n int) {
	for bytes := uint64(0); n < min(batch, len(memory)); n++ {
		if bytes += memory[n].Bytes; n > 0 && bytes > batchBytes {
			break
		}
	}
	return n
}

// giveBack has the process parked with its memory. Where the GPU has no room for that beside what is kept, it waits for
// the mover.
func (m *kept) giveBack(ctx context.Context, k *Kept) error {
	now, err := m.read()
	if err != nil {
		return err
	}
	if now.state != saved || len(m.memory) == 0 {
		_, err := m.ask(ctx, "bring back the GPU memory of", askBack, 0, patience)
		return err
	}
	now, err = m.takeAll(ctx, beside)
	if err != nil && now.result == outOfMemory {
		if !k.isCopied() {
			log.G(ctx).WithError(err).Info("the program stands still while its GPU memory is copied: the GPU has no room for it twice")
		}
		<-k.copied
		now, err = m.takeAll(ctx, 0)
	}
	if err != nil && now.result == outOfMemory && k.isCopied() && k.err == nil && m.mapsFile() {
		log.G(ctx).WithError(err).Warn("others have taken GPU memory meanwhile: the program's is brought back from the checkpoint")
		m.closeMemory()
		_, err = m.ask(ctx, "bring back the GPU memory of", askBack, fromCheckpoint, patience)
	}
	return err
}

// takeAll hands all pieces over that the process has not taken, and gives up each when it has.
func (m *kept) takeAll(ctx context.Context, how argument) (now control, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	m.hangUp()
	var taken uint32
	if m.socket, taken, err = m.meet(ctx); err != nil {
		return now, err
	}
	for {
		m.gone(taken)
		if len(m.memory) == 0 {
			break
		}
		n := min(batch, len(m.memory))
		if how != beside {
			n = ofBatch(m.memory)
		}
		now, err = m.take(ctx, m.socket, m.memory[:n], how)
		if err = inTime(ctx, "give back the GPU memory of", m.PID, err); err != nil {
			return now, err
		}
		if now.count != taken+uint32(n) { //nolint:gosec // a batch
			return now, fmt.Errorf("process %d has taken %d pieces of its GPU memory, and was given %d", m.PID, now.count, taken+uint32(n)) //nolint:gosec // as above
		}
		taken = now.count
	}
	return m.ask(ctx, "give back the GPU memory of", askReturn, 0, patience)
}

// gone gives up the pieces that the process has taken so far.
func (m *kept) gone(taken uint32) {
	n := min(int(max(taken, m.given)-m.given), len(m.memory))
	cuda.CloseMemory(m.memory[:n])
	m.memory, m.given = m.memory[n:], max(taken, m.given)
}

// mapsFile reports whether the process has the file mapped where its memory is saved.
func (m *kept) mapsFile() bool {
	_, found, err := proc.FindMapping(m.PID, func(a *proc.Mapping) bool {
		return a.Start <= m.start && m.start+m.bytes <= a.End && a.Inode == m.file.Ino && a.Offset == a.Start-m.start
	})
	return err == nil && found
}

// bringBack has all processes parked with their memory. It can be called again.
func (k *Kept) bringBack(ctx context.Context) error {
	k.back.Lock()
	defer k.back.Unlock()
	if k.returned {
		return nil
	}
	err := inAll(k.all, func(m *kept) error {
		if err := m.giveBack(ctx, k); err != nil && !proc.Ended(err) {
			return err
		}
		m.closeMemory()
		return nil
	})
	k.mu.Lock()
	defer k.mu.Unlock()
	k.returned = err == nil
	if k.returned && k.isCopied() {
		for _, m := range k.all {
			m.hangUp()
		}
	}
	return err
}

// of returns what a process has kept.
func (k *Kept) of(pid int) *kept {
	return k.all[slices.IndexFunc(k.all, func(m *kept) bool { return m.PID == pid })]
}

// Place returns where in a process the area of what it has kept is. It is valid while the process is parked.
func (k *Kept) Place(pid int) (start uint64) { return k.of(pid).start }

// InArea tells the processes that what is kept is in the files that they have mapped, where that is so: they do not
// depend on this process then. It is to be called when the files are mapped, and when Wait has returned. The processes may
// be frozen.
func (k *Kept) InArea() {
	if k == nil || !k.isCopied() || k.err != nil {
		return
	}
	for _, m := range k.all {
		if now, err := m.read(); err == nil && now.state == saved && m.bytes > 0 && m.mapsFile() {
			_ = m.write(offInArea, 1) // it may have ended
		}
	}
}

// Want says that somebody waits for the copy, by Wait, and will call Close. What nobody wants when the programs run is
// not copied any further.
func (k *Kept) Want() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.wanted = true
}

// Wait waits until all memory is in the files, and returns the bytes. The programs may run meanwhile or not. On an error
// files may be there in part, and the memory is as safe as before.
func (k *Kept) Wait(ctx context.Context) (bytes uint64, err error) {
	select {
	case <-k.copied:
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	for _, m := range k.all {
		bytes += m.bytes
	}
	return bytes, k.err
}

// Parts returns what the GPU has computed of what a process has kept, nil if it has not. Wait must have returned no error.
func (k *Kept) Parts(pid int) cuda.Parts { return k.of(pid).parts }

// Close ends the copy, if it is not done. The memory is as safe as before.
func (k *Kept) Close() {
	if k == nil || k.isCopied() {
		return
	}
	k.mover.Kill()
	<-k.copied
}

// Open is the function Open for processes of which some may be parked by p: also those whose memory is kept. It can be
// called on nil.
func (p *Parked) Open(ctx context.Context, procs cuda.Group) error {
	ctx = context.WithoutCancel(ctx)
	k := p.Kept()
	if k == nil {
		return Open(ctx, procs)
	}
	k.mu.Lock()
	wanted := k.wanted
	k.mu.Unlock()
	if !wanted {
		k.Close()
	}
	if err := k.bringBack(ctx); err != nil {
		return err
	}
	return Open(ctx, procs)
}

// Forget gives up what is kept, for processes that have ended. It can be called on nil.
func (p *Parked) Forget() {
	k := p.Kept()
	if k == nil {
		return
	}
	k.Close()
	for _, m := range k.all {
		m.close()
	}
}
