// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package beside

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/typeurl/v2"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// Run is a container on one way.
type Run struct {
	// Container is the one that runs, once it is started.
	Container *harness.Container

	ctx     context.Context
	cancel  context.CancelFunc
	in      *harness.Containerd
	way     string
	spec    harness.RunSpec
	files   string // a directory of the run's
	network string
	ref     string // the image's name
	round   int
}

// New prepares a run of a container whose network is as a pod's, in which only the loopback interface is.
// options are lines of CRIU's configuration for runc's shim; this project's chooses for itself. bins are the
// programs under test. End must be called.
func New(ctx context.Context, in *harness.Containerd, bins harness.Bins, way string, spec harness.RunSpec, options []string) (_ *Run, err error) {
	spec.ID += "-" + strings.Split(spec.Runtime, ".")[2] + "-" + strings.ToLower(way[:2])
	r := &Run{in: in, way: way, files: filepath.Join(in.Dir(), "run-"+spec.ID), ref: "checkpoint.test/" + spec.ID + ":"}
	r.network = filepath.Join(r.files, "network")
	if err := os.Mkdir(r.files, 0o700); err != nil {
		return nil, err
	}
	// It outlives the container.
	if err := harness.NewNetwork(r.network); err != nil {
		return nil, errors.Join(err, os.RemoveAll(r.files))
	}
	spec.OwnNetwork = true
	spec.CtrFlags = append(slices.Clone(spec.CtrFlags), "--with-ns", "network:"+r.network)
	if spec.Runtime == harness.RuncRuntime {
		err = r.forRunc(&spec, bins, options)
	}
	r.spec = spec
	r.ctx, r.cancel = context.WithCancel(ctx)
	if err != nil {
		return nil, errors.Join(err, r.End())
	}
	return r, nil
}

// forRunc has runc's shim give CRIU the options. Where root has no CAP_SYS_RESOURCE, CRIU gets the help of
// this project's library as well: else it could dump no server, which all run as users of their own.
func (r *Run) forRunc(spec *harness.RunSpec, bins harness.Bins, options []string) error {
	if !slices.ContainsFunc(options, func(line string) bool { return strings.HasPrefix(line, "network-lock") }) {
		options = append(slices.Clone(options), "network-lock nftables")
	}
	config := filepath.Join(r.files, "criu.conf")
	spec.Annotations = map[string]string{"org.criu.config": config}
	var paths []string
	for _, name := range []string{"gpuckpt_criu.so", "criu", "runc"} {
		path, err := bins.Path(name)
		if err != nil {
			return err
		}
		paths = append(paths, path)
	}
	runc := filepath.Join(r.files, "runc")
	spec.CtrFlags = append(spec.CtrFlags, "--runc-binary", runc)
	return errors.Join(
		os.WriteFile(config, []byte(strings.Join(options, "\n")+"\n"), 0o600),
		os.WriteFile(filepath.Join(r.files, "criu"), fmt.Appendf(nil, "#!/bin/sh\nLD_PRELOAD=%s exec %s \"$@\"\n", paths[0], paths[1]), 0o700),
		os.WriteFile(runc, fmt.Appendf(nil, "#!/bin/sh\nPATH=%s:$PATH exec %s \"$@\"\n", r.files, paths[2]), 0o700),
	)
}

// End removes all of it.
func (r *Run) End() error {
	r.cancel()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	err := r.in.Remove(ctx, r.spec.ID)
	if r.way != Place {
		err = errors.Join(err, r.removeImage(ctx))
	}
	return errors.Join(err, unix.Unmount(r.network, unix.MNT_DETACH), os.RemoveAll(r.files))
}

func (r *Run) removeImage(ctx context.Context) error {
	if r.round == 0 {
		return nil
	}
	_, err := r.in.Ctr(ctx, "images", "rm", "--sync", r.image())
	return err
}

// Start runs the container.
func (r *Run) Start() (err error) {
	r.Container, err = r.in.Run(r.ctx, r.spec)
	return err
}

