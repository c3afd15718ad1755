// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package images

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/tarname"
)

// ImageDir is the directory of the checkpoint in a checkpoint image, below its root.
const ImageDir = ".gpuckpt"

// PieceAlign divides the offset of every piece, in bytes: the size of huge pages, since a piece is
// mapped with the alignment of its area.
const PieceAlign = 2 << 20

// ErrDamaged reports that a checkpoint is not what was written: a file is missing, too short, not a
// regular file, or has other content.
var ErrDamaged = tarname.ErrDamaged

// Checkpoint is an opened checkpoint on a disk. It holds no file open. Nothing changes its files.
type Checkpoint struct {
	// Dir holds CRIU's images and gpuckpt.json: in a checkpoint image, the ImageDir of the topmost
	// of the checkpoint's layers.
	Dir string
	// Metadata is gpuckpt.json with the Location of each area; nil without, see AllowWithoutGPU.
	Metadata *Metadata
	// Files are all files except those of areas, by name. gpuckpt.json is one.
	Files []File

	pieces map[string]Location // by the name of the area's file
}

// File is a file of a checkpoint: in a directory, or a part of an archive.
type File struct {
	// Name without a directory.
	Name string
	// Path of the file. With Data it is only a name for errors.
	Path  string
	Bytes uint64
	// Data reads the file if it is a part of an archive, else nil.
	Data io.ReaderAt
	// Arrival is set if the file's bytes are still arriving; nil for a file that is
	// complete. Only the files of areas may arrive late.
	Arrival Arrival
	// Pieces are where the bytes are if the file is in pieces, as memory is in an image: see IsMemory.
	Pieces Location
}

// Arrival is a file whose bytes are still arriving, in any order. The file has its full size
// from the begin, and a range that has arrived does not change any more.
type Arrival interface {
	// Await returns nil once the bytes [from, to) of the file have arrived. It returns
	// an error if they never will, or if the context ends.
	Await(ctx context.Context, from, to uint64) error
}

// Open opens the file for reading, unless it is in pieces. It refuses a file that has become a symbolic link since it was
// found, and does not wait for one that has become a pipe.
func (f File) Open() (ReaderAtCloser, error) {
	if f.Pieces != nil {
		return nil, fmt.Errorf("%w: %s is in pieces", ErrDamaged, f.Name)
	}
	return openAt(f.Path, f.Data)
}

// Reader opens the file for reading, as Open does, and opens one in pieces too. A read waits for a piece that is still
// arriving, until ctx ends.
func (f File) Reader(ctx context.Context) (ReaderAtCloser, error) {
	if f.Pieces != nil {
		return f.Area().Open(ctx), nil
	}
	return f.Open()
}

// Area returns the file as an area without digests.
func (f File) Area() *Area {
	a := &Area{File: f.Name, Bytes: f.Bytes, Location: f.Pieces}
	if a.Location == nil {
		a.Location = Location{{Path: f.Path, Data: f.Data, Arrival: f.Arrival, Bytes: f.Bytes}}
	}
	return a
}

// PieceFile returns the name of the piece of an area's file that begins at an offset.
func PieceFile(areaFile string, offset uint64) string {
	return fmt.Sprintf("%s.%012x", areaFile, offset)
}

