// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package localstore tests images/localstore against the content and metadata stores of
// containerd, which this package builds in its own process.
package localstore

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/metadata"
	"github.com/containerd/containerd/v2/pkg/labels"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/plugins/content/local"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	bolt "go.etcd.io/bbolt"

	"github.com/gpuckpt/gpuckpt/images/localstore"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// daemon is what containerd's content service is made of.
type daemon struct {
	root  string
	db    *metadata.DB
	store content.Store
	known ocispec.Descriptor
}

func newDaemon(t *testing.T, opts ...metadata.DBOpt) (context.Context, *daemon) {
	t.Helper()
	ctx := namespaces.WithNamespace(t.Context(), "test")
	d := &daemon{root: t.TempDir()}
	backend, err := local.NewStore(d.root)
	if err != nil {
		t.Fatal(err)
	}
	db, err := bolt.Open(filepath.Join(t.TempDir(), "meta.db"), 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	d.db = metadata.NewDB(db, backend, nil, opts...)
	d.store = d.db.ContentStore()
	d.known = describe([]byte("the container's image"))
	if err := content.WriteBlob(ctx, d.store, "known", bytes.NewReader([]byte("the container's image")), d.known, root); err != nil {
		t.Fatal(err)
	}
	return ctx, d
}

// root keeps a blob from the garbage collector.
var root = content.WithLabels(map[string]string{labels.LabelUncompressed: "x", "containerd.io/gc.root": "now"})

func describe(data []byte) ocispec.Descriptor {
	return ocispec.Descriptor{Digest: digest.FromBytes(data), Size: int64(len(data))}
}

func begin(ctx context.Context, t *testing.T, s *localstore.Store, data []byte) content.Writer {
	t.Helper()
	w, err := s.Writer(ctx, content.WithRef("layer"))
	if err != nil {
		t.Fatal(err)
	}
	if n, err := w.Write(data); err != nil || n != len(data) {
		t.Fatal(n, err)
	}
	return w
}

func read(ctx context.Context, t *testing.T, store content.Provider, data []byte) {
	t.Helper()
	got, err := content.ReadBlob(ctx, store, describe(data))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, data) {
		t.Fatalf("the blob is %q, want %q", got, data)
	}
}

// What is committed is containerd's, with its labels, in this namespace and in
// no other, whatever the sharing policy.
func TestCommit(t *testing.T) {
	for name, opts := range map[string][]metadata.DBOpt{"shared": nil, "isolated": {metadata.WithPolicyIsolated}} {
		t.Run(name, func(t *testing.T) {
			ctx, d := newDaemon(t, opts...)
			s, err := localstore.Open(d.store, d.root, d.known)
			if err != nil {
				t.Fatal(err)
			}
			data := bytes.Repeat([]byte("GPU state"), 1000)
			w := begin(ctx, t, s, data)
			if w.Digest() != describe(data).Digest {
				t.Error("the digest is", w.Digest())
			}
			if err := w.Commit(ctx, int64(len(data)), w.Digest(), root); err != nil {
				t.Fatal(err)
			}
			read(ctx, t, d.store, data)
			info, err := s.Info(ctx, describe(data).Digest)
			if err != nil {
				t.Fatal(err)
			}
			if info.Size != int64(len(data)) || info.Labels[labels.LabelUncompressed] != "x" {
				t.Errorf("%+v", info)
			}
			if _, err := d.store.Info(namespaces.WithNamespace(ctx, "other"), describe(data).Digest); !errdefs.IsNotFound(err) {
				t.Error("another namespace has it as well:", err)
			}
			if _, err := s.Status(ctx, "layer"); !errdefs.IsNotFound(err) {
				t.Error("the ingest is still there:", err)
			}
			read(ctx, t, s, data)
			if _, err := s.ReaderAt(namespaces.WithNamespace(ctx, "other"), describe(data)); !errdefs.IsNotFound(err) {
				t.Error("another namespace reads it:", err)
			}
			// A second time it is there already.
			if err := begin(ctx, t, s, data).Commit(ctx, 0, ""); !errdefs.IsAlreadyExists(err) {
				t.Error("committed twice:", err)
			}
			if _, err := d.db.GarbageCollect(ctx); err != nil {
				t.Fatal(err)
			}
			read(ctx, t, d.store, data)
		})
	}
}

// collecting is a store whose garbage is collected when a blob is asked for by
// its digest.
type collecting struct {
	content.Store
	db *metadata.DB
}

func (c collecting) Writer(ctx context.Context, opts ...content.WriterOpt) (content.Writer, error) {
	if _, err := c.db.GarbageCollect(ctx); err != nil {
		return nil, err
	}
	return c.Store.Writer(ctx, opts...)
}

