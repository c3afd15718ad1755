// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package encryption moves checkpoint images to registries and back as the node's configuration
// wants it: encrypted for whom, and decrypted with which keys.
package encryption

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images/arriving"
	"github.com/gpuckpt/gpuckpt/images/convert"
	"github.com/gpuckpt/gpuckpt/images/crypt"
	"github.com/gpuckpt/gpuckpt/images/layout"
	"github.com/gpuckpt/gpuckpt/images/registry"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
)

// Encrypts reports whether Push will encrypt a plain image for anybody.
func Encrypts(recipients []string) bool {
	node, err := config.Load()
	return err != nil || len(recipients) > 0 || len(node.Encryption.Recipients) > 0
}

// Check reads whom Push will encrypt a plain image for, if for anybody.
func Check(recipients []string) error {
	node, err := config.Load()
	if len(recipients) == 0 {
		recipients = node.Encryption.Recipients
	}
	if err == nil && len(recipients) > 0 {
		_, err = crypt.ReadRecipients(recipients...)
	}
	return err
}

// Push is registry.Push of a source's image, which it encrypts before: for the recipients, files of
// public keys, or where there are none, for those of the node's configuration. It returns the digest
// of what it sent.
func Push(ctx context.Context, src *convert.Source, target string, recipients []string, o registry.Options) (_ digest.Digest, _ *registry.Result, err error) {
	node, err := config.Load()
	if err != nil {
		return "", nil, err
	}
	m, err := crypt.Manifest(ctx, src.Provider, *src.Image)
	if err != nil {
		return "", nil, err
	}
	state := crypt.StateOf(m)
	if len(recipients) == 0 && state == crypt.Plain {
		recipients = node.Encryption.Recipients
	}
	switch {
	case len(recipients) > 0 && state == crypt.Encrypted:
		return "", nil, errors.New("it is encrypted already: push it without --encrypt, or pull it decrypted first")
	case len(recipients) == 0:
		result, err := registry.Push(ctx, src.Provider, target, *src.Image, o)
		return src.Image.Digest, result, err
	}
	readers, err := crypt.ReadRecipients(recipients...)
	if err != nil {
		return "", nil, err
	}
	// Large files: /tmp is often memory.
	dir, err := os.MkdirTemp(cmp.Or(os.Getenv("TMPDIR"), "/var/tmp"), "gpuckpt-encrypt-")
	if err != nil {
		return "", nil, fmt.Errorf("make a directory for the encrypted layers: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	store, err := layout.Open(dir)
	if err != nil {
		return "", nil, err
	}
	image, err := crypt.Encrypt(ctx, src.Provider, store, *src.Image, readers, o.Progress)
	if err != nil {
		return "", nil, err
	}
	o.Ahead = nil // it has sent other blobs
	result, err := registry.Push(ctx, both{store, src.Provider}, target, image, o)
	return image.Digest, result, err
}

// both reads what is in the first store, and else in the second.
type both struct{ first, second content.InfoReaderProvider }

func (b both) ReaderAt(ctx context.Context, d ocispec.Descriptor) (content.ReaderAt, error) {
	if r, err := b.first.ReaderAt(ctx, d); !errdefs.IsNotFound(err) {
		return r, err
	}
	return b.second.ReaderAt(ctx, d)
}

func (b both) Info(ctx context.Context, d digest.Digest) (content.Info, error) {
	if info, err := b.first.Info(ctx, d); !errdefs.IsNotFound(err) {
		return info, err
	}
	return b.second.Info(ctx, d)
}

// Pull pulls an image from a registry, and decrypts it: with the keys of these files, or where there are
// none, with those of config.DecryptionKeys. An image that is encrypted is left to containerd's stream
// processors if there is no key at all.
func Pull(ctx context.Context, c *client.Client, ref, snapshotter string, keyFiles []string, o registry.Options) (client.Image, *registry.Result, error) {
	from, err := registry.Open(ctx, ref, "pull", o)
	if err != nil {
		return nil, nil, err
	}
	m, err := crypt.Manifest(ctx, from, from.Image)
	if err != nil {
		return nil, nil, fmt.Errorf("pull %s: %w", ref, err)
	}
	if !crypt.NeedsKey(m) {
		return from.Pull(ctx, c, snapshotter, nil)
	}
	if keyFiles == nil {
		keyFiles = []string{config.DecryptionKeys}
	}
	keys, err := crypt.ReadKeys(keyFiles...)
	if err != nil {
		return nil, nil, fmt.Errorf("pull %s: %w", ref, err)
	}
	if keys.None() {
		return from.Pull(ctx, c, snapshotter, nil)
	}
	if err := keys.FitAll(m); err != nil {
		return nil, nil, fmt.Errorf("pull %s: %w", ref, err)
	}
	return from.Pull(ctx, c, snapshotter, func(ctx context.Context, image ocispec.Descriptor) (ocispec.Descriptor, error) {
		return crypt.Decrypt(ctx, c.ContentStore(), c.ContentStore(), image, keys, o.Progress)
	})
}

// Arrive is arriving.Begin. The error is arriving.ErrWhole for an image that is encrypted.
func Arrive(ctx context.Context, c *client.Client, from *registry.Source, snapshotter string) (*arriving.Image, error) {
	m, err := crypt.Manifest(ctx, from, from.Image)
	if err != nil {
		return nil, err
	}
	if crypt.NeedsKey(m) {
		return nil, fmt.Errorf("it is encrypted: %w", arriving.ErrWhole)
	}
	return arriving.Begin(ctx, c, from, snapshotter)
}
