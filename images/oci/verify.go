// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/containerd/containerd/v2/core/content"
	cimages "github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/images/sign"
)

// Report is what Verify has read.
type Report struct {
	// Layers and their Bytes, as stored; GPU state in Blocks of GPUBytes.
	Layers   int    `json:"layers,omitempty"`
	Bytes    uint64 `json:"bytes,omitempty"`
	Blocks   int    `json:"blocks"`
	GPUBytes uint64 `json:"gpuBytes"`
	// Seal is the checkpoint's, whose manifest is right; nil without one. Nobody has asked
	// whose its signatures are.
	Seal *sign.Seal `json:"-"`
}

// maxDocument bounds manifests and configs, in bytes. Registries take 4 MiB.
const maxDocument = 8 << 20

// maxFaults bounds how many faults are named.
const maxFaults = 32

// Verify reads every byte of a checkpoint image: each blob must have its digest, each layer its
// diff_id, each block of GPU state its digest; the checkpoint's layers hold plain files where they
// belong and nothing else. progress receives the step "verify".
//
// The error joins up to 32 faults with their blobs or files: images.ErrDamaged, images.ErrSchema,
// images.ErrMalformed, ErrNotCheckpoint, or those of reading.
func Verify(ctx context.Context, provider content.Provider, manifest ocispec.Descriptor, progress images.Progress) (*Report, error) {
	v := &verifier{provider: provider, meter: progress.Begin("verify", 0)}
	if err := v.open(ctx, manifest); err != nil {
		return nil, fmt.Errorf("verify: %w", err)
	}
	v.verify(ctx)
	if err := cmp.Or(ctx.Err(), errors.Join(v.faults...)); err != nil {
		return nil, fmt.Errorf("verify: %w", err)
	}
	v.meter.End("read")
	return &v.report, nil
}

// verifier is one verification.
type verifier struct {
	provider content.Provider
	manifest ocispec.Manifest
	diffIDs  []digest.Digest
	meta     *images.Metadata
	memory   []sign.File // in blobs

	meter *images.Meter
	total uint64

	mu     sync.Mutex
	report Report
	faults []error
}

// fault notes what is wrong.
func (v *verifier) fault(err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.faults) < maxFaults {
		v.faults = append(v.faults, err)
	}
}

// ReadDocument reads a small blob, a manifest say, and checks its digest.
func ReadDocument(ctx context.Context, provider content.Provider, desc ocispec.Descriptor) ([]byte, error) {
	if err := checkDescriptor(desc); err != nil {
		return nil, err
	}
	if desc.Size > maxDocument {
		return nil, fmt.Errorf("%w: %s has %d bytes, more than %d", images.ErrDamaged, desc.Digest, desc.Size, maxDocument)
	}
	ra, err := provider.ReaderAt(ctx, desc)
	if err != nil {
		return nil, missing(desc.Digest.String(), err)
	}
	defer ra.Close()
	data, err := io.ReadAll(io.NewSectionReader(ra, 0, min(ra.Size(), maxDocument)))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", desc.Digest, err)
	}
	if got := desc.Digest.Algorithm().FromBytes(data); got != desc.Digest {
		return nil, fmt.Errorf("%w: blob %s has the digest %s", images.ErrDamaged, desc.Digest, got)
	}
	return data, nil
}

// missing says that a blob is not there.
func missing(what string, err error) error {
	if errdefs.IsNotFound(err) {
		return fmt.Errorf("%w: %s is missing; `gpuckpt image pull --no-unpack` fetches what an image lacks: %w", images.ErrDamaged, what, err)
	}
	return fmt.Errorf("read %s: %w", what, err)
}

