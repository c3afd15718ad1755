// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"strings"
	"time"

	taskAPI "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	ptypes "github.com/containerd/containerd/v2/pkg/protobuf/types"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/guard"
	"github.com/gpuckpt/gpuckpt/internal/node/bundle"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
	"github.com/gpuckpt/gpuckpt/internal/operation/imagedir"
	"github.com/gpuckpt/gpuckpt/runtime/internal/denied"
	"github.com/gpuckpt/gpuckpt/runtime/internal/gctune"
	"github.com/gpuckpt/gpuckpt/runtime/internal/suspension"
)

// Create creates a container. A restore is checked here, before anything of it
// exists: the metadata, the driver and the GPUs. It then happens in Start.
func (s *Service) Create(ctx context.Context, r *taskAPI.CreateTaskRequest) (*taskAPI.CreateTaskResponse, error) {
	resp, err := s.create(ctx, r)
	return resp, toGRPC(err)
}

func (s *Service) create(ctx context.Context, r *taskAPI.CreateTaskRequest) (_ *taskAPI.CreateTaskResponse, err error) {
	if r.Options, err = runcOptions(r.Options); err != nil {
		return nil, err
	}
	opts := new(options.Options)
	if r.Options.GetValue() != nil {
		if err := typeurl.UnmarshalTo(r.Options, opts); err != nil {
			return nil, fmt.Errorf("decode runtime options: %w: %w", err, errdefs.ErrInvalidArgument)
		}
	}
	c := newContainer(r.ID, r.Bundle)
	ctx = c.logged(ctx)
	c.toolkit = strings.HasPrefix(filepath.Base(opts.BinaryName), "nvidia-container-runtime")
	c.workDir = cmp.Or(opts.CriuWorkPath, filepath.Join(r.Bundle, "work"))
	if c.namespace, err = namespaces.NamespaceRequired(ctx); err != nil {
		return nil, err
	}
	c.runcState = host.RuncState(opts.Root, c.namespace, c.id)
	c.devices.State = filepath.Join(c.runcState, "state.json")
	began, restores := time.Now(), r.Checkpoint != ""
	defer func() {
		if err != nil && restores {
			s.announce.Over(ctx, "restore", c.id, began, 0, err)
			s.announce.Flush(flushWithin)
		}
		if err != nil {
			c.restore.close()
			c.removeRestoreDir(ctx)
		}
	}()
	if r.Checkpoint != "" {
		c.restore = &restoreState{dir: r.Checkpoint, unpacked: opts.CriuImagePath == "" && imagedir.IsTemporary(r.Checkpoint)}
		if c.restore.unpacked {
			if err := imagedir.NoteUnpacked(r.Bundle, r.Checkpoint); err != nil {
				return nil, err
			}
		}
	}
	file, err := bundle.Read(r.Bundle)
	if err != nil {
		return nil, err
	}
	c.annotations = maps.Clone(file.Spec.Annotations)
	if file.Spec.Annotations == nil {
		file.Spec.Annotations = make(map[string]string)
	}
	file.Spec.Annotations[annotations.CRIUConfig] = filepath.Join(r.Bundle, criu.SettingsName)
	c.config = config.For(c.annotations)
	given := c.restore
	if given == nil {
		err = c.restoreFromImage(ctx, r, file.Spec)
		restores = err != nil || c.restore != nil
	} else {
		err = given.admit(ctx, c.config)
	}
	if err == nil && c.restore == given { // else restoreFromImage did it
		err = c.fit(ctx, file.Spec)
	}
	if err != nil {
		return nil, err
	}
	if err := file.Save(); err != nil {
		return nil, err
	}
	if c.restore != nil {
		r.Checkpoint = criu.CopyPath(r.Bundle)
	}
	r.Rootfs = bundle.WithoutCheckpoint(r.Rootfs)
	resp, err := s.TTRPCTaskService.Create(ctx, r)
	if err != nil {
		return nil, err
	}
	c.pid = int(resp.Pid)
	s.mu.Lock()
	s.containers[r.ID] = c
	s.mu.Unlock()
	return resp, nil
}

