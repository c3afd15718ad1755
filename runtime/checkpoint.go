// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	taskAPI "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types/runc/options"
	ptypes "github.com/containerd/containerd/v2/pkg/protobuf/types"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/log"
	"github.com/containerd/typeurl/v2"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/config"
	"github.com/gpuckpt/gpuckpt/internal/host"
	"github.com/gpuckpt/gpuckpt/internal/proc"
)

// killTimeout bounds the wait for a container that was killed after its
// checkpoint: SIGKILL needs no more than the kernel's time.
const killTimeout = 30 * time.Second

// Checkpoint dumps the container into r.Path. A container without CUDA goes
// straight to runc. After an error, and after a checkpoint that leaves the
// container running, it is as it was before: running, or paused if the client
// had paused it.
func (s *Service) Checkpoint(ctx context.Context, r *taskAPI.CheckpointTaskRequest) (*ptypes.Empty, error) {
	c := s.container(r.ID)
	if c == nil {
		return s.TTRPCTaskService.Checkpoint(ctx, r)
	}
	if err := c.refuseSecond(); err != nil {
		return nil, toGRPC(err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.checkpointing.Store(c.paused)
	defer c.checkpointing.Store(false)
	if err := s.checkpoint(ctx, c, r); err != nil {
		return nil, toGRPC(err)
	}
	return &ptypes.Empty{}, nil
}

func (s *Service) checkpoint(ctx context.Context, c *container, r *taskAPI.CheckpointTaskRequest) (err error) {
	read := config.For(c.annotations)
	opts, err := checkpointOptions(r.Options, read)
	if err != nil {
		return err
	}
	if opts != nil {
		if r.Options, err = typeurl.MarshalAnyToProto(opts); err != nil {
			return fmt.Errorf("encode checkpoint options: %w", err)
		}
		if err := c.claimWorkDir(opts.WorkPath); err != nil {
			return err
		}
		defer func() {
			if err != nil {
				c.workPath = "" // for another try, by whoever makes it
			}
		}()
	}
	gpu, err := c.hasGPU()
	if err != nil {
		return err
	}
	if !gpu {
		if err := refuseTaken(r.Path); err != nil {
			return err
		}
		return s.dump(ctx, c, r, read)
	}
	if c.isSuspended() {
		return fmt.Errorf("the container is suspended, its GPU state is not in its processes: resume it first: %w", errdefs.ErrFailedPrecondition)
	}
	if opts == nil {
		opts = &options.CheckpointOptions{}
	}
	return s.checkpointGPU(ctx, c, r, opts, read)
}

// hasGPU says whether the container's checkpoint needs the CUDA steps.
func (c *container) hasGPU() (bool, error) {
	if c.gpu != nil || c.lockErr != nil {
		return true, nil
	}
	if c.pid == 0 {
		return false, nil
	}
	cg, err := host.CgroupOf(c.pid)
	if err != nil {
		return false, err
	}
	pids, err := cg.Pids()
	if err != nil {
		return false, err
	}
	may, err := mayUseCUDA(pids)
	return len(may) > 0, err
}

// checkpointGPU is the checkpoint of a GPU container, step by step.
func (s *Service) checkpointGPU(ctx context.Context, c *container, r *taskAPI.CheckpointTaskRequest, opts *options.CheckpointOptions, read config.Source) error {
	q := newSequence("checkpoint", c.id)
	defer func() { q.save(context.WithoutCancel(ctx), c.bundle) }()
	// CRIU must not end the container: that is done below, once the checkpoint
	// is complete on disk. Until then there is a way back.
	stay := proto.Clone(opts).(*options.CheckpointOptions)
	stay.Exit = false
	dump, err := typeurl.MarshalAnyToProto(stay)
	if err != nil {
		return fmt.Errorf("encode checkpoint options: %w", err)
	}
	var m *images.Metadata
	var procs []cuda.Process
	var store *storing
	defer func() { store.end() }()
	clientPaused := c.paused

	steps := []step{}
	if !clientPaused {
		steps = append(steps, step{
			name: "pause", do: func(ctx context.Context) (uint64, error) { return 0, s.pauseHere(ctx, c, read) },
			back: "resume", undo: func(ctx context.Context) error { _, err := s.resume(ctx, c); return err },
		})
	}
	steps = append(steps,
		step{name: "preflight", do: func(ctx context.Context) (_ uint64, err error) {
			if err := makeImageDir(r.Path); err != nil {
				return 0, err
			}
			if err := c.preflight(ctx, q, r.Path, read); err != nil {
				return 0, err
			}
			m, err = c.gpu.metadata(q.began)
			return 0, err
		}},
		step{
			name: "save GPU state", do: func(ctx context.Context) (uint64, error) {
				procs = c.gpu.procs
				sizes, err := c.gpu.save(ctx, c, r.Path)
				if err != nil {
					return 0, err
				}
				for i, n := range sizes {
					m.Processes[i].Bytes = n
				}
				return sum(sizes), nil
			},
			back: "give GPU state back", undo: func(ctx context.Context) error { return c.gpu.giveBack(ctx, c) },
		},
		step{name: "dump", do: func(ctx context.Context) (uint64, error) {
			if err := awaited(r.Path); err != nil {
				return 0, err
			}
			// Somebody may have come in past runc while it was thawed.
			if err := c.refuseOutsiders(); err != nil {
				return 0, err
			}
			// CRIU dumps what is left in the processes while the GPU state
			// that was taken out of them is digested, or written to the disk.
			var err error
			if store, err = c.gpu.startStoring(ctx, r.Path, !opts.Exit); err != nil {
				return 0, err
			}
			if err := s.dump(ctx, c, &taskAPI.CheckpointTaskRequest{ID: r.ID, Path: r.Path, Options: dump}, read); err != nil {
				return 0, err
			}
			return sizeOf(r.Path)
		}},
	)
	last := []step{
		{name: "store GPU state", do: func(ctx context.Context) (uint64, error) { return store.bytes(), store.wait() }},
		{name: "write metadata", do: func(context.Context) (uint64, error) {
			store.describe(m)
			m.Phases = q.known()
			return 0, images.WriteMetadata(r.Path, m)
		}},
	}
	err = q.run(ctx, steps...)
	var stuck error
	switch {
	case err == nil && opts.Exit:
		err = q.run(ctx, last...)
	case err == nil:
		// Leave running: the way back is the same as from a failure. The
		// container waits for CRIU, not for the disk; and who waits for the
		// files, whose metadata comes last, does not wait for the driver.
		stuck, err = q.runBeside(ctx, last...)
	}
	if err != nil {
		if clientPaused && errors.Is(err, context.Canceled) {
			log.G(ctx).WithField("id", c.id).Warnf("the client has given up its checkpoint: the container stays paused, as it was before, until somebody resumes it (ctr tasks resume %s)", c.id)
		}
		store.end()
		removeAreaFiles(ctx, r.Path, procs)
		return joinBack(err, stuck)
	}
	if opts.Exit {
		err := q.time(context.WithoutCancel(ctx), "stop", func(ctx context.Context) (uint64, error) { return 0, s.stop(ctx, c) })
		if err != nil {
			return joinBack(err, q.goBack(ctx))
		}
		return nil
	}
	if stuck != nil {
		return fmt.Errorf("the checkpoint in %s is complete, but the container did not go on: %w", r.Path, stuck)
	}
	return nil
}

// pauseHere pauses for a client that did not.
func (s *Service) pauseHere(ctx context.Context, c *container, read config.Source) error {
	if _, err := s.pause(ctx, c, read); err != nil {
		return err
	}
	c.paused = true
	return nil
}

// preflight refuses what cannot work before anything is touched.
func (c *container) preflight(ctx context.Context, q *sequence, dir string, read config.Source) error {
	if err := refuseTaken(dir); err != nil {
		return err
	}
	if err := c.checkLocked(q); err != nil {
		return err
	}
	if err := c.gpu.checkRoom(dir); err != nil {
		return err
	}
	if err := c.refuseOutsiders(); err != nil {
		return err
	}
	view, err := read()
	if err != nil {
		return err
	}
	return checkCRIU(ctx, view.Node)
}

// refuseOutsiders refuses a container with processes that a dump would lack.
func (c *container) refuseOutsiders() error {
	cg, err := host.CgroupOf(c.pid)
	if err != nil {
		return err
	}
	pids, err := cg.Pids()
	if err != nil {
		return err
	}
	extra, err := outsiders(c.pid, pids)
	if err != nil {
		return err
	}
	if len(extra) > 0 {
		var names []string
		for _, pid := range extra {
			names = append(names, proc.Describe(pid))
		}
		return fmt.Errorf("processes were exec'd into the container and would be missing from the checkpoint: %s; end them and try again: %w",
			strings.Join(names, ", "), errdefs.ErrFailedPrecondition)
	}
	return nil
}

// refuseTaken refuses a directory that holds a GPU checkpoint, which another dump
// would spoil, or GPU state of one that was cut short, by a shim that was killed,
// say. Beside that the new one would be complete and yet not be restored: its
// gpuckpt.json knows nothing of those files.
func refuseTaken(dir string) error {
	if _, err := os.Stat(filepath.Join(dir, images.MetadataName)); !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("%s holds a GPU checkpoint already: choose an empty directory: %w", dir, errdefs.ErrAlreadyExists)
	}
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look into the directory for the images: %w", err)
	}
	for _, e := range entries {
		if images.IsAreaFile(e.Name()) {
			return fmt.Errorf("%s is GPU state of a checkpoint that was cut short: choose an empty directory, or remove what is in %s: %w",
				filepath.Join(dir, e.Name()), dir, errdefs.ErrAlreadyExists)
		}
	}
	return nil
}

