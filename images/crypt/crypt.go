// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package crypt encrypts the layers that a checkpoint adds to an image, and decrypts them, with
// ocicrypt, in the form that containerd's imgcrypt and nerdctl read.
//
// Each layer gets a random key of its own (AES-256 in counter mode, with an HMAC of SHA-256). That
// key lies within the layer's annotations, encrypted for each recipient, and the media type ends
// with +encrypted. The base image's layers, the config and the annotations of the manifest stay
// readable. Decryption makes the image that was encrypted, with the same digests: signatures, which
// are within the layers, hold.
//
// Encryption says nothing of who made an image: anybody may encrypt for a public key.
package crypt

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"runtime"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/core/content"
	cimages "github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/containers/ocicrypt"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/images/oci"
)

// encrypted ends the media type of a layer that is encrypted.
const encrypted = "+encrypted"

// State is how much of an image's checkpoint is encrypted.
type State int

// The states of an image.
const (
	NoCheckpoint State = iota // it has no layers of a checkpoint
	Plain                     // at least one of them is not encrypted
	Encrypted                 // all of them are
)

// StateOf returns the state of an image.
func StateOf(m *ocispec.Manifest) State {
	state := NoCheckpoint
	for _, l := range m.Layers {
		switch {
		case l.Annotations[annotations.Layer] == "":
		case !isEncrypted(l):
			return Plain
		default:
			state = Encrypted
		}
	}
	return state
}

// NeedsKey reports whether any layer of an image is encrypted.
func NeedsKey(m *ocispec.Manifest) bool { return slices.ContainsFunc(m.Layers, isEncrypted) }

func isEncrypted(l ocispec.Descriptor) bool { return strings.HasSuffix(l.MediaType, encrypted) }

// Manifest reads the manifest of an image, in an index that for this platform.
func Manifest(ctx context.Context, from content.Provider, image ocispec.Descriptor) (*ocispec.Manifest, error) {
	m, err := cimages.Manifest(ctx, from, image, platforms.Default())
	if err != nil {
		return nil, fmt.Errorf("read the image's manifest: %w", err)
	}
	return &m, nil
}

// Encrypt encrypts a checkpoint's layers of an image for the recipients, and returns the manifest
// of the encrypted image. What is new goes into the store to; all else stays where it is. Layers
// that are encrypted stay as they are. The error of another image is oci.ErrNotCheckpoint.
// progress receives the step "encrypt". What a failed encryption has written is left in the store.
func Encrypt(ctx context.Context, from content.Provider, to content.Ingester, image ocispec.Descriptor, r *Recipients, progress images.Progress) (ocispec.Descriptor, error) {
	desc, err := each(ctx, from, to, image, progress.Begin("encrypt", 0), func(ctx context.Context, l *ocispec.Descriptor, data io.Reader) error {
		return encrypt(ctx, to, l, data, r)
	}, func(l ocispec.Descriptor) bool { return l.Annotations[annotations.Layer] != "" && !isEncrypted(l) })
	if errors.Is(err, errNothing) {
		err = fmt.Errorf("%w: it has no layer of a checkpoint that is not encrypted", oci.ErrNotCheckpoint)
	}
	if err != nil {
		return desc, fmt.Errorf("encrypt the image: %w", err)
	}
	return desc, nil
}

// Decrypt decrypts all layers of an image that are encrypted, and returns the manifest of the plain
// image. What is new goes into the store to. The error is ErrNoKey if none of the keys fits.
// progress receives the step "decrypt". What a failed decryption has written is left in the store.
func Decrypt(ctx context.Context, from content.Provider, to content.Ingester, image ocispec.Descriptor, k *Keys, progress images.Progress) (ocispec.Descriptor, error) {
	desc, err := each(ctx, from, to, image, progress.Begin("decrypt", 0), func(ctx context.Context, l *ocispec.Descriptor, data io.Reader) error {
		return decrypt(ctx, to, l, data, k)
	}, isEncrypted)
	if err != nil {
		return desc, fmt.Errorf("decrypt the image: %w", err)
	}
	return desc, nil
}

// errNothing reports that there is nothing to do.
var errNothing = errors.New("it has no encrypted layer")

