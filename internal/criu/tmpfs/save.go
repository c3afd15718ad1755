// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package tmpfs

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// maxWorkers bounds the threads that copy. Each has a buffer, which at a restore counts for the
// container.
const maxWorkers = 8

// chunk is what a thread copies at a time, in bytes.
const chunk = 8 << 20

// parallel has the threads that copy run at once: containerd has a shim, and all that it starts, use
// two processors. It stops the world, which a tmpfs without data need not wait for.
var parallel = sync.OnceFunc(func() { runtime.GOMAXPROCS(workers()) })

func workers() int { return min(maxWorkers, runtime.NumCPU()) }

// Save writes what is in a directory to an image, which is empty. It stays in the directory's file
// system, and leaves sockets out. A file that changes meanwhile is saved in part as it was and in
// part as it is.
func Save(dir, image *os.File) error {
	s := saver{image: image, links: make(map[uint64][]byte)}
	s.copies.SetLimit(workers())
	var root unix.Stat_t
	err := unix.Fstat(int(dir.Fd()), &root)
	if err == nil {
		s.device = root.Dev
		err = s.directory(dir, ".", &root)
	}
	if err = cmp.Or(err, s.copies.Wait()); err == nil {
		err = s.table.finish(image)
	}
	if err != nil {
		return fmt.Errorf("save the content of a tmpfs: %w", err)
	}
	return nil
}

type saver struct {
	image  *os.File
	device uint64
	table  table
	links  map[uint64][]byte // first names of files with several, by inode
	copies errgroup.Group
}

// directory adds an open directory and what is in it.
func (s *saver) directory(dir *os.File, name string, st *unix.Stat_t) error {
	if err := s.add(dir, name, st); err != nil {
		return err
	}
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return err
	}
	slices.Sort(names)
	for _, base := range names {
		if err := s.child(dir, base, path.Join(name, base)); err != nil {
			return err
		}
	}
	return nil
}

// child adds one thing in a directory.
func (s *saver) child(dir *os.File, base, name string) error {
	var st unix.Stat_t
	if err := unix.Fstatat(int(dir.Fd()), base, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil // removed by a program that is not of the container
		}
		return &os.PathError{Op: "stat", Path: name, Err: err}
	}
	if st.Mode&unix.S_IFMT == unix.S_IFSOCK {
		return nil
	}
	flags := unix.O_PATH
	if kind := st.Mode & unix.S_IFMT; kind == unix.S_IFDIR || kind == unix.S_IFREG {
		flags = unix.O_RDONLY | unix.O_NONBLOCK
	}
	fd, err := unix.Openat(int(dir.Fd()), base, flags|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		return &os.PathError{Op: "open", Path: name, Err: err}
	}
	f := os.NewFile(uintptr(fd), name)
	if err := unix.Fstat(fd, &st); err != nil {
		f.Close()
		return &os.PathError{Op: "stat", Path: name, Err: err}
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		return s.file(f, name, &st) // closes it
	case unix.S_IFDIR:
		defer f.Close()
		if st.Dev != s.device {
			return s.add(f, name, &st) // something is mounted there
		}
		return s.directory(f, name, &st)
	default:
		defer f.Close()
		return s.add(f, name, &st)
	}
}

// describe returns the entry of an open file.
func (s *saver) describe(f *os.File, name string, st *unix.Stat_t) (*entry, error) {
	e := &entry{Name: []byte(name), Mode: st.Mode, UID: st.Uid, GID: st.Gid, Time: st.Mtim.Nano()}
	if len(name) >= unix.PathMax {
		return nil, fmt.Errorf("the path %.40q… is too long", name)
	}
	if e.kind() != unix.S_IFDIR && st.Nlink > 1 {
		if first, ok := s.links[st.Ino]; ok {
			e.Same = first
			return e, nil
		}
		s.links[st.Ino] = e.Name
	}
	var err error
	switch e.kind() {
	case unix.S_IFLNK:
		target := make([]byte, unix.PathMax)
		n, rerr := unix.Readlinkat(int(f.Fd()), "", target)
		if rerr != nil {
			return nil, &os.PathError{Op: "readlink", Path: name, Err: rerr}
		}
		e.Link = target[:n]
		return e, nil
	case unix.S_IFCHR, unix.S_IFBLK:
		e.Device = st.Rdev
	}
	e.Xattrs, err = xattrs(f)
	return e, err
}

