// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package oci makes checkpoints OCI images and reads them: build, verify, inspect, compare.
//
// Build makes the layers of an opened images.Checkpoint in a content store, several at a time, then
// the config, then the manifest. Nobody sees the image before it has a name, which the caller gives
// it. From then on it is an image like any other, and not changed again.
//
// Its layers, bottom up: those of the base image by their digests, one with the container's
// writable files, one that says which blobs have GPU state and memory, and one with CRIU's images and gpuckpt.json. The
// blobs are in the manifest beside the layers: who pulls the image fetches them, and unpacks them nowhere.
// docs/internals/format.md describes them for others.
package oci

// The kinds of layers, as the annotation annotations.Layer of a layer has them.
const (
	LayerRW     = "rw"
	LayerIndex  = "index"
	LayerMemory = "memory" // always of a blob that is no layer
	LayerGPU    = "gpu"    // also of a blob
	LayerCRIU   = "criu"

	// layerAnchor was below GPU state in images of early versions, an empty directory.
	layerAnchor = "anchor"
)

// MediaTypeGPU is that of a blob with GPU state or memory as it is. It is no layer: containerd fetches it, and unpacks it nowhere.
const MediaTypeGPU = "application/vnd.gpuckpt.gpu.v1"

// isState reports whether what a checkpoint adds, of a kind, is a part of an area: it has its name and an offset.
func isState(kind string) bool { return kind == LayerGPU || kind == LayerMemory }
