// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package catalog is the checkpoint images that a containerd has: what there is, and what may go.
//
// The life of an entry: List finds it among containerd's images, Obsolete picks it, Remove takes its
// name away. containerd then collects what no other image needs.
package catalog

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/opencontainers/go-digest"

	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/images/localstore"
	"github.com/gpuckpt/gpuckpt/images/oci"
	"github.com/gpuckpt/gpuckpt/images/sign"
)

// Entry is one checkpoint image.
type Entry struct {
	Image  string        `json:"image"`
	Digest digest.Digest `json:"digest"`
	// Container is the container that the checkpoint was taken of, "" where the image does not say.
	Container string    `json:"container,omitempty"`
	Created   time.Time `json:"created"`
	named     time.Time // when the image got its name: a copy that was signed has its original's Created
	// Bytes are those of what the checkpoint adds to its base image, as stored. Other
	// checkpoints may share some.
	Bytes    uint64 `json:"bytes"`
	GPUBytes uint64 `json:"gpuBytes"` // GPU state
	// Signed is whether there is a signature, and SignedBy the name of the key if that is trusted here.
	Signed   bool   `json:"signed"`
	SignedBy string `json:"signedBy,omitempty"`
	// Used is whether a container was made of the image.
	Used bool `json:"used"`
}

// List returns the checkpoint images of a containerd's namespace whose names begin with prefix, the
// newest first. The node trusts keys. List verifies signatures alone, against their manifests.
func List(ctx context.Context, c *client.Client, prefix string, keys []sign.Key) (found []Entry, err error) {
	containers, err := c.ContainerService().List(ctx)
	if err != nil {
		return nil, fmt.Errorf("list the containers: %w", err)
	}
	used := map[string]bool{}
	for _, k := range containers {
		used[k.Image] = true
	}
	all, err := c.ImageService().List(ctx)
	if err != nil {
		return nil, fmt.Errorf("list the images: %w", err)
	}
	for _, i := range all {
		if !strings.HasPrefix(i.Name, prefix) {
			continue
		}
		e, err := describe(ctx, c, i, keys)
		switch {
		case errors.Is(err, oci.ErrNotCheckpoint) || errdefs.IsNotFound(err): // or without the layers
			continue
		case err != nil && (ctx.Err() != nil || errdefs.IsUnavailable(err) || errdefs.IsUnknown(err)): // containerd does not answer
			return nil, fmt.Errorf("read the image %s: %w", i.Name, err)
		case err != nil: // anybody's, who may pull images
			log.G(ctx).WithError(err).WithField("image", i.Name).Warn("an image that cannot be read is left out")
			continue
		}
		e.Used = used[i.Name]
		found = append(found, e)
	}
	slices.SortFunc(found, func(a, b Entry) int {
		return cmp.Or(b.Created.Compare(a.Created), strings.Compare(a.Image, b.Image))
	})
	return found, nil
}

func describe(ctx context.Context, c *client.Client, i images.Image, keys []sign.Key) (e Entry, err error) {
	image, err := oci.Inspect(ctx, c.ContentStore(), i.Target)
	if err != nil {
		return e, err
	}
	e = Entry{Image: i.Name, Digest: image.Digest, Container: image.Annotations[annotations.ContainerName], Created: image.Metadata.Created, named: i.CreatedAt}
	if e.Created.IsZero() {
		e.Created = i.CreatedAt
	}
	for _, l := range image.Layers {
		if l.Kind != oci.LayerBase {
			e.Bytes += l.Bytes
		}
	}
	if state := image.Annotations[annotations.GPUState]; state != "" {
		if e.GPUBytes, err = strconv.ParseUint(state, 10, 64); err != nil {
			return e, fmt.Errorf("annotation %s: %w", annotations.GPUState, err)
		}
	}
	sealed, err := oci.ReadSeal(ctx, c.ContentStore(), image)
	if err != nil || sealed == nil {
		return e, err
	}
	e.Signed = true
	if key, err := sealed.SignedBy(keys); err == nil {
		e.SignedBy = key.Name
	}
	return e, nil
}

// Rules say which checkpoints may go. Those of one container in one repository are counted together, and so
// are those without a container's name. An image names its container and its time itself. Its own name is
// what it was pulled by: only who writes to a repository can have others there let go.
type Rules struct {
	// Keep is how many of each container's checkpoints stay, the newest; 0 is none.
	Keep int
	// OlderThan is the age from which on a checkpoint may go; 0 is any.
	OlderThan time.Duration
	// Container restricts the rules to one container's checkpoints, if not empty.
	Container string
}

// Obsolete returns those of the entries that the rules let go: older than OlderThan, and not among
// the newest. An image that a container was made of stays: a restart would need it. The names of one image
// go together, and CRI's with the last other.
func (r Rules) Obsolete(entries []Entry, now time.Time) (gone []Entry) {
	type group struct{ container, repository string }
	seen := map[group][]digest.Digest{}
	newest := slices.Clone(entries)
	slices.SortStableFunc(newest, func(a, b Entry) int { return cmp.Or(b.Created.Compare(a.Created), b.named.Compare(a.named)) })
	for _, e := range newest {
		if _, err := digest.Parse(e.Image); err == nil || r.Container != "" && e.Container != r.Container {
			continue
		}
		dir, base := path.Split(e.Image)
		g := group{e.Container, dir + base[:strings.IndexAny(base+":", ":@")]}
		n := slices.Index(seen[g], e.Digest)
		if n < 0 {
			n, seen[g] = len(seen[g]), append(seen[g], e.Digest)
		}
		if n >= r.Keep && now.Sub(e.Created) >= r.OlderThan && !e.Used {
			gone = append(gone, e)
		}
	}
	return gone
}

// Remove removes an image of that name, if it is a checkpoint image, and what of it no other image
// needs. The error of another image is oci.ErrNotCheckpoint, of none errdefs.ErrNotFound.
//
// CRI calls each image by its config's digest as well, and keeps that name: it goes with the last other.
func Remove(ctx context.Context, c *client.Client, name string) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("remove %s: %w", name, err)
		}
	}()
	i, err := localstore.Find(ctx, c, name)
	if err != nil {
		return err
	}
	name = i.Name
	image, err := oci.Outline(ctx, c.ContentStore(), i.Target) // of a damaged or encrypted one, too
	if errors.Is(err, oci.ErrNotCheckpoint) {
		return fmt.Errorf("%w; `ctr images rm` removes any image", err)
	}
	if err != nil {
		return err
	}
	same, err := c.ImageService().List(ctx, fmt.Sprintf("target.digest==%q", i.Target.Digest))
	if err != nil {
		return err
	}
	// The digest of each: nobody removes what has got the name meanwhile.
	if id := image.Config.Digest.String(); len(same) == 2 && slices.ContainsFunc(same, func(s images.Image) bool { return s.Name == id && s.Name != name }) {
		err = c.ImageService().Delete(ctx, id, images.DeleteTarget(&i.Target))
	}
	return errors.Join(err, c.ImageService().Delete(ctx, name, images.SynchronousDelete(), images.DeleteTarget(&i.Target)))
}