// manifestOf reads a manifest, in an index that for this platform.
func manifestOf(ctx context.Context, provider content.Provider, desc ocispec.Descriptor) (m ocispec.Manifest, _ ocispec.Descriptor, err error) {
	if cimages.IsIndexType(desc.MediaType) {
		data, err := ReadDocument(ctx, provider, desc)
		if err != nil {
			return m, desc, err
		}
		var index ocispec.Index
		if err := json.Unmarshal(data, &index); err != nil {
			return m, desc, fmt.Errorf("%w: index %s: %w", images.ErrDamaged, desc.Digest, err)
		}
		if slices.ContainsFunc(index.Manifests, func(d ocispec.Descriptor) bool {
			return cimages.IsLayerType(d.MediaType) || d.MediaType == cimages.MediaTypeContainerd1Checkpoint
		}) {
			return m, desc, fmt.Errorf("%w, but what `ctr containers checkpoint` makes: `gpuckpt image convert` makes one of it", ErrNotCheckpoint)
		}
		at := slices.IndexFunc(index.Manifests, func(d ocispec.Descriptor) bool {
			return cimages.IsManifestType(d.MediaType) && (d.Platform == nil || platforms.Default().Match(*d.Platform))
		})
		if at < 0 {
			return m, desc, fmt.Errorf("%w: %s is an index without an image for this platform", ErrNotCheckpoint, desc.Digest)
		}
		desc = index.Manifests[at]
	}
	if !cimages.IsManifestType(desc.MediaType) {
		return m, desc, fmt.Errorf("%w: %s is of the type %s", ErrNotCheckpoint, desc.Digest, desc.MediaType)
	}
	data, err := ReadDocument(ctx, provider, desc)
	if err != nil {
		return m, desc, err
	}
	if err := json.Unmarshal(data, &m); err != nil {
		return m, desc, fmt.Errorf("%w: manifest %s: %w", images.ErrDamaged, desc.Digest, err)
	}
	for _, d := range append(slices.Clip(m.Layers), m.Config) {
		if err := checkDescriptor(d); err != nil {
			return m, desc, fmt.Errorf("manifest %s: %w", desc.Digest, err)
		}
	}
	return m, desc, nil
}

// checkDescriptor refuses a descriptor that names no blob. Whoever asks a digest that is none for
// its algorithm panics.
func checkDescriptor(d ocispec.Descriptor) error {
	if err := d.Digest.Validate(); err != nil {
		return fmt.Errorf("%w: digest %q: %w", images.ErrDamaged, d.Digest, err)
	}
	if d.Size < 0 {
		return fmt.Errorf("%w: %s has %d bytes", images.ErrDamaged, d.Digest, d.Size)
	}
	return nil
}

// open reads the manifest and the config.
func (v *verifier) open(ctx context.Context, desc ocispec.Descriptor) (err error) {
	if v.manifest, _, err = manifestOf(ctx, v.provider, desc); err != nil {
		return err
	}
	if _, v.diffIDs, err = readConfig(ctx, v.provider, &v.manifest); err != nil {
		return err
	}
	for _, l := range v.manifest.Layers {
		v.total += uint64(max(0, l.Size))
	}
	v.meter.Grow(int64(v.total))
	return nil
}

// verify reads the layer with gpuckpt.json, then all others at once.
func (v *verifier) verify(ctx context.Context) {
	top, err := criuLayer(&v.manifest)
	if err != nil {
		v.fault(err)
		return
	}
	v.layer(ctx, top, v.readCRIU)
	if v.meta == nil {
		return // there is nothing that the GPU state could be compared with
	}
	v.compareAnnotations()
	areas, jobs := v.sort(top)
	g := new(errgroup.Group)
	g.SetLimit(runtime.NumCPU())
	for _, job := range jobs {
		g.Go(func() error {
			if ctx.Err() == nil {
				job(ctx)
			}
			return nil
		})
	}
	_ = g.Wait() // faults are noted
	for _, a := range areas {
		if !images.IsMemory(a.area.File) {
			v.report.Blocks += len(a.area.Digests)
			v.report.GPUBytes += a.area.Bytes
		}
	}
	v.report.Layers, v.report.Bytes = len(v.manifest.Layers), v.total
}

// criuLayer finds the layer with gpuckpt.json. It refuses what is of a checkpoint and neither a layer nor a blob of GPU state.
func criuLayer(m *ocispec.Manifest) (int, error) {
	top := -1
	for i, l := range m.Layers {
		kind := l.Annotations[annotations.Layer]
		if blob := isState(kind) && strings.TrimSuffix(l.MediaType, "+encrypted") == MediaTypeGPU; kind != "" && !blob && !cimages.IsLayerType(l.MediaType) {
			return 0, fmt.Errorf("%w: what has the annotation %s=%s is of the type %s", images.ErrDamaged, annotations.Layer, kind, l.MediaType)
		}
		if kind != LayerCRIU {
			continue
		}
		if top >= 0 {
			return 0, fmt.Errorf("%w: two layers have the annotation %s=%s", images.ErrDamaged, annotations.Layer, LayerCRIU)
		}
		top = i
	}
	if top < 0 {
		return 0, fmt.Errorf("%w: no layer has the annotation %s=%s", ErrNotCheckpoint, annotations.Layer, LayerCRIU)
	}
	return top, nil
}

