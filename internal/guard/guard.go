// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package guard says whether a dump may be restored into a container, and makes what CRIU restores it
// from. It brings together what is known of the images (criu/image), of the spec (admission) and of
// this machine (host).
package guard

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	criucore "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"

	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/criu/adapt"
	"github.com/gpuckpt/gpuckpt/internal/criu/filelocks"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/criu/pages"
	"github.com/gpuckpt/gpuckpt/internal/guard/admission"
	"github.com/gpuckpt/gpuckpt/internal/node/bundle"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
)

// Images refuses what a restore would refuse of a directory with images. rootfs is the container's
// root file system; "" where it cannot be looked at, and mounts are not compared.
func Images(ctx context.Context, spec *specs.Spec, images *criu.Images, rootfs string) error {
	d, err := images.Dump()
	if err != nil {
		return err
	}
	var gone map[uint32]string
	if rootfs != "" {
		gone, err = goneNames(spec, images, rootfs)
	}
	if err == nil && len(gone) > 0 { // as the shim looks at first, before there is a root file system
		err = Dump(ctx, spec, images, d, "", nil)
	}
	if err != nil {
		return err
	}
	return Dump(ctx, spec, images, d, rootfs, gone)
}

// renamed returns an entry with the other name of a removed file, if it is of one.
func renamed(e *image.Entry, gone map[uint32]string) *image.Entry {
	f, _ := e.Message.(*fdinfo.FileEntry)
	name := gone[f.GetReg().GetId()]
	if name == "" {
		return e
	}
	f = proto.Clone(f).(*fdinfo.FileEntry)
	f.Reg.Name = &name
	other := *e
	other.Message = f
	return &other
}

// Own refuses a directory with images of a container, whose bundle is given, that a restore by the
// container's own spec would refuse.
func Own(ctx context.Context, dir string, read config.Source, images *criu.Images) error {
	view, err := read()
	if err == nil {
		err = adapt.CheckUnsent(ctx, images.Set, criu.Settings{Bundle: dir, View: view}, criu.Shim{})
	}
	if err != nil {
		return err
	}
	file, err := bundle.Read(dir)
	if err == nil {
		err = Images(ctx, file.Spec, images, bundle.RootOf(dir, file.Spec))
	}
	if err != nil {
		return fmt.Errorf("its own restore would refuse it: %w", err)
	}
	return nil
}

// Dump refuses a restore of a dump, which was read from the images, that asks for more than the
// container's spec. gone are other names that removed files get.
func Dump(ctx context.Context, spec *specs.Spec, images *criu.Images, d *criu.Dump, rootfs string, gone map[uint32]string) error {
	if spec.Process == nil || spec.Linux == nil {
		return fmt.Errorf("the container's spec has no process or is not for Linux: %w", errdefs.ErrInvalidArgument)
	}
	of := admission.Host{OwnsNamespace: host.OwnsNamespace, HasFile: host.HasFile, FirstPort: host.FirstPort, PingGroups: host.PingGroups, OOMScore: host.OOMScore(), DefaultNodes: host.DefaultNodes}
	if rootfs != "" {
		spec, _ = bundle.AtPlaces(spec, rootfs)
		of.Direct = newPaths(spec, rootfs).direct
	}
	notes, err := admission.Check(spec, d, of)
	if err == nil {
		entries := admission.EntriesOf(spec, d, of)
		if err = contents(images, d, entries); err == nil {
			err = images.All(func(e *image.Entry) error { return entries.Check(renamed(e, gone)) })
		}
	}
	for _, n := range notes {
		log.G(ctx).Warn(n)
	}
	if err != nil {
		return fmt.Errorf("the checkpoint does not fit the container's spec: %w: %w", err, errdefs.ErrFailedPrecondition)
	}
	return nil
}

// Copied is what a restore is made from.
type Copied struct {
	Images *criu.Copy
	Memory *pages.Plan     // what of the images CRIU does not restore
	Locks  filelocks.Locks // as well
	Ended  string          // for criu.WithPlugin, as Free
	Free   string
	// Different is what the container has not as it was, for its user.
	Different []string
	logs      []madeLog
}

