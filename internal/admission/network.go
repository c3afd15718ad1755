// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"fmt"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/internal/criu"
)

// A container's network is the host's, or one that the runtime makes for it (with ctr
// and nerdctl), or one that is there before it (a pod's). CRIU restores the first and
// the third into what it is given, and makes the second anew. So a checkpoint with a
// network of one kind cannot be restored into another: CRIU would refuse it in words
// that help nobody, or make an empty network beside the container's.

// networkKind says where a container's network comes from, in words for a person.
type networkKind string

const (
	hostNetwork  networkKind = "the host's network"
	madeNetwork  networkKind = "a network that the runtime makes for it, as with ctr and nerdctl"
	givenNetwork networkKind = "a network that is there before it, as a pod's"
)

// network compares where the dump's network comes from with where the spec's does.
// task finds each process that would be in the host's network.
func (a *allowance) network(d *criu.Dump) error {
	was, is := networkOfDump(d), a.networkOfSpec()
	if was == is || was == hostNetwork {
		return nil
	}
	return fmt.Errorf("it was made with %s, and the container has %s", was, is)
}

// networkOfDump returns the kind of network that the first process had.
func networkOfDump(d *criu.Dump) networkKind {
	switch own := d.Tasks[0].IDs.GetNetNsId(); {
	case own == 0 || own == d.Inventory.GetRootIds().GetNetNsId():
		return hostNetwork
	case d.NetworkGiven:
		return givenNetwork
	}
	return madeNetwork
}

// networkOfSpec returns the kind of network that the spec asks for.
func (a *allowance) networkOfSpec() networkKind {
	for _, ns := range a.spec.Linux.Namespaces {
		switch {
		case ns.Type != specs.NetworkNamespace:
		case ns.Path == "":
			return madeNetwork
		case !a.host.OwnsNamespace(ns):
			return givenNetwork
		}
	}
	return hostNetwork
}
