// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package tmpfs

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/tarname"
)

// An image begins with a header: the magic, and where the table is (two words, little endian: its
// offset and its length in bytes). Data follows, each piece at the start of a page, then the table:
// one entry a line, in JSON. A directory comes before what is in it.
const (
	magic      = "gpuckpt-tmpfs-1\n"
	headerSize = len(magic) + 16
	pageSize   = 4096
)

// Bounds of what is read, beyond what any tmpfs needs.
const (
	maxEntries = 4 << 20
	maxLine    = 16 << 20 // bytes of one entry
	maxPieces  = 100_000  // of one file
	maxXattr   = 64 << 10 // bytes of one attribute, the kernel's own bound
)

// entry is a file, a directory or another thing in a tmpfs.
type entry struct {
	Name   []byte            `json:"name"` // below the mount's root, which is "."
	Mode   uint32            `json:"mode"` // with its type, as in struct stat
	UID    uint32            `json:"uid,omitempty"`
	GID    uint32            `json:"gid,omitempty"`
	Time   int64             `json:"time"` // of the last change, in nanoseconds since 1970
	Size   int64             `json:"size,omitempty"`
	Device uint64            `json:"device,omitempty"` // numbers of a device
	Link   []byte            `json:"link,omitempty"`   // what a symbolic link says
	Same   []byte            `json:"same,omitempty"`   // an earlier name of the same file
	Xattrs map[string][]byte `json:"xattrs,omitempty"`
	Data   []piece           `json:"data,omitempty"`
}

// piece is a part of a file that is no hole.
type piece struct {
	Offset int64 `json:"offset"` // in the file
	Bytes  int64 `json:"bytes"`
	At     int64 `json:"at"` // in the image
}

func (e *entry) kind() uint32 { return e.Mode & unix.S_IFMT }

// check returns an error for an entry that no tmpfs has.
func (e *entry) check() error {
	if err := checkName(string(e.Name)); err != nil {
		return err
	}
	bad := func(what string) error { return fmt.Errorf("%w: tmpfs: %q has %s", tarname.ErrDamaged, e.Name, what) }
	if e.Same != nil {
		if e.kind() == unix.S_IFDIR || string(e.Name) == "." || string(e.Same) == "." {
			return bad("a second name, and is a directory")
		}
		return checkName(string(e.Same))
	}
	switch e.kind() {
	case unix.S_IFREG, unix.S_IFDIR, unix.S_IFLNK, unix.S_IFIFO, unix.S_IFCHR, unix.S_IFBLK:
	default:
		return bad("an unknown type")
	}
	switch {
	case e.Mode&^(unix.S_IFMT|0o7777) != 0:
		return bad("an unknown mode")
	case string(e.Name) == "." && e.kind() != unix.S_IFDIR:
		return bad("the name of the mount and is no directory")
	case e.UID == ^uint32(0) || e.GID == ^uint32(0):
		return bad("no owner")
	case e.kind() == unix.S_IFLNK && (len(e.Link) == 0 || len(e.Link) >= unix.PathMax || bytes.IndexByte(e.Link, 0) >= 0):
		return bad("a link that cannot be")
	case e.kind() != unix.S_IFREG && (e.Size != 0 || e.Data != nil):
		return bad("data, and is no file")
	case e.Size < 0 || len(e.Data) > maxPieces:
		return bad("a size that cannot be")
	}
	for name, value := range e.Xattrs {
		if !knownXattr(name) || len(value) > maxXattr {
			return bad("an unknown extended attribute")
		}
	}
	return nil
}

// checkName refuses a name that tarname.Clean refuses, or that is not clean.
func checkName(name string) error {
	clean, err := tarname.Clean(name)
	if err != nil {
		return err
	}
	if clean != name || len(name) >= unix.PathMax {
		return fmt.Errorf("%w: tmpfs: the name %q is not clean", tarname.ErrDamaged, name)
	}
	for part := range strings.SplitSeq(name, "/") {
		if len(part) > unix.NAME_MAX {
			return fmt.Errorf("%w: tmpfs: the name %q is too long", tarname.ErrDamaged, name)
		}
	}
	return nil
}