// checkLocked refuses a container whose CUDA processes are not all locked.
func (c *container) checkLocked(q *sequence) error {
	if c.lockErr != nil {
		return fmt.Errorf("the container's CUDA processes could not be locked when it was paused: %w", c.lockErr)
	}
	if c.gpu == nil {
		return fmt.Errorf("the container began to use CUDA while it was being paused; resume it and try again: %w", errdefs.ErrFailedPrecondition)
	}
	q.phases = append(q.phases, images.Phase{Name: "lock", Took: c.gpu.lockTook})
	cg, err := host.CgroupOf(c.pid)
	if err != nil {
		return err
	}
	pids, err := cg.Pids()
	if err != nil {
		return err
	}
	return c.gpu.refuseUnlocked(pids)
}

// makeImageDir makes the directory for the images if there is none, as runc does
// when it gets to it, unless its maker has taken it away (awaited). It stays
// after an error.
func makeImageDir(path string) error {
	if isTemporary(path) {
		return nil
	}
	if err := os.MkdirAll(path, 0o755); err != nil {
		return fmt.Errorf("make the directory for the images: %w", err)
	}
	return nil
}

// awaited says whether anybody waits for a checkpoint still. ttrpc does not tell
// of a client that has given up, but containerd then removes the directory that
// it made for the images, and runc would make it again for nobody.
func awaited(path string) error {
	if _, err := os.Stat(path); isTemporary(path) && errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("the client has given up, %s is gone: %w", path, context.Canceled)
	}
	return nil
}