func (s *saver) add(f *os.File, name string, st *unix.Stat_t) error {
	e, err := s.describe(f, name, st)
	if err != nil {
		return err
	}
	return s.table.add(e)
}

// file adds a regular file, has its data copied, and closes it.
func (s *saver) file(f *os.File, name string, st *unix.Stat_t) error {
	e, err := s.describe(f, name, st)
	if err == nil && e.Same == nil {
		e.Size = st.Size
		e.Data, err = pieces(f, st.Size)
	}
	if err != nil {
		f.Close()
		return err
	}
	for i := range e.Data {
		e.Data[i].At = s.table.room(e.Data[i].Bytes)
	}
	copyPieces(&s.copies, e.Data, func(p piece, buf *buffer) error {
		return copyRange(s.image, p.At, f, p.Offset, p.Bytes, buf)
	}, f.Close)
	return s.table.add(e)
}

// pieces returns where a file of a size has data. Beyond maxPieces holes count as data.
func pieces(f *os.File, size int64) (data []piece, err error) {
	for end := int64(0); end < size; {
		from, err := unix.Seek(int(f.Fd()), end, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break // a hole up to the end
		}
		if err != nil {
			return nil, &os.PathError{Op: "find the data of", Path: f.Name(), Err: err}
		}
		if end, err = unix.Seek(int(f.Fd()), from, unix.SEEK_HOLE); err != nil {
			return nil, &os.PathError{Op: "find the holes of", Path: f.Name(), Err: err}
		}
		if end = min(end, size); len(data) == maxPieces-1 {
			end = size
		}
		if end > from {
			data = append(data, piece{Offset: from, Bytes: end - from})
		}
	}
	return data, nil
}

// xattrs returns the extended attributes of an open file, which may be open as a path only.
func xattrs(f *os.File) (map[string][]byte, error) {
	at := fmt.Sprintf("/proc/self/fd/%d", f.Fd())
	list := make([]byte, maxXattr)
	n, err := unix.Listxattr(at, list)
	if errors.Is(err, unix.ENOTSUP) || n == 0 {
		return nil, nil
	}
	if err != nil {
		return nil, &os.PathError{Op: "list the attributes of", Path: f.Name(), Err: err}
	}
	all := make(map[string][]byte)
	for name := range strings.SplitSeq(strings.TrimSuffix(string(list[:n]), "\x00"), "\x00") {
		if !knownXattr(name) {
			continue
		}
		value := make([]byte, maxXattr)
		n, err := unix.Getxattr(at, name, value)
		if errors.Is(err, unix.ENODATA) || errors.Is(err, unix.ENOTSUP) || errors.Is(err, unix.EPERM) {
			continue
		}
		if err != nil {
			return nil, &os.PathError{Op: "read the attributes of", Path: f.Name(), Err: err}
		}
		all[name] = value[:n]
	}
	return all, nil
}

// little is how much data of a file is copied at once, in bytes: to have another thread begin takes
// longer.
const little = 64 << 10

// copyPieces has do called for parts of at most chunk bytes of each piece, in parallel, and done
// after the last one. Both may be called after it has returned, until group.Wait does.
func copyPieces(group *errgroup.Group, all []piece, do func(piece, *buffer) error, done func() error) {
	var parts []piece
	var total int64
	for _, p := range all {
		for total += p.Bytes; p.Bytes > chunk; p.Bytes -= chunk {
			parts = append(parts, piece{p.Offset, chunk, p.At})
			p.Offset, p.At = p.Offset+chunk, p.At+chunk
		}
		parts = append(parts, p)
	}
	if len(parts) == 0 {
		parts = []piece{{}} // for done alone
	}
	var left atomic.Int64
	left.Store(int64(len(parts)))
	copyOne := func(p piece) error {
		var err error
		if p.Bytes > 0 {
			buf := buffers.Get().(*buffer)
			err = do(p, buf)
			buffers.Put(buf)
		}
		if left.Add(-1) == 0 {
			if derr := done(); err == nil {
				err = derr
			}
		}
		return err
	}
	if total > little {
		parallel()
		for _, p := range parts {
			group.Go(func() error { return copyOne(p) })
		}
		return
	}
	for _, p := range parts {
		if err := copyOne(p); err != nil {
			group.Go(func() error { return err })
		}
	}
}