// A blob is read past the socket once containerd has said that there is one; where its file is not to be had, through it.
func TestReadPastTheSocket(t *testing.T) {
	ctx, d := newDaemon(t)
	data := []byte("GPU state")
	if err := content.WriteBlob(ctx, d.store, "blob", bytes.NewReader(data), describe(data), root); err != nil {
		t.Fatal(err)
	}
	s, err := localstore.Open(unread{d.store}, d.root, d.known)
	if err != nil {
		t.Fatal(err)
	}
	read(ctx, t, s, data)
	if _, err := s.ReaderAt(ctx, describe([]byte("another"))); !errdefs.IsNotFound(err) {
		t.Error("read what is not there:", err)
	}
	if err := os.Remove(filepath.Join(d.root, "blobs", "sha256", describe(data).Digest.Encoded())); err != nil {
		t.Fatal(err)
	}
	if _, err := s.ReaderAt(ctx, describe(data)); !errors.Is(err, errSocket) {
		t.Error("without the file:", err)
	}
}

var errSocket = errors.New("through the socket")

// unread is a store from which nothing is read through the socket.
type unread struct{ content.Store }

func (unread) ReaderAt(context.Context, ocispec.Descriptor) (content.ReaderAt, error) {
	return nil, errSocket
}

// The collector may take the blob before containerd is asked for it.
func TestCollectedInBetween(t *testing.T) {
	ctx, d := newDaemon(t)
	s, err := localstore.Open(collecting{d.store, d.db}, d.root, d.known)
	if err != nil {
		t.Fatal(err)
	}
	data := bytes.Repeat([]byte("GPU state"), 1000)
	if err := begin(ctx, t, s, data).Commit(ctx, 0, "", root); err != nil {
		t.Fatal(err)
	}
	read(ctx, t, d.store, data)
}

// A blob whose digest is known goes past the socket, too, unless the namespace has it or another kind of digest names it.
func TestKnownDigest(t *testing.T) {
	ctx, d := newDaemon(t)
	s, err := localstore.Open(d.store, d.root, d.known)
	if err != nil {
		t.Fatal(err)
	}
	data := []byte("GPU state")
	long := ocispec.Descriptor{Digest: digest.SHA512.FromBytes(data), Size: int64(len(data))}
	for name, c := range map[string]struct {
		of     ocispec.Descriptor
		socket bool
	}{"SHA-256": {describe(data), false}, "SHA-512": {long, true}} {
		w, err := s.Writer(ctx, content.WithRef(name), content.WithDescriptor(c.of))
		if err != nil {
			t.Fatal(name, err)
		}
		if _, err := d.store.Status(ctx, name); c.socket != (err == nil) {
			t.Errorf("%s: containerd's ingest: %v", name, err)
		}
		if err := content.Copy(ctx, w, bytes.NewReader(data), c.of.Size, c.of.Digest, root); err != nil {
			t.Error(name, err)
		}
		if _, err := s.Writer(ctx, content.WithRef(name), content.WithDescriptor(c.of)); !errdefs.IsAlreadyExists(err) {
			t.Errorf("%s, once more: %v", name, err)
		}
	}
	read(ctx, t, d.store, data)
	of := describe([]byte("another state"))
	w, err := s.Writer(ctx, content.WithRef("wrong"), content.WithDescriptor(of))
	if err != nil {
		t.Fatal(err)
	}
	if err := content.Copy(ctx, w, bytes.NewReader([]byte("another stale")), of.Size, of.Digest); !errdefs.IsFailedPrecondition(err) {
		t.Error("other bytes than those of the digest:", err)
	}
	if _, err := d.store.Info(ctx, of.Digest); !errdefs.IsNotFound(err) {
		t.Error("they are there:", err)
	}
}

// What is given up leaves nothing behind, nor does what is not as expected.
func TestNothingLeft(t *testing.T) {
	ctx, d := newDaemon(t)
	s, err := localstore.Open(d.store, d.root, d.known)
	if err != nil {
		t.Fatal(err)
	}
	w := begin(ctx, t, s, []byte("given up"))
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := w.Commit(ctx, 0, ""); !errdefs.IsFailedPrecondition(err) {
		t.Error("commit after close:", err)
	}
	if err := begin(ctx, t, s, []byte("short")).Commit(ctx, 6, ""); !errdefs.IsFailedPrecondition(err) {
		t.Error("commit with a wrong size:", err)
	}
	if err := begin(ctx, t, s, []byte("other")).Commit(ctx, 0, d.known.Digest); !errdefs.IsFailedPrecondition(err) {
		t.Error("commit with a wrong digest:", err)
	}
	var names []string
	for _, dir := range []string{"blobs/sha256", "ingest"} {
		entries, err := os.ReadDir(filepath.Join(d.root, dir))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			names = append(names, e.Name())
		}
	}
	if len(names) != 1 || names[0] != d.known.Digest.Encoded() {
		t.Error("the store holds", names)
	}
}

