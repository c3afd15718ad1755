// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sync/errgroup"

	"github.com/gpuckpt/gpuckpt/images/oci"
	connections "github.com/gpuckpt/gpuckpt/images/registry"
)

// registryServer is a registry on a loopback port, go-containerregistry's, with
// its blobs in files: images here are too large for memory.
type registryServer struct {
	host  string // "127.0.0.1:4711"
	blobs *blobFiles
	web   *http.Server
	limit *limiter
}

// startRegistry starts one with its blobs in a new directory in parent. Its end
// is close's.
func startRegistry(parent string) (*registryServer, error) {
	dir, err := os.MkdirTemp(parent, "registry")
	if err != nil {
		return nil, fmt.Errorf("start a registry: %w", err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start a registry: %w", err), os.Remove(dir))
	}
	blobs := &blobFiles{dir: dir}
	handler := registry.New(registry.WithBlobHandler(blobs), registry.Logger(log.New(io.Discard, "", 0)))
	limit := new(limiter)
	s := &registryServer{
		host: listener.Addr().String(), blobs: blobs, limit: limit,
		web: &http.Server{Handler: limit.handler(inOneRequest(handler)), ReadHeaderTimeout: time.Minute},
	}
	go func() { _ = s.web.Serve(listener) }() // until close
	return s, nil
}

// ref is an image's name in the registry.
func (s *registryServer) ref(name string) string { return s.host + "/" + name }

// rate fetches all layers of GPU state without a limit and throws them away, over as many connections as
// gpuckpt has, and returns the bytes a second.
func (s *registryServer) rate(ctx context.Context, image *oci.Image) (float64, error) {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(connections.DefaultParallel())
	var fetched atomic.Int64
	began := time.Now()
	for _, l := range image.Layers {
		if l.Kind != oci.LayerGPU {
			continue
		}
		group.Go(func() error {
			q, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+s.ref("v2/job/blobs/"+l.Digest.String()), nil)
			if err != nil {
				return err
			}
			answer, err := http.DefaultClient.Do(q)
			if err != nil {
				return err
			}
			defer answer.Body.Close()
			if answer.StatusCode != http.StatusOK {
				return fmt.Errorf("fetch %s: %s", l.Digest, answer.Status)
			}
			n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, answer.Body, make([]byte, 1<<20))
			fetched.Add(n)
			return err
		})
	}
	err := group.Wait()
	return float64(fetched.Load()) / time.Since(began).Seconds(), err
}

// sent is how many bytes of blobs were sent to the registry up to now.
func (s *registryServer) sent() uint64 { return uint64(s.blobs.received.Load()) }

// close ends the registry and removes its blobs.
func (s *registryServer) close() error {
	return errors.Join(s.web.Close(), os.RemoveAll(s.blobs.dir))
}

// inOneRequest makes of the end of an upload, a PUT with all of the blob, an
// upload in one request, a POST with the digest. To the library they are the
// same, but of the former it takes one at a time.
func inOneRequest(next http.Handler) http.Handler {
	const uploads = "/blobs/uploads/"
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if at := strings.LastIndex(r.URL.Path, uploads); at >= 0 && r.Method == http.MethodPut && r.ContentLength > 0 {
			r = r.Clone(r.Context())
			r.Method, r.URL.Path = http.MethodPost, r.URL.Path[:at+len(uploads)]
		}
		next.ServeHTTP(w, r)
	})
}

// blobFiles are blobs in a directory, a file each. The library's own such store
// reads a blob in full each time that somebody asks whether it is there.
type blobFiles struct {
	dir string
	// received are the bytes that were put here.
	received atomic.Int64
}

func (b *blobFiles) path(h v1.Hash) string { return filepath.Join(b.dir, h.Algorithm+"-"+h.Hex) }

// Stat gives the size of a blob.
func (b *blobFiles) Stat(_ context.Context, _ string, h v1.Hash) (int64, error) {
	info, err := os.Stat(b.path(h))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, registry.ErrNotFound
	}
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

// Get opens a blob.
func (b *blobFiles) Get(_ context.Context, _ string, h v1.Hash) (io.ReadCloser, error) {
	f, err := os.Open(b.path(h))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, registry.ErrNotFound
	}
	return f, err
}

// Put stores a blob, whose end fails to be read unless its digest is right. On an
// error there is none.
func (b *blobFiles) Put(_ context.Context, _ string, h v1.Hash, data io.ReadCloser) error {
	f, err := os.CreateTemp(b.dir, "upload")
	if err != nil {
		return err
	}
	n, err := io.Copy(f, data)
	b.received.Add(n)
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), b.path(h))
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}
