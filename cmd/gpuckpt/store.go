// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"runtime"
	"sync/atomic"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
)

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
