// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package tmpfs

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"path"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/tarname"
)

// Load puts what an image has into a directory, the root of a mount. It reads an image of Save's or
// a compressed tar archive. With keep, what the directory has already stays as it is: then several
// containers of a pod may bring the same files. Without keep the directory is empty. On an error a
// part may be there. An image that no tmpfs can have made is tarname.ErrDamaged.
func Load(image, dir *os.File, keep bool) error {
	st, err := image.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fmt.Errorf("%w: tmpfs: the image is no regular file", tarname.ErrDamaged)
	}
	if err != nil {
		return fmt.Errorf("restore the content of a tmpfs: %w", err)
	}
	l := loader{tree: tree{root: dir, keep: keep}}
	l.copies.SetLimit(workers())
	err = readTable(image, st.Size(), func(e *entry) error { return l.add(e, image) })
	if errors.Is(err, errNotOurs) {
		err = l.archive(io.NewSectionReader(image, 0, st.Size()))
	}
	err = cmp.Or(err, l.copies.Wait())
	err = cmp.Or(err, l.tree.finish(err == nil))
	if errors.Is(err, unix.ENOSPC) {
		err = fmt.Errorf("it does not fit: %w", err)
	}
	if err != nil {
		return fmt.Errorf("restore the content of a tmpfs: %w", err)
	}
	return nil
}

type loader struct {
	tree   tree
	copies errgroup.Group
}

// add makes what an entry describes, and has its data copied from the image.
func (l *loader) add(e *entry, image *os.File) error {
	f, err := l.tree.put(e)
	if err != nil || f == nil {
		return err
	}
	copyPieces(&l.copies, e.Data, func(p piece, buf *buffer) error {
		return copyRange(f, p.Offset, image, p.At, p.Bytes, buf)
	}, func() error { return settle(f, e) })
	return nil
}

// archive reads a tar archive as CRIU has it made.
func (l *loader) archive(image io.Reader) error {
	return eachInArchive(image, func(e *entry, data io.Reader) error {
		f, err := l.tree.put(e)
		if err != nil || f == nil {
			return err
		}
		return cmp.Or(unpack(f, data), settle(f, e))
	})
}

// fromTar returns the entry of a tar header, checked.
func fromTar(h *tar.Header) (*entry, error) {
	name, err := tarname.Clean(h.Name)
	if err != nil {
		return nil, err
	}
	e := &entry{
		Name: []byte(name), Mode: uint32(h.Mode) & 0o7777, UID: uint32(h.Uid), GID: uint32(h.Gid), Time: h.ModTime.UnixNano(),
	}
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeGNUSparse:
		e.Mode |= unix.S_IFREG
		e.Size = h.Size
	case tar.TypeDir:
		e.Mode |= unix.S_IFDIR
	case tar.TypeSymlink:
		e.Mode |= unix.S_IFLNK
		e.Link = []byte(h.Linkname)
	case tar.TypeLink:
		e.Mode |= unix.S_IFREG
		if name, err = tarname.Clean(h.Linkname); err != nil {
			return nil, err
		}
		e.Same = []byte(name)
	case tar.TypeChar:
		e.Mode |= unix.S_IFCHR
	case tar.TypeBlock:
		e.Mode |= unix.S_IFBLK
	case tar.TypeFifo:
		e.Mode |= unix.S_IFIFO
	default:
		return nil, fmt.Errorf("%w: archive: %q is of the unknown type %q", tarname.ErrDamaged, h.Name, h.Typeflag)
	}
	if k := e.kind(); k == unix.S_IFCHR || k == unix.S_IFBLK {
		e.Device = unix.Mkdev(uint32(h.Devmajor), uint32(h.Devminor))
	}
	return e, e.check()
}

// unpack writes the data of a file, whose size is set, but for pages of zeros.
func unpack(f *os.File, from io.Reader) error {
	_, err := io.CopyBuffer(&sparse{f: f}, struct{ io.Reader }{from}, make([]byte, chunk/8))
	if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, gzip.ErrChecksum) {
		err = fmt.Errorf("%w: archive: %w", tarname.ErrDamaged, err)
	}
	return err
}

// sparse writes to a file whatever is not all zeros.
type sparse struct {
	f  *os.File
	at int64
}

var zeros [pageSize]byte

func (s *sparse) Write(p []byte) (int, error) {
	for done := 0; done < len(p); {
		page := p[done:min(len(p), done+pageSize-int(s.at%pageSize))]
		if !bytes.Equal(page, zeros[:len(page)]) {
			if _, err := s.f.WriteAt(page, s.at); err != nil {
				return done, err
			}
		}
		done, s.at = done+len(page), s.at+int64(len(page))
	}
	return len(p), nil
}

// tree makes files below a directory. Its methods follow no link and stay in the directory's file
// system.
type tree struct {
	root *os.File
	keep bool // what is there already stays

	parent *os.File // where the last entry went
	name   string   // its name
	dirs   []*entry // their times are set last
}

