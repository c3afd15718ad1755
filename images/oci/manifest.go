// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	cimages "github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
)

// base is the image that a checkpoint is put on.
type base struct {
	layers []layer
	// config is the base image's, field by field as it was written.
	config  map[string]json.RawMessage
	history []json.RawMessage
}

// readImage returns the manifest of an image, the one for this platform if it has
// several, with its config and diff_ids.
func readImage(ctx context.Context, provider content.Provider, image ocispec.Descriptor) (ocispec.Manifest, map[string]json.RawMessage, []digest.Digest, error) {
	m, err := cimages.Manifest(ctx, provider, image, platforms.Default())
	if err != nil {
		return m, nil, nil, err
	}
	config, ids, err := readConfig(ctx, provider, &m)
	return m, config, ids, err
}

// readConfig returns the config of an image, field by field, and the diff_ids of all that is in the manifest's layers:
// "" of what is none.
func readConfig(ctx context.Context, provider content.Provider, m *ocispec.Manifest) (map[string]json.RawMessage, []digest.Digest, error) {
	data, err := ReadDocument(ctx, provider, m.Config)
	if err != nil {
		return nil, nil, err
	}
	var config map[string]json.RawMessage
	if err := json.Unmarshal(data, &config); err != nil {
		return nil, nil, fmt.Errorf("%w: config %s: %w", images.ErrDamaged, m.Config.Digest, err)
	}
	var rootfs ocispec.RootFS
	if err := json.Unmarshal(config["rootfs"], &rootfs); err != nil {
		return nil, nil, fmt.Errorf("%w: rootfs of config %s: %w", images.ErrDamaged, m.Config.Digest, err)
	}
	for _, id := range rootfs.DiffIDs {
		if err := id.Validate(); err != nil {
			return nil, nil, fmt.Errorf("%w: diff_id %q of config %s: %w", images.ErrDamaged, id, m.Config.Digest, err)
		}
	}
	ids, layers := make([]digest.Digest, len(m.Layers)), 0
	for i, l := range m.Layers {
		if !cimages.IsLayerType(l.MediaType) {
			continue
		}
		if layers < len(rootfs.DiffIDs) {
			ids[i] = rootfs.DiffIDs[layers]
		}
		layers++
	}
	if layers != len(rootfs.DiffIDs) {
		return nil, nil, fmt.Errorf("%w: config %s has %d diff_ids for %d layers", images.ErrDamaged, m.Config.Digest, len(rootfs.DiffIDs), layers)
	}
	return config, ids, nil
}

// rootfs returns what a config says of layers; diff_ids of "" are of none.
func rootfs(ids []digest.Digest) ocispec.RootFS {
	return ocispec.RootFS{Type: "layers", DiffIDs: slices.DeleteFunc(slices.Clone(ids), func(id digest.Digest) bool { return id == "" })}
}

// checkpointKinds are the kinds of layers that a checkpoint has above the container's files.
var checkpointKinds = []string{layerAnchor, LayerIndex, LayerMemory, LayerGPU, LayerCRIU}

// readBase reads the base image without what is of a checkpoint that the container
// was restored from. Layers with writable files stay: the container's own writable
// files are the difference to them.
func (b *builder) readBase(ctx context.Context) (*base, error) {
	if b.Base.Digest == "" {
		p := platforms.DefaultSpec()
		raw := func(s string) json.RawMessage { return json.RawMessage(strconv.Quote(s)) }
		return &base{config: map[string]json.RawMessage{
			"architecture": raw(p.Architecture), "os": raw(p.OS), "config": json.RawMessage("{}"),
		}}, nil
	}
	m, config, ids, err := readImage(ctx, b.Provider, b.Base)
	if err != nil {
		return nil, fmt.Errorf("read the base image: %w", err)
	}
	out := &base{config: config}
	var drop []bool
	for i, d := range m.Layers {
		kind := d.Annotations[annotations.Layer]
		gone := slices.Contains(checkpointKinds, kind)
		if ids[i] != "" {
			drop = append(drop, gone)
		}
		if gone {
			continue
		}
		d.MediaType = ociType(d.MediaType)
		out.layers = append(out.layers, layer{desc: d, diffID: ids[i], kind: kind})
	}
	if out.history, err = historyOf(config["history"], drop); err != nil {
		return nil, fmt.Errorf("read the base image: history: %w", err)
	}
	return out, nil
}

