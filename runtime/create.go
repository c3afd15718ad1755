// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	taskAPI "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2/process"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	ptypes "github.com/containerd/containerd/v2/pkg/protobuf/types"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/guard"
	"github.com/gpuckpt/gpuckpt/internal/node/bundle"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
	"github.com/gpuckpt/gpuckpt/internal/operation/imagedir"
	"github.com/gpuckpt/gpuckpt/internal/operation/oplog"
	"github.com/gpuckpt/gpuckpt/runtime/internal/denied"
	"github.com/gpuckpt/gpuckpt/runtime/internal/hooks"
	"github.com/gpuckpt/gpuckpt/runtime/internal/suspension"
)

// Create creates a container. A restore is checked here, before anything of it
// exists: the metadata, the driver and the GPUs. It then happens in Start.
func (s *Service) Create(ctx context.Context, r *taskAPI.CreateTaskRequest) (*taskAPI.CreateTaskResponse, error) {
	began := time.Now()
	k := &creating{s: s, c: newContainer(r.ID, r.Bundle), r: r, restores: r.Checkpoint != ""}
	ctx = k.c.logged(ctx)
	if k.restores {
		go image.Warm(false)
	}
	resp, err := k.run(ctx)
	if err == nil {
		return resp, nil
	}
	if k.fallsBack(ctx) {
		why := err
		k.c.restore.close()
		k.c.gpu.Forget()
		k = &creating{s: s, c: newContainer(r.ID, r.Bundle), r: r, restores: true, afresh: true}
		if resp, err = k.run(ctx); err == nil {
			log.G(ctx).WithError(why).Warn("the image is not restored here: the container starts afresh")
			s.announce.Afresh(ctx, r.ID, began, why)
			k.noteAfresh(ctx, began, why)
			return resp, nil
		}
		err = fmt.Errorf("%w; nor does it start afresh: %w", why, err)
	}
	if k.restores {
		s.announce.Over(ctx, "restore", r.ID, began, 0, nil, err)
		s.announce.Flush(flushWithin)
	}
	k.c.restore.close()
	k.c.removeRestoreDir(ctx).Free(func() {})
	return nil, toGRPC(err)
}

// flushWithin bounds the wait for an event of a Create that has failed: a containerd that has asked for
// it takes it at once.
const flushWithin = 10 * time.Second

// creating is one creation of a container.
type creating struct {
	s        *Service
	c        *container
	r        *taskAPI.CreateTaskRequest
	spec     *bundle.File
	restores bool // as far as is known
	fits     bool // nothing of the checkpoint, the node and the spec is against it
	afresh   bool // it is not restored, though its image is a checkpoint
}

// fallsBack reports whether a restore that was refused is one of a container that then starts afresh. What is
// wrong with the node's file is no reason to.
func (k *creating) fallsBack(ctx context.Context) bool {
	if !k.restores || k.fits || k.r.Checkpoint != "" || !config.PrefersRestore(k.c.annotations) || ctx.Err() != nil {
		return false
	}
	_, err := k.c.config()
	return err == nil
}

// noteAfresh adds a start from the beginning to the node's log of operations, and why it was no restore.
func (k *creating) noteAfresh(ctx context.Context, began time.Time, why error) {
	view, err := k.c.config()
	if err == nil {
		err = oplog.Append(view.LogDir, oplog.Entry{Operation: "restore", Namespace: k.c.namespace, Container: k.c.id, Began: began.UTC(), Took: time.Since(began), Error: why.Error()})
	}
	if err != nil {
		log.G(ctx).WithError(err).Warn("note that the container starts afresh")
	}
}

// run takes the steps. Nothing of the container exists before the last one.
func (k *creating) run(ctx context.Context) (*taskAPI.CreateTaskResponse, error) {
	if err := k.readSpec(); err != nil {
		return nil, err
	}
	if err := k.readOptions(ctx); err != nil {
		return nil, err
	}
	if err := k.findCheckpoint(ctx, k.fit); err != nil {
		return nil, err
	}
	k.fits = true
	if err := k.spec.Save(); err != nil {
		return nil, err
	}
	return k.create(ctx)
}

