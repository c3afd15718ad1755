// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package annotations is the list of all annotation keys of this project, and of
// the keys of others that it reads or writes. One key is elsewhere, because cdi
// imports nothing: cdi.PairsAnnotation.
//
// An annotation begins on a container, where its user sets it, or on the manifest
// of a checkpoint image, where images/oci writes it. Nobody changes it afterwards,
// except a Task Update, whose annotations are orders and are not kept.
package annotations

// Prefix begins all annotations of this project.
const Prefix = "dev.gpuckpt."

// On a container: docs/reference.md has these comments. On a pod they reach the
// shim only if containerd's configuration of the runtime has pod_annotations =
// ["dev.gpuckpt.*"].
const (
	// Restore is true to restore a container whose image is a checkpoint, false to start it afresh, prefer
	// to start it afresh where it cannot be restored.
	Restore = "dev.gpuckpt.restore"
	// OnCheckpoint is keep (the default) or stop: what becomes of the container after a checkpoint whose
	// request has no options. Requests of ctr have options, those of the kubelet and nerdctl do not.
	OnCheckpoint = "dev.gpuckpt.on-checkpoint"
	// IOUring is deny (the default) or allow: whether io_uring, MPTCP and Landlock fail as on a kernel
	// without them. CRIU cannot dump them.
	IOUring = "dev.gpuckpt.io-uring"
	// Interposer is true to have the container's programs load the interposer, false (the default) not.
	Interposer = "dev.gpuckpt.interposer"
	// Companion is the name that dev.gpuckpt.interposer had until November 2026: older checkpoints have it.
	Companion = "dev.gpuckpt.companion"
	// HookPrefix begins the annotations of hooks: before-checkpoint, after-checkpoint and after-restore,
	// a command or a signal each. timeout and after-restore.on-failure are further ones.
	HookPrefix = "dev.gpuckpt.hook."
	// ChangedFiles is refuse (the default) or accept: whether a file on a volume, which a program had
	// open or mapped, may have another size at the restore. One that is open for appending may grow.
	ChangedFiles = "dev.gpuckpt.changed-files"
	// CRIUPrefix begins the annotations that set an option of CRIU: true, false or its value. They win
	// over [criu.options].
	CRIUPrefix = "dev.gpuckpt.criu."
	// ContainerName is the name of the container that a checkpoint was taken of, in the checkpoint.
	//
	// It is not org.criu.checkpoint.container.name: by that key CRI of containerd 2.2 and 2.3
	// knows images in another form, which it refuses to run.
	ContainerName = "dev.gpuckpt.container.name"
)

// On a Task Update. Such an update changes no resources; a client should send empty
// ones all the same, because runc's shim crashes without.
const (
	// Suspend is true to take the container off its GPUs, false to return it.
	Suspend = "dev.gpuckpt.suspend"
	// SuspendSpill is an absolute path of a directory on a disk of the node, to which a suspension writes
	// GPU state.
	SuspendSpill = "dev.gpuckpt.suspend.spill"
	// ResumeGPUs are the GPUs to resume on: UUIDs or CUDA's indices, one for each that the
	// container had, in their order.
	ResumeGPUs = "dev.gpuckpt.resume.gpus"
)

// On what a checkpoint adds to an image's layers.
const (
	// Layer is "rw", "index", "criu" or "gpu", and in images of early versions "anchor".
	Layer = "dev.gpuckpt.layer"
	// Area and Offset are on blobs, and layers, with GPU state: the name of the area, and where
	// in the area's file it begins, a decimal number.
	Area   = "dev.gpuckpt.area"
	Offset = "dev.gpuckpt.offset"
)

// On the manifest of a checkpoint image, for schedulers and people: a copy of what gpuckpt.json
// has. A node has facts under the same keys, to compare.
const (
	// LayerBytes is the size of the pieces that GPU state was cut into.
	LayerBytes = "dev.gpuckpt.layer.bytes"
	// Schema is the version of gpuckpt.json; of a node, the one that it reads.
	Schema = "dev.gpuckpt.schema"
	// Created is when the checkpoint was made, by RFC 3339.
	Created = "dev.gpuckpt.created"
	// Driver is the driver's version, which must be the same.
	Driver = "dev.gpuckpt.driver"
	// CUDA is the newest CUDA version of that driver.
	CUDA = "dev.gpuckpt.cuda"
	// GPUCount is the number of GPUs; as a label of a node, of its usable GPUs.
	GPUCount = "dev.gpuckpt.gpu.count"
	// GPUModels are their models, sorted, each once, with a comma and a space between.
	GPUModels = "dev.gpuckpt.gpu.models"
	// GPUMemory is how many bytes of memory the GPUs have in all.
	GPUMemory = "dev.gpuckpt.gpu.memory"
	// GPUState is how many bytes of GPU state there are; of an image alone.
	GPUState = "dev.gpuckpt.gpu.state"
	// GPUFree is how many bytes of GPU memory are free now; of a node alone.
	GPUFree = "dev.gpuckpt.gpu.free"
	// Processes is the number of CUDA processes; of an image alone.
	Processes = "dev.gpuckpt.processes"
)

// Keys of others.
const (
	// CRIUConfig tells runc which configuration file CRIU reads, in a dump and in a
	// restore (runc, libcontainer/criu_linux.go).
	CRIUConfig = "org.criu.config"
	// CRIImageName is where containerd's CRI service writes the name of the image.
	// Other clients write it nowhere that a shim can see.
	CRIImageName = "io.kubernetes.cri.image-name"
	// CRISandboxID is on each container of a pod.
	CRISandboxID = "io.kubernetes.cri.sandbox-id"
	// Base and BaseDigest name the base image (OCI image specification).
	Base       = "org.opencontainers.image.base.name"
	BaseDigest = "org.opencontainers.image.base.digest"
)
