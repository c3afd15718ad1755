// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"archive/tar"
	"bufio"
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
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
	"github.com/gpuckpt/gpuckpt/images/sign"
)

type plan struct {
	kind string
	// The area of GPU state or memory, and a range of its file. The range of another is as long as its entries.
	area *images.AreaReader
	name string
	ends bool // the file ends with the range
	span
	entries []entry
}

// layerKey is what tells a layer of a checkpoint from its others, by its annotations.
func layerKey(of map[string]string) string {
	if !isState(of[annotations.Layer]) {
		return of[annotations.Layer]
	}
	return of[annotations.Layer] + " " + of[annotations.Area] + " " + of[annotations.Offset]
}

// checkpointLayers makes the blobs of memory and GPU state but zeros, and the layers of the checkpoint, several at once.
func (b *builder) checkpointLayers(ctx context.Context, c *images.Checkpoint, previous map[string]layer) ([]layer, error) {
	var plans []plan
	var open []*images.AreaReader
	defer func() {
		for _, r := range open {
			r.Close()
		}
	}()
	cut := func(kind string, a *images.Area) {
		r := a.Open(ctx)
		open = append(open, r)
		for at := uint64(0); at < a.End(); at += b.layerBytes {
			to := min(at+b.layerBytes, a.End())
			plans = append(plans, plan{kind: kind, area: r, name: a.File, ends: to == a.End(), span: span{at, to}})
		}
	}
	for _, f := range b.memory { // a restore needs it first
		cut(LayerMemory, f.Area())
	}
	areas := c.Areas()
	slices.SortStableFunc(areas, func(a, b images.Area) int { // what the driver restores, which interposers wait for
		switch {
		case a.Interposer == b.Interposer:
			return 0
		case b.Interposer:
			return -1
		}
		return 1
	})
	for i := range areas {
		cut(LayerGPU, &areas[i])
	}
	last, done, err := criuPlan(ctx, c.Files, b.memory)
	defer done()
	if err != nil {
		return nil, err
	}
	plans = append(plans, last)
	made := make([][]layer, len(plans))
	g, working := errgroup.WithContext(ctx)
	for i := range slices.Backward(plans) { // CRIU's layer may take longest, and begins first
		b.meter.Grow(int64(plans[i].to - plans[i].from))
		err := b.processors.Acquire(working, 1)
		g.Go(func() error {
			if err != nil {
				return err
			}
			defer b.processors.Release(1)
			if made[i], err = b.make(working, &plans[i], previous); err != nil {
				return err
			}
			for _, l := range made[i] {
				b.tell(l.desc)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	layers := slices.Concat(made...)
	if top := len(layers) - 1; top > 0 && layers[0].diffID == "" {
		blobs := layers[:top]
		index, err := b.index(ctx, blobs)
		if err != nil {
			return nil, err
		}
		b.tell(index.desc)
		// Behind all layers: many tools count layers and diff_ids alike.
		layers = append([]layer{*index, layers[top]}, blobs...)
	}
	return layers, nil
}

// index makes the layer that says which blobs have what: a file for each, an images.Pointer.
func (b *builder) index(ctx context.Context, blobs []layer) (*layer, error) {
	var entries []entry
	for _, l := range blobs {
		offset, err := strconv.ParseUint(l.desc.Annotations[annotations.Offset], 10, 64)
		if err != nil {
			return nil, err
		}
		text := images.Pointer{Digest: l.desc.Digest, Bytes: uint64(l.desc.Size)}.String()
		entries = append(entries, entry{name: images.PieceFile(l.desc.Annotations[annotations.Area], offset), from: strings.NewReader(text), len: uint64(len(text))})
	}
	l, err := b.writeLayer(ctx, LayerIndex, func(w io.Writer) error { return writeTar(ctx, w, entries, nil) })
	if err != nil {
		return nil, err
	}
	l.kind, l.desc.Annotations = LayerIndex, map[string]string{annotations.Layer: LayerIndex}
	return l, nil
}

// chooseMemory chooses the files of memory that become blobs: those of a dump whose digests a restore finds in the manifest,
// and of which CRIU gets little. What CRIU gets of a blob is copied.
func (b *builder) chooseMemory(c *images.Checkpoint) {
	sealed := slices.ContainsFunc(c.Files, func(f images.File) bool { return f.Name == sign.ManifestName })
	if !sealed || c.Dir == "" || b.Memory == nil || !b.isBlob(LayerMemory) {
		return
	}
	chosen, err := b.Memory(c.Dir)
	if err != nil {
		log.L.WithError(err).Debug("all memory is in CRIU's layer") // whoever restores it says why
	}
	for _, f := range c.Files {
		if slices.Contains(chosen, f.Name) && f.Bytes >= minLayerBytes && f.Bytes%images.PageBytes == 0 {
			b.memory = append(b.memory, f)
		}
	}
}

// criuPlan returns the plan of the layer with CRIU's images, without those that are blobs. gpuckpt.json is its first file.
// done closes the files.
func criuPlan(ctx context.Context, files, blobs []images.File) (p plan, done func(), err error) {
	var open []io.Closer
	done = func() {
		for _, f := range open {
			f.Close()
		}
	}
	p.kind = LayerCRIU
	for _, f := range files {
		if slices.ContainsFunc(blobs, func(b images.File) bool { return b.Name == f.Name }) {
			continue
		}
		r, err := f.Reader(ctx)
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

// make makes what a plan says, which is in the store then: nothing of zeros.
func (b *builder) make(ctx context.Context, p *plan, previous map[string]layer) ([]layer, error) {
	if isState(p.kind) {
		parts, err := runs(p.area, p.from, p.to)
		if err != nil {
			return nil, err
		}
		if p.kind == LayerMemory && p.ends {
			parts = toEnd(parts, p.to)
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
	if !b.isBlob(p.kind) {
		return b.one(ctx, p.kind, p.name, p.from, content, previous, b.writeLayer, func(w io.Writer, meter *images.Meter) error {
			return writeTar(ctx, w, p.entries, meter)
		})
	}
	var made []layer
	for _, e := range p.entries {
		l, err := b.one(ctx, p.kind, p.name, e.offset, e.len, previous, b.writeState, func(w io.Writer, meter *images.Meter) error {
			return e.copy(ctx, w, meter, make([]byte, 1<<20))
		})
		if err != nil {
			return nil, err
		}
		made = append(made, l...)
	}
	return made, nil
}

// isBlob reports whether what is of a kind is a blob as it is, and no layer.
func (b *builder) isBlob(kind string) bool { return isState(kind) && !b.layers }

// one makes a layer or a blob, unless it is what previous has in its place.
func (b *builder) one(ctx context.Context, kind, area string, offset, bytes uint64, previous map[string]layer,
	write func(context.Context, string, func(io.Writer) error) (*layer, error), fill func(io.Writer, *images.Meter) error,
) ([]layer, error) {
	of := map[string]string{annotations.Layer: kind}
	if isState(kind) {
		of[annotations.Area], of[annotations.Offset] = area, strconv.FormatUint(offset, 10)
	}
	key := layerKey(of)
	if old, ok := previous[key]; ok && (old.diffID == "") == b.isBlob(kind) {
		// Reading what has changed twice is cheaper than compressing, or writing, what has not.
		h := digest.Canonical.Digester()
		if err := fill(h.Hash(), nil); err != nil {
			return nil, err
		}
		if h.Digest() == cmp.Or(old.diffID, old.desc.Digest) {
			b.meter.Add(int64(bytes))
			old.desc.Annotations = of
			old.kind, old.reused = kind, true
			return []layer{old}, nil
		}
	}
	l, err := write(ctx, key, func(w io.Writer) error { return fill(w, b.meter) })
	if err != nil {
		return nil, err
	}
	l.kind, l.desc.Annotations = kind, of
	return []layer{*l}, nil
}

// pack compresses as the Options say. Its output depends on its input alone.
func (b *builder) pack(w io.Writer) (io.WriteCloser, error) {
	if b.Compression == Gzip {
		return gzip.NewWriterLevel(w, max(1, b.Level))
	}
	return &framer{w: w, encoder: b.encoder, idle: b.processors}, nil
}

// writeLayer writes what fill writes, compressed, into a layer of the store. On an error nothing is left.
// Its frames take processors that are idle.
func (b *builder) writeLayer(ctx context.Context, name string, fill func(io.Writer) error) (l *layer, err error) {
	if b.Compression == None {
		if l, err = b.write(ctx, name, fill); err == nil {
			l.diffID = l.desc.Digest
		}
	} else {
		plain := digest.Canonical.Digester()
		l, err = b.write(ctx, name, func(w io.Writer) error {
			packed, err := b.pack(w)
			if err != nil {
				return err
			}
			err = fill(io.MultiWriter(packed, plain.Hash()))
			return cmp.Or(err, packed.Close()) // it has goroutines
		}, func(info *content.Info) error {
			return content.WithLabels(map[string]string{labels.LabelUncompressed: plain.Digest().String()})(info)
		})
		if err == nil {
			l.diffID = plain.Digest()
		}
	}
	if err != nil {
		return nil, err
	}
	l.desc.MediaType = b.Compression.MediaType()
	return l, nil
}

// writeState writes what fill writes into a blob of the store, as it is. On an error nothing is left.
func (b *builder) writeState(ctx context.Context, name string, fill func(io.Writer) error) (*layer, error) {
	return b.write(ctx, name, fill)
}

// write writes what fill writes into a blob of the store. opts are called then.
func (b *builder) write(ctx context.Context, name string, fill func(io.Writer) error, opts ...content.Opt) (_ *layer, err error) {
	ref := b.id + " " + name
	w, err := content.OpenWriter(ctx, b.store, content.WithRef(ref))
	if err != nil {
		return nil, fmt.Errorf("write %s: %w", name, err)
	}
	defer func() {
		w.Close()
		if err != nil {
			abort(ctx, b.store, ref)
			err = fmt.Errorf("write %s: %w", name, err)
		}
	}()
	counted := &counter{w: w}
	buffered := bufio.NewWriterSize(counted, 256<<10) // less than is written at a time, which is not copied then
	if err = fill(buffered); err == nil {
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
	l := &layer{desc: ocispec.Descriptor{MediaType: MediaTypeGPU, Digest: w.Digest(), Size: counted.bytes}}
	err = w.Commit(ctx, counted.bytes, l.desc.Digest, opts...)
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
		l, err = b.writeLayer(ctx, LayerRW, func(w io.Writer) error {
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
		if err := e.copy(ctx, t, meter, buf); err != nil {
			return err
		}
	}
	return t.Close()
}

// copy writes the bytes of the file, by way of buf.
func (e *entry) copy(ctx context.Context, w io.Writer, meter *images.Meter, buf []byte) error {
	if area, ok := e.from.(*images.AreaReader); ok {
		return area.WriteRange(meter.Writer(ctx, w), e.offset, e.offset+e.len, buf)
	}
	from := io.NewSectionReader(e.from, int64(e.offset), int64(e.len))
	n, err := io.CopyBuffer(w, meter.Reader(ctx, from), buf)
	if err == nil && n < from.Size() {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return fmt.Errorf("read %s at %d: %w", e.name, e.offset+uint64(n), err)
	}
	return nil
}
