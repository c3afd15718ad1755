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
	own := slices.ContainsFunc(a.spec.Linux.Namespaces, func(n specs.LinuxNamespace) bool {
		return n.Type == specs.UserNamespace && !a.host.OwnsNamespace(n)
	})
	id := t.IDs.GetUserNsId()
	if id == 0 || id == d.Inventory.GetRootIds().GetUserNsId() {
		return nil // the host's: whether the spec has that is compared with the others
	}
	if !own {
		return errors.New("it is in a user namespace of its own, and the spec has none")
	}
	maps := d.UserNS[id]
	if err := idMap("user", maps.GetUidMap(), a.spec.Linux.UIDMappings); err != nil {
		return err
	}
	return idMap("group", maps.GetGidMap(), a.spec.Linux.GIDMappings)
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
