// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package localstore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/diff"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/unpack"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/reference"
	"github.com/containerd/containerd/v2/plugins"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/semaphore"

	checkpoint "github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/images/oci"
	"github.com/gpuckpt/gpuckpt/internal/node/mmapfile"
)

// Content returns a containerd's content store: that of Of, where there is one.
func Content(ctx context.Context, c *client.Client) content.Store {
	if s, err := Of(ctx, c); err == nil {
		return s
	}
	return c.ContentStore()
}

// Of opens a containerd's content store if it is its own and on this machine, and has a blob of the namespace.
func Of(ctx context.Context, c *client.Client) (*Store, error) {
	answer, err := c.IntrospectionService().Plugins(ctx,
		"type=="+string(plugins.ContentPlugin)+",id==content", "type=="+string(plugins.MetadataPlugin)+",id==bolt")
	if err != nil {
		return nil, fmt.Errorf("ask containerd where its content store is: %w", err)
	}
	exports := make(map[string]string)
	for _, p := range answer.Plugins {
		for k, v := range p.Exports {
			exports[p.ID+"."+k] = v
		}
	}
	// With "isolated" (plugins/metadata) a namespace has no blob by asking for it.
	if policy := exports["bolt.policy"]; policy != "shared" {
		return nil, fmt.Errorf("containerd's content sharing policy is %q", policy)
	}
	root := exports["content.root"]
	if !filepath.IsAbs(root) {
		return nil, errors.New("containerd does not say where its content store is")
	}
	var known ocispec.Descriptor
	one, cancel := context.WithCancel(ctx)
	defer cancel()
	err = c.ContentStore().Walk(one, func(i content.Info) error {
		known = ocispec.Descriptor{Digest: i.Digest, Size: i.Size}
		return errdefs.ErrAlreadyExists // one is enough
	})
	if err != nil && !errdefs.IsAlreadyExists(err) {
		return nil, fmt.Errorf("ask containerd for a blob: %w", err)
	}
	return Open(Outlasting(c), root, known)
}

// Lease keeps containerd from collecting what is written with the context that it returns, until
// release, or for a day if the program is killed.
func Lease(ctx context.Context, c *client.Client) (_ context.Context, release func() error, _ error) {
	leased, end, err := c.WithLease(ctx, leases.WithRandomID(), leases.WithExpiration(24*time.Hour))
	if err != nil {
		return nil, nil, fmt.Errorf("keep containerd from collecting the image: %w", err)
	}
	return leased, func() error {
		last := context.WithoutCancel(leased)
		return Outlast(last, c, func() error {
			if err := end(last); !errdefs.IsNotFound(err) {
				return err
			}
			return nil
		})
	}, nil
}

// Keep keeps containerd from collecting an image that is there, until release: whoever removes its name
// meanwhile, such as a kubelet that frees its disk, does not take its blobs.
func Keep(ctx context.Context, c *client.Client, image digest.Digest) (release func() error, err error) {
	ctx, release, err = Lease(ctx, c)
	if err != nil {
		return nil, err
	}
	id, _ := leases.FromContext(ctx)
	if err := c.LeasesService().AddResource(ctx, leases.Lease{ID: id}, leases.Resource{ID: image.String(), Type: "content"}); err != nil {
		return nil, errors.Join(fmt.Errorf("keep containerd from collecting the image: %w", err), release())
	}
	return release, nil
}

// restart is how long a containerd may be away that is restarted.
const restart = time.Minute

// gone is since when containerd has been away; zero: it was there. All that is asked for meanwhile waits until the same
// moment: what undoes the first would otherwise wait a minute more, and so on.
var gone atomic.Pointer[time.Time]

// Outlast asks containerd for something, and once more if containerd was restarted meanwhile. What is asked
// for must be the same when it is done twice. The error is that of the last time.
func Outlast(ctx context.Context, c *client.Client, ask func() error) error {
	err := ask()
	// A stream that breaks while it is written to says EOF alone, as text.
	if away := errdefs.IsUnavailable(err) || errdefs.IsUnknown(err) && strings.HasSuffix(err.Error(), "EOF"); !away {
		gone.Store(nil)
		return err
	}
	now := time.Now()
	since := cmp.Or(gone.Load(), &now)
	gone.Store(since)
	back, cancel := context.WithDeadline(ctx, since.Add(restart))
	defer cancel()
	if serving, _ := c.IsServing(back); !serving {
		if ctx.Err() != nil {
			return errors.Join(err, ctx.Err())
		}
		return fmt.Errorf("containerd has not answered for %v: %v", restart, err) //nolint:errorlint // of Unavailable its library asks again, without end
	}
	gone.Store(nil)
	return ask()
}

// Outlasting returns containerd's content store, whose writers are asked for as Outlast does.
func Outlasting(c *client.Client) content.Store { return outlasting{c.ContentStore(), c} }

type outlasting struct {
	content.Store
	c *client.Client
}