// refuseUnlocked finds CUDA processes that are not among the locked ones: a
// program that called cuInit between the lock and the freeze.
func (g *gpuState) refuseUnlocked(pids []int) error {
	may, err := mayUseCUDA(pids)
	if err != nil {
		return err
	}
	known := make(map[int]bool)
	for _, p := range g.procs {
		known[p.PID] = true
	}
	for _, pid := range may {
		if known[pid] {
			continue
		}
		devices, err := cuda.HoldsDevice(pid)
		if err != nil {
			return err
		}
		if devices {
			return fmt.Errorf("process %s has files of a GPU open and was not locked: it began to use CUDA while the container was being paused (resume it and try again), or it was forked by a process that uses CUDA and can do nothing with these files but keep CRIU from dumping it (end it, or start such processes before CUDA is used): %w",
				proc.Describe(pid), errdefs.ErrFailedPrecondition)
		}
	}
	return nil
}

// dump runs runc's checkpoint with this shim's CRIU settings, and says what
// CRIU had to say when it fails. A dump that has begun is not given up: CRIU has
// code of its own in the processes then, and would go on without runc.
func (s *Service) dump(ctx context.Context, c *container, r *taskAPI.CheckpointTaskRequest, read config.Source) error {
	view, err := read()
	if err != nil {
		return err
	}
	if err := c.writeCRIUSettings(ctx, view); err != nil {
		return err
	}
	// That of an earlier failure is not to be quoted for this one.
	if err := os.Remove(c.criuLog(dumpLog)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove CRIU's old log: %w", err)
	}
	watch := watchCRIU(ctx, false)
	_, err = s.TTRPCTaskService.Checkpoint(context.WithoutCancel(ctx), r)
	if err = watch.end(errgrpc.ToNative(err)); err != nil {
		return joinBack(withCRIULog(err, view.Node, c, dumpLog), endCRIU())
	}
	return nil
}

// stop kills a container whose checkpoint is complete and waits for its end.
// It is frozen until then, so nothing runs in between.
func (s *Service) stop(ctx context.Context, c *container) error {
	ctx, cancel := context.WithTimeout(ctx, killTimeout)
	defer cancel()
	if _, err := s.TTRPCTaskService.Kill(ctx, &taskAPI.KillRequest{ID: c.id, Signal: uint32(unix.SIGKILL), All: true}); err != nil {
		if err := errgrpc.ToNative(err); !errdefs.IsNotFound(err) {
			return fmt.Errorf("kill the container after its checkpoint: %w", err)
		}
	}
	if _, err := s.TTRPCTaskService.Wait(ctx, &taskAPI.WaitRequest{ID: c.id}); err != nil {
		return fmt.Errorf("wait for the container's end after its checkpoint: %w", err)
	}
	c.paused = false
	c.gpu.close()
	c.gpu.dropAreas()
	c.gpu = nil
	log.G(ctx).WithField("id", c.id).Info("stopped after its checkpoint")
	return nil
}

func sum(sizes []uint64) (bytes uint64) {
	for _, n := range sizes {
		bytes += n
	}
	return bytes
}
