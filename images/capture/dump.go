// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package capture

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	metadata "github.com/checkpoint-restore/checkpointctl/lib"
	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/core/diff"
	"github.com/containerd/containerd/v2/pkg/rootfs"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/typeurl/v2"

	"github.com/gpuckpt/gpuckpt/images"
)

// completeEvery is how often complete looks. A GPU needs tenths of a second to be filled again.
const completeEvery = 5 * time.Millisecond

// runningDump is a dump whose files are complete. The shim may still be at it.
type runningDump struct {
	began time.Time
	done  chan struct{} // closed when the shim has answered; err is then set
	err   error
}

// wait waits until the shim has done with the container, which without an error is then as before.
func (d *runningDump) wait() error {
	<-d.done
	return d.err
}

// wait waits for the dump of dump. Its error is nil where there is none, and where the answer was lost with a
// containerd that was restarted, if the shim is asked to resume next, which tells.
func (r *run) wait() error {
	if r.dumped == nil {
		return nil
	}
	err := r.dumped.wait()
	if errdefs.IsUnavailable(err) && !r.pausedAt.IsZero() {
		err = nil
	}
	r.result.DumpSeconds = time.Since(r.dumped.began).Seconds()
	return err
}

// dump has the shim dump the processes while containerd takes the writable files. It returns when
// all files are complete. After an error nothing goes on in the shim.
func (r *run) dump(ctx context.Context) error {
	if err := r.describe(); err != nil {
		return err
	}
	opts, err := typeurl.MarshalAnyToProto(&options.CheckpointOptions{ImagePath: r.dumpDir})
	if err != nil {
		return fmt.Errorf("encode the request: %w", err)
	}
	meter := r.Progress.Begin("dump", 0)
	d := &runningDump{began: time.Now(), done: make(chan struct{})}
	go func() {
		defer close(d.done)
		_, err := r.client.TaskService().Checkpoint(ctx, &tasks.CheckpointTaskRequest{ContainerID: r.task.ID(), Options: opts})
		d.err = errgrpc.ToNative(err)
	}()
	// If one of the two fails, the other goes on: an undo in its middle would race it.
	diffErr := r.takeDiff(ctx)
	complete, metaErr := d.complete(filepath.Join(r.dumpDir, images.MetadataName))
	if complete && diffErr == nil {
		meter.End("dumped")
		r.dumped = d
		return nil
	}
	err = errors.Join(d.wait(), diffErr, metaErr)
	if ctx.Err() != nil {
		// The shim gives up a dump whose directory is gone.
		err = errors.Join(err, removeDump(r.dumpDir))
	}
	return err
}

// complete waits for metadata or the shim's answer, and reports whether all files are complete.
func (d *runningDump) complete(metadata string) (bool, error) {
	tick := time.NewTicker(completeEvery)
	defer tick.Stop()
	for answered := false; ; {
		switch _, err := os.Stat(metadata); {
		case err == nil:
			return true, nil
		case !errors.Is(err, os.ErrNotExist):
			<-d.done
			return false, fmt.Errorf("look for the end of the dump: %w", err)
		case answered: // no GPU state
			return d.err == nil, nil
		}
		select {
		case <-tick.C:
		case <-d.done:
			answered = true
		}
	}
}

func (r *run) takeDiff(ctx context.Context) error {
	if r.info.SnapshotKey == "" {
		return nil
	}
	rw, err := rootfs.CreateDiff(ctx, r.info.SnapshotKey, r.client.SnapshotService(r.info.Snapshotter), r.client.DiffService(),
		diff.WithReference("gpuckpt-rw-"+filepath.Base(r.dumpDir)), diff.WithMediaType(r.Build.Compression.MediaType()))
	if err != nil {
		return fmt.Errorf("take its writable files: %w", err)
	}
	r.Build.RW = &rw
	return nil
}

// named adds the container's name to a spec where checkpointctl reads it, unless CRI has done so.
func named(spec []byte, name string) ([]byte, error) {
	const key = "io.kubernetes.cri.container-name"
	var all map[string]json.RawMessage
	var given struct {
		Annotations map[string]string `json:"annotations"`
	}
	if err := errors.Join(json.Unmarshal(spec, &all), json.Unmarshal(spec, &given)); err != nil {
		return nil, err
	}
	if all == nil {
		return nil, errors.New("the container has no spec")
	}
	if given.Annotations[key] != "" {
		return spec, nil
	}
	if given.Annotations == nil {
		given.Annotations = map[string]string{}
	}
	given.Annotations[key] = name
	data, err := json.Marshal(given.Annotations)
	if err != nil {
		return nil, err
	}
	all["annotations"] = data
	return json.Marshal(all)
}

// describe writes beside the dump what the container is, for readers and Kubernetes archives.
func (r *run) describe() error {
	spec := []byte("{}")
	if r.info.Spec != nil {
		spec = r.info.Spec.GetValue()
	}
	spec, err := named(spec, r.info.ID)
	if err != nil {
		return fmt.Errorf("the spec of %s: %w", r.info.ID, err)
	}
	config, err := json.Marshal(metadata.ContainerConfig{
		ID: r.info.ID, Name: r.info.ID, RootfsImage: r.info.Image, RootfsImageName: r.info.Image,
		RootfsImageRef: r.Build.Base.Digest.String(), OCIRuntime: r.info.Runtime.Name,
		CreatedTime: r.info.CreatedAt, CheckpointedAt: time.Now(),
	})
	if err != nil {
		return err
	}
	for name, data := range map[string][]byte{metadata.SpecDumpFile: spec, metadata.ConfigDumpFile: config} {
		if err := os.WriteFile(filepath.Join(r.dumpDir, name), data, 0o600); err != nil {
			return fmt.Errorf("write down what it is: %w", err)
		}
	}
	return nil
}