// ThereAndBack takes the container there and back, in a row as often as rounds says, and has verdict say
// after each round, from 1 on, whether all is as it was. A refused checkpoint ends the rounds, and verdict is
// asked as after a restore. The seconds of the outcome are medians. The error is the test's own.
func (r *Run) ThereAndBack(rounds int, verdict func(round int) error) (*Outcome, error) {
	checkpoint, restore := r.checkpointImage, r.restoreImage
	if r.way == Place {
		checkpoint, restore = r.checkpointInto, r.restoreFrom
	}
	outcome := &Outcome{}
	fail := func(step string, err error) *Outcome {
		outcome.Failed, outcome.Error = step, r.Short(err)
		if r.round > 1 {
			outcome.Error = fmt.Sprintf("round %d: %s", r.round, outcome.Error)
		}
		return outcome
	}
	var checkpoints, restores []float64
	for r.round = 1; ; r.round++ {
		err := timed(&checkpoints, checkpoint)
		if err != nil {
			outcome.RunsOn = verdict(r.round) == nil
			return fail("checkpoint", err), nil
		}
		if outcome.Size, err = r.size(); err != nil {
			return nil, err
		}
		if err := r.leave(); err != nil {
			return nil, err
		}
		if err := timed(&restores, restore); err != nil {
			return fail("restore", err), nil
		}
		if err := verdict(r.round); err != nil {
			return fail("verdict", err), nil
		}
		if r.round == rounds {
			outcome.Checkpoint, outcome.Restore = Median(checkpoints), Median(restores)
			return outcome, nil
		}
		if err := r.forget(); err != nil {
			return nil, err
		}
	}
}

func timed(seconds *[]float64, do func() error) error {
	began := time.Now()
	err := do()
	*seconds = append(*seconds, float64(time.Since(began).Milliseconds())/1000)
	return err
}

// Short is the end of an error's text, for results, without the instance's directory.
func (r *Run) Short(err error) string {
	text := []rune(strings.ReplaceAll(strings.TrimSpace(err.Error()), r.in.Dir(), ""))
	return string(text[max(0, len(text)-600):])
}

func (r *Run) dump() string { return filepath.Join(r.files, "dump") }

func (r *Run) image() string { return fmt.Sprint(r.ref, r.round) }

// forget removes what a restore no longer needs.
func (r *Run) forget() error {
	if r.way == Place {
		return os.RemoveAll(r.dump())
	}
	return r.removeImage(r.ctx)
}

// checkpointInto is the shim's Checkpoint with exit, as nerdctl and Docker ask for it.
func (r *Run) checkpointInto() error {
	if err := os.Mkdir(r.dump(), 0o700); err != nil {
		return err
	}
	with, err := typeurl.MarshalAnyToProto(&options.CheckpointOptions{Exit: true, ImagePath: r.dump()})
	if err != nil {
		return err
	}
	_, err = r.in.Client().TaskService().Checkpoint(r.ctx, &tasks.CheckpointTaskRequest{ContainerID: r.spec.ID, Options: with})
	return err
}

func (r *Run) restoreFrom() error {
	container, err := r.in.Client().LoadContainer(r.ctx, r.spec.ID)
	if err != nil {
		return err
	}
	task, err := container.NewTask(r.ctx, cio.LogFile(filepath.Join(r.in.Dir(), "logs", r.spec.ID+".restored")), client.WithRestoreImagePath(r.dump()))
	if err != nil {
		return err
	}
	return task.Start(r.ctx)
}

func (r *Run) checkpointImage() error { return r.Container.Checkpoint(r.ctx, r.image()) }

func (r *Run) restoreImage() (err error) {
	r.Container, err = r.in.Restore(r.ctx, r.spec.ID, r.image(), 0)
	return err
}

// leave ends what was checkpointed, so that a restore can take its place.
func (r *Run) leave() error {
	if r.way != Place {
		return r.Container.Remove(r.ctx)
	}
	for {
		status, err := r.Container.Status(r.ctx)
		if err != nil {
			return err
		}
		if status == client.Stopped {
			_, err = r.in.Ctr(r.ctx, "tasks", "delete", r.spec.ID)
			return err
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// size is a checkpoint's: of the files, or of the layers that the image has beside the container's own.
func (r *Run) size() (size int64, err error) {
	if r.way == Place {
		err = filepath.WalkDir(r.dump(), func(_ string, entry fs.DirEntry, err error) error {
			if err != nil || !entry.Type().IsRegular() {
				return err
			}
			info, err := entry.Info()
			size += info.Size()
			return err
		})
		return size, err
	}
	img, err := r.in.Client().ImageService().Get(r.ctx, r.image())
	if err != nil {
		return 0, err
	}
	err = images.Walk(r.ctx, images.HandlerFunc(func(ctx context.Context, d ocispec.Descriptor) ([]ocispec.Descriptor, error) {
		if !images.IsIndexType(d.MediaType) {
			size += d.Size
			return nil, nil
		}
		var index ocispec.Index
		data, err := content.ReadBlob(ctx, r.in.Client().ContentStore(), d)
		if err == nil {
			err = json.Unmarshal(data, &index)
		}
		return index.Manifests, err
	}), img.Target)
	return size, err
}
