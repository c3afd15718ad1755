// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"slices"
	"testing"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images/oci"
)

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
