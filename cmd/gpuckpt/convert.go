// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	cimages "github.com/containerd/containerd/v2/core/images"
	ociarchive "github.com/containerd/containerd/v2/core/images/archive"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/semaphore"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/archive"
	"github.com/gpuckpt/gpuckpt/images/oci"
)

// conversion takes a checkpoint from one place to another.
type conversion struct {
	daemon
	buildFlags
	base string
	// mustBuild refuses a source that is an image already.
	mustBuild bool

	ctx      context.Context // with containerd's namespace
	progress *progress
	dial     func() (*client.Client, error)
	closers  []func() error
}

// conversionAnswer is what it prints.
type conversionAnswer struct {
	Source      string `json:"source"`
	Destination string `json:"destination"`
	// Digest of the image, where an image was made.
	Digest string `json:"digest,omitempty"`
	// Built says that the image was built, and not copied.
	Built        bool   `json:"built"`
	GPUBytes     uint64 `json:"gpuBytes,omitempty"`
	Bytes        uint64 `json:"bytes,omitempty"`
	WrittenBytes uint64 `json:"writtenBytes,omitempty"`
	ReusedBytes  uint64 `json:"reusedBytes,omitempty"`
}

func (a *conversionAnswer) words(w io.Writer) (err error) {
	switch {
	case a.Built:
		_, err = fmt.Fprintf(w, "%s@%s\n%s of GPU state; %s stored, of which %s were there already\n",
			a.Destination, a.Digest, size(a.GPUBytes), size(a.Bytes), size(a.ReusedBytes))
	case a.Digest != "":
		_, err = fmt.Fprintf(w, "%s@%s\n", a.Destination, a.Digest)
	default:
		_, err = fmt.Fprintln(w, a.Destination)
	}
	return err
}

// run converts. On an error the destination is as it was.
func (v *conversion) run(ctx context.Context, from, to place) (_ *conversionAnswer, err error) {
	v.ctx = ctx
	v.dial = sync.OnceValues(func() (*client.Client, error) {
		named, c, err := v.connect(ctx)
		if err != nil {
			return nil, err
		}
		v.closers = append(v.closers, c.Close)
		// What is written belongs to nobody else until it has a name.
		leased, release, err := c.WithLease(named, leases.WithRandomID(), leases.WithExpiration(leaseLimit))
		if err != nil {
			return nil, fmt.Errorf("keep containerd from collecting the image: %w", err)
		}
		v.ctx = leased
		v.closers = append(v.closers, func() error { return release(context.WithoutCancel(leased)) })
		return c, nil
	})
	defer func() {
		for i := len(v.closers) - 1; i >= 0; i-- {
			err = errors.Join(err, v.closers[i]())
		}
	}()
	v.progress = v.daemon.progress()
	defer v.progress.wait()
	if from.kind == inContainerd || to.kind == inContainerd {
		if _, err := v.dial(); err != nil { // so that every step has the context
			return nil, err
		}
	}
	src, err := from.open(v.ctx, v.dial, &v.daemon)
	if err != nil {
		return nil, err
	}
	defer joinClose(&err, src)
	if v.mustBuild && src.image != nil {
		return nil, fmt.Errorf("%s is no dump, no checkpoint of containerd's and no Kubernetes archive, of which an image could be built", from)
	}
	if to.ref == "" && to.kind != inKubernetes {
		to.ref = src.name
	}
	answer := &conversionAnswer{Source: from.String(), Destination: to.String()}
	switch to.kind {
	case inContainerd:
		err = v.intoContainerd(src, to, answer)
	case inLayout:
		err = v.intoLayout(src, to.path, to.ref, answer)
	case inOCIArchive:
		err = v.intoArchive(src, to, answer)
	case inKubernetes:
		err = v.intoKubernetes(src, to.path)
	default:
		err = fmt.Errorf("a checkpoint cannot be written to a place of the kind %q", to.kind)
	}
	if err != nil {
		return nil, fmt.Errorf("write %s: %w", to, err)
	}
	return answer, nil
}

func (v *conversion) intoContainerd(src *source, to place, answer *conversionAnswer) error {
	c, err := v.dial()
	if err != nil {
		return err
	}
	manifest, err := v.intoStore(src, c.ContentStore(), answer)
	if err != nil {
		return err
	}
	return tag(v.ctx, c, cimages.Image{Name: to.ref, Target: manifest})
}

