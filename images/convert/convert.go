// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package convert takes a checkpoint from any form to any form: images in containerd, OCI layouts
// and archives, containerd's own checkpoints, the kubelet's archives, dumps.
//
// A Ref names a place, Open opens the checkpoint there as a Source, Convert writes it to another
// place. An image is copied and keeps its digest; of every other form an image is built. The
// destination appears when it is complete; if Convert fails it is as before.
package convert

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	metadata "github.com/checkpoint-restore/checkpointctl/lib"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/images/localstore"
	"github.com/gpuckpt/gpuckpt/images/oci"
	"github.com/gpuckpt/gpuckpt/images/sign"
)

// Options say how a checkpoint is converted.
type Options struct {
	// Dial connects to containerd. It may be nil where no Ref is in containerd.
	Dial Dial
	// Build says how an image is built: Compression, Level, Threads.
	Build oci.Options
	// For building an image: Base is the Ref of the image that the container was made from, empty:
	// as the source says; Previous that of an earlier checkpoint image of the container.
	Base, Previous string
	// MustBuild refuses a source that is an image already.
	MustBuild bool
	// Sign, if set, has the checkpoint signed on its way. An image is then not copied: it
	// gets another layer in place of the one with CRIU's images, and another digest.
	Sign sign.Sign
	// Progress receives the steps "image" or "copy", "unpack", "verify" and "archive".
	Progress images.Progress
}

// Result says what was made.
type Result struct {
	Source      string `json:"source"`
	Destination string `json:"destination"`
	// Digest is the image's, where the destination is one.
	Digest string `json:"digest,omitempty"`
	// Built reports that the image was built, and not copied. Result is then set.
	Built bool `json:"built"`
	*oci.Result
}

type conversion struct {
	Options
	src     *Source
	to      Ref
	result  Result
	closers []func() error // what came last is closed first
}

func (v *conversion) atEnd(do func() error) { v.closers = append(v.closers, do) }

// Convert writes a checkpoint to another place, which is as before after an error.
func Convert(ctx context.Context, from, to Ref, o Options) (_ *Result, err error) {
	if err := o.Build.Check(); err != nil {
		return nil, err
	}
	v := &conversion{Options: o, to: to}
	defer func() {
		for _, closer := range slices.Backward(v.closers) {
			err = errors.Join(err, closer())
		}
	}()
	if to.Kind == InContainerd {
		c, err := o.Dial.client()
		if err != nil {
			return nil, err
		}
		// What is written belongs to nobody else until it has a name.
		var release func() error
		if ctx, release, err = localstore.Lease(ctx, c); err != nil {
			return nil, err
		}
		v.atEnd(release)
	}
	if v.src, err = v.open(ctx, from); err != nil {
		return nil, err
	}
	if o.MustBuild && v.src.Image != nil {
		return nil, fmt.Errorf("%s is an image already: an image can be built of a dump, a checkpoint of containerd's own or a Kubernetes archive", from)
	}
	if to.Name == "" && to.Kind != InKubernetes {
		v.to.Name = v.src.name
	}
	v.result.Source, v.result.Destination = from.String(), v.to.String()
	switch to.Kind {
	case InContainerd:
		err = v.intoContainerd(ctx)
	case InLayout:
		err = v.intoLayout(ctx)
	case InOCIArchive:
		err = v.intoArchive(ctx)
	case InKubernetes:
		err = v.intoKubernetes(ctx)
	default:
		err = errors.New("a checkpoint cannot be written as a dump")
	}
	if err != nil {
		return nil, fmt.Errorf("write %s: %w", v.to, err)
	}
	return &v.result, nil
}

// open opens a source until the end of the conversion.
func (v *conversion) open(ctx context.Context, ref Ref) (*Source, error) {
	s, err := Open(ctx, ref, v.Dial)
	if err == nil {
		v.atEnd(s.Close)
	}
	return s, err
}

// find opens what an option names, which must be an image.
func (v *conversion) find(ctx context.Context, text string) (*Source, error) {
	ref, err := ParseRef(text)
	if err != nil {
		return nil, err
	}
	s, err := v.open(ctx, ref)
	if err == nil && s.Image == nil {
		err = fmt.Errorf("%s is not an OCI image", text)
	}
	return s, err
}