// readOptions decodes the request, and notes what containerd has unpacked for it.
func (k *creating) readOptions(ctx context.Context) (err error) {
	cgroup := ""
	if linux := k.spec.Spec.Linux; linux != nil {
		cgroup = linux.CgroupsPath
	}
	if k.r.Options, err = runcOptions(k.r.Options, cgroup, host.RunsSystemd()); err != nil {
		return err
	}
	opts := new(options.Options)
	if k.r.Options.GetValue() != nil {
		if err := typeurl.UnmarshalTo(k.r.Options, opts); err != nil {
			return fmt.Errorf("decode runtime options: %w: %w", err, errdefs.ErrInvalidArgument)
		}
	}
	c := k.c
	if c.namespace, err = namespaces.NamespaceRequired(ctx); err != nil {
		return err
	}
	c.toolkit = strings.HasPrefix(filepath.Base(opts.BinaryName), "nvidia-container-runtime")
	c.workDir = cmp.Or(opts.CriuWorkPath, filepath.Join(c.bundle, "work"))
	c.runcState = host.RuncState(opts.Root, c.namespace, c.id)
	c.runc = process.NewRunc(opts.Root, k.r.Bundle, c.namespace, opts.BinaryName, opts.SystemdCgroup)
	c.devices.State = filepath.Join(c.runcState, "state.json")
	if k.r.Checkpoint == "" {
		return nil
	}
	c.restore = &restoreState{dir: k.r.Checkpoint, unpacked: opts.CriuImagePath == "" && imagedir.IsTemporary(k.r.Checkpoint)}
	if !c.restore.unpacked {
		return nil
	}
	return imagedir.NoteUnpacked(c.bundle, c.restore.dir)
}

// readSpec reads the container's spec, and the configuration as its annotations change it.
func (k *creating) readSpec() (err error) {
	if k.spec, err = bundle.Read(k.c.bundle); err != nil {
		return err
	}
	spec := k.spec.Spec
	k.c.annotations = maps.Clone(spec.Annotations)
	k.c.config = config.For(k.c.annotations)
	if spec.Annotations == nil {
		spec.Annotations = make(map[string]string)
	}
	spec.Annotations[annotations.CRIUConfig] = filepath.Join(k.c.bundle, criu.SettingsName)
	return nil
}

// findCheckpoint finds what the container is restored from, if it is: the request names it, or its image is
// a checkpoint. Then it calls do, while that can be read.
func (k *creating) findCheckpoint(ctx context.Context, do func(context.Context) error) error {
	if k.c.restore == nil {
		return k.inImage(ctx, do)
	}
	if err := k.c.restore.admit(ctx, k.c.config); err != nil {
		return err
	}
	return do(ctx)
}

// fit makes the container's spec fit this node, and a restore fit the spec, or refuses it. What is granted
// is compared last, with the spec as it will be.
func (k *creating) fit(ctx context.Context) error {
	c, spec := k.c, k.spec.Spec
	view, err := c.config()
	if c.restore == nil && err != nil { // a container that may never be checkpointed starts all the same
		return c.deny(spec, nil)
	}
	if err != nil {
		return err
	}
	if c.restore == nil {
		return cmp.Or(c.fitSpec(ctx, view, spec), c.deny(spec, nil))
	}
	capable := beside(func() error { return criu.CheckOnce(ctx, criu.Shim{}, view.CRIU.Path) }) // which takes milliseconds
	if err := c.fitSpec(ctx, view, spec); err != nil {
		return err
	}
	found, err := c.restore.open()
	if err != nil {
		return err
	}
	works := beside(func() error { return c.prepareGPU(ctx, view, found) }) // by the driver, which takes 100
	err = c.fitDump(ctx, view, spec)
	return cmp.Or(capable(), works(), err)
}

// beside begins to do something, and returns what waits for its end, once.
func beside(do func() error) (wait func() error) {
	done := make(chan error, 1)
	go func() { done <- do() }()
	return func() error { return <-done }
}

// deny keeps the container from what cannot be restored; dump is what it is restored from, or nil.
func (c *container) deny(spec *specs.Spec, dump *criu.Dump) error {
	return denied.Deny(spec, config.View{Annotations: c.annotations}, dump)
}

// fitDump makes the spec of a restore fit what was dumped, or refuses it.
func (c *container) fitDump(ctx context.Context, view config.View, spec *specs.Spec) (err error) {
	dumped := c.restore.read()
	c.restore.dumped = dumped
	if spec.Linux != nil {
		c.restore.gpus.Devices = slices.Clone(spec.Linux.Devices)
	}
	if c.restore.gpus.Stray, err = rebindFiles(ctx, view.Node, spec, dumped); err != nil {
		return err
	}
	dump, err := dumped.Dump()
	if err != nil {
		return err
	}
	c.restore.otherUsers = dump.OtherUsers()
	if err := c.deny(spec, dump); err != nil {
		return err
	}
	if spec.Process != nil && len(spec.Process.Args) == 0 { // as of an image without a command
		spec.Process.Args = []string{"restored"} // runc wants one, and starts none
	}
	return guard.Dump(ctx, spec, dumped, dump, "", nil)
}