// intoLayout writes into a layout, which is made if there is none.
func (v *conversion) intoLayout(src *source, dir, name string, answer *conversionAnswer) (err error) {
	if name == "" {
		return errors.New("the image needs a name: write it after the directory, DIR@example.com/job:1")
	}
	_, serr := os.Stat(dir)
	layout, err := oci.OpenLayout(dir)
	if err != nil {
		return err
	}
	defer joinClose(&err, layout)
	defer func() {
		if err != nil && errors.Is(serr, os.ErrNotExist) {
			err = errors.Join(err, os.RemoveAll(dir))
		}
	}()
	manifest, err := v.intoStore(src, layout, answer)
	if err != nil {
		return err
	}
	return layout.Tag(v.ctx, name, manifest)
}

// intoArchive writes an OCI archive, by way of a layout beside it.
func (v *conversion) intoArchive(src *source, to place, answer *conversionAnswer) (err error) {
	if to.ref == "" {
		return errors.New("the image needs a name: write it after the file, FILE@example.com/job:1")
	}
	provider := src.provider
	var manifest ocispec.Descriptor
	if src.image != nil {
		manifest = bare(*src.image)
		answer.Digest = manifest.Digest.String()
	} else {
		dir, err := os.MkdirTemp(filepath.Dir(to.path), "."+filepath.Base(to.path)+".")
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
		layout, err := oci.OpenLayout(dir)
		if err != nil {
			return err
		}
		defer joinClose(&err, layout)
		if manifest, err = v.intoStore(src, layout, answer); err != nil {
			return err
		}
		provider = layout
	}
	out, err := os.CreateTemp(filepath.Dir(to.path), "."+filepath.Base(to.path)+".")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = out.Close() // it may be closed
			err = errors.Join(err, os.Remove(out.Name()))
		}
	}()
	step := v.progress.step("archive")
	err = ociarchive.Export(v.ctx, infoless{provider}, &countedWriter{v.ctx, out, step}, ociarchive.WithManifest(manifest, to.ref),
		ociarchive.WithSkipDockerManifest(), ociarchive.WithAllPlatforms())
	if err != nil {
		step.end("")
		return err
	}
	if err := out.Sync(); err != nil {
		return err
	}
	if err := out.Close(); err != nil {
		return err
	}
	step.end("written")
	return os.Rename(out.Name(), to.path)
}

// infoless has no more to say of a blob than its name where the provider has
// no more: Export asks for the repositories it came from.
type infoless struct{ p content.Provider }

func (i infoless) ReaderAt(ctx context.Context, d ocispec.Descriptor) (content.ReaderAt, error) {
	return i.p.ReaderAt(ctx, d)
}

func (i infoless) Info(ctx context.Context, dgst digest.Digest) (content.Info, error) {
	if p, ok := i.p.(content.InfoProvider); ok {
		return p.Info(ctx, dgst)
	}
	return content.Info{Digest: dgst}, nil
}

type countedWriter struct {
	ctx  context.Context
	w    io.Writer
	step *step
}

func (c *countedWriter) Write(p []byte) (int, error) {
	if err := context.Cause(c.ctx); err != nil {
		return 0, err
	}
	n, err := c.w.Write(p)
	c.step.add(int64(n), 0)
	return n, err
}

// bare is a descriptor without what an index said of it.
func bare(d ocispec.Descriptor) ocispec.Descriptor {
	return ocispec.Descriptor{MediaType: d.MediaType, Digest: d.Digest, Size: d.Size}
}