// intoStore copies an image into a store, or builds it there, and has it named.
func (v *conversion) intoStore(ctx context.Context, store content.Store, collected bool, tag func(ocispec.Descriptor) error) error {
	if v.src.Image == nil || v.Sign != nil {
		built, err := v.build(ctx, store, !collected)
		if err != nil {
			return err
		}
		return tag(built)
	}
	if _, err := oci.Inspect(ctx, v.src.Provider, *v.src.Image); err != nil {
		return err
	}
	v.result.Digest = v.src.Image.Digest.String()
	if err := v.copyImage(ctx, store, collected); err != nil {
		return err
	}
	return tag(*v.src.Image)
}

// build builds the image of a source that is none.
func (v *conversion) build(ctx context.Context, store content.Store, discard bool) (none ocispec.Descriptor, err error) {
	o := v.Build
	o.Discard, o.Progress = discard, v.Progress
	if v.src.Image != nil {
		return v.signImage(ctx, store, o)
	}
	if o.Checkpoint, err = v.signed(ctx, v.src.Checkpoint); err != nil {
		return none, err
	}
	if err := v.describe(ctx, &o); err != nil {
		return none, err
	}
	if v.Previous != "" {
		previous, err := v.find(ctx, v.Previous)
		if err != nil {
			return none, fmt.Errorf("the previous image: %w", err)
		}
		o.Previous, o.Provider = previous.Image, providers{o.Provider, previous.Provider}
	}
	if v.Base != "" || o.Base.Digest == "" {
		name := baseRef(v.Base, o.BaseName)
		if name == "" {
			return none, errors.New("name the image that the container was made from with --base")
		}
		base, err := v.find(ctx, name)
		if err != nil {
			return none, fmt.Errorf("the container's image (--base names it): %w", err)
		}
		o.Base, o.Provider = *base.Image, providers{o.Provider, base.Provider}
		if v.Base != "" {
			o.BaseName = base.name
		}
	}
	built, err := oci.Build(ctx, store, o)
	if err != nil {
		return none, err
	}
	v.result.Built, v.result.Digest, v.result.Result = true, built.Manifest.Digest.String(), built
	return built.Manifest, nil
}

// baseRef returns where the container's image is: where the user says, else among the images of
// containerd, by the name that the checkpoint has. A checkpoint of somebody else's is not to name a
// file of this machine.
func baseRef(given, recorded string) string {
	if given != "" || recorded == "" {
		return given
	}
	return InContainerd + ":" + recorded
}

// describe fills in what the source says of the container, and has of its files.
func (v *conversion) describe(ctx context.Context, o *oci.Options) error {
	switch s := v.src; {
	case s.containerd != nil:
		o.Provider, o.Base, o.RW = s.Provider, s.containerd.Base, s.containerd.RW
		config, _, err := s.containerd.Record(ctx)
		if err != nil {
			return err
		}
		o.BaseName = config.RootfsImageName
		o.Annotations = map[string]string{metadata.CheckpointAnnotationEngine: "containerd"}
	case s.archive != nil:
		o.BaseName = cmp.Or(s.archive.Config.RootfsImageName, s.archive.Config.RootfsImage)
		o.Annotations = map[string]string{
			annotations.ContainerName:                    s.archive.Config.Name,
			metadata.CheckpointAnnotationRootfsImageName: o.BaseName,
			metadata.CheckpointAnnotationRuntimeName:     s.archive.Config.OCIRuntime,
		}
		rw, err := s.archive.RootFS(ctx)
		if err != nil {
			return err
		}
		if rw != nil {
			v.atEnd(rw.Close)
			o.RWTar = rw
		}
	}
	return nil
}

// providers reads a blob from the first that has it.
type providers []content.Provider

func (all providers) ReaderAt(ctx context.Context, d ocispec.Descriptor) (_ content.ReaderAt, err error) {
	err = fmt.Errorf("%s: %w", d.Digest, errdefs.ErrNotFound)
	for _, p := range all {
		if p == nil {
			continue
		}
		var r content.ReaderAt
		if r, err = p.ReaderAt(ctx, d); err == nil || !errdefs.IsNotFound(err) {
			return r, err
		}
	}
	return nil, err
}