// knownXattr reports whether an extended attribute is of a kind that a tmpfs keeps.
func knownXattr(name string) bool {
	if strings.ContainsRune(name, 0) || len(name) > unix.NAME_MAX {
		return false
	}
	return strings.HasPrefix(name, "user.") || strings.HasPrefix(name, "trusted.") ||
		strings.HasPrefix(name, "security.") || path.Dir(name) == "." && strings.HasPrefix(name, "system.posix_acl_")
}

// errNotOurs reports that an image is not of this package.
var errNotOurs = errors.New("not an image of a tmpfs")

// readTable calls do for each entry of an image of size bytes, in order. Every entry is checked,
// and its data lies in the image, after the data of the entries before it.
func readTable(image io.ReaderAt, size int64, do func(*entry) error) error {
	header := make([]byte, headerSize)
	if _, err := image.ReadAt(header, 0); err != nil || string(header[:len(magic)]) != magic {
		return errNotOurs
	}
	at := int64(binary.LittleEndian.Uint64(header[len(magic):]))
	length := int64(binary.LittleEndian.Uint64(header[len(magic)+8:]))
	if at < pageSize || length < 0 || at > size || length > size-at {
		return fmt.Errorf("%w: tmpfs: the image is cut short", tarname.ErrDamaged)
	}
	lines := bufio.NewScanner(io.NewSectionReader(image, at, length))
	lines.Buffer(make([]byte, 64<<10), maxLine)
	used := int64(pageSize)
	for n := 0; lines.Scan(); n++ {
		if n >= maxEntries {
			return fmt.Errorf("%w: tmpfs: more than %d files", tarname.ErrDamaged, maxEntries)
		}
		e := new(entry)
		line := json.NewDecoder(bytes.NewReader(lines.Bytes()))
		line.DisallowUnknownFields()
		if err := line.Decode(e); err != nil {
			return fmt.Errorf("%w: tmpfs: entry %d: %w", tarname.ErrDamaged, n, err)
		}
		if err := e.check(); err != nil {
			return err
		}
		end := int64(0) // in the file
		for _, p := range e.Data {
			if p.Bytes <= 0 || p.Offset < end || p.Offset > e.Size || p.Bytes > e.Size-p.Offset || p.At < used || p.At > at || p.Bytes > at-p.At {
				return fmt.Errorf("%w: tmpfs: the data of %q is not in the image", tarname.ErrDamaged, e.Name)
			}
			end, used = p.Offset+p.Bytes, p.At+p.Bytes
		}
		if err := do(e); err != nil {
			return err
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("%w: tmpfs: read the table: %w", tarname.ErrDamaged, err)
	}
	return nil
}

// table is the end of an image that is being written.
type table struct {
	lines bytes.Buffer
	used  int64 // bytes of the image
}

// room returns where n bytes of data go.
func (t *table) room(n int64) (at int64) {
	at = max(t.used, pageSize)
	t.used = (at + n + pageSize - 1) / pageSize * pageSize
	return at
}

func (t *table) add(e *entry) error {
	line, err := json.Marshal(e)
	if err != nil {
		return err
	}
	t.lines.Write(line)
	t.lines.WriteByte('\n')
	return nil
}

// finish writes the table and the header.
func (t *table) finish(image io.WriterAt) error {
	at := t.room(0)
	if _, err := image.WriteAt(t.lines.Bytes(), at); err != nil {
		return err
	}
	header := []byte(magic)
	header = binary.LittleEndian.AppendUint64(header, uint64(at))
	header = binary.LittleEndian.AppendUint64(header, uint64(t.lines.Len()))
	_, err := image.WriteAt(header, 0)
	return err
}