// intoStore copies an image into a store, or builds it there.
func (v *conversion) intoStore(src *source, store content.Store, answer *conversionAnswer) (none ocispec.Descriptor, err error) {
	if src.image != nil {
		manifest := bare(*src.image)
		if _, err := oci.Inspect(v.ctx, src.provider, manifest); err != nil {
			return none, err
		}
		answer.Digest = manifest.Digest.String()
		return manifest, v.copyImage(src.provider, store, manifest)
	}
	o, err := v.options()
	if err != nil {
		return none, err
	}
	o.Checkpoint = src.flat()
	if err := v.describe(src, &o); err != nil {
		return none, err
	}
	if src.archive != nil {
		rw, err := src.archive.RootFS(v.ctx)
		if err != nil {
			return none, err
		}
		if rw != nil {
			defer rw.Close()
			o.RWTar = rw
		}
	}
	if v.previous != "" {
		p, err := parsePlace(v.previous)
		if err != nil {
			return none, fmt.Errorf("--previous: %w", err)
		}
		previous, err := p.open(v.ctx, v.dial, &v.daemon)
		if err != nil {
			return none, fmt.Errorf("--previous: %w", err)
		}
		defer joinClose(&err, previous)
		if previous.image == nil {
			return none, fmt.Errorf("--previous %s: %w", v.previous, oci.ErrNotCheckpoint)
		}
		o.Previous = previous.image
		o.Provider = providers{o.Provider, previous.provider}
	}
	if v.base != "" || o.Base.Digest == "" {
		closer, err := v.findBase(src, &o)
		if err != nil {
			return none, err
		}
		defer joinClose(&err, closer)
	}
	step := v.progress.step("image")
	o.Progress = step.set
	result, err := oci.Build(v.ctx, store, o)
	if err != nil {
		step.end("")
		return none, err
	}
	step.end(fmt.Sprintf("%s stored, %s were there already", size(result.Bytes), size(result.Reused)))
	answer.Built, answer.Digest = true, result.Manifest.Digest.String()
	answer.GPUBytes, answer.Bytes = result.GPUBytes, result.Bytes
	answer.WrittenBytes, answer.ReusedBytes = result.Written, result.Reused
	return result.Manifest, nil
}

// describe fills in what the source says of the container.
func (v *conversion) describe(src *source, o *oci.Options) error {
	switch {
	case src.stock != nil:
		o.Provider, o.Base, o.RW = src.provider, src.stock.Base, src.stock.RW
		config, err := stockConfig(v.ctx, src)
		if err != nil {
			return err
		}
		o.BaseName = config.RootfsImageName
		o.Annotations = map[string]string{"org.criu.checkpoint.engine.name": "containerd"}
	case src.archive != nil:
		o.BaseName = cmp.Or(src.archive.Config.RootfsImageName, src.archive.Config.RootfsImage)
		o.Annotations = map[string]string{
			containerNameAnnotation:               src.archive.Config.Name,
			"org.criu.checkpoint.rootfsImageName": o.BaseName,
			"org.criu.checkpoint.runtime.name":    src.archive.Config.Runtime,
		}
	}
	return nil
}

