// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"errors"
	"fmt"
	"slices"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/userns"
	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// userNamespace compares what the ids in a process's user namespace are on the
// host: CRIU makes that namespace with the images' maps, not with the spec's.
func (g *grants) userNamespace(d *dumped, t dumpedTask) error {
	own := slices.ContainsFunc(g.spec.Linux.Namespaces, func(n specs.LinuxNamespace) bool {
		return n.Type == specs.UserNamespace && !isHosts(n)
	})
	id := t.ids.GetUserNsId()
	if id == 0 || id == d.inventory.GetRootIds().GetUserNsId() {
		return nil // the host's: whether the spec has that is compared with the others
	}
	if !own {
		return errors.New("it is in a user namespace of its own, and the spec has none")
	}
	maps := d.userns[id]
	if err := idMap("user", maps.GetUidMap(), g.spec.Linux.UIDMappings); err != nil {
		return err
	}
	return idMap("group", maps.GetGidMap(), g.spec.Linux.GIDMappings)
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
