// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package adapt

import (
	"path"
	"slices"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/inventory"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mnt"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
)

// ForRestore returns the plan for a dump's images and a container that is restored by a spec, and by
// the options that its settings have.
func ForRestore(spec *specs.Spec, dumped *image.Set, settings criu.Settings) (*Plan, error) {
	accept, err := settings.View.AcceptsChangedFiles()
	if err != nil {
		return nil, err
	}
	decided, err := settings.ConnectionsDecided()
	if err != nil {
		return nil, err
	}
	var mounts []*mnt.MntEntry
	var files []*fdinfo.FileEntry
	closed := false
	err = each(dumped, func(e *image.Entry) {
		switch m := e.Message.(type) {
		case *mnt.MntEntry:
			mounts = append(mounts, m)
		case *fdinfo.FileEntry:
			files = append(files, m)
		case *inventory.InventoryEntry:
			closed = m.GetTcpClose()
		}
	})
	if err != nil {
		return nil, err
	}
	place, err := Here(spec, mounts, accept)
	if err != nil {
		return nil, err
	}
	place.Connections, place.Closed, place.Slaves = !decided, closed, slaves(spec, mounts)
	return Make(place, files), nil
}

// slaves returns the mounts from outside to which the host's later mounts come, without a word of that in
// the spec: runc makes them so where the host shares its mounts, as systemd does.
func slaves(spec *specs.Spec, mounts []*mnt.MntEntry) map[uint32]bool {
	asked := func(options ...string) bool {
		return slices.ContainsFunc(options, func(o string) bool { return slices.Contains([]string{"shared", "rshared", "slave", "rslave"}, o) })
	}
	found := make(map[uint32]bool)
	for _, m := range mounts {
		at := path.Clean("/" + m.GetMountpoint())
		outside := at == "/" || m.GetExtMount() || m.GetExtKey() != ""
		if m.GetMasterId() == 0 || m.GetSharedId() != 0 || !outside || spec.Linux != nil && asked(spec.Linux.RootfsPropagation) {
			continue
		}
		found[m.GetMntId()] = !slices.ContainsFunc(spec.Mounts, func(s specs.Mount) bool {
			return path.Clean("/"+s.Destination) == at && asked(s.Options...)
		})
	}
	return found
}

// each calls do with each mount and open file of a dump, and with its inventory.
func each(dumped *image.Set, do func(*image.Entry)) error {
	names, err := dumped.Names()
	if err != nil {
		return err
	}
	for _, name := range names {
		switch image.KindOf(name).Magic {
		case "MNTS", "FILES", "INVENTORY":
			err = dumped.Each(name, func(e *image.Entry) error {
				do(e)
				return nil
			})
		}
		if err != nil {
			return err
		}
	}
	return nil
}