func (s outlasting) Writer(ctx context.Context, opts ...content.WriterOpt) (w content.Writer, err error) {
	err = Outlast(ctx, s.c, func() error {
		w, err = s.Store.Writer(ctx, opts...)
		return err
	})
	return w, err
}

// CheckName refuses what is not an image's full name, by which nobody would find it.
func CheckName(name string) error {
	spec, err := reference.Parse(name)
	if err != nil || spec.Object == "" {
		return fmt.Errorf("%q is not a full image name such as example.com/job:1", name)
	}
	return nil
}

// FindContainer finds a container in containerd.
func FindContainer(ctx context.Context, c *client.Client, id string) (client.Container, error) {
	found, err := c.LoadContainer(ctx, id)
	if errdefs.IsNotFound(err) {
		namespace, _ := namespaces.Namespace(ctx)
		return nil, fmt.Errorf("there is no such container in containerd's namespace %s (`gpuckpt ps --all --all-namespaces` lists all): %w", namespace, errdefs.ErrNotFound)
	}
	return found, err
}

// Find finds an image in containerd by its name, or by NAME@DIGEST if NAME has that digest.
func Find(ctx context.Context, c *client.Client, name string) (images.Image, error) {
	found, err := c.ImageService().Get(ctx, name)
	if errdefs.IsNotFound(err) {
		if alone, of, ok := strings.Cut(name, "@"); ok {
			if i, err := c.ImageService().Get(ctx, alone); err == nil && i.Target.Digest.String() == of {
				return i, nil
			}
		}
		namespace, _ := namespaces.Namespace(ctx)
		if bad := CheckName(name); bad != nil {
			return found, fmt.Errorf("there is no image %s in containerd's namespace %s, and %w: %w", name, namespace, bad, errdefs.ErrNotFound)
		}
		return found, fmt.Errorf("there is no image %s in containerd's namespace %s: %w", name, namespace, errdefs.ErrNotFound)
	}
	if err != nil {
		return found, fmt.Errorf("look up the image %s: %w", name, err)
	}
	return found, nil
}

// Private begins the names of images that are here for a while. No registry is called so. CRI does
// nothing about them: it would give them a second name, which stays.
const Private = "gpuckpt.invalid/"

// ErrTaken says that a name belongs to another image already, which keeps it. For errdefs it is
// ErrAlreadyExists.
var ErrTaken error = taken{errors.New("the name belongs to another image")}

type taken struct{ error }

// AlreadyExists is what errdefs looks for.
func (taken) AlreadyExists() {}

// CheckFree returns ErrTaken if another image than that of a digest has the name; an empty digest is
// of none.
func CheckFree(ctx context.Context, c *client.Client, name string, digest digest.Digest) error {
	found, err := Find(ctx, c, name)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil || found.Target.Digest == digest {
		return err
	}
	namespace, _ := namespaces.Namespace(ctx)
	return fmt.Errorf("name the image %s: %w, %s: choose another name, or remove that image first with `ctr --namespace %s images rm %s`",
		name, ErrTaken, found.Target.Digest, namespace, name)
}

// Tag gives an image in containerd its name, in one step, and never takes the name from another image:
// the error is ErrTaken then.
func Tag(ctx context.Context, c *client.Client, name string, target ocispec.Descriptor) error {
	image := images.Image{Name: name, Target: target}
	if strings.HasPrefix(name, Private) {
		image.Labels = map[string]string{"io.cri-containerd.image": "managed"}
	}
	for {
		_, err := c.ImageService().Create(ctx, image)
		if err == nil {
			return nil
		}
		if !errdefs.IsAlreadyExists(err) {
			return fmt.Errorf("name the image %s: %w", name, err)
		}
		if err := CheckFree(ctx, c, name, target.Digest); err != nil {
			return err
		}
		if _, err := Find(ctx, c, name); !errdefs.IsNotFound(err) { // else it was removed in between
			return err
		}
	}
}

// Unpack makes an image in containerd ready to run, unless it is. What by has just written is not digested
// once more; nil: nothing was. GPU state in blobs is not unpacked. The checkpoint's
// layers are unpacked several at once, for a snapshotter that puts layers together afterwards (overlayfs, from containerd 2.2 on). Those
// below are unpacked one by one: several at once, containerd gives a directory that an archive lacks its own mode,
// and not that of the layers below.
func Unpack(ctx context.Context, c *client.Client, image client.Image, snapshotter string, by *Store) (err error) {
	unpacked, err := image.IsUnpacked(ctx, snapshotter)
	if err == nil && !unpacked {
		err = unpackAll(ctx, c, image, snapshotter, by)
	}
	if err == nil {
		return nil
	}
	err = fmt.Errorf("unpack the image: %w", err)
	if m, _ := images.Manifest(ctx, c.ContentStore(), image.Target(), image.Platform()); slices.ContainsFunc(m.Layers, isEncrypted) {
		err = fmt.Errorf("%w\nthe image is encrypted: `gpuckpt image pull --decrypt-key KEY` decrypts it, or have containerd do so", err)
	}
	return err
}