// findBase finds the image the container was made from, by --base or by the name
// that the source has for it.
func (v *conversion) findBase(src *source, o *oci.Options) (io.Closer, error) {
	name := cmp.Or(v.base, o.BaseName)
	if name == "" {
		return nil, errors.New("name the image that the container was made from with --base")
	}
	p, err := parsePlace(name)
	if err != nil {
		return nil, fmt.Errorf("the container's image (--base names it): %w", err)
	}
	base, err := p.open(v.ctx, v.dial, &v.daemon)
	if err != nil {
		return nil, fmt.Errorf("the container's image (--base names it): %w", err)
	}
	if base.image == nil {
		return nil, errors.Join(fmt.Errorf("--base %s: it is no image", name), base.Close())
	}
	o.Base = *base.image
	if v.base != "" {
		o.BaseName = base.name
	}
	o.Provider = providers{o.Provider, base.provider}
	return base, nil
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

// copiesAtOnce is how many blobs are copied at the same time.
const copiesAtOnce = 4

// copyImage copies an image's blobs, several at a time. Half an image has no
// name, and containerd's lease keeps what is there of it.
func (v *conversion) copyImage(from content.Provider, to content.Store, image ocispec.Descriptor) error {
	step := v.progress.step("copy")
	children := cimages.FilterPlatforms(cimages.ChildrenHandler(from), platforms.All)
	if _, layout := to.(*oci.Layout); !layout {
		// By these labels containerd's collector follows an image to its blobs.
		children = cimages.SetChildrenMappedLabels(to, children, nil)
	}
	write := cimages.HandlerFunc(func(ctx context.Context, d ocispec.Descriptor) ([]ocispec.Descriptor, error) {
		data, err := from.ReaderAt(ctx, d)
		if err != nil {
			return nil, err
		}
		defer data.Close()
		counted := &countedReader{ctx: ctx, r: io.NewSectionReader(data, 0, data.Size()), progress: func(n int64) { step.add(n, 0) }}
		err = content.WriteBlob(ctx, to, "gpuckpt-copy-"+d.Digest.String(), counted, d)
		if errdefs.IsAlreadyExists(err) {
			err = nil
		}
		return nil, err
	})
	if err := cimages.Dispatch(v.ctx, cimages.Handlers(write, children), semaphore.NewWeighted(copiesAtOnce), image); err != nil {
		step.end("")
		return err
	}
	step.end("copied")
	return nil
}

// intoKubernetes writes an archive as the kubelet keeps them.
func (v *conversion) intoKubernetes(src *source, file string) (err error) {
	contents := archive.Contents{Checkpoint: src.flat()}
	switch {
	case src.image != nil:
		image, err := oci.Inspect(v.ctx, src.provider, *src.image)
		if err != nil {
			return err
		}
		root, err := os.MkdirTemp(filepath.Dir(file), "."+filepath.Base(file)+".")
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(root)) }()
		step := v.progress.step("unpack")
		if contents.Checkpoint, err = extract(v.ctx, src.provider, image, root, step); err != nil {
			step.end("")
			return err
		}
		step.end("unpacked")
		contents.Config = archive.Config{
			Name: image.Annotations[containerNameAnnotation], RootfsImageName: image.BaseName, RootfsImage: image.BaseName,
			Runtime: image.Annotations["org.criu.checkpoint.runtime.name"], CheckpointedAt: image.Metadata.Created,
		}
		contents.Spec = []byte("{}")
		for _, l := range image.Layers {
			if l.Kind == oci.LayerRW {
				contents.Layers = append(contents.Layers, func(ctx context.Context) (io.ReadCloser, error) {
					return openLayer(ctx, src.provider, l, nil)
				})
			}
		}
	case src.stock != nil:
		if contents.Config, contents.Spec, err = stockDumps(v.ctx, src); err != nil {
			return err
		}
		if rw := src.stock.RW; rw != nil {
			layer := oci.Layer{Digest: rw.Digest, MediaType: rw.MediaType, Bytes: uint64(rw.Size)}
			contents.Layers = []archive.Layer{func(ctx context.Context) (io.ReadCloser, error) { return openLayer(ctx, src.provider, layer, nil) }}
		}
	case src.archive != nil:
		return errors.New("the source is one already")
	default:
		contents.Spec = []byte("{}")
	}
	step := v.progress.step("archive")
	if err := archive.Write(v.ctx, file, contents, func(n uint64) { step.add(int64(n), 0) }); err != nil {
		step.end("")
		return err
	}
	step.end("written")
	return nil
}

// stockConfig and stockDumps read the record of the container that a checkpoint
// of containerd's holds.
func stockConfig(ctx context.Context, src *source) (archive.Config, error) {
	config, _, err := stockDumps(ctx, src)
	return config, err
}

func stockDumps(ctx context.Context, src *source) (config archive.Config, spec json.RawMessage, err error) {
	spec = []byte("{}")
	data, err := content.ReadBlob(ctx, src.provider, src.index)
	if err != nil {
		return config, nil, fmt.Errorf("read the checkpoint's index: %w", err)
	}
	var index ocispec.Index
	if err := json.Unmarshal(data, &index); err != nil {
		return config, nil, fmt.Errorf("%w: the checkpoint's index: %w", images.ErrDamaged, err)
	}
	// Clients write the name in either of two places.
	config.RootfsImageName = cmp.Or(index.Annotations[ocispec.AnnotationRefName], index.Annotations["image.name"])
	config.Runtime = index.Annotations["io.containerd.checkpoint.runtime"]
	config.RootfsImage = config.RootfsImageName
	config.RootfsImageRef = src.stock.Base.Digest.String()
	if m := src.stock.Checkpoint.Metadata; m != nil {
		config.CheckpointedAt = m.Created
	}
	if src.stock.RuntimeName.Digest != "" {
		name, err := content.ReadBlob(ctx, src.provider, src.stock.RuntimeName)
		if err != nil {
			return config, nil, fmt.Errorf("read the runtime's name: %w", err)
		}
		config.Runtime = string(name)
	}
	if src.stock.Config.Digest == "" {
		return config, spec, nil
	}
	if data, err = content.ReadBlob(ctx, src.provider, src.stock.Config); err != nil {
		return config, nil, fmt.Errorf("read the container's record: %w", err)
	}
	var any anypb.Any
	if err := proto.Unmarshal(data, &any); err != nil {
		return config, nil, fmt.Errorf("%w: the container's record: %w", images.ErrDamaged, err)
	}
	if json.Valid(any.GetValue()) {
		spec = any.GetValue()
	}
	return config, spec, nil
}