// pieceForm matches the names of files of areas and of memory, whole or in pieces.
var pieceForm = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^(gpu-[1-9][0-9]*-[0-9]+|pages-[1-9][0-9]*\.img)(?:\.([0-9a-f]{12}))?$`)
})

// IsMemory reports whether a name is that of CRIU's file with the memory of a process, or of a segment. An image may have it
// in pieces, the last of which ends where the file ends: its digests are in the checkpoint's manifest (package sign).
func IsMemory(name string) bool {
	parts := pieceForm().FindStringSubmatch(name)
	return parts != nil && parts[2] == "" && !IsAreaFile(name)
}

// Option changes what Open and OpenFiles accept.
type Option int

// AllowWithoutGPU accepts the checkpoint of a container that used no GPU: without gpuckpt.json and
// areas. A dump that was cut short looks the same, so the caller must know.
const AllowWithoutGPU Option = 1

// Open opens a checkpoint in a flat directory, as a dump leaves it. The errors are ErrNoMetadata
// (no GPU state, or no checkpoint), ErrSchema, ErrMalformed, ErrDamaged, or those of reading.
func Open(dir string, opts ...Option) (*Checkpoint, error) {
	c, err := list([]string{dir})
	if err != nil {
		return nil, err
	}
	return c.complete(true, opts...)
}

// OpenFiles is Open for known files, such as parts of an archive. The Checkpoint has no Dir.
func OpenFiles(files []File, opts ...Option) (*Checkpoint, error) {
	c := &Checkpoint{pieces: make(map[string]Location)}
	for _, f := range files {
		c.take(f)
	}
	return c.complete(true, opts...)
}

// OpenParts opens an image, as OpenImage does, whose files are in one directory, and whose pieces are elsewhere.
func OpenParts(dir string, pieces []File) (*Checkpoint, error) {
	c, err := list([]string{dir})
	if err != nil {
		return nil, err
	}
	for _, f := range pieces {
		c.take(f)
	}
	if err := c.assemble(); err != nil {
		return nil, err
	}
	return c.complete(false)
}

// file returns a file by its name, nil if there is none. It knows no areas' files.
func (c *Checkpoint) file(name string) *File {
	at := slices.IndexFunc(c.Files, func(f File) bool { return f.Name == name })
	if at < 0 {
		return nil
	}
	return &c.Files[at]
}

// OpenImage is Open for an unpacked checkpoint image. roots is its root directory, or those of its
// layers, the topmost first. blobs is the directory of the blobs that pieces are in, see Pointer, by the hexadecimal
// digits of their digests. ErrNoMetadata also reports an image that is not a checkpoint.
func OpenImage(blobs string, roots ...string) (*Checkpoint, error) {
	dirs, err := ImageDirs(roots...)
	if err != nil {
		return nil, err
	}
	if len(dirs) == 0 {
		return nil, fmt.Errorf("%w in any of the image's layers", ErrNoMetadata)
	}
	c, err := ListImage(blobs, dirs...)
	if err != nil {
		return nil, err
	}
	return c.complete(false)
}

// ListImage opens an image as OpenImage does, without the Metadata. It reads nothing but which blobs the pieces are. dirs is
// what ImageDirs returned.
func ListImage(blobs string, dirs ...string) (*Checkpoint, error) {
	c, err := list(dirs)
	if err == nil {
		err = c.follow(blobs)
	}
	if err == nil {
		err = c.assemble()
	}
	if err != nil {
		return nil, err
	}
	return c, nil
}

// Complete reads the Metadata of what ListImage returned.
func (c *Checkpoint) Complete() error {
	_, err := c.complete(false)
	return err
}

// follow finds the blobs of those pieces that an image has a Pointer for.
func (c *Checkpoint) follow(blobs string) error {
	for _, pieces := range c.pieces {
		for i := range pieces {
			if err := pieces[i].follow(blobs); err != nil {
				return err
			}
		}
	}
	return nil
}

func (p *Piece) follow(blobs string) error {
	if p.Bytes >= PageBytes {
		return nil // a piece is whole pages
	}
	f, err := p.Open()
	if err != nil {
		return fmt.Errorf("open checkpoint: %w", err)
	}
	defer f.Close()
	text := make([]byte, p.Bytes)
	if _, err := f.ReadAt(text, 0); err != nil {
		return fmt.Errorf("open checkpoint: %w", err)
	}
	to, err := ParsePointer(string(text))
	if err != nil {
		return fmt.Errorf("%s: %w", p, err)
	}
	if blobs == "" { // else a file of the working directory
		return fmt.Errorf("%w: %s says that blob %s has it, and where blobs are is not known", ErrDamaged, p, to.Digest)
	}
	path := filepath.Join(blobs, to.Digest.Encoded())
	st, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: blob %s, which has memory or GPU state, is not in %s: `gpuckpt image pull` fetches what an image lacks, with --decrypt-key what is encrypted", ErrDamaged, to.Digest, blobs)
	}
	if err != nil {
		return fmt.Errorf("open checkpoint: %w", err)
	}
	if !st.Mode().IsRegular() || uint64(st.Size()) != to.Bytes {
		return fmt.Errorf("%w: %s is no file of %d bytes", ErrDamaged, path, to.Bytes)
	}
	p.Path, p.Bytes = path, to.Bytes
	return nil
}

// Pointer is the content of the file that an image has in the place of a piece whose bytes are a blob of the image.
type Pointer struct {
	Digest digest.Digest // of the algorithm digest.Canonical
	Bytes  uint64
}

// String returns what is in the file: fewer bytes than a page, which no piece has.
func (p Pointer) String() string { return fmt.Sprintf("%s %d\n", p.Digest, p.Bytes) }

// ParsePointer parses what String returned. The error is ErrDamaged.
func ParsePointer(text string) (p Pointer, err error) {
	if _, err := fmt.Sscanf(text, "%s %d\n", &p.Digest, &p.Bytes); err != nil || p.String() != text ||
		p.Digest.Validate() != nil || p.Digest.Algorithm() != digest.Canonical || p.Bytes < PageBytes {
		return Pointer{}, fmt.Errorf("%w: it is neither whole pages, nor says which blob has them", ErrDamaged)
	}
	return p, nil
}

// ImageDirs returns the ImageDir of those layers that have one, the topmost first; none if the
// image is not a checkpoint. A layer that hides those below is the last.
func ImageDirs(roots ...string) ([]string, error) {
	var dirs []string
	for _, root := range roots {
		dir := filepath.Join(root, ImageDir)
		st, err := os.Lstat(dir)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("look for a checkpoint in the image: %w", err)
		}
		if !st.IsDir() {
			break // a whiteout, or a file that somebody has put there
		}
		dirs = append(dirs, dir)
		if opaque(dir) {
			break
		}
	}
	if len(dirs) == 0 {
		return nil, nil
	}
	// The checkpoint's topmost layer has it. What is above, or is left without it, is none.
	if _, err := os.Lstat(filepath.Join(dirs[0], MetadataName)); errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %s has no %s", ErrDamaged, dirs[0], MetadataName)
	} else if err != nil {
		return nil, fmt.Errorf("look for a checkpoint in the image: %w", err)
	}
	return dirs, nil
}

// opaque reports whether a directory of an overlay's layer hides those in lower layers.
func opaque(dir string) bool {
	for _, name := range []string{"trusted.overlay.opaque", "user.overlay.opaque"} {
		value := make([]byte, 1)
		if n, err := unix.Lgetxattr(dir, name, value); err == nil && n == 1 && value[0] == 'y' {
			return true
		}
	}
	return false
}

// ListDirs lists the files of a checkpoint, but GPU state and what is in pieces, and reads none of
// them. dirs is the checkpoint's directory, or what ImageDirs returned. It refuses whatever is
// not a regular file.
func ListDirs(dirs ...string) ([]File, error) {
	c, err := list(dirs)
	if err != nil {
		return nil, err
	}
	return c.Files, nil
}

// maxFiles bounds the files of a checkpoint, which are listed before a signature is looked for. Each thread has one.
const maxFiles = 1 << 18

// readDir is os.ReadDir of a directory that has at most so many names.
func readDir(dir string, most int) ([]fs.DirEntry, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	entries, err := d.ReadDir(most + 1)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if len(entries) > most {
		return nil, fmt.Errorf("%w: it has more than %d files", ErrDamaged, maxFiles)
	}
	slices.SortFunc(entries, func(a, b fs.DirEntry) int { return cmp.Compare(a.Name(), b.Name()) })
	return entries, nil
}

// list sorts in the files of directories. An earlier one hides a later one's file of that name.
func list(dirs []string) (*Checkpoint, error) {
	c := &Checkpoint{Dir: dirs[0], pieces: make(map[string]Location)}
	seen, left := make(map[string]bool), maxFiles
	for i, dir := range dirs {
		entries, err := readDir(dir, left)
		if err != nil {
			return nil, fmt.Errorf("open checkpoint: %w", err)
		}
		left -= len(entries)
		points := false
		for _, e := range entries {
			// Only areas are spread: the rest is in one directory, for CRIU.
			_, _, piece := ParsePieceFile(e.Name())
			if seen[e.Name()] || i > 0 && !piece && !IsAreaFile(e.Name()) {
				continue
			}
			seen[e.Name()] = true
			path := filepath.Join(dir, e.Name())
			st, err := e.Info()
			if err != nil {
				return nil, fmt.Errorf("open checkpoint: %w", err)
			}
			// CRIU would follow a link out of an image that nobody trusts.
			if !st.Mode().IsRegular() {
				return nil, fmt.Errorf("%w: %s is not a regular file", ErrDamaged, path)
			}
			c.take(File{Name: e.Name(), Path: path, Bytes: uint64(st.Size())})
			points = points || piece && st.Size() < PageBytes
		}
		if points {
			break // it says where all pieces are: what is below is the container's own, such as a copy of an older checkpoint
		}
	}
	return c, nil
}

func (c *Checkpoint) take(f File) {
	area, offset, piece := ParsePieceFile(f.Name)
	switch {
	case piece:
	case IsAreaFile(f.Name):
		area = f.Name
	default:
		c.Files = append(c.Files, f)
		return
	}
	c.pieces[area] = append(c.pieces[area], Piece{Path: f.Path, Data: f.Data, Arrival: f.Arrival, Offset: offset, Bytes: f.Bytes})
}

// complete reads the metadata, if there is any, and checks the files against it.
func (c *Checkpoint) complete(flat bool, opts ...Option) (*Checkpoint, error) {
	for _, f := range c.Files {
		if f.Arrival != nil {
			return nil, fmt.Errorf("open checkpoint: %s is still arriving, and only files of GPU state may", f.Name)
		}
	}
	slices.SortFunc(c.Files, func(a, b File) int { return cmp.Compare(a.Name, b.Name) })
	f := c.file(MetadataName)
	if f == nil {
		if slices.Contains(opts, AllowWithoutGPU) {
			return c, c.withoutGPU()
		}
		return nil, fmt.Errorf("%w in %s", ErrNoMetadata, cmp.Or(c.Dir, "the archive"))
	}
	var err error
	if c.Metadata, err = f.metadata(); err != nil {
		return nil, err
	}
	return c, c.arrange(flat)
}

// assemble makes files of the pieces of memory. In a flat directory there are none: they would belong to no area.
func (c *Checkpoint) assemble() error {
	for name, pieces := range c.pieces {
		if !IsMemory(name) {
			continue
		}
		delete(c.pieces, name)
		if c.file(name) != nil {
			return fmt.Errorf("%w: %s is there whole and in pieces", ErrDamaged, name)
		}
		f := File{Name: name, Path: name, Pieces: pieces}
		for _, p := range pieces {
			f.Bytes = max(f.Bytes, p.Offset+p.Bytes)
		}
		if err := f.Pieces.arrange(f.Area()); err != nil {
			return err
		}
		c.Files = append(c.Files, f)
	}
	return nil
}

func (c *Checkpoint) withoutGPU() error {
	for name := range c.pieces {
		return fmt.Errorf("%w: it has %s, a file of GPU state, and no %s", ErrDamaged, name, MetadataName)
	}
	if c.file("inventory.img") == nil {
		return fmt.Errorf("%w: it has no inventory.img", ErrDamaged)
	}
	return nil
}

// WithMetadata returns the checkpoint with a gpuckpt.json: its own, or, without GPU state,
// one that has no processes.
func (c *Checkpoint) WithMetadata() (*Checkpoint, error) {
	if c.Metadata != nil {
		return c, nil
	}
	with := *c
	with.Metadata = &Metadata{SchemaVersion: SchemaVersion, Created: time.Now().UTC()}
	data, err := EncodeMetadata(with.Metadata)
	if err != nil {
		return nil, err
	}
	with.Files = append([]File{{Name: MetadataName, Path: MetadataName, Bytes: uint64(len(data)), Data: bytes.NewReader(data)}}, c.Files...)
	return &with, nil
}

// arrange gives each area its Location, and refuses a piece that belongs to no area.
func (c *Checkpoint) arrange(flat bool) error {
	areas := make(map[string]bool)
	for _, p := range c.Metadata.Processes {
		for i := range p.Areas {
			a := &p.Areas[i]
			areas[a.File] = true
			a.Location = c.pieces[a.File]
			if flat && len(a.Location) == 0 {
				return fmt.Errorf("%w: %s is missing in %s", ErrDamaged, a.File, c.Dir)
			}
			if whole := a.Location; flat && len(whole) == 1 && whole[0].Offset == 0 && whole[0].Bytes < a.End() {
				return fmt.Errorf("%w: %s is truncated: it has %d bytes of %d", ErrDamaged, whole[0], whole[0].Bytes, a.End())
			}
			if err := a.Location.arrange(a); err != nil {
				return err
			}
		}
	}
	for name, pieces := range c.pieces {
		if !areas[name] {
			return fmt.Errorf("%w: %s belongs to no area of %s", ErrDamaged, pieces[0], MetadataName)
		}
	}
	return nil
}

// Areas returns all areas of all processes, in order. It can be called on nil.
func (m *Metadata) Areas() (all []Area) {
	if m == nil {
		return nil
	}
	for _, p := range m.Processes {
		all = append(all, p.Areas...)
	}
	return all
}

// Areas returns those of the metadata.
func (c *Checkpoint) Areas() []Area { return c.Metadata.Areas() }

// AreaBytes returns the size of all areas.
func (c *Checkpoint) AreaBytes() (bytes uint64) {
	for _, a := range c.Areas() {
		bytes += a.Bytes
	}
	return bytes
}

// IsAreaFile reports whether a name belongs to an area's file or to a piece of one.
func IsAreaFile(name string) bool {
	return strings.HasPrefix(name, "gpu-") && pieceForm().MatchString(name)
}

// ParsePieceFile parses a name that PieceFile made.
func ParsePieceFile(name string) (areaFile string, offset uint64, ok bool) {
	parts := pieceForm().FindStringSubmatch(name)
	if parts == nil || parts[2] == "" {
		return "", 0, false
	}
	offset, err := strconv.ParseUint(parts[2], 16, 64)
	return parts[1], offset, err == nil
}
