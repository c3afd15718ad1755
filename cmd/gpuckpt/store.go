// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"sync/atomic"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/plugins"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images/localstore"
)

// blobStore gives containerd's content store by the fastest way that there is to
// write many large blobs: its directory, else several connections. known is a
// blob that it has, by which its directory is known; it may be zero. done is to
// be called when nothing is written any more; the client stays open.
func (d *daemon) blobStore(ctx context.Context, c *client.Client, known ocispec.Descriptor, shown *progress) (store content.Store, done func() error, err error) {
	local, err := openLocal(ctx, c, known)
	if err == nil {
		return local, func() error { return nil }, nil
	}
	shown.line("layers go through containerd's socket, which takes longer: %v", err)
	wide, err := d.widen(c)
	if err != nil {
		return nil, nil, err
	}
	return wide, wide.close, nil
}

// openLocal opens the directory of containerd's content store, if it is one of
// containerd's own on this machine.
func openLocal(ctx context.Context, c *client.Client, known ocispec.Descriptor) (*localstore.Store, error) {
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
	// See containerd's plugins/metadata: what is in the store is not a
	// namespace's own for the asking if the policy is "isolated".
	if policy := exports["bolt.policy"]; policy != "shared" {
		return nil, fmt.Errorf("containerd's content sharing policy is %q", policy)
	}
	root := exports["content.root"]
	if !filepath.IsAbs(root) {
		return nil, errors.New("containerd does not say where its content store is")
	}
	return localstore.Open(c.ContentStore(), root, known)
}

// maxConnections is how many connections carry blobs into containerd at most.
// One carries little more than 1 GB/s, whatever the number of blobs on it: the
// frames of an HTTP/2 connection are read and written by one goroutine at
// either end.
const maxConnections = 8

// wideStore is containerd's content store by way of several connections: each
// blob that is written takes the next.
type wideStore struct {
	content.Store // the first connection's, for all else
	others        []*client.Client
	next          atomic.Uint32
}

// widen adds connections to a client's. close is to be called when nothing is
// written any more; the client stays open.
func (d *daemon) widen(c *client.Client) (store *wideStore, err error) {
	store = &wideStore{Store: c.ContentStore()}
	for range min(maxConnections, (runtime.NumCPU()+1)/2) - 1 {
		other, err := client.New(d.address, client.WithDefaultNamespace(d.namespace), client.WithTimeout(dialLimit))
		if err != nil {
			return nil, errors.Join(err, store.close())
		}
		store.others = append(store.others, other)
	}
	return store, nil
}

// Writer opens a writer on the next connection.
func (s *wideStore) Writer(ctx context.Context, opts ...content.WriterOpt) (content.Writer, error) {
	n := int(s.next.Add(1)-1) % (len(s.others) + 1)
	if n == len(s.others) {
		return s.Store.Writer(ctx, opts...)
	}
	return s.others[n].ContentStore().Writer(ctx, opts...)
}

func (s *wideStore) close() (err error) {
	for _, c := range s.others {
		err = errors.Join(err, c.Close())
	}
	return err
}
