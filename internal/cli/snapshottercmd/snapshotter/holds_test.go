// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/plugins/content/local"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images/oci"
)

// A pull that asks for no layer any more is soon in nobody's way, and one that takes long is in the end. The
// next pull of the image holds again.
func TestHolds(t *testing.T) {
	store, err := local.NewStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	c, err := client.New("", client.WithServices(client.WithContentStore(store)))
	if err != nil {
		t.Fatal(err)
	}
	image := &oci.Image{Layers: []oci.Layer{{Kind: oci.LayerGPU, MediaType: ocispec.MediaTypeImageLayer, Digest: digest.FromString("gpu")}}}
	ref := remotes.MakeRefKey(t.Context(), image.Layers[0].Descriptor())
	synctest.Test(t, func(t *testing.T) {
		h := newHolds(context.Background(), c, func() error { return nil })
		held := func(want bool, what string) {
			t.Helper()
			synctest.Wait()
			if _, err := store.Status(t.Context(), ref); (err == nil) != want || err != nil && !errdefs.IsNotFound(err) {
				t.Errorf("%s: held is %t: %v", what, !want, err)
			}
		}
		answered := h.take(image)
		time.Sleep(holdFor - time.Second)
		held(true, "a layer takes long")
		answered()
		held(true, "between two layers")
		answered = h.take(image)
		time.Sleep(2 * time.Second)
		held(false, "the pull takes too long")
		answered()
		h.take(image)()
		held(false, "it goes on")
		time.Sleep(holdIdle + time.Second)
		h.take(image)()
		held(true, "the next pull")
		time.Sleep(holdIdle + time.Second)
		held(false, "it was given up")
		h.take(image)
		h.end()
		held(false, "the pull has ended")
	})
}
