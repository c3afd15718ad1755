// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package filelocks gives restored processes the file locks that they were dumped with: POSIX locks,
// flock, open file description locks and leases.
//
// CRIU dumps them, but for some that Found.Complete adds. Its restore takes them too early: it closes
// a descriptor of each mapped file after that, and a POSIX lock on a file goes with any descriptor of
// it that the process closes (SQLite in WAL mode has both); a lease is broken by the next process that
// opens its file. It also waits without an end for a lock that somebody else has taken.
//
// So CRIU does not get the locks (Locks.Take). Once it has restored all processes and holds each of
// their threads at the gate (package criu), Locks.Restore has the processes themselves take them,
// waits for none, and compares what the kernel lists then with the dump.
//
// A lease that is being broken is left to CRIU: it ends by itself within a minute.
package filelocks

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"

	filelock "github.com/checkpoint-restore/go-criu/v8/crit/images/file-lock"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/criu/held"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// Kinds of locks as CRIU has them (criu/include/file-lock.h), and the bit of the type of a lease that
// is being broken.
const (
	posix    = 1
	flock    = 2
	ofd      = 4
	lease    = 8
	breaking = 4
)

// ofdSetlk is fcntl's F_OFD_SETLK (fcntl.h).
const ofdSetlk = 37

// maxLocks bounds the locks of a dump.
const maxLocks = 100_000

// Locks are what a dump lists.
type Locks []*filelock.FileLockEntry

// Take keeps an entry of a dump's images that is a lock, and reports whether it did: CRIU must not
// get it.
func (l *Locks) Take(entry proto.Message) (bool, error) {
	e, ok := entry.(*filelock.FileLockEntry)
	if !ok || e.GetFlag() == lease && e.GetType()&breaking != 0 {
		return false, nil
	}
	if len(*l) == maxLocks {
		return false, fmt.Errorf("%w: more than %d file locks", images.ErrDamaged, maxLocks)
	}
	*l = append(*l, e)
	return true, nil
}

// Restore has the processes take their locks. inside are the container's processes, see proc.Inside. The
// error names the lock, its file and who has it now; some of the locks may be taken then.
func (l Locks) Restore(inside map[int]int, gate held.Gate) error {
	if len(l) == 0 {
		return nil
	}
	processes := held.At(gate)
	for _, e := range l {
		pid, found := inside[int(e.GetPid())]
		if !found {
			return fmt.Errorf("%w: a file lock is of process %d, which there is not", images.ErrDamaged, e.GetPid())
		}
		if err := take(pid, e, processes); err != nil {
			return fmt.Errorf("process %s held a %s when it was dumped, and %w: %w", proc.Describe(pid), describe(pid, e), taken(pid, e, err), errdefs.ErrFailedPrecondition)
		}
	}
	return l.compare(inside)
}

// take has a process take one lock.
func take(pid int, e *filelock.FileLockEntry, processes *held.Processes) error {
	kind, fd := uint64(e.GetType()), uint64(e.GetFd())
	if kind != unix.F_RDLCK && kind != unix.F_WRLCK || e.GetFd() < 0 {
		return fmt.Errorf("%w: it is of type %d, which the kernel does not have", images.ErrDamaged, kind)
	}
	switch e.GetFlag() {
	case flock:
		how := uint64(unix.LOCK_SH | unix.LOCK_NB)
		if kind == unix.F_WRLCK {
			how = unix.LOCK_EX | unix.LOCK_NB
		}
		return processes.Call(pid, unix.SYS_FLOCK, fd, how)
	case lease:
		return processes.Call(pid, unix.SYS_FCNTL, fd, unix.F_SETLEASE, kind)
	case posix, ofd:
		command := uint64(unix.F_SETLK)
		if e.GetFlag() == ofd {
			command = ofdSetlk
		}
		var data [32]byte // struct flock: l_type, l_whence (SEEK_SET), l_start, l_len, l_pid
		binary.NativeEndian.PutUint16(data[0:], uint16(kind))
		binary.NativeEndian.PutUint64(data[8:], uint64(e.GetStart()))
		binary.NativeEndian.PutUint64(data[16:], uint64(e.GetLen()))
		return processes.Lend(pid, data[:], func(at uint64) error {
			return processes.Call(pid, unix.SYS_FCNTL, fd, command, at)
		})
	}
	return fmt.Errorf("%w: it is of kind %d, which CRIU does not have", images.ErrDamaged, e.GetFlag())
}

// compare refuses processes that have not the locks that the dump lists, or others.
func (l Locks) compare(inside map[int]int) error {
	type descriptor struct{ pid, fd int }
	files := make(map[descriptor]map[lock]proc.Lock)
	known := make(map[proc.Lock]bool)
	for _, e := range l {
		pid := inside[int(e.GetPid())]
		d := descriptor{pid, int(e.GetFd())}
		if files[d] == nil {
			held, err := proc.FileLocks(pid, d.fd)
			if err != nil {
				return err
			}
			files[d] = byLock(held)
		}
		h, holds := files[d][lockOf(e)]
		if !holds {
			return fmt.Errorf("process %s held a %s when it was dumped, and does not hold it now: %w", proc.Describe(pid), describe(pid, e), errdefs.ErrFailedPrecondition)
		}
		known[h] = true
	}
	h, err := unknown(slices.Collect(maps.Values(inside)), func(h *proc.Lock) bool { return h.Mode == "BREAKING" || known[*h] })
	if err != nil || h == nil {
		return err
	}
	return fmt.Errorf("process %s holds a %s on %s, which the dump does not list: %w", proc.Describe(h.PID), name(*h), mapped(h.PID, *h), errdefs.ErrFailedPrecondition)
}

