// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/netdev"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// A container's network is the host's, one that runc makes for it (ctr's, nerdctl's),
// or one that is there before it (a pod's). CRIU restores the first and the third
// into what is given to it, and makes the second anew. So a checkpoint with a network
// of one kind cannot be restored into another: CRIU would refuse it with words that
// help nobody, or give the processes an empty network beside the container's.

// networkKind is where a container's network comes from, as a person is told.
type networkKind string

const (
	hostNetwork  networkKind = "the host's network"
	madeNetwork  networkKind = "a network that the runtime makes for it, as with ctr and nerdctl"
	givenNetwork networkKind = "a network that is there before it, as a pod's"
)

// readNetwork says whether CRIU expects to be given the network namespace of that
// id: then it has written what it calls it by.
func readNetwork(dir *imageDir, id uint32) (given bool, err error) {
	name := fmt.Sprintf("netns-%d.img", id)
	if _, err := os.Lstat(filepath.Join(dir.path, name)); errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	entry, err := one[netdev.NetnsEntry](dir, name, magicNetwork)
	if err != nil {
		return false, err
	}
	return entry.GetExtKey() != "", nil
}

// network compares where a dump's network comes from with where the spec's does. Who
// would be in the host's is for task to find, process by process.
func (g *grants) network(d *dumped) error {
	was, is := d.network(), networkOf(g.spec)
	if was == is || was == hostNetwork {
		return nil
	}
	return fmt.Errorf("it was made with %s, and the container has %s", was, is)
}

// network is the kind of the dump's, by its first process.
func (d *dumped) network() networkKind {
	switch own := d.tasks[0].ids.GetNetNsId(); {
	case own == 0 || own == d.inventory.GetRootIds().GetNetNsId():
		return hostNetwork
	case d.networkGiven:
		return givenNetwork
	}
	return madeNetwork
}

// networkOf is the kind of a spec's.
func networkOf(spec *specs.Spec) networkKind {
	for _, ns := range spec.Linux.Namespaces {
		switch {
		case ns.Type != specs.NetworkNamespace:
		case ns.Path == "":
			return madeNetwork
		case !isHosts(ns):
			return givenNetwork
		}
	}
	return hostNetwork
}