// sort returns a job for each other layer, and for each part of an area that is zero and has none.
func (v *verifier) sort(top int) (areas map[string]*areaCheck, jobs []func(context.Context)) {
	areas = make(map[string]*areaCheck)
	size, err := layerBytes(v.manifest.Annotations)
	all := v.meta.Areas()
	for _, f := range v.memory {
		all = append(all, images.Area{File: f.Name, Bytes: f.Bytes, Digests: f.Digests})
	}
	for _, a := range all {
		if err != nil {
			v.fault(err)
			return nil, nil
		}
		areas[a.File] = newAreaCheck(v, a, size)
	}
	var blobs, indexed bool
	ends := make(map[string]bool) // by memory whose last piece is there
	for i, l := range v.manifest.Layers {
		if i == top {
			continue
		}
		switch l.Annotations[annotations.Layer] {
		case LayerGPU, LayerMemory:
		case LayerIndex:
			indexed = true
			jobs = append(jobs, func(ctx context.Context) { v.layer(ctx, i, v.readIndex) })
			continue
		default:
			jobs = append(jobs, func(ctx context.Context) { v.layer(ctx, i, nil) })
			continue
		}
		blobs = blobs || v.diffIDs[i] == ""
		a := areas[l.Annotations[annotations.Area]]
		if a == nil {
			v.fault(fmt.Errorf("%w: %s is of the area %q, which %s does not have", images.ErrDamaged, v.nameOf(i), l.Annotations[annotations.Area], images.MetadataName))
		} else if end, err := a.take(i, l); err != nil {
			v.fault(fmt.Errorf("%w: %s: %w", images.ErrDamaged, v.nameOf(i), err))
		} else if end == a.area.Bytes {
			ends[a.area.File] = true
		}
	}
	for _, f := range v.memory {
		if !ends[f.Name] {
			v.fault(fmt.Errorf("%w: no blob has the end of %s", images.ErrDamaged, f.Name))
		}
	}
	if blobs && !indexed {
		v.fault(fmt.Errorf("%w: no layer says what its blobs have", images.ErrDamaged))
	}
	for _, a := range areas {
		for i := range a.parts {
			jobs = append(jobs, a.parts[i].check)
		}
	}
	return areas, jobs
}

// nameOf names a layer for a person.
func (v *verifier) nameOf(i int) string {
	l := v.manifest.Layers[i]
	switch kind := l.Annotations[annotations.Layer]; kind {
	case "":
		return fmt.Sprintf("layer %d (base, %s)", i, l.Digest)
	case LayerGPU, LayerMemory:
		return fmt.Sprintf("layer %d (%s from %s, %s)", i, l.Annotations[annotations.Area], l.Annotations[annotations.Offset], l.Digest)
	default:
		return fmt.Sprintf("layer %d (%s, %s)", i, kind, l.Digest)
	}
}

// layer reads a layer, or a blob, to its end and compares its digests. read, which may be nil, reads the
// archive, or the blob. layer reports whether that went without an error.
func (v *verifier) layer(ctx context.Context, i int, read func(io.Reader) error) bool {
	desc := v.manifest.Layers[i]
	if err := desc.Digest.Validate(); err != nil {
		v.fault(fmt.Errorf("%w: %s: %w", images.ErrDamaged, v.nameOf(i), err))
		return false
	}
	ra, err := v.provider.ReaderAt(ctx, desc)
	if err != nil {
		v.fault(missing(v.nameOf(i), err))
		return false
	}
	defer ra.Close()
	if ra.Size() != desc.Size {
		v.fault(fmt.Errorf("%w: %s is truncated or too long: it has %d bytes, not %d", images.ErrDamaged, v.nameOf(i), ra.Size(), desc.Size))
		return false
	}
	blob := desc.Digest.Algorithm().Digester()
	raw := io.TeeReader(v.meter.Reader(ctx, io.NewSectionReader(ra, 0, ra.Size())), blob.Hash())
	plain := digest.Canonical.Digester()
	var archiveErr error
	switch {
	case v.diffIDs[i] != "":
		archiveErr = v.archive(raw, desc.MediaType, plain, read)
	case strings.HasSuffix(desc.MediaType, "+encrypted"):
		archiveErr = ErrEncrypted
	case read != nil:
		archiveErr = read(raw)
	}
	if _, err := io.Copy(io.Discard, raw); err != nil {
		v.fault(fmt.Errorf("read %s: %w", v.nameOf(i), err))
		return false
	}
	if got := blob.Digest(); got != desc.Digest {
		v.fault(fmt.Errorf("%w: %s has the digest %s", images.ErrDamaged, v.nameOf(i), got))
	} else if got := plain.Digest(); archiveErr == nil && v.diffIDs[i] != "" && got != v.diffIDs[i] {
		v.fault(fmt.Errorf("%w: %s unpacks to %s, and the config says %s", images.ErrDamaged, v.nameOf(i), got, v.diffIDs[i]))
	}
	if archiveErr != nil {
		v.fault(fmt.Errorf("%s: %w", v.nameOf(i), archiveErr))
	}
	return archiveErr == nil
}

