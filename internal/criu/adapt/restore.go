// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package adapt

import (
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
	place.Connections, place.Closed = !decided, closed
	return Make(place, files), nil
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