// historyOf returns the history without the entries of dropped layers. It returns
// nothing if the entries do not fit the layers.
func historyOf(raw json.RawMessage, drop []bool) ([]json.RawMessage, error) {
	if raw == nil {
		return nil, nil
	}
	var history, kept []json.RawMessage
	var read []ocispec.History
	if err := errors.Join(json.Unmarshal(raw, &history), json.Unmarshal(raw, &read)); err != nil {
		return nil, err
	}
	at := 0
	for i, h := range read {
		if !h.EmptyLayer {
			if at == len(drop) {
				return nil, nil
			}
			at++
			if drop[at-1] {
				continue
			}
		}
		kept = append(kept, history[i])
	}
	if at != len(drop) {
		return nil, nil
	}
	return kept, nil
}

// readPrevious returns those checkpoint layers of the previous image that the store
// has, by key. It sets layerBytes as in the previous image.
func (b *builder) readPrevious(ctx context.Context) (map[string]layer, error) {
	if b.Previous == nil {
		return nil, nil
	}
	m, _, ids, err := readImage(ctx, b.Provider, *b.Previous)
	if err != nil {
		return nil, fmt.Errorf("read the previous image: %w", err)
	}
	if n, err := layerBytes(m.Annotations); err == nil {
		b.layerBytes = n
	}
	previous := make(map[string]layer)
	for i, d := range m.Layers {
		kind := d.Annotations[annotations.Layer]
		if !isState(kind) && kind != LayerCRIU || strings.HasSuffix(d.MediaType, "+encrypted") { // for others' keys
			continue
		}
		ok, err := content.Exists(ctx, b.store, d)
		if err != nil {
			return nil, fmt.Errorf("read the previous image: %w", err)
		}
		if ok {
			previous[layerKey(d.Annotations)] = layer{desc: d, diffID: ids[i]}
		}
	}
	return previous, nil
}

// layerBytes reads annotations.LayerBytes.
func layerBytes(of map[string]string) (uint64, error) {
	n, err := strconv.ParseUint(of[annotations.LayerBytes], 10, 64)
	if err != nil || n < minLayerBytes || n&(n-1) != 0 {
		return 0, fmt.Errorf("%w: annotation %s is %q", images.ErrDamaged, annotations.LayerBytes, of[annotations.LayerBytes])
	}
	return n, nil
}

// writeManifest writes the config and then the manifest, which completes the image.
func (b *builder) writeManifest(ctx context.Context, meta *images.Metadata, on *base, added []layer) (ocispec.Descriptor, error) {
	created := meta.Created.UTC()
	layers := append(slices.Clone(on.layers), added...)
	m := ocispec.Manifest{
		Versioned:   specs.Versioned{SchemaVersion: 2},
		MediaType:   ocispec.MediaTypeImageManifest,
		Annotations: b.annotations(meta),
	}
	var ids []digest.Digest
	for _, l := range layers {
		m.Layers = append(m.Layers, l.desc)
		ids = append(ids, l.diffID)
	}
	config := maps.Clone(on.config)
	set := func(key string, value any) (err error) {
		config[key], err = json.Marshal(value)
		return err
	}
	err := errors.Join(set("created", created), set("rootfs", rootfs(ids)))
	delete(config, "history")
	if on.history != nil || len(on.layers) == 0 {
		history := slices.Clone(on.history)
		for _, l := range added {
			if l.diffID == "" {
				continue
			}
			raw, herr := json.Marshal(ocispec.History{Created: &created, CreatedBy: "gpuckpt", Comment: "checkpoint: " + l.kind})
			err = errors.Join(err, herr)
			history = append(history, raw)
		}
		err = errors.Join(err, set("history", history))
	}
	if err != nil {
		return ocispec.Descriptor{}, fmt.Errorf("make the config: %w", err)
	}
	return b.writeImage(ctx, m, config)
}