// flushWithin bounds the wait for an event of a Create that has failed: a containerd that has asked for
// it takes it at once.
const flushWithin = 10 * time.Second

// fit makes the container's spec fit this node, and a restore fit the spec, or
// refuses it. What is granted is compared last, with the spec as it will be.
func (c *container) fit(ctx context.Context, spec *specs.Spec) error {
	// criu is asked, which takes milliseconds, and the driver, which takes 100, beside the rest.
	capable, works := make(chan error, 1), make(chan error, 1)
	node, err := c.config()
	if c.restore != nil && err == nil {
		go func() { capable <- c.criu.Check(ctx, criu.Shim{}, node.CRIU.Path) }()
	}
	if err := c.fitSpec(ctx, spec); err != nil {
		return err
	}
	view, hasGPU := config.View{Annotations: c.annotations}, len(c.request.Sources) > 0
	if c.restore == nil {
		return denied.Deny(spec, view, hasGPU, nil)
	}
	gctune.Begin()
	if err == nil {
		_, err = c.restore.open()
	}
	if err != nil {
		return err
	}
	go func() { works <- c.checkRestore(ctx) }()
	err = c.fitRestore(ctx, spec, view, hasGPU)
	return cmp.Or(<-capable, <-works, err)
}

// fitRestore is fit for a restore whose checkpoint is open.
func (c *container) fitRestore(ctx context.Context, spec *specs.Spec, view config.View, hasGPU bool) error {
	images := criu.Open(c.restore.images())
	if err := c.fitFiles(ctx, spec, images); err != nil {
		return err
	}
	dump, err := images.Dump()
	if err != nil {
		return err
	}
	if err := denied.Deny(spec, view, hasGPU, dump); err != nil {
		return err
	}
	if spec.Process != nil && len(spec.Process.Args) == 0 { // as of an image without a command
		spec.Process.Args = []string{"restored"} // runc wants one, and starts none
	}
	return guard.Dump(ctx, spec, images, dump, "")
}

// checkRestore refuses a checkpoint that cannot work here.
func (c *container) checkRestore(ctx context.Context) error {
	found, err := c.restore.open()
	if err != nil || found == nil { // a checkpoint without GPU state
		return err
	}
	view, err := c.config()
	if err != nil {
		return err
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

// removeRestoreDir removes what containerd unpacked for this restore.
func (c *container) removeRestoreDir(ctx context.Context) {
	if c.restore == nil || !c.restore.unpacked {
		return
	}
	if err := imagedir.RemoveUnpacked(c.bundle); err != nil {
		log.G(ctx).WithError(err).Warn("remove the unpacked checkpoint")
		return
	}
	c.restore.unpacked = false
}

// Delete removes a container or an exec'd process, and with a container all
// that this service keeps of it.
func (s *Service) Delete(ctx context.Context, r *taskAPI.DeleteRequest) (*taskAPI.DeleteResponse, error) {
	c := s.container(r.ID)
	if c != nil && r.ExecID == "" {
		thawEnded(c.logged(ctx), c, s.TTRPCTaskService)
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
	c.removeRestoreDir(ctx)
	c.journal.End(ctx, "", nil)
	return resp, nil
}

// Update is runc's, and suspends and resumes a container whose annotations say so (suspend.go). A
// change of limits takes its turn after a checkpoint rather than in the middle of one.
func (s *Service) Update(ctx context.Context, r *taskAPI.UpdateTaskRequest) (*ptypes.Empty, error) {
	if c := s.container(r.ID); c != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		want, err := suspension.Read(r)
		if err == nil && want != nil {
			err = obey(c.logged(ctx), want, s, c)
		}
		if err != nil {
			return nil, toGRPC(err)
		}
		if want != nil {
			return &ptypes.Empty{}, nil
		}
	}
	return s.TTRPCTaskService.Update(ctx, r)
}
