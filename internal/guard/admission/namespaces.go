// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"errors"
	"fmt"
	"slices"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/userns"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/internal/criu"
)

// userNamespace compares what the ids in a process's user namespace are on the host.
// CRIU makes that namespace with the maps of the images, not with those of the spec.
func (a *allowance) userNamespace(d *criu.Dump, t criu.Task) error {
	id := t.IDs.GetUserNsId()
	if id == 0 || id == d.Inventory.GetRootIds().GetUserNsId() {
		return nil // the host's: whether the spec has that is compared with the others
	}
	if !a.host.ownUsers(a.spec) {
		return errors.New("it is in a user namespace of its own, and the spec has none")
	}
	maps := d.UserNS[id]
	if err := idMap("user", maps.GetUidMap(), a.spec.Linux.UIDMappings); err != nil {
		return err
	}
	return idMap("group", maps.GetGidMap(), a.spec.Linux.GIDMappings)
}

// ownUsers reports whether the spec has a user namespace that is not the host's.
func (h Host) ownUsers(spec *specs.Spec) bool {
	return slices.ContainsFunc(spec.Linux.Namespaces, func(n specs.LinuxNamespace) bool {
		return n.Type == specs.UserNamespace && !h.OwnsNamespace(n)
	})
}

// otherNamespaces refuses a process in a namespace that the spec does not have, or that is not the
// first process's: only a process with CAP_SYS_ADMIN can make one.
func (a *allowance) otherNamespaces(d *criu.Dump, t criu.Task) error {
	if a.admin() {
		return nil
	}
	host, first, own := namespaceIDs(d.Inventory.GetRootIds()), namespaceIDs(d.Tasks[0].IDs), namespaceIDs(t.IDs)
	for kind, id := range own {
		has := slices.ContainsFunc(a.spec.Linux.Namespaces, func(n specs.LinuxNamespace) bool { return n.Type == kind })
		has = has || kind == specs.TimeNamespace // CRIU makes one in every restore
		if id != first[kind] || id != host[kind] && id != 0 && !has {
			return fmt.Errorf("it is in a %s namespace that is not the container's, and the spec has no CAP_SYS_ADMIN", kind)
		}
	}
	return nil
}

// idMap refuses a map that has more than the spec's.
func idMap(kind string, have []*userns.UidGidExtent, spec []specs.LinuxIDMapping) error {
	for _, e := range have {
		first, lower, count := uint64(e.GetFirst()), uint64(e.GetLowerFirst()), uint64(e.GetCount())
		within := slices.ContainsFunc(spec, func(m specs.LinuxIDMapping) bool {
			from := uint64(m.ContainerID)
			return first >= from && first+count <= from+uint64(m.Size) && first-from == lower-uint64(m.HostID)
		})
		if !within {
			return fmt.Errorf("its %s ids from %d are the host's from %d, %d of them, as the spec does not have them", kind, first, lower, count)
		}
	}
	return nil
}

// A container's network is the host's, or one that the runtime makes for it (with ctr
// and nerdctl), or one that is there before it (a pod's). CRIU restores the first and the
// third into what it is given, and makes the second anew. So a checkpoint with a network
// of one kind cannot be restored into another.

// Where a container's network comes from, in words for a person.
const (
	hostNetwork  = "the host's network"
	madeNetwork  = "a network that the runtime makes for it, as with ctr and nerdctl"
	givenNetwork = "a network that is there before it, as a pod's"
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
func networkOfDump(d *criu.Dump) string {
	switch own := d.Tasks[0].IDs.GetNetNsId(); {
	case own == 0 || own == d.Inventory.GetRootIds().GetNetNsId():
		return hostNetwork
	case d.NetworkGiven:
		return givenNetwork
	}
	return madeNetwork
}

// networkOfSpec returns the kind of network that the spec asks for.
func (a *allowance) networkOfSpec() string {
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
