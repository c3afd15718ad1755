// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package oci makes checkpoints OCI images and reads them: build, verify, inspect, compare.
//
// Build makes the layers of an opened images.Checkpoint in a content store, several at a time, then
// the config, then the manifest. Nobody sees the image before it has a name, which the caller gives
// it. From then on it is an image like any other, and not changed again.
//
// Its layers, bottom up: those of the base image by their digests, one with the container's
// writable files, an anchor, those with the GPU state, and one with CRIU's images and gpuckpt.json.
// docs/internals/format.md describes them for others.
package oci

// The kinds of layers, as the annotation annotations.Layer of a layer has them.
const (
	LayerRW     = "rw"
	LayerAnchor = "anchor"
	LayerGPU    = "gpu"
	LayerCRIU   = "criu"
)