// put makes what an entry describes. It returns a regular file open, of its size and without data,
// for settle; nil for anything else, and for what is kept.
func (t *tree) put(e *entry) (*os.File, error) {
	name := string(e.Name)
	fail := func(err error) error { return &os.PathError{Op: "make", Path: name, Err: err} }
	if name == "." {
		if !t.keep {
			t.dirs = append(t.dirs, e)
		}
		return nil, nil
	}
	dir, err := t.directory(path.Dir(name))
	if err != nil {
		return nil, fail(err)
	}
	base := path.Base(name)
	switch {
	case e.Same != nil:
		from, err := t.open(path.Dir(string(e.Same)))
		if err != nil {
			return nil, fail(err)
		}
		defer from.Close()
		err = unix.Linkat(int(from.Fd()), path.Base(string(e.Same)), int(dir.Fd()), base, 0)
		if t.keep && (errors.Is(err, unix.EEXIST) || errors.Is(err, unix.ENOENT)) {
			return nil, nil
		}
		if err != nil {
			return nil, fail(err)
		}
		return nil, nil
	case e.kind() == unix.S_IFREG:
		fd, err := unix.Openat(int(dir.Fd()), base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
		if t.keep && errors.Is(err, unix.EEXIST) {
			return nil, nil
		}
		if err != nil {
			return nil, fail(err)
		}
		f := os.NewFile(uintptr(fd), name)
		if err := f.Truncate(e.Size); err != nil {
			f.Close()
			return nil, err
		}
		return f, nil
	case e.kind() == unix.S_IFDIR:
		err = unix.Mkdirat(int(dir.Fd()), base, 0o700)
	case e.kind() == unix.S_IFLNK:
		err = unix.Symlinkat(string(e.Link), int(dir.Fd()), base)
	default:
		err = unix.Mknodat(int(dir.Fd()), base, e.kind()|0o600, int(e.Device))
	}
	if t.keep && errors.Is(err, unix.EEXIST) {
		return nil, nil
	}
	if err != nil {
		return nil, fail(err)
	}
	if e.kind() == unix.S_IFDIR {
		t.dirs = append(t.dirs, e)
		return nil, nil
	}
	return nil, t.describe(dir, base, e)
}

// describe sets what is told of anything but a regular file.
func (t *tree) describe(dir *os.File, base string, e *entry) error {
	fd, err := unix.Openat(int(dir.Fd()), base, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: string(e.Name), Err: err}
	}
	return settle(os.NewFile(uintptr(fd), string(e.Name)), e)
}

// directory returns a directory, which belongs to the tree.
func (t *tree) directory(name string) (*os.File, error) {
	if t.parent != nil && t.name == name {
		return t.parent, nil
	}
	f, err := t.open(name)
	if err != nil {
		return nil, err
	}
	if t.parent != nil {
		t.parent.Close()
	}
	t.parent, t.name = f, name
	return f, nil
}

func (t *tree) open(name string) (*os.File, error) {
	fd, err := unix.Openat2(int(t.root.Fd()), name, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
	})
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

// finish sets what is told of the directories, the innermost first, and closes what is open.
func (t *tree) finish(set bool) error {
	if t.parent != nil {
		defer t.parent.Close()
	}
	for i := len(t.dirs) - 1; set && i >= 0; i-- {
		f, err := t.open(string(t.dirs[i].Name))
		if err == nil {
			err = settle(f, t.dirs[i])
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// settle sets owner, mode, attributes and time of an open file, which may be open as a path only,
// and closes it.
func settle(f *os.File, e *entry) error {
	defer f.Close()
	fd, at := int(f.Fd()), fmt.Sprintf("/proc/self/fd/%d", f.Fd())
	fail := func(op string, err error) error { return &os.PathError{Op: op, Path: string(e.Name), Err: err} }
	if err := unix.Fchownat(fd, "", int(e.UID), int(e.GID), unix.AT_EMPTY_PATH); err != nil {
		return fail("change the owner of", err)
	}
	if e.kind() != unix.S_IFLNK {
		if err := unix.Chmod(at, e.Mode&0o7777); err != nil {
			return fail("change the mode of", err)
		}
		for name, value := range e.Xattrs {
			err := unix.Setxattr(at, name, value, 0)
			if err != nil && !errors.Is(err, unix.ENOTSUP) && !errors.Is(err, unix.EPERM) {
				return fail("set "+name+" of", err)
			}
		}
	}
	times := []unix.Timespec{{Nsec: unix.UTIME_OMIT}, unix.NsecToTimespec(e.Time)}
	if err := unix.UtimesNanoAt(fd, "", times, unix.AT_EMPTY_PATH); err != nil {
		return fail("set the time of", err)
	}
	return nil
}
