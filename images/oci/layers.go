// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"archive/tar"
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/pkg/labels"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/klauspost/compress/gzip"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
)

type plan struct {
	kind string
	// A GPU layer's area and range of its file. The range of another is as long as its entries.
	area *images.AreaReader
	name string
	span
	entries []entry
}

func (p *plan) key() string { return layerKey(p.kind, p.name, strconv.FormatUint(p.from, 10)) }

func layerKey(kind, area, offset string) string {
	if kind != LayerGPU {
		return kind
	}
	return kind + " " + area + " " + offset
}

func (p *plan) annotations() map[string]string {
	a := map[string]string{annotations.Layer: p.kind}
	if p.kind == LayerGPU {
		a[annotations.Area], a[annotations.Offset] = p.name, strconv.FormatUint(p.from, 10)
	}
	return a
}

// checkpointLayers makes the layers of GPU state but zeros, and of CRIU's images, several at once.
func (b *builder) checkpointLayers(ctx context.Context, c *images.Checkpoint, previous map[string]layer) ([]layer, error) {
	var plans []plan
	areas := c.Areas()
	for i := range areas {
		a := &areas[i]
		r := a.Open(ctx)
		defer r.Close()
		for at := uint64(0); at < a.End(); at += b.LayerBytes {
			plans = append(plans, plan{kind: LayerGPU, area: r, name: a.File, span: span{at, min(at+b.LayerBytes, a.End())}})
		}
	}
	last, done, err := criuPlan(c)
	defer done()
	if err != nil {
		return nil, err
	}
	plans = append(plans, last)
	made := make([]*layer, len(plans))
	g, working := errgroup.WithContext(ctx)
	for i := range slices.Backward(plans) { // CRIU's layer takes longest
		b.meter.Grow(int64(plans[i].to - plans[i].from))
		err := b.processors.Acquire(working, 1)
		g.Go(func() error {
			if err != nil {
				return err
			}
			defer b.processors.Release(1)
			if made[i], err = b.makeLayer(working, &plans[i], previous); made[i] != nil && err == nil {
				b.tell(made[i].desc)
			}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	var layers []layer
	for _, l := range made {
		if l != nil {
			layers = append(layers, *l)
		}
	}
	if len(layers) > 1 {
		anchor, err := b.anchor(ctx, b.LayerBytes, layers)
		if err != nil {
			return nil, err
		}
		b.tell(anchor.desc)
		layers = slices.Insert(layers, 0, *anchor)
	}
	return layers, nil
}

// Anchor returns the archive of the layer below GPU state: an empty directory, with a digest in its header of all that
// the layers above become as they arrive. Those are the layers of GPU state and that of CRIU's images; of each the
// diff_id, Area and Offset count. So their chain IDs are those of this one checkpoint, cut in this one way: no other
// image has them, whatever it claims.
func Anchor(layerBytes uint64, above []Layer) ([]byte, error) {
	text := fmt.Appendf(nil, "%d\n", layerBytes)
	for _, l := range above {
		text = fmt.Appendf(text, "%s %s %q %d\n", l.Kind, l.DiffID, l.Area, l.Offset)
	}
	var b bytes.Buffer
	t := tar.NewWriter(&b)
	h := tar.Header{
		Typeflag: tar.TypeDir, Name: images.ImageDir + "/", Mode: 0o700, ModTime: time.Unix(0, 0),
		PAXRecords: map[string]string{"GPUCKPT.above": digest.FromBytes(text).String()},
	}
	err := errors.Join(t.WriteHeader(&h), t.Close())
	return b.Bytes(), err
}

// anchor makes the layer of Anchor, below these.
func (b *builder) anchor(ctx context.Context, layerBytes uint64, above []layer) (*layer, error) {
	var all []Layer
	for _, l := range above {
		of, err := layerOf(l.desc, l.diffID)
		if err != nil {
			return nil, err
		}
		all = append(all, of)
	}
	data, err := Anchor(layerBytes, all)
	if err != nil {
		return nil, err
	}
	l, err := b.writeLayer(ctx, LayerAnchor, b.pack, func(w io.Writer) error {
		_, err := w.Write(data)
		return err
	})
	if err != nil {
		return nil, err
	}
	l.kind, l.desc.Annotations = LayerAnchor, map[string]string{annotations.Layer: LayerAnchor}
	return l, nil
}

// criuPlan is the layer with CRIU's images. gpuckpt.json is its first file. done closes the files.
func criuPlan(c *images.Checkpoint) (p plan, done func(), err error) {
	var open []io.Closer
	done = func() {
		for _, f := range open {
			f.Close()
		}
	}
	p.kind = LayerCRIU
	for _, f := range c.Files {
		r, err := f.Open()
		if err != nil {
			return p, done, fmt.Errorf("read the checkpoint: %w", err)
		}
		open = append(open, r)
		e := entry{name: f.Name, from: r, len: f.Bytes}
		p.to += e.len
		if f.Name == images.MetadataName {
			p.entries = slices.Insert(p.entries, 0, e)
		} else {
			p.entries = append(p.entries, e)
		}
	}
	return p, done, nil
}

// makeLayer returns the layer, which is then in the store; nil if it would be empty.
func (b *builder) makeLayer(ctx context.Context, p *plan, previous map[string]layer) (*layer, error) {
	if p.kind == LayerGPU {
		parts, err := runs(p.area, p.from, p.to)
		if err != nil {
			return nil, err
		}
		for _, r := range parts {
			p.entries = append(p.entries, entry{name: images.PieceFile(p.name, r.from), from: p.area, offset: r.from, len: r.to - r.from})
		}
	}
	content := uint64(0)
	for _, e := range p.entries {
		content += e.len
	}
	b.meter.Add(int64(p.to - p.from - content)) // zeros are done
	if len(p.entries) == 0 {
		return nil, nil
	}
	if old, ok := previous[p.key()]; ok {
		// Reading what has changed twice is cheaper than compressing what has not.
		h := digest.Canonical.Digester()
		if err := writeTar(ctx, h.Hash(), p.entries, nil); err != nil {
			return nil, err
		}
		if h.Digest() == old.diffID {
			b.meter.Add(int64(content))
			old.desc.Annotations = p.annotations()
			old.kind, old.reused = p.kind, true
			return &old, nil
		}
	}
	pack := b.pack
	if b.Compression == Zstd && b.Level == 0 {
		switch saves, err := b.worthwhile(p.entries); {
		case err != nil:
			return nil, err
		case !saves:
			pack = func(w io.Writer) (io.WriteCloser, error) { return newRawWriter(w), nil }
		}
	}
	l, err := b.writeLayer(ctx, p.key(), pack, func(w io.Writer) error {
		return writeTar(ctx, w, p.entries, b.meter)
	})
	if err != nil {
		return nil, err
	}
	l.kind, l.desc.Annotations = p.kind, p.annotations()
	return l, nil
}

// pack compresses as the Options say. Its output depends on its input alone.
func (b *builder) pack(w io.Writer) (io.WriteCloser, error) {
	switch b.Compression {
	case None:
		return unclosed{w}, nil
	case Gzip:
		return gzip.NewWriterLevel(w, max(1, b.Level))
	}
	return &framer{w: w, encoder: b.encoder, idle: b.processors}, nil
}

type unclosed struct{ io.Writer }

func (unclosed) Close() error { return nil }

// writeLayer writes what fill writes, through pack, into a layer of the store. On an error nothing is
// left.
func (b *builder) writeLayer(ctx context.Context, name string, pack func(io.Writer) (io.WriteCloser, error), fill func(io.Writer) error) (_ *layer, err error) {
	ref := b.id + " " + name
	w, err := content.OpenWriter(ctx, b.store, content.WithRef(ref))
	if err != nil {
		return nil, fmt.Errorf("write layer: %w", err)
	}
	defer func() {
		w.Close()
		if err != nil {
			abort(ctx, b.store, ref)
			err = fmt.Errorf("write layer: %w", err)
		}
	}()
	counted := &counter{w: w}
	buffered := bufio.NewWriterSize(counted, 1<<20)
	packed, err := pack(buffered)
	if err != nil {
		return nil, err
	}
	// The store hashes what it gets, which without compression is the same.
	plain, into := digest.Canonical.Digester(), io.Writer(packed)
	if b.Compression != None {
		into = io.MultiWriter(packed, plain.Hash())
	}
	err = fill(into)
	err = cmp.Or(err, packed.Close()) // it has goroutines
	if err == nil {
		err = buffered.Flush()
	}
	if err != nil {
		return nil, err
	}
	// A remote writer knows its digest once it has asked.
	status, err := w.Status()
	if err != nil {
		return nil, err
	}
	if status.Offset != counted.bytes {
		return nil, fmt.Errorf("the store has %d of %d bytes", status.Offset, counted.bytes)
	}
	l := &layer{desc: ocispec.Descriptor{MediaType: b.Compression.MediaType(), Digest: w.Digest(), Size: counted.bytes}}
	if l.diffID = l.desc.Digest; b.Compression != None {
		l.diffID = plain.Digest()
	}
	err = w.Commit(ctx, counted.bytes, l.desc.Digest, content.WithLabels(map[string]string{labels.LabelUncompressed: l.diffID.String()}))
	if errdefs.IsAlreadyExists(err) {
		l.reused = true
		return l, nil
	}
	if err == nil {
		b.note(l.desc.Digest)
	}
	return l, err
}

func (b *builder) note(d digest.Digest) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.wrote = append(b.wrote, d)
}

func abort(ctx context.Context, store content.IngestManager, ref string) {
	ctx = context.WithoutCancel(ctx)
	if err := store.Abort(ctx, ref); err != nil && !errdefs.IsNotFound(err) {
		log.G(ctx).WithError(err).WithField("ref", ref).Warn("remove an unfinished layer")
	}
}

type counter struct {
	w     io.Writer
	bytes int64
}

func (c *counter) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.bytes += int64(n)
	return n, err
}

// writable returns the layer of the container's writable files, if there is one.
func (b *builder) writable(ctx context.Context) (_ []layer, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("writable files: %w", err)
		}
	}()
	l := new(layer)
	switch rw := b.RW; {
	case b.RWTar != nil:
		l, err = b.writeLayer(ctx, LayerRW, b.pack, func(w io.Writer) error {
			_, err := io.Copy(w, b.RWTar)
			return err
		})
		if err != nil {
			return nil, err
		}
	case rw != nil:
		if l.diffID, err = diffID(ctx, b.Provider, *rw); err != nil {
			return nil, err
		}
		if l.reused, err = content.Exists(ctx, b.store, *rw); err != nil {
			return nil, err
		}
		if err := b.copyBlob(ctx, *rw); err != nil {
			return nil, err
		}
		l.desc = ocispec.Descriptor{MediaType: ociType(rw.MediaType), Digest: rw.Digest, Size: rw.Size}
	default:
		return nil, nil
	}
	l.kind, l.desc.Annotations = LayerRW, map[string]string{annotations.Layer: LayerRW}
	return []layer{*l}, nil
}

