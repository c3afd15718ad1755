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

// The annotations of a checkpoint image.
const (
	// AnnotationLayer is on the layers that a checkpoint adds: LayerRW,
	// LayerGPU or LayerCRIU.
	AnnotationLayer = "dev.gpuckpt.layer"
	// AnnotationArea and AnnotationOffset are on GPU layers: the area's name
	// and where in the area's file the layer begins, a decimal number.
	AnnotationArea   = "dev.gpuckpt.area"
	AnnotationOffset = "dev.gpuckpt.offset"
	// AnnotationLayerBytes is on the manifest: the size of what the GPU state
	// was cut into, a decimal number.
	AnnotationLayerBytes = "dev.gpuckpt.layer.bytes"

	// The following are on the manifest, for schedulers and people: a copy of
	// what gpuckpt.json says.
	AnnotationSchema    = "dev.gpuckpt.schema"
	AnnotationCreated   = "dev.gpuckpt.created"    // RFC 3339
	AnnotationDriver    = "dev.gpuckpt.driver"     // "580.159.04"
	AnnotationCUDA      = "dev.gpuckpt.cuda"       // "13.0"
	AnnotationGPUCount  = "dev.gpuckpt.gpu.count"  // "2"
	AnnotationGPUModels = "dev.gpuckpt.gpu.models" // names, sorted, each once, ", " between
	AnnotationGPUMemory = "dev.gpuckpt.gpu.memory" // bytes of all the GPUs' memory
	AnnotationGPUState  = "dev.gpuckpt.gpu.state"  // bytes of GPU state
	AnnotationProcesses = "dev.gpuckpt.processes"  // number of CUDA processes
	// AnnotationBase names the base image, where Options.BaseName says it:
	// the key of the OCI image specification.
	AnnotationBase       = "org.opencontainers.image.base.name"
	AnnotationBaseDigest = "org.opencontainers.image.base.digest"

	// AnnotationContainer is the name of the container. It is not
	// org.criu.checkpoint.container.name: by that key CRI of containerd 2.2 and 2.3
	// knows images in another form, which it refuses to run.
	AnnotationContainer = "dev.gpuckpt.container.name"
)

// The values of AnnotationLayer.
const (
	LayerRW   = "rw"
	LayerGPU  = "gpu"
	LayerCRIU = "criu"
)
