// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package images

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"
)

// ImageDir is the directory at the root of a checkpoint image in which the
// checkpoint lies.
const ImageDir = ".gpuckpt"

// PieceAlign is what the offset of every piece is a multiple of, in bytes: the
// size of huge pages, so that a piece is mapped with the alignment of its area.
const PieceAlign = 2 << 20

// ErrDamaged says that a checkpoint is not what was written: a file is missing,
// is no regular file, is too short, or has another content.
var ErrDamaged = errors.New("damaged checkpoint")

// Checkpoint is a checkpoint on a disk, opened for a restore, for verifying or
// for building an image. It holds no file open; nothing of it is changed.
type Checkpoint struct {
	// Dir holds CRIU's images and gpuckpt.json. In a checkpoint image that is
	// the ImageDir of the topmost of its checkpoint layers.
	Dir string
	// Metadata is the content of gpuckpt.json; nil in a checkpoint without GPU
	// state, see OpenWithoutGPU.
	Metadata *Metadata
	// Files are all files but the areas', gpuckpt.json among them, by name.
	Files []File

	pieces map[string][]Piece
}

// File is a file of a checkpoint: in a directory, or a part of an archive.
type File struct {
	// Name without a directory.
	Name string
	// Path of the file; for what is part of an archive, words that name it.
	Path  string
	Bytes uint64
	// OpenAs is another path of the same file, to open it by; empty: Path is.
	OpenAs string `json:",omitempty"`
	// Data reads it where it is no file of its own; nil: it is opened.
	Data io.ReaderAt
}

// Piece is a file that holds a part of an area. What no piece of an area holds
// is zero.
type Piece struct {
	File
	// Offset is where the piece begins, counted as Area.Offset is, from the
	// begin of the area's one file in a flat checkpoint. Its length is Bytes.
	Offset uint64
}

// PieceFile names the piece of an area's file that begins at an offset.
func PieceFile(areaFile string, offset uint64) string {
	return fmt.Sprintf("%s.%012x", areaFile, offset)
}

// pieceForm are the names of areas' files, whole or in pieces.
var pieceForm = regexp.MustCompile(`^(gpu-[1-9][0-9]*-[0-9]+)(?:\.([0-9a-f]{12}))?$`)

// Open opens a checkpoint in a flat directory, as a dump leaves it. The errors
// are ErrNoMetadata (a checkpoint without GPU state, or none), ErrSchema,
// ErrMalformed and ErrDamaged, or those of reading files.
func Open(dir string) (*Checkpoint, error) { return open([]string{dir}, true) }

// OpenFiles opens a flat checkpoint of which the files are known already, parts
// of an archive say. Dir of what it gives is empty. Errors as those of Open.
func OpenFiles(files []File) (*Checkpoint, error) {
	c, err := takeAll(files)
	if err != nil {
		return nil, err
	}
	return c, c.complete(true)
}

func takeAll(files []File) (*Checkpoint, error) {
	c := &Checkpoint{pieces: make(map[string][]Piece)}
	for _, f := range files {
		if err := c.take(f); err != nil {
			return nil, err
		}
	}
	c.sort()
	return c, nil
}

// OpenWithoutGPU opens the flat checkpoint of a container that used no GPU: it
// has no gpuckpt.json, and what it gives no Metadata. Whoever calls it knows
// that the dump was complete. A directory with GPU state, or without CRIU's
// inventory.img, is ErrDamaged.
func OpenWithoutGPU(dir string) (*Checkpoint, error) {
	c, err := list([]string{dir})
	if err != nil {
		return nil, err
	}
	return c, c.withoutGPU()
}

// OpenFilesWithoutGPU is OpenWithoutGPU for files as OpenFiles takes them.
func OpenFilesWithoutGPU(files []File) (*Checkpoint, error) {
	c, err := takeAll(files)
	if err != nil {
		return nil, err
	}
	return c, c.withoutGPU()
}

func (c *Checkpoint) withoutGPU() error {
	if len(c.pieces) > 0 || c.file(MetadataName) != nil {
		return fmt.Errorf("%w: it is said to have no GPU state and has files of it", ErrDamaged)
	}
	if c.file("inventory.img") == nil {
		return fmt.Errorf("%w: it has no inventory.img", ErrDamaged)
	}
	return nil
}