// diffID returns the digest of the unpacked layer, by the store's labels or by unpacking it.
func diffID(ctx context.Context, provider content.Provider, desc ocispec.Descriptor) (digest.Digest, error) {
	if store, ok := provider.(content.InfoProvider); ok {
		info, err := store.Info(ctx, desc.Digest)
		if err != nil {
			return "", err
		}
		if id, ok := info.Labels[labels.LabelUncompressed]; ok {
			return digest.Parse(id)
		}
	}
	r, err := OpenLayer(ctx, provider, desc, nil)
	if err != nil {
		return "", err
	}
	defer r.Close()
	return digest.Canonical.FromReader(r)
}

func (b *builder) copyBlob(ctx context.Context, desc ocispec.Descriptor) (err error) {
	if ok, err := content.Exists(ctx, b.store, desc); ok || err != nil {
		return err
	}
	ra, err := b.Provider.ReaderAt(ctx, desc)
	if errdefs.IsNotFound(err) {
		return fmt.Errorf("it is not in the content store; fetch the whole image first (ctr images pull, or content fetch): %w", err)
	}
	if err != nil {
		return err
	}
	defer ra.Close()
	return b.put(ctx, ocispec.Descriptor{Digest: desc.Digest, Size: desc.Size}, content.NewReader(ra))
}