// unknown returns the annotations that begin as this project's, and have no effect on a container: mistyped
// ones, or those of a newer version. What hooks and CRIU's options may be called is said when they are read.
func unknown(container map[string]string) []string {
	known := []string{annotations.Restore, annotations.OnCheckpoint, annotations.IOUring, annotations.Interposer, annotations.Companion,
		annotations.ChangedFiles, annotations.ContainerName, cdi.PairsAnnotation}
	return slices.DeleteFunc(slices.Sorted(maps.Keys(container)), func(key string) bool {
		return !strings.HasPrefix(key, annotations.Prefix) || slices.Contains(known, key) ||
			strings.HasPrefix(key, annotations.HookPrefix) || strings.HasPrefix(key, annotations.CRIUPrefix)
	})
}

// create has runc create the container.
func (k *creating) create(ctx context.Context) (*taskAPI.CreateTaskResponse, error) {
	if keys := unknown(k.c.annotations); len(keys) > 0 {
		log.G(ctx).Warnf("annotations of no effect, as this version knows none of that name on a container: %q", keys)
	}
	if k.c.restore != nil {
		k.r.Checkpoint = criu.CopyPath(k.c.bundle)
		// A program that had pipes gets pipes again, which nothing comes by: runc would give it the
		// host's /dev/null, with which CRIU could not dump it again.
		for _, name := range []*string{&k.r.Stdin, &k.r.Stdout, &k.r.Stderr} {
			if *name == "" && !k.r.Terminal {
				*name = os.DevNull
			}
		}
	}
	k.r.Rootfs = bundle.WithoutCheckpoint(k.r.Rootfs)
	resp, err := k.s.TTRPCTaskService.Create(ctx, k.r)
	if err != nil {
		return nil, err
	}
	k.c.pid = int(resp.Pid)
	if k.afresh {
		if err := hooks.RemoveNote(k.c.bundle); err != nil {
			log.G(ctx).WithError(err).Warn("the file /run/gpuckpt/restored is not removed")
		}
	}
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	k.s.containers[k.r.ID] = k.c
	return resp, nil
}

// prepareGPU refuses GPU state that cannot be restored here, and begins to restore it; found is nil for none.
func (c *container) prepareGPU(ctx context.Context, view config.View, found *images.Checkpoint) (err error) {
	if found == nil {
		return nil
	}
	// The digests of GPU state are compared beside what containerd and runc do until Start. Start begins
	// with it where the checkpoint lies elsewhere by then, and where memory is limited: a container that
	// nobody starts must not keep others from theirs.
	held := found
	if c.restore.mounted != "" || view.Staging.MemoryLimit > 0 {
		held = nil
	}
	c.restore.gpu, err = c.gpu.Prepare(ctx, found.Metadata, c.annotations[cdi.PairsAnnotation], held, c.gpuOptions(view.Node))
	return err
}

// removeRestoreDir removes what containerd unpacked for this restore. The caller frees its room.
func (c *container) removeRestoreDir(ctx context.Context) (removed imagedir.Removed) {
	if c.restore == nil || !c.restore.unpacked {
		return nil
	}
	removed, err := imagedir.RemoveUnpacked(c.bundle)
	if err != nil {
		log.G(ctx).WithError(err).Warn("remove the unpacked checkpoint")
	}
	c.restore.unpacked = err != nil
	return removed
}

// Delete removes a container or an exec'd process, and with a container all
// that this service keeps of it.
func (s *Service) Delete(ctx context.Context, r *taskAPI.DeleteRequest) (*taskAPI.DeleteResponse, error) {
	c := s.container(r.ID)
	if c != nil && r.ExecID == "" {
		s.thawEnded(c.logged(ctx), c)
	}
	resp, err := s.TTRPCTaskService.Delete(ctx, r)
	if err != nil || r.ExecID != "" || c == nil {
		return resp, err
	}
	s.mu.Lock()
	delete(s.containers, r.ID)
	s.mu.Unlock()
	c.execs.End("it was removed")
	c.mu.Lock()
	defer c.mu.Unlock()
	ctx = c.logged(ctx)
	c.restore.close()
	c.gpu.Forget()
	c.removeSpill(ctx)
	c.removeRestoreDir(ctx).Free(func() {})
	c.journal.End(ctx, "", nil)
	return resp, nil
}

// Update is runc's, and suspends and resumes a container whose annotations say so (suspend.go). A
// change of limits takes its turn after a checkpoint rather than in the middle of one.
func (s *Service) Update(ctx context.Context, r *taskAPI.UpdateTaskRequest) (*ptypes.Empty, error) {
	if c := s.container(r.ID); c != nil {
		want, err := suspension.Read(r)
		if err != nil {
			return nil, toGRPC(err)
		}
		if want == nil || !want.Suspend {
			c.mu.Lock()
		} else if err := c.exclusive.LockToSuspend(&c.mu); err != nil {
			return nil, toGRPC(err)
		}
		defer c.mu.Unlock()
		if want != nil {
			return &ptypes.Empty{}, toGRPC(s.obey(c.logged(ctx), c, want))
		}
	}
	return s.TTRPCTaskService.Update(ctx, r)
}
