// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package registryserver is a registry on a port of this machine, go-containerregistry's, for tests and
// measurements on machines that have no other. Its blobs are files, because checkpoint images are too
// large for memory, and it can send them at a rate.
package registryserver

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

// Server is a registry that runs.
type Server struct {
	host  string // "127.0.0.1:4711"
	blobs *blobFiles
	web   *http.Server
	limit *limiter
}

// Start starts a registry on a loopback port, with its blobs in a new directory in parent. Close ends it.
// On an error nothing is left.
func Start(parent string) (*Server, error) { return StartAt("127.0.0.1", parent) }

// StartAt is Start at another address of this machine.
func StartAt(address, parent string) (*Server, error) {
	dir, err := os.MkdirTemp(parent, "registry")
	if err != nil {
		return nil, fmt.Errorf("start a registry: %w", err)
	}
	listener, err := net.Listen("tcp", net.JoinHostPort(address, "0"))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start a registry: %w", err), os.Remove(dir))
	}
	blobs := &blobFiles{dir: dir}
	handler := registry.New(registry.WithBlobHandler(blobs), registry.Logger(log.New(io.Discard, "", 0)))
	limit := new(limiter)
	s := &Server{
		host: listener.Addr().String(), blobs: blobs, limit: limit,
		web: &http.Server{Handler: limit.handler(inOneRequest(handler)), ReadHeaderTimeout: time.Minute},
	}
	go func() { _ = s.web.Serve(listener) }() // until close
	return s, nil
}

// Ref returns an image's name in the registry, of "job:1" for example.
func (s *Server) Ref(name string) string { return s.host + "/" + name }

// Rate fetches all layers of GPU state without a limit and throws them away, over as many connections as
// gpuckpt has, and returns the bytes a second. The image must be pushed as "job".
func (s *Server) Rate(ctx context.Context, image *oci.Image) (float64, error) {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(connections.DefaultParallel())
	var fetched atomic.Int64
	began := time.Now()
	for _, l := range image.Layers {
		if l.Kind != oci.LayerGPU {
			continue
		}
		group.Go(func() error {
			q, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+s.Ref("v2/job/blobs/"+l.Digest.String()), nil)
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

// Received returns how many bytes of blobs the registry has been sent.
func (s *Server) Received() uint64 { return uint64(s.blobs.received.Load()) }

// Limit has the registry send so many bytes of blobs a second, over all connections; 0 is no limit. Sent
// begins anew.
func (s *Server) Limit(rate uint64) { s.limit.set(rate) }

// Sent returns how many bytes of blobs the registry has sent since the last Limit.
func (s *Server) Sent() uint64 { return s.limit.count() }

// Close ends the registry and removes its blobs.
func (s *Server) Close() error {
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