// A directory that is not this containerd's is not written to.
func TestForeign(t *testing.T) {
	_, d := newDaemon(t)
	_, other := newDaemon(t)
	absent := describe([]byte("what only one of them has"))
	if _, err := localstore.Open(d.store, other.root, absent); err == nil {
		t.Error("a directory without a known blob was taken")
	}
	longer := other.known
	longer.Size++
	if _, err := localstore.Open(d.store, other.root, longer); err == nil {
		t.Error("a directory with another blob under a known digest was taken")
	}
	if _, err := localstore.Open(d.store, d.root, ocispec.Descriptor{}); err == nil {
		t.Error("the directory of a namespace without blobs was taken")
	}
	if _, err := localstore.Open(d.store, filepath.Join(d.root, "none"), d.known); err == nil {
		t.Error("a directory that is not there was taken")
	}
}

// An image keeps its name, whoever wants it for another.
func TestNameIsKept(t *testing.T) {
	ctx, d := newDaemon(t)
	names := metadata.NewImageStore(d.db)
	c, err := client.New("", client.WithServices(client.WithImageStore(names)))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	const name = "registry.test/kube-proxy:1"
	theirs, ours := describe([]byte("theirs")), describe([]byte("ours"))
	theirs.MediaType, ours.MediaType = ocispec.MediaTypeImageManifest, ocispec.MediaTypeImageManifest
	has := func(want digest.Digest) {
		t.Helper()
		if found, err := localstore.Find(ctx, c, name); err != nil || found.Target.Digest != want {
			t.Errorf("%s is %s, %v; want %s", name, found.Target.Digest, err, want)
		}
	}
	for range 2 { // once more is nothing new
		if err := errors.Join(localstore.CheckFree(ctx, c, name, theirs.Digest), localstore.Tag(ctx, c, name, theirs)); err != nil {
			t.Fatal(err)
		}
		has(theirs.Digest)
	}
	for _, err := range []error{localstore.Tag(ctx, c, name, ours), localstore.CheckFree(ctx, c, name, ours.Digest), localstore.CheckFree(ctx, c, name, "")} {
		if !errors.Is(err, localstore.ErrTaken) || !errdefs.IsAlreadyExists(err) {
			t.Errorf("error %v", err)
		}
		harness.Says(t, err, theirs.Digest.String(), "ctr --namespace test images rm "+name)
	}
	has(theirs.Digest)
	if err := names.Delete(ctx, name); err != nil {
		t.Fatal(err)
	}
	if err := localstore.Tag(ctx, c, name, ours); err != nil {
		t.Fatal(err)
	}
	has(ours.Digest)
}

// A blob can be read by its other name before it is complete, with its full size, and is not written anew; it is none of
// containerd's unless its digest is right, and then has one copy. One that containerd has gets a link.
func TestEarly(t *testing.T) {
	ctx, d := newDaemon(t)
	s, err := localstore.Open(d.store, d.root, d.known)
	if err != nil {
		t.Fatal(err)
	}
	dir, err := s.Beside("arriving", "image")
	if err != nil {
		t.Fatal(err)
	}
	data := bytes.Repeat([]byte("GPU state"), 10_000)
	desc := describe(data)
	path := filepath.Join(dir, desc.Digest.Encoded())
	w, err := s.Early(ctx, desc, dir)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	seen := func(want []byte) {
		t.Helper()
		got, err := os.ReadFile(path)
		if err != nil || len(got) != len(data) || !bytes.HasPrefix(got, want) {
			t.Errorf("%d bytes can be read, %v", len(got), err)
		}
	}
	seen(nil)
	if _, err := w.Write(data[:100]); err != nil {
		t.Fatal(err)
	}
	seen(data[:100])
	if err := w.Truncate(0); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("it is written anew: %v", err)
	}
	if _, err := w.Write(data[100:]); err != nil {
		t.Fatal(err)
	}
	seen(data)
	if err := s.Link(ctx, desc, t.TempDir()); !errdefs.IsNotFound(err) {
		t.Errorf("it is containerd's already: %v", err)
	}
	if err := w.Commit(ctx, desc.Size, desc.Digest, root); err != nil {
		t.Fatal(err)
	}
	read(ctx, t, s, data)
	ours, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := os.Stat(filepath.Join(d.root, "blobs", "sha256", desc.Digest.Encoded()))
	if err != nil || !os.SameFile(ours, theirs) {
		t.Errorf("there are two copies: %v", err)
	}
	if dir, err = s.Beside("arriving", "another"); err == nil {
		err = s.Link(ctx, desc, dir)
	}
	if err != nil {
		t.Fatal(err)
	}
	if linked, err := os.Stat(filepath.Join(dir, desc.Digest.Encoded())); err != nil || !os.SameFile(ours, linked) {
		t.Errorf("the link: %v", err)
	}
	long := desc
	long.Size++
	if err := s.Link(ctx, long, t.TempDir()); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a link to a blob of another size: %v", err)
	}
	other := describe([]byte("GPU state of another"))
	if w, err = s.Early(ctx, other, dir); err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if _, err := w.Write(data[:other.Size]); err != nil {
		t.Fatal(err)
	}
	if err := w.Commit(ctx, other.Size, other.Digest, root); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("wrong bytes: %v", err)
	}
}
