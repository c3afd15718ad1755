// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package capture

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	metadata "github.com/checkpoint-restore/checkpointctl/lib"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	annotate "github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/images/localstore"
	"github.com/gpuckpt/gpuckpt/images/oci"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// prepare looks at all that can be wrong, before the container is touched.
func (r *run) prepare(ctx context.Context, id string) error {
	if err := localstore.CheckName(r.Image); err != nil {
		return err
	}
	if err := r.Build.Check(); err != nil {
		return err
	}
	container, err := localstore.FindContainer(ctx, r.client, id)
	if err != nil {
		return err
	}
	if r.info, err = container.Info(ctx, client.WithoutRefreshedMetadata); err != nil {
		return err
	}
	r.result.Name = r.info.Labels[labelContainer]
	if r.task, err = container.Task(ctx, nil); err != nil {
		if errdefs.IsNotFound(err) {
			return fmt.Errorf("it has no task, so nothing runs in it: %w", errdefs.ErrFailedPrecondition)
		}
		return err
	}
	status, err := r.task.Status(ctx)
	if err != nil {
		return err
	}
	if status.Status != client.Running && status.Status != client.Paused {
		return fmt.Errorf("it is %s: %w", status.Status, errdefs.ErrFailedPrecondition)
	}
	process, _ := proc.StatusOf(int(r.task.Pid()))
	if _, shim := process.Shim(); strings.HasPrefix(shim, "containerd-shim-") && shim != proc.ShimName {
		return fmt.Errorf("its runtime is %s, not gpuckpt's, so no node would restore it: make it anew with the runtime io.containerd.gpuckpt.v2, a pod with runtimeClassName: gpuckpt: %w", shim, errdefs.ErrFailedPrecondition)
	}
	if r.Build.Base, err = r.base(ctx); err != nil {
		return err
	}
	r.Build.BaseName = r.info.Image
	if r.Previous != "" {
		previous, err := localstore.Find(ctx, r.client, r.Previous)
		if err != nil {
			return fmt.Errorf("the previous image: %w", err)
		}
		if _, err := oci.Inspect(ctx, r.client.ContentStore(), previous.Target); err != nil {
			return fmt.Errorf("the previous image %s: %w", r.Previous, err)
		}
		r.Build.Previous = &previous.Target
	}
	if err := localstore.CheckFree(ctx, r.client, r.Image, ""); err != nil {
		return err
	}
	if r.Dir, err = filepath.Abs(r.Dir); err != nil { // containerd has another working directory
		return err
	}
	// Only the last part of a user's directory is made: a disk that is not mounted must not become
	// a directory on the root file system.
	mkdir := os.Mkdir
	if r.Dir == DefaultDir {
		mkdir = os.MkdirAll
	}
	if err := mkdir(r.Dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make the directory for the dump: %w", err)
	}
	return nil
}

// base finds the container's image. It refuses a name that now means another one.
func (r *run) base(ctx context.Context) (none ocispec.Descriptor, _ error) {
	if r.info.Image == "" {
		return none, fmt.Errorf("it was not made from an image, so its checkpoint cannot be an image: use `ctr tasks checkpoint --image-path DIR`: %w", errdefs.ErrFailedPrecondition)
	}
	found, err := localstore.Find(ctx, r.client, r.info.Image)
	if err != nil {
		return none, fmt.Errorf("the image it was made from is needed: %w", err)
	}
	if r.info.SnapshotKey == "" {
		return found.Target, nil
	}
	diffIDs, err := client.NewImage(r.client, found).RootFS(ctx)
	if err != nil {
		return none, fmt.Errorf("read the image %s: %w", found.Name, err)
	}
	snapshot, err := r.client.SnapshotService(r.info.Snapshotter).Stat(ctx, r.info.SnapshotKey)
	if err != nil {
		return none, fmt.Errorf("look at its files: %w", err)
	}
	chain := identity.ChainID(diffIDs).String()
	if snapshot.Parent != chain && !strings.HasPrefix(snapshot.Parent, chain+"-") { // for a user namespace
		return none, fmt.Errorf("the image %s has changed since the container was created; give the original its name back: %w", found.Name, errdefs.ErrFailedPrecondition)
	}
	return found.Target, nil
}

// annotations are the keys by which other tools know checkpoint images.
func annotations(info containers.Container) map[string]string {
	a := map[string]string{
		metadata.CheckpointAnnotationEngine:                   "containerd",
		annotate.ContainerName:                                info.ID,
		metadata.CheckpointAnnotationRuntimeName:              info.Runtime.Name,
		metadata.CheckpointAnnotationRootfsImageName:          info.Image,
		metadata.CheckpointAnnotationRootfsImageUserRequested: info.Image,
		metadata.CheckpointAnnotationHostArch:                 runtime.GOARCH,
	}
	for label, key := range map[string]string{
		labelContainer: annotate.ContainerName,
		labelPod:       metadata.CheckpointAnnotationPod,
		labelNamespace: metadata.CheckpointAnnotationNamespace,
		labelUID:       metadata.CheckpointAnnotationPodUID,
	} {
		if v := info.Labels[label]; v != "" {
			a[key] = v
		}
	}
	return a
}
