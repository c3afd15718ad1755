// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package capture

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/localstore"
)

// Target is a container, and the name that its image gets, "example.com/job:1".
type Target struct {
	ID, Image string
	// Previous names an earlier checkpoint image, or is empty: what it has is not stored again.
	Previous string
	// Made is called with each blob of the image, as oci.Options have it; nil: it is not.
	Made func(ocispec.Descriptor)
}

// Containers takes checkpoints of several containers in one cut: none is dumped before all are locked
// and frozen, and none runs on before all are dumped. ctx carries containerd's namespace.
//
// On an error all containers are as before and there is no image, unless the error says that they
// are complete.
func Containers(ctx context.Context, c *client.Client, targets []Target, o Options) ([]*Result, error) {
	if len(targets) == 0 {
		return nil, fmt.Errorf("no container is named: %w", errdefs.ErrInvalidArgument)
	}
	o.Dir = cmp.Or(o.Dir, DefaultDir)
	all, err := prepared(ctx, c, targets, o)
	if err != nil {
		return nil, err
	}
	memory := min(o.InMemory, spareMemory(ctx, c, o.Dir))
	results, err := all.checkpoint(ctx, memory)
	if memory == 0 || ctx.Err() != nil || !hadNoRoom(err) || all.stuck() {
		return results, err
	}
	if all, err = prepared(ctx, c, targets, o); err != nil {
		return nil, err
	}
	return all.checkpoint(ctx, 0)
}

// prepared looks at all that can be wrong with each container, and waits until it is to be taken.
func prepared(ctx context.Context, c *client.Client, targets []Target, o Options) (all cut, err error) {
	var one sync.Mutex
	for _, t := range targets {
		if slices.ContainsFunc(all, func(r *run) bool { return r.result.Container == t.ID || r.Image == t.Image }) {
			return nil, fmt.Errorf("checkpoint %s as %s: one of the two is named twice: %w", t.ID, t.Image, errdefs.ErrInvalidArgument)
		}
		r := &run{Options: o, Target: t, client: c, began: time.Now(), result: Result{Container: t.ID, Image: t.Image, Running: o.LeaveRunning}}
		r.Build.Made = t.Made
		if len(targets) > 1 && o.Progress != nil {
			r.Progress = func(s images.Step) {
				one.Lock()
				defer one.Unlock()
				s.Name = t.ID + " " + s.Name
				o.Progress(s)
			}
		}
		all = append(all, r)
	}
	for _, r := range all {
		if err := r.prepare(ctx, r.result.Container); err != nil {
			return nil, r.failed(err)
		}
	}
	if o.WaitFor != "" {
		err = all.each(func(r *run) error { return r.awaitFile(ctx) })
	}
	return all, err
}

// checkpoint takes the checkpoint, with dumps that share so much memory, in bytes; 0 for dumps in the directory itself.
func (all cut) checkpoint(ctx context.Context, memory uint64) ([]*Result, error) {
	for _, r := range all {
		r.memory = memory / uint64(len(all))
	}
	c, dir := all[0].client, all[0].Dir
	// What it cannot do is no reason to refuse these: "gpuckpt recover" tells.
	_, _ = Recover(ctx, func() (*client.Client, error) { return c, nil }, dir)
	// What is written belongs to nobody else until the image has its name.
	ctx, release, err := localstore.Lease(ctx, c)
	if err != nil {
		return nil, fmt.Errorf("checkpoint %s: %w", all.names(), err)
	}
	if err := errors.Join(all.take(ctx), release()); err != nil {
		return nil, err
	}
	var results []*Result
	for _, r := range all {
		r.result.SecondsOverall = time.Since(r.began).Seconds()
		results = append(results, &r.result)
	}
	return results, nil
}

// cut is the checkpoint of containers that are dumped together.
type cut []*run

// each does something for all containers at the same time.
func (all cut) each(do func(*run) error) error {
	errs := make([]error, len(all))
	var group sync.WaitGroup
	for i, r := range all {
		group.Go(func() { errs[i] = r.failed(do(r)) })
	}
	group.Wait()
	return errors.Join(errs...)
}

func (r *run) failed(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("checkpoint %s: %w", r.result.Container, err)
}

func (all cut) names() string {
	var names []string
	for _, r := range all {
		names = append(names, r.result.Container)
	}
	return strings.Join(names, ", ")
}

// take is the checkpoint, in order, with the undo of each step.
func (all cut) take(ctx context.Context) (err error) {
	defer func() { err = errors.Join(err, all.each((*run).removeDumpDir)) }()
	if err := all.each((*run).makeDumpDir); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, all.resume(context.WithoutCancel(ctx)))
		}
	}()
	if err := all.each(func(r *run) error { return r.pause(ctx) }); err != nil {
		return err
	}
	// All are locked and frozen.
	dumping, giveUp := context.WithCancel(ctx) // until all have answered
	defer giveUp()
	if err := all.dump(dumping, giveUp); err != nil {
		return &notDumped{err}
	}
	// The images are built of the files while the shims give the GPUs back.
	var group errgroup.Group
	group.Go(func() error {
		err := all.each((*run).wait)
		if err == nil && all[0].LeaveRunning {
			err = all.resume(ctx)
		}
		return err
	})
	for _, r := range all {
		if err = r.failed(r.build(ctx)); err != nil {
			break
		}
	}
	stuck := group.Wait()
	if err == nil {
		err = all.tag(ctx)
	}
	if err != nil {
		return errors.Join(err, stuck)
	}
	if stuck != nil {
		return fmt.Errorf("%s complete, but not all goes on: %w", all.images(), stuck)
	}
	if !all[0].LeaveRunning {
		if err := all.each(func(r *run) error { return r.kill(ctx) }); err != nil {
			return fmt.Errorf("%s complete, but not all has ended: %w", all.images(), err)
		}
	}
	for _, r := range all {
		r.result.PausedSeconds = r.paused.Seconds()
	}
	return nil
}

// images begins a sentence of an error.
func (all cut) images() string {
	if len(all) == 1 {
		return "the image " + all[0].Image + " is"
	}
	var names []string
	for _, r := range all {
		names = append(names, r.Image)
	}
	return "the images " + strings.Join(names, ", ") + " are"
}

// stuck reports whether one is still paused, and would be taken for one that its client has paused.
func (all cut) stuck() bool {
	return slices.ContainsFunc(all, func(r *run) bool { return !r.pausedAt.IsZero() })
}

func (all cut) resume(ctx context.Context) error {
	return all.each(func(r *run) error { return r.resume(ctx) })
}

// dump returns when the files of all are complete. If one fails, it gives up the others. The error is
// that of the first that failed; a shim that is still on its way back has its container until then.
func (all cut) dump(ctx context.Context, giveUp func()) error {
	var once sync.Once
	var first error
	_ = all.each(func(r *run) error {
		if err := r.dump(ctx); err != nil {
			once.Do(func() { first = r.failed(err) })
			giveUp()
		}
		return nil
	})
	if first != nil {
		_ = all.each((*run).wait) // of those that were complete
	}
	return first
}

// tag names the images, all or none.
func (all cut) tag(ctx context.Context) error {
	for i, r := range all {
		err := r.failed(localstore.Outlast(ctx, r.client, func() error { return localstore.Tag(ctx, r.client, r.Image, r.manifest) }))
		if err == nil {
			continue
		}
		for _, named := range all[:i] {
			err = errors.Join(err, named.client.ImageService().Delete(context.WithoutCancel(ctx), named.Image))
		}
		return err
	}
	return nil
}