// writeImage writes the config of an image, and then the manifest with it.
func (b *builder) writeImage(ctx context.Context, m ocispec.Manifest, config map[string]json.RawMessage) (_ ocispec.Descriptor, err error) {
	if m.Config, err = b.writeJSON(ctx, ocispec.MediaTypeImageConfig, config, nil); err != nil {
		return ocispec.Descriptor{}, err
	}
	return b.writeJSON(ctx, ocispec.MediaTypeImageManifest, m, References(&m))
}

// References returns the labels of a manifest that containerd's garbage collector goes by.
func References(m *ocispec.Manifest) map[string]string {
	refs := map[string]string{"containerd.io/gc.ref.content.config": m.Config.Digest.String()}
	for i, l := range m.Layers {
		kind := "l"
		if !cimages.IsLayerType(l.MediaType) { // which `ctr content prune references` takes for unpacked
			kind = "gpu"
		}
		refs[fmt.Sprintf("containerd.io/gc.ref.content.%s.%d", kind, i)] = l.Digest.String()
	}
	return refs
}

// writeJSON writes a small blob.
func (b *builder) writeJSON(ctx context.Context, mediaType string, value any, labels map[string]string) (ocispec.Descriptor, error) {
	data, err := json.Marshal(value)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	desc := ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(data), Size: int64(len(data))}
	if err := b.put(ctx, desc, bytes.NewReader(data), content.WithLabels(labels)); err != nil {
		return desc, fmt.Errorf("write %s: %w", mediaType, err)
	}
	return desc, nil
}

// annotations of the manifest.
func (b *builder) annotations(m *images.Metadata) map[string]string {
	a := make(map[string]string)
	maps.Copy(a, b.Annotations)
	maps.Copy(a, Facts(m))
	a[ocispec.AnnotationCreated] = a[annotations.Created]
	a[annotations.LayerBytes] = strconv.FormatUint(b.layerBytes, 10)
	if b.BaseName != "" {
		a[annotations.Base] = b.BaseName
	}
	if b.Base.Digest != "" {
		a[annotations.BaseDigest] = b.Base.Digest.String()
	}
	return a
}

// Facts returns what a manifest says, by annotations, of the metadata in its image.
func Facts(m *images.Metadata) map[string]string {
	var memory uint64
	var models []string
	for _, g := range m.GPUs {
		memory += g.Memory
		models = append(models, g.Name)
	}
	slices.Sort(models)
	a := map[string]string{
		annotations.Schema:    strconv.Itoa(m.SchemaVersion),
		annotations.Created:   m.Created.UTC().Format(time.RFC3339),
		annotations.GPUCount:  strconv.Itoa(len(m.GPUs)),
		annotations.Processes: strconv.Itoa(len(m.Processes)),
	}
	if len(m.Processes) > 0 {
		maps.Copy(a, map[string]string{
			annotations.Driver:    m.DriverVersion,
			annotations.CUDA:      m.CUDAVersion,
			annotations.GPUModels: strings.Join(slices.Compact(models), ", "),
			annotations.GPUMemory: strconv.FormatUint(memory, 10),
			annotations.GPUState:  strconv.FormatUint(stateBytes(m), 10),
		})
	}
	return a
}

// stateBytes returns the size of all GPU state, in files of its own or in CRIU's images.
func stateBytes(m *images.Metadata) (bytes uint64) {
	for _, p := range m.Processes {
		bytes += p.Bytes
	}
	return bytes
}

// ociType returns the OCI media type for one of Docker's.
func ociType(mediaType string) string {
	switch mediaType {
	case cimages.MediaTypeDockerSchema2Layer:
		return ocispec.MediaTypeImageLayer
	case cimages.MediaTypeDockerSchema2LayerGzip:
		return ocispec.MediaTypeImageLayerGzip
	case cimages.MediaTypeDockerSchema2LayerZstd:
		return ocispec.MediaTypeImageLayerZstd
	}
	return mediaType
}
