// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mnt"
	"github.com/checkpoint-restore/go-criu/v8/magic"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/gpuckpt/gpuckpt/images"
)

// maxBytes bounds what is read of the images of one checkpoint, in bytes. A thread takes
// up to 5 KiB, a process and a mount 200 bytes, an open file 100: a program with 5,000
// threads and 50,000 open files has 30 MiB. Pages of memory are in other images.
//
// go-criu reads the same format, and allocates whatever an image claims to have;
// so only its types and magic numbers are used here.
const maxBytes = 32 << 20

// maxEntry bounds one entry, in bytes: decoded it may take fifty times as much
// memory. The largest has all seccomp filters; the kernel lets those of a thread
// have 256 KiB.
const maxEntry = 1 << 20

// maxMounts bounds the mounts of a dump: the kernel's own bound for a namespace
// (fs.mount-max).
const maxMounts = 100_000

// Images reads the images of one dump. All errors are images.ErrDamaged, but those
// of a file that cannot be opened.
type Images struct {
	dir    string
	left   int64 // bytes that may still be read
	magics map[string]uint64
	mounts []*mnt.MntEntry // once they were read
}

// Open returns a reader of the images in a directory. It reads nothing yet.
func Open(dir string) *Images {
	return &Images{dir: dir, left: maxBytes, magics: magic.LoadMagic().ByName}
}

// Mounts returns the paths in the container at which a dump had something mounted
// from outside: the bind mounts of the container's spec, which CRIU calls external
// and knows by a key. The paths are sorted, each once; there are none in a directory
// without images.
func (im *Images) Mounts() ([]string, error) {
	mounts, err := im.allMounts()
	if err != nil {
		return nil, err
	}
	var paths []string
	for _, m := range mounts {
		paths = append(paths, m.GetExtKey())
	}
	return sortedSet(paths), nil
}

// allMounts reads the mounts of all mount namespaces of the dump, once.
func (im *Images) allMounts() ([]*mnt.MntEntry, error) {
	if im.mounts != nil {
		return im.mounts, nil
	}
	names, err := filepath.Glob(filepath.Join(im.dir, "mountpoints-*.img"))
	if err != nil {
		return nil, fmt.Errorf("find CRIU's images: %w", err)
	}
	for _, name := range names {
		err := each(im, filepath.Base(name), "MNTS", func(m *mnt.MntEntry) error {
			if len(im.mounts) == maxMounts {
				return fmt.Errorf("more than %d mounts", maxMounts)
			}
			im.mounts = append(im.mounts, m)
			return nil
		})
		if err != nil {
			im.mounts = nil
			return nil, err
		}
	}
	return im.mounts, nil
}

// Files returns the regular files that the processes of a dump have open or
// mapped, by their paths in the container. The paths are sorted, each once; there
// are none in a directory without images.
func (im *Images) Files() ([]string, error) {
	if !im.has("files.img") {
		return nil, nil
	}
	var paths []string
	err := each(im, "files.img", "FILES", func(f *fdinfo.FileEntry) error {
		paths = append(paths, f.GetReg().GetName())
		return nil
	})
	if err != nil {
		return nil, err
	}
	return sortedSet(paths), nil
}

// sortedSet returns the paths that are not empty, sorted, each once.
func sortedSet(paths []string) []string {
	slices.Sort(paths)
	return slices.DeleteFunc(slices.Compact(paths), func(p string) bool { return p == "" })
}

func (im *Images) has(name string) bool {
	_, err := os.Lstat(filepath.Join(im.dir, name))
	return !errors.Is(err, os.ErrNotExist)
}

// message is a protobuf message that is made of T.
type message[T any] interface {
	*T
	proto.Message
}

// one reads an image that has one entry. CRIU takes the first and ignores others,
// which an image of this kind never has.
func one[T any, M message[T]](im *Images, name, kind string) (entry M, err error) {
	n := 0
	err = each(im, name, kind, func(m M) error {
		n++
		entry = m
		return nil
	})
	if err == nil && n != 1 {
		err = fmt.Errorf("%w: %s has %d entries, not one", images.ErrDamaged, filepath.Join(im.dir, name), n)
	}
	return entry, err
}

// each reads an image of a kind (go-criu's name of its magic number) and calls do
// with one entry after the other.
func each[T any, M message[T]](im *Images, name, kind string, do func(M) error) error {
	path := filepath.Join(im.dir, name)
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, unix.ELOOP) || errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("%w: CRIU's image is missing or a symbolic link: %w", images.ErrDamaged, err)
	}
	if err != nil {
		return fmt.Errorf("read CRIU's images: %w", err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return fmt.Errorf("read CRIU's images: %w", err)
	}
	if !st.Mode().IsRegular() {
		return fmt.Errorf("%w: %s is not a regular file", images.ErrDamaged, path)
	}
	if im.left -= st.Size(); im.left < 0 {
		return fmt.Errorf("%w: CRIU's images in %s that are read have more than %d bytes", images.ErrDamaged, im.dir, maxBytes)
	}
	err = im.frames(io.LimitReader(f, st.Size()), kind, func(data []byte) error {
		m := M(new(T))
		// Entries of a newer CRIU may have kinds of files that are not known here.
		partial := proto.UnmarshalOptions{AllowPartial: kind == "FILES"}
		if err := partial.Unmarshal(data, m); err != nil {
			return err
		}
		return do(m)
	})
	if err != nil {
		return fmt.Errorf("%w: %s: %w", images.ErrDamaged, path, err)
	}
	return nil
}

// frames takes an image apart: one or two words that say what it is, then entries,
// each behind its length (criu.org/Images).
func (im *Images) frames(r io.Reader, kind string, do func(entry []byte) error) error {
	b := bufio.NewReader(r)
	word := func() (uint32, error) {
		var w [4]byte
		_, err := io.ReadFull(b, w[:])
		return binary.LittleEndian.Uint32(w[:]), err
	}
	first, err := word()
	if err == nil && (uint64(first) == im.magics["IMG_COMMON"] || uint64(first) == im.magics["IMG_SERVICE"]) {
		first, err = word() // all kinds but the inventory have two
	}
	if err != nil || uint64(first) != im.magics[kind] {
		return fmt.Errorf("it begins with %#x, and is not of the kind %s", first, kind)
	}
	var entry []byte
	for {
		size, err := word()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("it is cut short: %w", err)
		}
		if size > maxEntry {
			return fmt.Errorf("an entry has %d bytes, more than %d", size, maxEntry)
		}
		entry = slices.Grow(entry[:0], int(size))[:size]
		if _, err := io.ReadFull(b, entry); err != nil {
			return fmt.Errorf("it is cut short: %w", err)
		}
		if err := do(entry); err != nil {
			return err
		}
	}
}
