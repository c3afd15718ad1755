// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package arriving

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"

	"github.com/containerd/containerd/v2/core/content"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/images/oci"
	"github.com/gpuckpt/gpuckpt/images/registry"
)

// Target is where a layer of a checkpoint arrives: the root of its snapshot. Whoever calls its
// methods is the only one who writes there.
type Target struct {
	oci.Layer
	// LayerBytes is that of the image.
	LayerBytes uint64 `json:"layerBytes"`
	// Root is the directory that holds the layer's files, and no others.
	Root string `json:"root"`
	// Part, if set, is called while the file of a layer of GPU state is written: its first bytes are
	// there, though no digest says so yet. Fewer than before mean that the file is written anew.
	Part func(bytes uint64) `json:"-"`
}

// partBytes is how much is written before Part is called again: once the last byte of a layer has
// arrived, a reader has no more than that to digest.
const partBytes = 4 << 20

// growing writes a file from its begin to its end, and tells of it.
type growing struct {
	to      io.WriterAt
	at      int64
	told    int64
	part    func(bytes uint64)
	jumbled bool // the archive is not in the file's order
}

func (g *growing) tell(bytes int64) {
	if g.told = bytes; g.part != nil {
		g.part(uint64(bytes))
	}
}

// begin goes on at an offset in the file. What is between is zero.
func (g *growing) begin(at int64) {
	if at < g.at && !g.jumbled {
		g.jumbled = true
		g.tell(0)
	}
	g.at = at
}

func (g *growing) Write(p []byte) (int, error) {
	n, err := g.to.WriteAt(p, g.at)
	if g.at += int64(n); !g.jumbled && g.at-g.told >= partBytes {
		g.tell(g.at)
	}
	return n, err
}

// dir is where the layer's files are.
func (t *Target) dir() string { return filepath.Join(t.Root, images.ImageDir) }

// File returns the path of the one file that a layer of GPU state becomes, with holes where it has
// zeros.
func (t *Target) File() string { return filepath.Join(t.dir(), images.PieceFile(t.Area, t.Offset)) }

// descriptor finds the layer in the registry.
func (t *Target) descriptor() ocispec.Descriptor {
	d := t.Descriptor()
	d.Annotations = map[string]string{annotations.Layer: t.Kind}
	return d
}

// empty makes the layer's directory, and removes what is in it.
func (t *Target) empty() error {
	if err := os.RemoveAll(t.dir()); err != nil {
		return err
	}
	return os.Mkdir(t.dir(), 0o700)
}

// Make makes the file of a layer of GPU state at its full size. What was there is removed.
func (t *Target) Make() error {
	if _, _, ok := images.ParsePieceFile(images.PieceFile(t.Area, t.Offset)); !ok || t.LayerBytes == 0 || t.Offset%t.LayerBytes != 0 {
		return fmt.Errorf("%w: layer %s says it is %q from %d", images.ErrDamaged, t.Digest, t.Area, t.Offset)
	}
	err := t.empty()
	if err != nil {
		return err
	}
	f, err := os.OpenFile(t.File(), os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(f.Truncate(int64(t.LayerBytes)), f.Close())
}

// Fetch fetches a layer of GPU state into its file, which Make has made. The file is right when it
// returns nil: the layer's diff_id is compared. After an error it has anything in it.
func (t *Target) Fetch(ctx context.Context, from *registry.Source) error {
	d := t.descriptor()
	return from.Try(ctx, d, func() error {
		f, err := t.open()
		if err != nil {
			return err
		}
		defer f.Close()
		data, err := from.Stream(ctx, d)
		if err != nil {
			return err
		}
		defer data.Close()
		return t.fill(f, data)
	})
}

// open opens the file that Make has made, and empties it: another try may have written what is to be
// zero. It has its size at all times: a restore may be looking at it.
func (t *Target) open() (*os.File, error) {
	f, err := os.OpenFile(t.File(), os.O_WRONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	if t.Part != nil {
		t.Part(0)
	}
	err = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, int64(t.LayerBytes))
	if errors.Is(err, unix.EOPNOTSUPP) {
		err = errors.Join(f.Truncate(0), f.Truncate(int64(t.LayerBytes)))
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// fill writes the pieces in the layer's archive to where they belong in its file.
func (t *Target) fill(f io.WriterAt, data io.Reader) error {
	buf := make([]byte, 1<<20)
	to := &growing{to: f, part: t.Part}
	return t.read(data, func(name string, size int64, r io.Reader) error {
		area, offset, ok := images.ParsePieceFile(name)
		end := t.Offset + t.LayerBytes
		if !ok || area != t.Area || offset%images.PieceAlign != 0 || offset < t.Offset || offset > end || uint64(size) > end-offset {
			return fmt.Errorf("%w: %s, %d bytes, is not a piece of %s from %d to %d", images.ErrDamaged, name, size, t.Area, t.Offset, end)
		}
		to.begin(int64(offset - t.Offset))
		_, err := io.CopyBuffer(to, struct{ io.Reader }{r}, buf)
		return err
	})
}

// read reads the layer's archive, and compares its diff_id, which the config has. The manifest has a
// digest of the same bytes as they are sent. Nothing is kept of those, so it would tell no more, and
// SHA-256 takes most of a fetch.
func (t *Target) read(data io.Reader, file func(name string, size int64, r io.Reader) error) error {
	digested := newHasher(t.DiffID.Algorithm())
	err := t.unpack(data, digested, file)
	got := digested.end()
	if err == nil && got != t.DiffID {
		err = fmt.Errorf("%w: unpacked it has the digest %s, not %s", registry.ErrWrongBytes, got, t.DiffID)
	}
	return err
}

// unpack reads the layer's archive to the end, and digests it.
func (t *Target) unpack(data io.Reader, digested io.Writer, file func(name string, size int64, r io.Reader) error) error {
	processors := 1 // there are many layers of GPU state
	if t.Kind == oci.LayerCRIU {
		processors = runtime.NumCPU()
	}
	archive, err := oci.Decompress(data, t.MediaType, processors)
	if err != nil {
		return fmt.Errorf("layer %s: %w", t.Digest, err)
	}
	defer archive.Close()
	whole := io.TeeReader(archive, digested)
	if err = images.ReadLayer(whole, file); err == nil {
		_, err = io.Copy(io.Discard, whole) // what is behind the end mark counts for the digest
	}
	if err == nil {
		_, err = io.Copy(io.Discard, data)
	}
	return err
}

// Unpack unpacks the layer with CRIU's images out of a content store. What was there is removed.
func (t *Target) Unpack(ctx context.Context, store content.Provider) error {
	if err := t.empty(); err != nil {
		return err
	}
	blob, err := store.ReaderAt(ctx, t.Descriptor())
	if err != nil {
		return err
	}
	defer blob.Close()
	return t.read(content.NewReader(blob), func(name string, size int64, r io.Reader) error {
		f, err := os.OpenFile(filepath.Join(t.dir(), name), os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o600)
		if err == nil {
			_, err = io.CopyN(f, r, size)
			err = errors.Join(err, f.Close())
		}
		return err
	})
}
