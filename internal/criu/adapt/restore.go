// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package adapt

import (
	"cmp"
	"path"
	"slices"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/inventory"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mnt"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
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
	closed := false
	err = image.EachOf(dumped, "mountpoints-*.img", func(m *mnt.MntEntry) error {
		mounts = append(mounts, m)
		return nil
	})
	files, ferr := filesOf(dumped)
	if err = cmp.Or(err, ferr); err == nil {
		err = image.EachOf(dumped, "inventory*.img", func(m *inventory.InventoryEntry) error {
			closed = m.GetTcpClose()
			return nil
		})
	}
	if err != nil {
		return nil, err
	}
	place, err := Here(spec, mounts, accept)
	if err != nil {
		return nil, err
	}
	if slices.ContainsFunc(files, func(f *fdinfo.FileEntry) bool { return f.GetPsk() != nil }) && place.Shared {
		if place.Interfaces, err = host.Interfaces(place.Network); err != nil {
			return nil, err
		}
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

// filesOf returns the open files of a dump.
func filesOf(dumped *image.Set) (files []*fdinfo.FileEntry, err error) {
	err = image.EachOf(dumped, "files*.img", func(f *fdinfo.FileEntry) error {
		files = append(files, f)
		return nil
	})
	return files, err
}
