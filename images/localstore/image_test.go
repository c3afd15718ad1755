// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package localstore

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	checkpoint "github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/images/oci"
)

// one has one blob under all digests.
type one struct{ *bytes.Reader }

func (o one) Close() error { return nil }

func (o one) ReaderAt(context.Context, ocispec.Descriptor) (content.ReaderAt, error) { return o, nil }

func rootOf(t *testing.T, dir string) *os.Root {
	t.Helper()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { root.Close() })
	return root
}

// What is unpacked is called by the digest that it has, and not by the one that it should have, unless its bytes have
// been digested just now, on their way into the store.
func TestUnpackFilesDigest(t *testing.T) {
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: checkpoint.ImageDir + "/pages-1.img", Size: 6, Mode: 0o600}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write([]byte("memory")); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	d := ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayer, Digest: digest.FromString("another"), Size: int64(layer.Len())}
	wrote := new(Store)
	wrote.wrote.Store(d.Digest, true)
	for by, want := range map[*Store]digest.Digest{nil: digest.FromBytes(layer.Bytes()), new(Store): digest.FromBytes(layer.Bytes()), wrote: d.Digest} {
		root := rootOf(t, t.TempDir())
		made, err := applier{store: one{bytes.NewReader(layer.Bytes())}, by: by}.unpackFiles(t.Context(), d, root)
		if err != nil || made.Digest != want {
			t.Errorf("it is %s, %v; want %s", made.Digest, err, want)
		}
		if data, err := root.ReadFile(checkpoint.ImageDir + "/pages-1.img"); err != nil || string(data) != "memory" {
			t.Errorf("the file has %q, %v", data, err)
		}
	}
}

// An archive that says more of a file than it has is refused before there is a file.
func TestUnpackFilesTruncated(t *testing.T) {
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: checkpoint.ImageDir + "/pages-1.img", Size: 1 << 60, Mode: 0o600}); err != nil {
		t.Fatal(err)
	}
	d := ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayer, Digest: digest.FromBytes(layer.Bytes()), Size: int64(layer.Len())}
	dir := t.TempDir()
	_, err := applier{store: one{bytes.NewReader(layer.Bytes())}}.unpackFiles(t.Context(), d, rootOf(t, dir))
	if left, lerr := os.ReadDir(filepath.Join(dir, checkpoint.ImageDir)); !errors.Is(err, checkpoint.ErrDamaged) || lerr != nil || len(left) > 0 {
		t.Errorf("%v; %v, %v", err, left, lerr)
	}
}

// Where a snapshotter shows the layers below as well, a link of theirs leads to no directory of this machine.
func TestApplyFollowsNoLink(t *testing.T) {
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: checkpoint.ImageDir + "/job", Mode: 0o600}); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	snapshot, hosts := t.TempDir(), t.TempDir()
	if err := os.Symlink(hosts, filepath.Join(snapshot, checkpoint.ImageDir)); err != nil {
		t.Fatal(err)
	}
	d := ocispec.Descriptor{
		MediaType: ocispec.MediaTypeImageLayer, Digest: digest.FromBytes(layer.Bytes()), Size: int64(layer.Len()), Annotations: map[string]string{annotations.Layer: oci.LayerCRIU},
	}
	_, err := applier{store: one{bytes.NewReader(layer.Bytes())}}.Apply(t.Context(), d, []mount.Mount{{Type: "bind", Source: snapshot, Options: []string{"rbind"}}})
	if made, lerr := os.ReadDir(hosts); err == nil || lerr != nil || len(made) > 0 {
		t.Errorf("it has made %v on the host: %v, %v", made, err, lerr)
	}
}

// A containerd that is away is waited for once, and not by each step of what is undone for it.
func TestOutlastWaitsOnce(t *testing.T) {
	conn, err := grpc.NewClient("unix:"+filepath.Join(t.TempDir(), "nobody.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }() // nothing is sent
	c, err := client.NewWithConn(conn)
	if err != nil {
		t.Fatal(err)
	}
	before := time.Now().Add(-restart)
	gone.Store(&before)
	ctx, cancel := context.WithTimeout(t.Context(), restart/2)
	defer cancel()
	asked := 0
	err = Outlast(ctx, c, func() error {
		asked++
		return errdefs.ErrUnavailable
	})
	if err == nil || asked != 1 || ctx.Err() != nil {
		t.Errorf("asked %d times, %v, %v", asked, err, ctx.Err())
	}
	// containerd's library asks for a writer as long as it is told Unavailable.
	if _, err := content.OpenWriter(ctx, Outlasting(c), content.WithRef("blob")); err == nil || ctx.Err() != nil {
		t.Errorf("a writer: %v, %v", err, ctx.Err())
	}
	gone.Store(nil)
	brief, end := context.WithTimeout(ctx, 100*time.Millisecond)
	defer end()
	if err := Outlast(brief, c, func() error { return errdefs.ErrUnavailable }); err == nil || strings.Contains(err.Error(), "has not answered") {
		t.Errorf("who asks has no more time: %v", err)
	}
	if err := Outlast(ctx, c, func() error { return nil }); err != nil || gone.Load() != nil {
		t.Errorf("%v: it is there, and gone since %v", err, gone.Load())
	}
}
