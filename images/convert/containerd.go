// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package convert

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/containerd/containerd/v2/core/content"
	cimages "github.com/containerd/containerd/v2/core/images"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/archive"
	"github.com/gpuckpt/gpuckpt/images/oci"
)

// ContainerdCheckpoint is containerd's own form of a checkpoint, an index of raw blobs.
type ContainerdCheckpoint struct {
	// Checkpoint reads the archive, until Close. Without GPU state its Metadata is nil.
	Checkpoint *images.Checkpoint
	// Base is the container's image; zero when the checkpoint was made without --image.
	Base ocispec.Descriptor
	// RW is the layer of the container's writable files, nil without --rw.
	RW *ocispec.Descriptor

	provider        content.Provider
	index           ocispec.Index
	config, runtime ocispec.Descriptor // zero where the index has none
	archive         io.Closer
}

// Close closes the archive.
func (s *ContainerdCheckpoint) Close() error { return s.archive.Close() }

// OpenContainerd opens a checkpoint that containerd made, and copies nothing. The error is
// oci.ErrNotCheckpoint if the index has no archive of CRIU's images.
func OpenContainerd(ctx context.Context, provider content.Provider, index ocispec.Descriptor) (*ContainerdCheckpoint, error) {
	if !cimages.IsIndexType(index.MediaType) {
		return nil, fmt.Errorf("%w: %s is of the type %s", oci.ErrNotCheckpoint, index.Digest, index.MediaType)
	}
	data, err := oci.ReadDocument(ctx, provider, index)
	if err != nil {
		return nil, err
	}
	s := &ContainerdCheckpoint{provider: provider}
	if err := json.Unmarshal(data, &s.index); err != nil {
		return nil, fmt.Errorf("%w: index %s: %w", images.ErrDamaged, index.Digest, err)
	}
	var criu *ocispec.Descriptor
	for _, d := range s.index.Manifests {
		switch {
		case d.MediaType == cimages.MediaTypeContainerd1Checkpoint:
			criu = &d
		case d.MediaType == cimages.MediaTypeContainerd1CheckpointConfig:
			s.config = d
		case d.MediaType == cimages.MediaTypeContainerd1CheckpointRuntimeName:
			s.runtime = d
		case cimages.IsLayerType(d.MediaType):
			s.RW = &d
		case cimages.IsManifestType(d.MediaType), cimages.IsIndexType(d.MediaType):
			s.Base = d
		}
	}
	if criu == nil {
		return nil, fmt.Errorf("%w: index %s has no archive of the type %s; was it made with --task?", oci.ErrNotCheckpoint, index.Digest, cimages.MediaTypeContainerd1Checkpoint)
	}
	ra, err := provider.ReaderAt(ctx, *criu)
	if err != nil {
		return nil, fmt.Errorf("read the checkpoint archive %s: %w", criu.Digest, err)
	}
	s.archive = ra
	files, err := images.TarFiles(ra, ra.Size())
	if err == nil {
		var top []images.File
		for _, f := range files {
			if !strings.Contains(f.Name, "/") {
				top = append(top, f)
			}
		}
		s.Checkpoint, err = images.OpenFiles(top, images.AllowWithoutGPU)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("checkpoint archive %s: %w", criu.Digest, err), ra.Close())
	}
	return s, nil
}

// Record reads what the checkpoint says of its container, and the container's OCI spec.
func (s *ContainerdCheckpoint) Record(ctx context.Context) (config archive.Config, spec json.RawMessage, err error) {
	spec = []byte("{}")
	// Clients write the name in either of two places.
	config.RootfsImageName = cmp.Or(s.index.Annotations[ocispec.AnnotationRefName], s.index.Annotations["image.name"])
	config.OCIRuntime = s.index.Annotations["io.containerd.checkpoint.runtime"]
	config.RootfsImage = config.RootfsImageName
	config.RootfsImageRef = s.Base.Digest.String()
	if m := s.Checkpoint.Metadata; m != nil {
		config.CheckpointedAt = m.Created
	}
	if s.runtime.Digest != "" {
		name, err := oci.ReadDocument(ctx, s.provider, s.runtime)
		if err != nil {
			return config, nil, fmt.Errorf("read the runtime's name: %w", err)
		}
		config.OCIRuntime = string(name)
	}
	if s.config.Digest == "" {
		return config, spec, nil
	}
	data, err := oci.ReadDocument(ctx, s.provider, s.config)
	if err != nil {
		return config, nil, fmt.Errorf("read the container's record: %w", err)
	}
	var record anypb.Any // around the spec
	if err := proto.Unmarshal(data, &record); err != nil {
		return config, nil, fmt.Errorf("%w: the container's record: %w", images.ErrDamaged, err)
	}
	if json.Valid(record.GetValue()) {
		spec = record.GetValue()
	}
	return config, spec, nil
}