func isEncrypted(l ocispec.Descriptor) bool { return strings.HasSuffix(l.MediaType, "+encrypted") }

func unpackAll(ctx context.Context, c *client.Client, image client.Image, snapshotter string, by *Store) error {
	if !images.IsManifestType(image.Target().MediaType) {
		return image.Unpack(ctx, snapshotter)
	}
	// The snapshots belong to nobody until the image's config names them.
	ctx, release, err := c.WithLease(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = release(context.WithoutCancel(ctx)) }() // it expires
	below, err := oci.Below(ctx, c.ContentStore(), image.Target())
	if err != nil {
		return err
	}
	if err := client.NewImage(c, images.Image{Name: image.Name(), Target: below}).Unpack(ctx, snapshotter); err != nil {
		return err
	}
	capabilities, err := c.GetSnapshotterCapabilities(ctx, snapshotter)
	if err != nil {
		return err
	}
	unpacker, err := unpack.NewUnpacker(ctx, c.ContentStore(), unpack.WithUnpackLimiter(semaphore.NewWeighted(int64(runtime.NumCPU()))), unpack.WithUnpackPlatform(unpack.Platform{
		Platform:                platforms.All, // the handler chooses
		SnapshotterKey:          snapshotter,
		Snapshotter:             c.SnapshotService(snapshotter),
		SnapshotterCapabilities: capabilities,
		Applier:                 applier{c.DiffService(), Content(ctx, c), by},
	}))
	if err != nil {
		return err
	}
	handler := images.FilterPlatforms(images.ChildrenHandler(c.ContentStore()), image.Platform())
	err = images.Dispatch(ctx, unpacker.Unpack(handler), nil, image.Target())
	if _, werr := unpacker.Wait(); err == nil {
		err = werr
	}
	return err
}

// applier unpacks the layer with CRIU's images by several processors, if it is not compressed: these and SHA-256 work side
// by side then. containerd does so with all else.
type applier struct {
	diff.Applier
	store content.Provider
	by    *Store
}

// Apply unpacks a layer into mounts, and returns what it is as an archive.
func (a applier) Apply(ctx context.Context, d ocispec.Descriptor, mounts []mount.Mount, opts ...diff.ApplyOpt) (ocispec.Descriptor, error) {
	if d.Annotations[annotations.Layer] != oci.LayerCRIU || d.MediaType != ocispec.MediaTypeImageLayer {
		return a.Applier.Apply(ctx, d, mounts, opts...)
	}
	var made ocispec.Descriptor
	into := func(path string) error {
		root, err := os.OpenRoot(path) // with a snapshotter that has no directory for each layer it has the layers below, with links
		if err != nil {
			return err
		}
		defer root.Close()
		made, err = a.unpackFiles(ctx, d, root)
		return err
	}
	if dir := upper(mounts); dir != "" {
		err := into(dir)
		return made, err
	}
	err := mount.WithTempMount(ctx, mounts, into)
	return made, err
}

// upper returns the directory of what an overlay has above its other layers, if it is to be an overlay: while several
// layers are unpacked at once, there are no others yet.
func upper(mounts []mount.Mount) string {
	if len(mounts) != 1 || mounts[0].Type != "overlay" {
		return ""
	}
	for _, o := range mounts[0].Options {
		if dir, ok := strings.CutPrefix(o, "upperdir="); ok {
			return dir
		}
	}
	return ""
}

// unpackFiles unpacks a layer of a checkpoint, files in one directory, which may be there, into the image's root.
func (a applier) unpackFiles(ctx context.Context, d ocispec.Descriptor, root *os.Root) (made ocispec.Descriptor, err error) {
	if err := root.Mkdir(checkpoint.ImageDir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return made, err
	}
	blob, err := a.store.ReaderAt(ctx, d)
	if err != nil {
		return made, err
	}
	defer blob.Close()
	made.MediaType = ocispec.MediaTypeImageLayer
	digested := make(chan error, 1)
	go func() {
		var err error
		made.Digest, err = a.plainDigest(d, blob)
		digested <- err
	}()
	files, err := checkpoint.LayerFiles(blob, blob.Size())
	for _, l := range files {
		if err == nil {
			made.Size += int64(l.Bytes)
			err = unpackFile(l, root)
		}
	}
	err = errors.Join(err, <-digested)
	return made, err
}

func unpackFile(l checkpoint.File, root *os.Root) error {
	f, err := root.OpenFile(filepath.Join(checkpoint.ImageDir, l.Name), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(mmapfile.Copy(f, io.NewSectionReader(l.Data, 0, int64(l.Bytes))), f.Close())
}

// plainDigest returns the digest of a layer.
func (a applier) plainDigest(d ocispec.Descriptor, blob content.ReaderAt) (digest.Digest, error) {
	if a.by != nil {
		if _, wrote := a.by.wrote.Load(d.Digest); wrote {
			return d.Digest, nil
		}
	}
	return digest.Canonical.FromReader(content.NewReader(blob))
}
