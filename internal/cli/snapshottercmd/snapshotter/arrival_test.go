// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"errors"
	"slices"
	"testing"

	introspectionapi "github.com/containerd/containerd/api/services/introspection/v1"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/introspection"
	"github.com/containerd/containerd/v2/plugins/content/local"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images/arriving"
	"github.com/gpuckpt/gpuckpt/images/oci"
	"github.com/gpuckpt/gpuckpt/images/registry"
)

// unasked is a containerd that nobody is to ask where its content store is.
type unasked struct {
	introspection.Service
	*testing.T
}

func (u unasked) Plugins(context.Context, ...string) (*introspectionapi.PluginsResponse, error) {
	u.Error("containerd is asked where its content store is")
	return nil, errdefs.ErrUnavailable
}

// A layer that is not in containerd's content store comes from the registry, without a look at where that store is.
func TestFetchFromRegistry(t *testing.T) {
	store, err := local.NewStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	a := newArrival(&Snapshotter{ctx: t.Context(), o: Options{Dial: func() (*client.Client, error) {
		return client.New("", client.WithServices(client.WithContentStore(store), client.WithIntrospectionService(unasked{T: t})))
	}}}, record{})
	p := &part{Target: arriving.Target{Layer: oci.Layer{Kind: oci.LayerGPU, Area: "gpu-1-0", Digest: digest.FromString("gpu"), DiffID: digest.FromString("gpu")}, LayerBytes: 1 << 20, Root: t.TempDir()}}
	if err := p.Make(); err != nil {
		t.Fatal(err)
	}
	a.from.here = registry.Local(store, "r.test/job:1", ocispec.Descriptor{}, "", registry.Options{}) // which lacks it, too
	if err := a.fetch(t.Context(), p); !errors.Is(err, errdefs.ErrNotFound) {
		t.Error(err)
	}
}

// An image of more layers than can be stacked is left to containerd: each would cost a snapshot and a writer.
func TestInOrder(t *testing.T) {
	above := []oci.Layer{{Kind: oci.LayerGPU, Area: "gpu-1-0"}, {Kind: oci.LayerCRIU}}
	anchor, err := oci.Anchor(64<<20, above)
	if err != nil {
		t.Fatal(err)
	}
	i := &oci.Image{LayerBytes: 64 << 20, Layers: append(append(make([]oci.Layer, 497), oci.Layer{DiffID: digest.FromBytes(anchor)}), above...)}
	for n := range i.Layers {
		i.Layers[n].MediaType = ocispec.MediaTypeImageLayer
	}
	if !inOrder(i) {
		t.Error("500 layers are too many")
	}
	i.Layers = slices.Insert(i.Layers, 0, i.Layers[0])
	if inOrder(i) {
		t.Error("501 layers are not too many")
	}
}
