// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package oci makes checkpoints OCI images and reads them: build, verify,
// inspect, compare.
//
// A checkpoint image begins as a flat checkpoint, an opened images.Checkpoint.
// Build writes its layers into a content store, several at a time, then the
// config, then the manifest; nobody sees the image before that is there and has
// been given a name, which is the caller's to do. From then on it is an image
// like any other: pushed, pulled, unpacked, and not changed again.
//
// Its layers, bottom up: those of the base image by their digests, one with
// the container's writable files, those with the GPU state, and one with
// CRIU's images and gpuckpt.json. docs/images.md describes them for others.
package oci

// The kinds of layers, as the annotation annotations.Layer of a layer has them.
const (
	LayerRW   = "rw"
	LayerGPU  = "gpu"
	LayerCRIU = "criu"
)