// archive unpacks a layer and has it read.
func (v *verifier) archive(raw io.Reader, mediaType string, plain digest.Digester, read func(io.Reader) error) error {
	unpacked, err := Decompress(raw, mediaType)
	if err != nil {
		return fmt.Errorf("%w: %w", images.ErrDamaged, err)
	}
	defer unpacked.Close()
	tee := io.TeeReader(unpacked, plain.Hash())
	if read != nil {
		if err := read(tee); err != nil {
			return err
		}
	}
	if _, err := io.Copy(io.Discard, tee); err != nil {
		return fmt.Errorf("%w: %w", images.ErrDamaged, err)
	}
	return nil
}

// readIndex compares the layer that says what the blobs have with what the manifest says.
func (v *verifier) readIndex(r io.Reader) error {
	want := make(map[string]string)
	for i, l := range v.manifest.Layers {
		if isState(l.Annotations[annotations.Layer]) && v.diffIDs[i] == "" {
			offset, _ := strconv.ParseUint(l.Annotations[annotations.Offset], 10, 64) // another is a fault of the blob
			want[images.PieceFile(l.Annotations[annotations.Area], offset)] = images.Pointer{Digest: l.Digest, Bytes: uint64(l.Size)}.String()
		}
	}
	err := images.ReadLayer(r, func(name string, size int64, r io.Reader) error {
		text, err := io.ReadAll(io.LimitReader(r, int64(len(want[name]))))
		if err != nil {
			return err
		}
		if want[name] == "" || string(text) != want[name] || size != int64(len(text)) {
			return fmt.Errorf("%w: %s is not what the manifest says of it", images.ErrDamaged, name)
		}
		delete(want, name)
		return nil
	})
	for name := range want {
		err = cmp.Or(err, fmt.Errorf("%w: it does not have %s", images.ErrDamaged, name))
	}
	return err
}

// readCRIU reads the layer with CRIU's images and gpuckpt.json.
func (v *verifier) readCRIU(r io.Reader) error {
	var sealed sign.Collector
	err := images.ReadLayer(r, func(name string, size int64, r io.Reader) error {
		if _, _, piece := images.ParsePieceFile(name); piece || images.IsAreaFile(name) {
			return fmt.Errorf("%w: %s is not in a layer of its own", images.ErrDamaged, name)
		}
		if name != images.MetadataName {
			if v.meta == nil {
				return notFirst(name)
			}
			return sealed.Take(name, size, r)
		}
		data, err := io.ReadAll(io.LimitReader(r, maxDocument))
		if err != nil {
			return fmt.Errorf("read %s: %w", images.MetadataName, err)
		}
		if v.meta, err = readMetadata(bytes.NewReader(data)); err != nil {
			return err
		}
		return sealed.Take(name, size, bytes.NewReader(data))
	})
	if err == nil {
		v.report.Seal, v.memory, err = sealed.Seal()
	}
	if err == nil && v.meta == nil {
		err = fmt.Errorf("%w: it has no %s", images.ErrDamaged, images.MetadataName)
	}
	return err
}

// readMetadata reads gpuckpt.json from an archive.
func readMetadata(r io.Reader) (*images.Metadata, error) {
	data, err := io.ReadAll(io.LimitReader(r, maxDocument))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", images.MetadataName, err)
	}
	m, err := images.ParseMetadata(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", images.MetadataName, err)
	}
	return m, nil
}

// compareAnnotations refuses a manifest that promises something else.
func (v *verifier) compareAnnotations() {
	want := Facts(v.meta)
	for _, key := range []string{annotations.Schema, annotations.Created, annotations.Driver, annotations.CUDA, annotations.GPUCount, annotations.GPUModels, annotations.GPUMemory, annotations.GPUState, annotations.Processes} {
		if got := v.manifest.Annotations[key]; got != want[key] {
			v.fault(fmt.Errorf("%w: annotation %s of the manifest is %q, and %s says %q", images.ErrDamaged, key, got, images.MetadataName, want[key]))
		}
	}
	if _, err := layerBytes(v.manifest.Annotations); err != nil {
		v.fault(err)
	}
}