// unknown returns a lock of processes that is not known; nil where others have more locks than are read.
// A POSIX lock ends with its process. Any other is an open file's: it stays listed under the number of a
// process that has ended, which another may have now. Such a lock counts if a process here maps its file,
// or has a message with files that it has not read.
func unknown(pids []int, known func(*proc.Lock) bool) (*proc.Lock, error) {
	ours := make(map[int]bool)
	for _, pid := range pids {
		ours[pid] = true
	}
	listed, err := proc.Locks(func(h *proc.Lock) bool { return ours[h.PID] && !known(h) })
	if errors.Is(err, proc.ErrTooMuch) || err == nil && len(listed) == 0 {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	type file struct {
		device string
		inode  uint64
	}
	files := make(map[file]*proc.Lock)
	for i, h := range listed {
		if h.Kind == kernelKinds[posix] {
			return &listed[i], nil
		}
		files[file{h.Device, h.Inode}] = &listed[i]
	}
	for _, pid := range pids {
		m, found, err := proc.FindMapping(pid, func(m *proc.Mapping) bool { return files[file{m.Device, m.Inode}] != nil })
		if found {
			return files[file{m.Device, m.Inode}], nil
		}
		sockets, serr := proc.OpenFiles(pid, "socket:[")
		if err = cmp.Or(err, serr); err != nil && !proc.Ended(err) {
			return nil, err
		}
		for fd := range sockets {
			// Of one that has ended there are none.
			if sent, _ := proc.FileInfo(pid, fd, "scm_fds: "); len(sent) > 0 && sent[0] != "0" {
				return &listed[0], nil
			}
		}
	}
	return nil, nil
}

// lock is what the kernel and CRIU say alike of a lock that a descriptor has.
type lock struct {
	kind  string
	write bool
	start int64
	end   string
}

func lockOf(e *filelock.FileLockEntry) lock {
	l := lock{kernelKinds[e.GetFlag()], e.GetType() == unix.F_WRLCK, e.GetStart(), "EOF"}
	if e.GetLen() > 0 {
		l.end = strconv.FormatInt(e.GetStart()+e.GetLen()-1, 10)
	}
	return l
}

func byLock(held []proc.Lock) map[lock]proc.Lock {
	by := make(map[lock]proc.Lock)
	for _, h := range held {
		by[lock{h.Kind, h.Type == "WRITE", h.Start, h.End}] = h
	}
	return by
}

// kernelKinds are the kernel's names of CRIU's kinds, and people's names of these.
var (
	kernelKinds = map[uint32]string{posix: "POSIX", flock: "FLOCK", ofd: "OFDLCK", lease: "LEASE"}
	names       = map[string]string{"POSIX": "POSIX lock", "FLOCK": "lock (flock)", "OFDLCK": "open file description lock", "LEASE": "lease"}
)

// name names a lock for a person: "write POSIX lock".
func name(h proc.Lock) string {
	of := cmp.Or(names[h.Kind], h.Kind)
	if h.Type == "WRITE" {
		return "write " + of
	}
	return "read " + of
}

// describe names a lock of a dump, and its file.
func describe(pid int, e *filelock.FileLockEntry) string {
	h := proc.Lock{Kind: kernelKinds[e.GetFlag()], Type: "READ"}
	if e.GetType() == unix.F_WRLCK {
		h.Type = "WRITE"
	}
	path, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", pid, e.GetFd()))
	if err != nil {
		path = fmt.Sprintf("file %d", e.GetFd())
	}
	return name(h) + " on " + path
}

// taken says why a process did not get its lock: as a rule another program has it.
func taken(pid int, e *filelock.FileLockEntry, err error) error {
	if !errors.Is(err, unix.EAGAIN) {
		return fmt.Errorf("cannot take it again: %w", err)
	}
	by := "another program"
	var st unix.Stat_t
	if err := unix.Stat(fmt.Sprintf("/proc/%d/fd/%d", pid, e.GetFd()), &st); err == nil {
		device := fmt.Sprintf("%02x:%02x", unix.Major(st.Dev), unix.Minor(st.Dev))
		_, _ = proc.Locks(func(h *proc.Lock) bool {
			if h.Device == device && h.Inode == st.Ino && h.PID > 0 && h.PID != pid && (h.Kind == "LEASE") == (e.GetFlag() == lease) {
				by = "process " + proc.Describe(h.PID)
			}
			return false
		})
	}
	if e.GetFlag() == lease {
		by += " or an open descriptor of the file"
	}
	return fmt.Errorf("%s stands in its way now: end that, or restore once it has let go", by)
}

// mapped returns the name of the file of a lock, if the process maps it.
func mapped(pid int, h proc.Lock) string {
	m, found, _ := proc.FindMapping(pid, func(m *proc.Mapping) bool { return m.Device == h.Device && m.Inode == h.Inode })
	if found { // of a process that has ended there is none
		return m.Path
	}
	return fmt.Sprintf("file %d of device %s", h.Inode, h.Device)
}

// Found are the locks that processes have by their descriptors.
type Found map[int]map[int]map[lock]proc.Lock // by process and descriptor, as the process counts itself

// Find lists the locks of a container's processes, as this process counts these; init is the first
// one.
func Find(init int, list func() ([]int, error)) (Found, error) {
	inside, err := proc.Inside(list, init)
	if err != nil && !proc.Ended(err) {
		return nil, err
	}
	count, found := 0, make(Found)
	for number, pid := range inside {
		files, err := proc.OpenFiles(pid, "")
		if err != nil && !proc.Ended(err) {
			return nil, err
		}
		found[number] = make(map[int]map[lock]proc.Lock)
		for fd, link := range files {
			if strings.HasPrefix(link, "anon_inode:") { // of a watch for each of a million files, which the kernel lists
				continue
			}
			held, err := proc.FileLocks(pid, fd)
			if err != nil && !proc.Ended(err) {
				return nil, err
			}
			if count += len(held); count > maxLocks { // a lock is held by each copy of a descriptor
				return nil, fmt.Errorf("the container's descriptors hold more than %d file locks, which a restore refuses: %w", maxLocks, errdefs.ErrFailedPrecondition)
			}
			if len(held) > 0 {
				found[number][fd] = byLock(held)
			}
		}
	}
	return found, nil
}

// Hidden refuses a container whose processes, which stay frozen, hold a lock by no descriptor: CRIU would
// lose it. Where others have more locks than are read, none is found. The kernel takes some 25 ms to list
// the machine's locks (percpu_down_write in locks_start of fs/locks.c), so it is for beside other work.
func (f Found) Hidden(list func() ([]int, error)) error {
	pids, err := list()
	if err != nil && !proc.Ended(err) {
		return err
	}
	known := make(map[proc.Lock]bool)
	for _, files := range f {
		for _, held := range files {
			for _, h := range held {
				known[h] = true
			}
		}
	}
	h, err := unknown(pids, func(h *proc.Lock) bool { return known[*h] })
	if err != nil || h == nil {
		return err
	}
	return fmt.Errorf("process %s holds a %s on %s, which it has not open: CRIU cannot dump a lock without an open descriptor: the program must keep the file open, or unmap it: %w",
		proc.Describe(h.PID), name(*h), mapped(h.PID, *h), errdefs.ErrFailedPrecondition)
}

// Break reports whether a process that opens a file to read it, as CRIU does to find its build ID,
// would break a lease.
func (f Found) Break() bool {
	for _, files := range f {
		for _, held := range files {
			for _, h := range held {
				if h.Kind == "LEASE" && (h.Type == "WRITE" || h.Mode == "BREAKING") {
					return true
				}
			}
		}
	}
	return false
}

// Complete adds the locks that CRIU has left out to its images: POSIX locks of a process that has
// inherited the descriptor from another one. CRIU takes them for the other's (criu/files.c,
// discard_dup_locks_tail).
func (f Found) Complete(dumped *image.Set) error {
	type key struct {
		pid  int
		lock proc.Lock
	}
	listed := make(map[key]bool)
	if dumped.Has(imageName) {
		err := image.EachOf(dumped, imageName, func(m *filelock.FileLockEntry) error {
			if h, holds := f[int(m.GetPid())][int(m.GetFd())][lockOf(m)]; holds {
				listed[key{int(m.GetPid()), h}] = true
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	var missing []proto.Message
	for pid, files := range f {
		for fd, held := range files {
			for _, h := range held {
				if h.Kind != kernelKinds[posix] || listed[key{pid, h}] {
					continue
				}
				listed[key{pid, h}] = true
				e, err := entryOf(pid, fd, h)
				if err != nil {
					return err
				}
				missing = append(missing, e)
			}
		}
	}
	if len(missing) == 0 {
		return nil
	}
	return dumped.Append(imageName, missing...)
}

// imageName is CRIU's image of locks.
const imageName = "filelocks.img"

// entryOf returns the entry of a POSIX lock.
func entryOf(pid, fd int, h proc.Lock) (*filelock.FileLockEntry, error) {
	kind, length := uint32(unix.F_RDLCK), int64(0)
	if h.Type == "WRITE" {
		kind = unix.F_WRLCK
	}
	if h.End != "EOF" {
		end, err := strconv.ParseInt(h.End, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("file lock %v: %w", h, err)
		}
		length = end + 1 - h.Start
	}
	return &filelock.FileLockEntry{
		Flag: proto.Uint32(posix), Type: &kind, Pid: new(int32(pid)), Fd: new(int32(fd)), Start: new(h.Start), Len: &length,
	}, nil
}