// mostEnded bounds Ended: the kernel takes no variable of more than 128 KiB.
const mostEnded = 100_000

// Close ends the copies. It can be called on nil.
func (c *Copied) Close() {
	if c != nil {
		c.Images.Close()
	}
}

// RemoveLogs takes away the logs that Copy has made, if nobody has written to them. It can be called on nil.
func (c *Copied) RemoveLogs() (err error) {
	if c == nil {
		return nil
	}
	for _, l := range c.logs {
		err = errors.Join(err, l.remove())
	}
	return err
}

// Copy writes the images of a directory again, for CRIU alone, as they fit the place of the restore
// (package adapt), and refuses what CRIU would read there if the container's spec, which is in the
// bundle, does not grant it. The copies lack the memory of the plan, and the locks. It makes the logs
// that are not there any more.
func Copy(ctx context.Context, dumped *criu.Images, settings criu.Settings) (_ *Copied, err error) {
	file, err := bundle.Read(settings.Bundle)
	if err != nil {
		return nil, err
	}
	if err := adapt.CheckUnsent(ctx, dumped.Set, settings, criu.Shim{}); err != nil {
		return nil, err
	}
	fit, err := adapt.ForRestore(file.Spec, dumped.Set, settings)
	if err != nil {
		return nil, err
	}
	c := &Copied{}
	defer func() {
		if err != nil {
			c.Close()
		}
	}()
	if c.Memory, err = pages.NewPlan(dumped.Set, settings.View.LargeMemory()); err != nil {
		return nil, err
	}
	rootfs := bundle.RootOf(settings.Bundle, file.Spec)
	gone, err := goneNames(file.Spec, dumped, rootfs)
	if err != nil {
		return nil, err
	}
	renewed := &renewals{spec: file.Spec, rootfs: rootfs}
	dumped.Parts = c.Memory.Parts
	modes := make(map[uint32]uint32) // of logs, by their numbers: CRIU is to compare none
	c.Images, err = dumped.Copy(ctx, settings.Bundle, 0, func(e *image.Entry) error {
		if took, err := c.Locks.Take(e.Message); err != nil || took {
			return cmp.Or(err, image.ErrOmit)
		}
		if core, ok := e.Message.(*criucore.CoreEntry); ok && len(c.Ended) < mostEnded {
			c.Ended += criu.Ended(e.File, core)
		}
		if f, ok := e.Message.(*fdinfo.FileEntry); ok && isLog(f.GetReg()) {
			modes[f.GetReg().GetId()] = f.GetReg().GetMode()
		}
		fit.Edit(e.Message)
		if f, ok := e.Message.(*fdinfo.FileEntry); ok && gone[f.GetReg().GetId()] != "" {
			e.Message = renamed(e, gone).Message
		} else if ok {
			if err := renewed.file(f); err != nil {
				return err
			}
		}
		return c.Memory.Edit(e)
	})
	if err != nil {
		return nil, err
	}
	c.Free = fit.Free
	copied := criu.Open(c.Images.Path())
	d, err := copied.Dump()
	if err != nil {
		return nil, err
	}
	if err := Dump(ctx, file.Spec, copied, d, rootfs, nil); err != nil {
		return nil, err
	}
	if err := fit.FreePorts(); err != nil {
		log.G(ctx).WithError(err).Warn("a port may be taken for a minute by connections that have ended")
	}
	if n := len(fit.Closed); n > 0 {
		log.G(ctx).WithField("connections", fit.Closed[:min(n, 16)]).Infof("%d TCP connections come back closed: the container has one end of each", n)
		c.Different = append(c.Different, fmt.Sprintf("%d TCP connections to programs outside: closed", n))
	}
	c.logs = makeLogs(ctx, file.Spec, copied, d, rootfs, modes)
	if n := len(c.logs); n > 0 {
		c.Different = append(c.Different, fmt.Sprintf("%d logs that were gone: new, and empty", n))
	}
	return c, nil
}
