// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package adapt

import (
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mnt"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/internal/node/host"
)

// Here returns the place of a container that is restored by a spec. mounts are those of the dump.
// With accept a file on any of its volumes may have changed.
func Here(spec *specs.Spec, mounts []*mnt.MntEntry, accept bool) (place Place, err error) {
	if accept {
		place.Volumes = make(map[int32]bool)
		for _, m := range mounts {
			if m.GetExtMount() || m.GetExtKey() != "" {
				place.Volumes[int32(m.GetMntId())] = true
			}
		}
	}
	made := false // without a namespace of its own the container has the host's
	if spec.Linux != nil {
		for _, ns := range spec.Linux.Namespaces {
			if ns.Type == specs.NetworkNamespace {
				place.Network, made = ns.Path, ns.Path == ""
				place.Moves = !made && !host.OwnsNamespace(ns)
			}
		}
	}
	if place.Shared = !made; !made {
		place.Addresses, err = host.Addresses(place.Network)
	}
	return place, err
}