// put writes a blob that is at hand, unless the store has it.
func (b *builder) put(ctx context.Context, desc ocispec.Descriptor, from io.Reader, opts ...content.Opt) error {
	had, err := content.Exists(ctx, b.store, desc)
	if err != nil {
		return err
	}
	ref := b.id + " " + desc.Digest.String()
	if err := content.WriteBlob(ctx, b.store, ref, from, desc, opts...); err != nil {
		abort(ctx, b.store, ref)
		return err
	}
	if !had {
		b.note(desc.Digest)
	}
	return nil
}

// entry is a file of a layer: bytes of a reader, from an offset.
type entry struct {
	name        string // in images.ImageDir
	from        io.ReaderAt
	offset, len uint64
}

// writeTar writes a layer's archive, which depends on names and content alone: the same content has
// the same digest. meter counts the bytes read.
func writeTar(ctx context.Context, w io.Writer, entries []entry, meter *images.Meter) error {
	t := tar.NewWriter(w)
	h := tar.Header{Typeflag: tar.TypeDir, Name: images.ImageDir + "/", Mode: 0o700, ModTime: time.Unix(0, 0)}
	if err := t.WriteHeader(&h); err != nil {
		return err
	}
	buf := make([]byte, 1<<20)
	for _, e := range entries {
		h = tar.Header{Typeflag: tar.TypeReg, Name: images.ImageDir + "/" + e.name, Size: int64(e.len), Mode: 0o600, ModTime: h.ModTime}
		if err := t.WriteHeader(&h); err != nil {
			return err
		}
		from := io.NewSectionReader(e.from, int64(e.offset), int64(e.len))
		n, err := io.CopyBuffer(t, meter.Reader(ctx, from), buf)
		if err == nil && n < from.Size() {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return fmt.Errorf("read %s at %d: %w", e.name, e.offset+uint64(n), err)
		}
	}
	return t.Close()
}