// file finds a file that is no area's.
func (c *Checkpoint) file(name string) *File {
	at, ok := slices.BinarySearchFunc(c.Files, name, func(f File, name string) int { return cmp.Compare(f.Name, name) })
	if !ok {
		return nil
	}
	return &c.Files[at]
}

// OpenImage opens the checkpoint of an unpacked checkpoint image: its root
// directory, or the root directories of its layers, the topmost first, as an
// overlay's lowerdir option lists them. Errors as those of Open; ErrNoMetadata
// is also that of an image that is no checkpoint.
func OpenImage(roots ...string) (*Checkpoint, error) {
	dirs, err := ImageDirs(roots...)
	if err != nil {
		return nil, err
	}
	if len(dirs) == 0 {
		return nil, fmt.Errorf("%w in any of the image's layers", ErrNoMetadata)
	}
	return open(dirs, false)
}

// ImageDirs gives the ImageDir of those layers that have one, the topmost
// first; none when the image is no checkpoint. It costs an lstat for each
// layer of an image that is none, and opens nothing. A layer that hides what
// is below it, or in which the name is no directory, is the last.
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
	// The topmost layer of a checkpoint is complete without the others. What
	// is above it, or is left of a checkpoint of which a layer is gone, is none.
	if _, err := os.Lstat(filepath.Join(dirs[0], MetadataName)); errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %s has no %s", ErrDamaged, dirs[0], MetadataName)
	} else if err != nil {
		return nil, fmt.Errorf("look for a checkpoint in the image: %w", err)
	}
	return dirs, nil
}

// opaque says whether a directory of an overlay's layer hides those below it.
func opaque(dir string) bool {
	for _, name := range []string{"trusted.overlay.opaque", "user.overlay.opaque"} {
		value := make([]byte, 1)
		if n, err := unix.Lgetxattr(dir, name, value); err == nil && n == 1 && value[0] == 'y' {
			return true
		}
	}
	return false
}

// open opens a checkpoint whose files are spread over directories, of which an
// earlier one hides the same name in a later one.
func open(dirs []string, flat bool) (*Checkpoint, error) {
	c, err := list(dirs)
	if err != nil {
		return nil, err
	}
	return c, c.complete(flat)
}

// list sorts the files in.
func list(dirs []string) (*Checkpoint, error) {
	c := &Checkpoint{Dir: dirs[0], pieces: make(map[string][]Piece)}
	seen := make(map[string]bool)
	for i, dir := range dirs {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return nil, fmt.Errorf("open checkpoint: %w", err)
		}
		for _, e := range entries {
			// Only areas are spread: the rest is in one directory, for CRIU.
			if seen[e.Name()] || i > 0 && !pieceForm.MatchString(e.Name()) {
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
				return nil, fmt.Errorf("%w: %s is no regular file", ErrDamaged, path)
			}
			if err := c.take(File{Name: e.Name(), Path: path, Bytes: uint64(st.Size())}); err != nil {
				return nil, err
			}
		}
	}
	c.sort()
	return c, nil
}

func (c *Checkpoint) sort() {
	slices.SortFunc(c.Files, func(a, b File) int { return cmp.Compare(a.Name, b.Name) })
}

// take sorts one file in.
func (c *Checkpoint) take(f File) error {
	parts := pieceForm.FindStringSubmatch(f.Name)
	if parts == nil {
		c.Files = append(c.Files, f)
		return nil
	}
	p := Piece{File: f}
	if parts[2] != "" {
		var err error
		if p.Offset, err = strconv.ParseUint(parts[2], 16, 64); err != nil {
			return fmt.Errorf("%w: %s: %w", ErrDamaged, f.Path, err)
		}
	}
	c.pieces[parts[1]] = append(c.pieces[parts[1]], p)
	return nil
}