// each changes the chosen layers of an image, several at once, and writes the new manifest.
func each(ctx context.Context, from content.Provider, to content.Ingester, image ocispec.Descriptor, meter *images.Meter,
	change func(ctx context.Context, l *ocispec.Descriptor, data io.Reader) error, chosen func(ocispec.Descriptor) bool,
) (none ocispec.Descriptor, _ error) {
	m, err := Manifest(ctx, from, image)
	if err != nil {
		return none, err
	}
	if !slices.ContainsFunc(m.Layers, chosen) {
		return none, errNothing
	}
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(runtime.NumCPU())
	for i := range m.Layers {
		l := &m.Layers[i]
		if !chosen(*l) {
			continue
		}
		meter.Grow(l.Size)
		g.Go(func() error {
			was := l.Digest
			data, err := from.ReaderAt(gctx, *l)
			if errdefs.IsNotFound(err) {
				err = fmt.Errorf("it is not in the store; `gpuckpt image pull --no-unpack` fetches what an image lacks: %w", err)
			}
			if err == nil {
				err = change(gctx, l, meter.Reader(gctx, io.NewSectionReader(data, 0, data.Size())))
				err = errors.Join(err, data.Close())
			}
			if err != nil {
				return fmt.Errorf("layer %s: %w", was, err)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return none, err
	}
	meter.End("done")
	data, err := json.Marshal(m)
	if err != nil {
		return none, err
	}
	desc := ocispec.Descriptor{MediaType: ocispec.MediaTypeImageManifest, Digest: digest.FromBytes(data), Size: int64(len(data))}
	if err := content.WriteBlob(ctx, to, ref(), bytes.NewReader(data), desc, content.WithLabels(oci.References(m))); err != nil {
		return none, fmt.Errorf("write the manifest: %w", err)
	}
	return desc, nil
}

// ref names an unfinished blob.
func ref() string { return "gpuckpt-crypt-" + rand.Text() }

// encrypt writes a layer encrypted, and makes l its descriptor.
func encrypt(ctx context.Context, to content.Ingester, l *ocispec.Descriptor, data io.Reader, r *Recipients) error {
	data, finish, err := ocicrypt.EncryptLayer(r.config, data, *l)
	if err != nil {
		return err
	}
	d, size, err := ingest(ctx, to, data)
	if err != nil {
		return err
	}
	wrapped, err := finish()
	if err != nil {
		return err
	}
	l.MediaType, l.Digest, l.Size = l.MediaType+encrypted, d, size
	l.Annotations = maps.Clone(l.Annotations)
	maps.Copy(l.Annotations, wrapped)
	return nil
}

// decrypt writes a layer decrypted, and makes l its descriptor. A layer that was changed has another
// HMAC, which is the error of reading its end.
func decrypt(ctx context.Context, to content.Ingester, l *ocispec.Descriptor, data io.Reader, k *Keys) error {
	if err := k.Fits(*l); err != nil {
		return err
	}
	plain, _, err := ocicrypt.DecryptLayer(k.config, data, *l, false)
	if err != nil {
		return err
	}
	if l.Digest, l.Size, err = ingest(ctx, to, plain); err != nil {
		return fmt.Errorf("it could not be decrypted: %w", err)
	}
	l.MediaType = strings.TrimSuffix(l.MediaType, encrypted)
	if l.Annotations = ocicrypt.FilterOutAnnotations(l.Annotations); len(l.Annotations) == 0 {
		l.Annotations = nil
	}
	return nil
}

// ingest writes a blob whose digest nobody knows yet.
func ingest(ctx context.Context, to content.Ingester, data io.Reader) (digest.Digest, int64, error) {
	w, err := content.OpenWriter(ctx, to, content.WithRef(ref()))
	if err != nil {
		return "", 0, err
	}
	defer w.Close()
	size, err := io.Copy(w, data)
	if err != nil {
		return "", 0, err
	}
	if err := w.Commit(ctx, size, ""); err != nil && !errdefs.IsAlreadyExists(err) {
		return "", 0, err
	}
	return w.Digest(), size, nil
}
