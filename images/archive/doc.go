// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package archive reads and writes the archives in which the kubelet keeps
// checkpoints (`/var/lib/kubelet/checkpoints/checkpoint-….tar`): those that
// containerd's CRI, CRI-O and this project write, and that checkpointctl shows.
//
// An archive is one tar file. Open reads it in place: nothing is unpacked, each file of
// the checkpoint reads its own part of the archive, which must stay as it is until
// Close. Nobody trusts an archive: Open checks the name and kind of every entry first.
//
//	config.dump       the container: name, image, runtime, times
//	spec.dump         its OCI spec
//	status.dump       its status, as CRI has it
//	network.status    its networks, as Podman has them
//	checkpoint/       CRIU's images; gpuckpt.json and the GPU state
//	rootfs-diff.tar   the writable files: a layer, as a plain tar or compressed
//	deleted.files     files of the image that are gone, a JSON list
//	dump.log, stats-dump, …   what CRIU had to say
package archive

import (
	"encoding/json"
	"errors"

	metadata "github.com/checkpoint-restore/checkpointctl/lib"

	"github.com/gpuckpt/gpuckpt/images"
)

var (
	// ErrMalformed reports a file that is not an archive of a checkpoint, is damaged, or has what
	// images.ReadTar refuses: links, devices, names that lead out of it.
	ErrMalformed = errors.New("malformed checkpoint archive")
	// ErrUnsupported reports an archive with what a restore could not bring back (volumes, shared
	// memory apart), or compressed as a whole.
	ErrUnsupported = errors.New("unsupported checkpoint archive")
)

// Config is config.dump: RootfsImage is the image as the user called it, RootfsImageRef its digest
// or id, RootfsImageName its full name.
type Config = metadata.ContainerConfig

// Contents are what an archive is written of.
type Contents struct {
	// Checkpoint is read in place. Its files with names of an archive's root (spec.dump, dump.log
	// and so on) go there, the rest to checkpoint/.
	Checkpoint *images.Checkpoint
	// Config and Spec are written unless the checkpoint has files for them.
	Config Config
	Spec   json.RawMessage
	// Layers are the writable files, bottom up: plain tar archives.
	Layers []Layer
}