// complete reads the metadata and checks the files against it.
func (c *Checkpoint) complete(flat bool) error {
	f := c.file(MetadataName)
	if f == nil {
		where := ""
		if c.Dir != "" {
			where = " in " + c.Dir
		}
		return fmt.Errorf("%w%s", ErrNoMetadata, where)
	}
	r, err := f.Open()
	if err != nil {
		return fmt.Errorf("read checkpoint metadata: %w", err)
	}
	defer r.Close()
	data, err := io.ReadAll(io.NewSectionReader(r, 0, int64(min(f.Bytes, maxMetadata+1))))
	if err != nil {
		return fmt.Errorf("read checkpoint metadata: %w", err)
	}
	if c.Metadata, err = ParseMetadata(data); err != nil {
		return fmt.Errorf("%s: %w", f.Path, err)
	}
	return c.arrange(flat)
}

// ReaderAtCloser reads a file.
type ReaderAtCloser interface {
	io.ReaderAt
	io.Closer
}

// Open opens the file for reading. One that has become a link since it was found
// is refused, and one that nothing comes out of is not waited for.
func (f File) Open() (ReaderAtCloser, error) {
	if f.Data != nil {
		return unclosed{f.Data}, nil
	}
	return os.OpenFile(cmp.Or(f.OpenAs, f.Path), os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
}

// unclosed is a reader that somebody else closes.
type unclosed struct{ io.ReaderAt }

func (unclosed) Close() error { return nil }

// arrange orders the pieces and checks that they are the areas' and do not
// overlap; what is behind an area's end is left out.
func (c *Checkpoint) arrange(flat bool) error {
	areas := make(map[string]bool)
	for _, p := range c.Metadata.Processes {
		for _, a := range p.Areas {
			areas[a.File] = true
			pieces := c.pieces[a.File]
			slices.SortFunc(pieces, func(x, y Piece) int { return cmp.Compare(x.Offset, y.Offset) })
			end := a.Offset + a.Bytes
			if flat && len(pieces) == 0 {
				return fmt.Errorf("%w: %s is missing in %s", ErrDamaged, a.File, c.Dir)
			}
			if flat && len(pieces) == 1 && pieces[0].Offset == 0 && pieces[0].Bytes < end {
				return fmt.Errorf("%w: %s is truncated: it has %d bytes of %d", ErrDamaged, pieces[0].Path, pieces[0].Bytes, end)
			}
			var at uint64
			for i := range pieces {
				q := &pieces[i]
				if q.Offset%PieceAlign != 0 || q.Offset < at || q.Offset >= end || q.Bytes == 0 {
					return fmt.Errorf("%w: %s is no piece of %s: %d bytes at %d, of %d", ErrDamaged, q.Path, a.File, q.Bytes, q.Offset, end)
				}
				q.Bytes = min(q.Bytes, end-q.Offset)
				if q.Bytes%pageBytes != 0 {
					return fmt.Errorf("%w: %s is truncated: %d bytes are no whole pages", ErrDamaged, q.Path, q.Bytes)
				}
				at = q.Offset + q.Bytes
			}
			c.pieces[a.File] = pieces
		}
	}
	for name, pieces := range c.pieces {
		if !areas[name] {
			return fmt.Errorf("%w: %s belongs to no area of %s", ErrDamaged, pieces[0].Path, MetadataName)
		}
	}
	return nil
}

// Pieces gives the files that hold an area, in order and without overlaps. What
// lies between them, within the area's range, is zero.
func (c *Checkpoint) Pieces(areaFile string) []Piece { return slices.Clone(c.pieces[areaFile]) }

// Areas gives all areas of all processes, in order.
func (c *Checkpoint) Areas() []Area {
	if c.Metadata == nil {
		return nil
	}
	var all []Area
	for _, p := range c.Metadata.Processes {
		all = append(all, p.Areas...)
	}
	return all
}

// AreaBytes is the size of the GPU state that is in files of its own.
func (c *Checkpoint) AreaBytes() (bytes uint64) {
	for _, a := range c.Areas() {
		bytes += a.Bytes
	}
	return bytes
}

// IsAreaFile says whether a name is that of a file with GPU state, whole or a
// piece.
func IsAreaFile(name string) bool { return pieceForm.MatchString(name) }

// ParsePieceFile takes a name that PieceFile made apart.
func ParsePieceFile(name string) (areaFile string, offset uint64, ok bool) {
	parts := pieceForm.FindStringSubmatch(name)
	if parts == nil || parts[2] == "" {
		return "", 0, false
	}
	offset, err := strconv.ParseUint(parts[2], 16, 64)
	return parts[1], offset, err == nil
}
