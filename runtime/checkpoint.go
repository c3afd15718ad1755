// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"sync"
	"time"

	taskAPI "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types/runc/options"
	ptypes "github.com/containerd/containerd/v2/pkg/protobuf/types"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/log"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/criu/adapt"
	"github.com/gpuckpt/gpuckpt/internal/criu/different"
	"github.com/gpuckpt/gpuckpt/internal/criu/filelocks"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/criu/pages"
	"github.com/gpuckpt/gpuckpt/internal/criu/tmpfs"
	"github.com/gpuckpt/gpuckpt/internal/guard"
	"github.com/gpuckpt/gpuckpt/internal/guard/admission"
	"github.com/gpuckpt/gpuckpt/internal/guard/trust"
	"github.com/gpuckpt/gpuckpt/internal/node/bundle"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
	"github.com/gpuckpt/gpuckpt/internal/operation/imagedir"
	"github.com/gpuckpt/gpuckpt/internal/operation/journal"
	"github.com/gpuckpt/gpuckpt/internal/operation/quota"
	"github.com/gpuckpt/gpuckpt/internal/operation/sequence"
	"github.com/gpuckpt/gpuckpt/runtime/internal/burden"
	"github.com/gpuckpt/gpuckpt/runtime/internal/denied"
	"github.com/gpuckpt/gpuckpt/runtime/internal/devnode"
	"github.com/gpuckpt/gpuckpt/runtime/internal/execs"
	"github.com/gpuckpt/gpuckpt/runtime/internal/gpustate"
	"github.com/gpuckpt/gpuckpt/runtime/internal/hostmemory"
	"github.com/gpuckpt/gpuckpt/runtime/internal/hung"
	"github.com/gpuckpt/gpuckpt/runtime/internal/inspect"
	"github.com/gpuckpt/gpuckpt/runtime/internal/names"
	"github.com/gpuckpt/gpuckpt/runtime/internal/openfiles"
	"github.com/gpuckpt/gpuckpt/runtime/internal/reaper"
	"github.com/gpuckpt/gpuckpt/runtime/internal/scheduling"
	"github.com/gpuckpt/gpuckpt/runtime/internal/told"
)

// Checkpoint dumps the container into r.Path. A container without CUDA goes
// straight to runc. After an error, and after a checkpoint that leaves the
// container running, it is as it was before: running, or paused if the client
// had paused it. If the driver does not give its GPU state back, it has ended, and
// there is no checkpoint.
func (s *Service) Checkpoint(ctx context.Context, r *taskAPI.CheckpointTaskRequest) (*ptypes.Empty, error) {
	c := s.container(r.ID)
	if c == nil {
		return s.TTRPCTaskService.Checkpoint(ctx, r)
	}
	if err := c.exclusive.Lock(&c.mu); err != nil {
		return nil, toGRPC(err)
	}
	defer c.mu.Unlock()
	c.exclusive.Begin(c.paused)
	ctx, began := c.logged(ctx), time.Now()
	err := s.checkpoint(ctx, c, r)
	c.exclusive.End(err)
	size, _ := imagedir.Size(r.Path) // of what is there, for the event
	s.announce.Over(ctx, "checkpoint", c.id, began, size, c.different, err)
	if err == nil {
		s.announce.Checkpointed(ctx, c.id, r.Path)
	}
	return &ptypes.Empty{}, toGRPC(err)
}

func (s *Service) checkpoint(ctx context.Context, c *container, r *taskAPI.CheckpointTaskRequest) (err error) {
	if c.pid == 0 { // nothing runs in it yet, or any more: runc's service refuses it
		_, err := s.TTRPCTaskService.Checkpoint(ctx, r)
		return errgrpc.ToNative(err)
	}
	read := config.For(c.annotations)
	opts, err := checkpointOptions(r.Options, read)
	if err != nil {
		return err
	}
	if opts != nil {
		if r.Options, err = typeurl.MarshalAnyToProto(opts); err != nil {
			return fmt.Errorf("encode checkpoint options: %w", err)
		}
		if c.paused {
			if err := c.exclusive.Claim(opts.WorkPath); err != nil {
				return err
			}
		}
	}
	gpu, err := c.hasGPU()
	if err != nil {
		return err
	}
	if c.suspended {
		return fmt.Errorf("the container is suspended, its GPU state is not in its processes: resume it first: %w", errdefs.ErrFailedPrecondition)
	}
	if err := hung.Refuse(c.pid); err != nil {
		return err
	}
	turn, err := quota.TakeMemory(ctx, quota.Who{Operation: "checkpoint", Container: c.id}, read)
	if err != nil {
		return err
	}
	defer turn.Give()
	dir, stuck := imagedir.Look(r.Path), error(nil)
	if err := c.begin(ctx, read, journal.Record{Operation: "checkpoint", Images: &dir}); err != nil {
		return err
	}
	defer func() { c.end(ctx, stuck) }()
	if gpu { // else dumpSigned does it, beside CRIU
		if err := c.journal.FlushBeside()(); err != nil {
			return err
		}
	}
	opts = cmp.Or(opts, new(options.CheckpointOptions))
	for try := 1; ; try++ {
		k := &checkpointing{pausing: pausing{s: s, c: c, read: read}, turn: turn, q: sequence.New("checkpoint", c.id), images: imagedir.Dir{Path: r.Path}, opts: opts}
		if gpu {
			k.q.Journal = &c.journal
			err, stuck = k.run(ctx), k.q.Stuck
		} else {
			err = k.withoutCUDA(ctx)
		}
		if !c.ended {
			k.release()
		}
		// A container that the client has paused stays so, and the other end of a connection with it.
		if try == tries || c.paused || c.ended || !errors.Is(err, admission.ErrTorn) && !errors.Is(err, adapt.ErrUnsent) {
			return err
		}
		log.G(ctx).WithError(err).WithField("try", try).Info("the container runs on for a moment, and is checkpointed again")
	}
}

// tries is how often a checkpoint is tried that a moment's work of the program stood in the way of.
const tries = 5

// checkpointing is one checkpoint of a container. Its steps leave their results in it.
type checkpointing struct {
	pausing
	q      *sequence.Sequence
	images imagedir.Dir
	opts   *options.CheckpointOptions
	next   gpustate.Next
	turn   *quota.Memory
	beside bool // the way back goes beside the last steps
	keeps  bool // all TCP connections are to be restored open, of dumpStaying
	holds  bool // they take nothing, of dumpStaying

	sealer   *trust.Sealer         // of preflight
	metadata *images.Metadata      // of preflight
	memory   *pages.Dump           // of save
	dumped   *criu.Images          // of dump
	tree     func() ([]int, error) // of dump: the container's, which stands still
	writer   *gpustate.Writer      // of dump
}

// withoutCUDA checkpoints a container that does not use CUDA, without the cost of steps. A container
// that is to end stays frozen until its checkpoint is complete. After an error it runs on, or is
// paused as it was, and nothing of the checkpoint is left.
func (k *checkpointing) withoutCUDA(ctx context.Context) (err error) {
	if !k.c.paused && k.c.hears(false) { // else its pause has told the program
		if k.told, err = k.c.readHooks(k.read); err != nil {
			return err
		}
		if _, err := k.tellBefore(ctx); err != nil {
			return err
		}
		defer func() { err = sequence.Join(err, k.tellAfter(context.WithoutCancel(ctx))) }()
	}
	if err := k.refuseHook(); err != nil {
		return err
	}
	if err := k.images.Prepare(); err != nil {
		return err
	}
	thaw, err := k.freeze()
	if err != nil {
		return sequence.Join(err, k.images.Leave(ctx))
	}
	defer func() { err = sequence.Join(err, thaw()) }()
	if err = k.refuseBurden(); err == nil {
		err = denied.Refuse(k.c.tree)
	}
	if err != nil {
		return sequence.Join(err, k.images.Leave(ctx))
	}
	if err := k.dumpSigned(ctx, thaw); err != nil {
		k.release()
		return sequence.Join(err, k.images.Leave(ctx))
	}
	if k.opts.Exit {
		_, err = k.stop(context.WithoutCancel(ctx))
	}
	return err
}

// dumpSigned dumps the processes and signs the dump. A container that is not to end resumes in between.
func (k *checkpointing) dumpSigned(ctx context.Context, thaw func() error) (err error) {
	if k.sealer, err = trust.NewSealer(k.read, k.images.Path); err != nil {
		return err
	}
	k.memory = k.c.pastCRIU(ctx, k.images.Path, k.read)
	defer k.memory.Close()
	flushed := k.c.journal.FlushBeside()
	if err := k.dumpStaying(ctx); err != nil {
		return err
	}
	if err := flushed(); err != nil {
		return err
	}
	if !k.opts.Exit {
		if err := thaw(); err != nil {
			return err
		}
	}
	if err := guard.Own(ctx, k.c.bundle, k.read, k.dumped); err != nil {
		return err
	}
	return k.sealer.Complete(context.WithoutCancel(ctx), k.images.Path, new(images.Metadata), k.memory.Digests())
}

// freeze freezes a container that its client has not paused, by its cgroup: runc takes longer for it
// than CRIU for a small program. thaw may be called again, and when the container has ended.
func (k *checkpointing) freeze() (thaw func() error, err error) {
	if k.c.paused {
		return func() error { return nil }, nil
	}
	cg, err := host.CgroupOf(k.c.pid)
	if err != nil {
		return nil, err
	}
	thaw = sync.OnceValue(func() error {
		k.c.frozen.Store(nil)
		if err := cg.Thaw(); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	})
	k.c.frozen.Store(cg) // nobody finds it by a process that has ended
	if _, err := host.RetryFreeze(k.c.pid, func() (any, error) { return nil, cg.Freeze() }); err != nil {
		return nil, sequence.Join(err, thaw())
	}
	return thaw, nil
}

// run takes the steps. A checkpoint that ends the container is complete when the container has ended. One that
// leaves it running goes the way back that a failure takes, but keeps the files; meanwhile these are completed. So
// the container waits for CRIU, not for the disk; and who waits for the files, whose metadata comes last, does not
// wait for the driver.
func (k *checkpointing) run(ctx context.Context) (err error) {
	if k.told, err = k.c.readHooks(k.read); err != nil {
		return err
	}
	defer func() {
		k.memory.Close()
		k.q.Save(context.WithoutCancel(ctx), k.c.bundle)
	}()
	clientPaused := k.c.paused
	if k.next = gpustate.StaysFrozen; !clientPaused && !k.opts.Exit {
		k.next = gpustate.Resumes
	}
	var begin []sequence.Step
	if !clientPaused {
		begin = append(begin,
			sequence.Step{Name: "tell before", Do: k.tellBefore, Back: "tell after", Undo: k.tellAfter},
			sequence.Step{Name: "hold execs", Do: k.holdExecs, Back: "let execs in", Undo: k.letExecsIn},
			sequence.Step{Name: "pause", Do: k.pause, Back: "resume", Undo: k.resume},
		)
	}
	begin = append(begin,
		sequence.Step{Name: "preflight", Do: k.preflight, Back: "remove images", Undo: k.images.Leave, UntilComplete: true},
		sequence.Step{Name: "save GPU state", Do: k.save, Back: "give GPU state back", Undo: k.giveBack},
		sequence.Step{Name: "dump", Do: k.dump, Back: "end writing", Undo: k.endWriting, UntilComplete: true},
	)
	finish := []sequence.Step{
		{Name: "admit", Do: k.admit},
		{Name: "store GPU state", Do: k.store},
		{Name: "write metadata", Do: k.writeMetadata, Completes: true},
	}
	var stuck error // stuck is that of the way back
	if err = k.q.Run(ctx, begin...); err == nil && k.writer.Filling() {
		finish = slices.Insert(finish, 1, sequence.Step{Name: "drain GPU state", Do: k.drain})
	}
	switch {
	case err != nil:
	case k.opts.Exit:
		err = k.q.Run(ctx, append(finish, sequence.Step{Name: "stop", Do: k.stop})...)
	default:
		k.beside = true
		if k.told.AfterCheckpoint != nil {
			finish = k.endTurn(finish)
		}
		stuck, err = k.q.RunBeside(ctx, finish...)
	}
	switch {
	case err != nil:
		if clientPaused && errors.Is(err, context.Canceled) {
			log.G(ctx).Warnf("the client has given up its checkpoint: the container stays paused, as it was before, until somebody resumes it (ctr tasks resume %s)", k.c.id)
		}
		return sequence.Join(err, stuck)
	case errors.Is(stuck, gpustate.ErrLost): // nor would it be given back to a restored container
		return sequence.Join(stuck, k.images.Leave(context.WithoutCancel(ctx)))
	case stuck != nil:
		return fmt.Errorf("the checkpoint in %s is complete, but the container did not go on: %w", k.images.Path, stuck)
	}
	return nil
}

// preflight refuses what cannot work before anything is touched.
func (k *checkpointing) preflight(ctx context.Context) (uint64, error) {
	if err := k.images.Prepare(); err != nil {
		return 0, err
	}
	if err := k.check(ctx); err != nil {
		return 0, sequence.Join(err, k.images.Leave(ctx))
	}
	return 0, nil
}

func (k *checkpointing) check(ctx context.Context) error {
	if err := k.refuseHook(); err != nil {
		return err
	}
	if err := k.c.requireLock(k.q); err != nil {
		return err
	}
	if err := k.refuseBurden(); err != nil { // before anything looks at each file or mapping
		return err
	}
	view, err := k.read()
	if err != nil {
		return err
	}
	capable := beside(func() error { return criu.CheckOnce(ctx, criu.Shim{}, view.CRIU.Path) }) // which takes milliseconds
	if err := k.c.gpu.Preflight(ctx, k.images.Path); err != nil {
		return err
	}
	if err := k.c.gpu.RefuseGraphics(); err != nil {
		return err
	}
	if err := execs.Refuse(k.c.execed()); err != nil {
		return err
	}
	if err := denied.Refuse(k.c.pids); err != nil {
		return err
	}
	if k.sealer, err = trust.NewSealer(k.read, k.images.Path); err != nil {
		return err
	}
	if k.metadata, err = k.c.gpu.Describe(k.q.Began()); err != nil {
		return err
	}
	return capable()
}

// refuseHook refuses a container whose program was not ready when it was paused.
func (k *checkpointing) refuseHook() error {
	if k.c.hookErr == nil {
		return nil
	}
	return fmt.Errorf("the program was not ready for a checkpoint when the container was paused: %w", k.c.hookErr)
}

// refuseBurden refuses a container whose checkpoint would cost the node too much.
func (k *checkpointing) refuseBurden() error {
	view, err := k.read()
	if err != nil {
		return err
	}
	return burden.Refuse(k.c.pid, k.c.tree, k.images.Path, view.ForkLimit)
}

// save saves the GPU state. The pages that dump fills are made meanwhile.
func (k *checkpointing) save(ctx context.Context) (uint64, error) {
	k.memory = k.c.pastCRIU(ctx, k.images.Path, k.read)
	k.memory.MakeRoom()
	bytes, err := k.c.gpu.Save(ctx, k.images.Path, k.next)
	return bytes, k.s.endLost(ctx, k.c, err)
}

// dump has CRIU dump what is left in the processes, and begins to write what was taken out of them, beside CRIU.
func (k *checkpointing) dump(ctx context.Context) (_ uint64, err error) {
	if err := imagedir.ClientWaits(k.images.Path); err != nil {
		return 0, err
	}
	// A process may have come in past runc while the container was thawed.
	if err := execs.Refuse(k.c.execed()); err != nil {
		return 0, err
	}
	if err := k.c.gpu.RefuseGraphics(); err != nil {
		return 0, err
	}
	if k.writer, err = k.c.gpu.Store(ctx, k.images.Path, !k.opts.Exit); err != nil {
		return 0, err
	}
	defer func() {
		if err != nil {
			k.writer.Close()
		}
	}()
	if err := k.dumpStaying(ctx); err != nil {
		return 0, err
	}
	k.memory.Close()
	return imagedir.Size(k.images.Path)
}

// dumpStaying has CRIU dump the processes, and refuses what their own restore would not restore. CRIU
// does not end the container: that comes when the checkpoint is complete on disk. Until then there is
// a way back.
func (k *checkpointing) dumpStaying(ctx context.Context) (err error) {
	defer func() {
		if err != nil {
			k.release()
		}
	}()
	inspected := beside(k.c.inspect)
	view, err := k.read()
	if err != nil {
		return err
	}
	if k.keeps, err = (criu.Settings{Bundle: k.c.bundle, View: view}).KeepsConnections(); err != nil {
		return err
	}
	k.dumped, k.tree = criu.Open(k.images.Path), sync.OnceValues(k.c.tree)
	if k.holds = k.keeps && k.opts.Exit; k.holds {
		pids, _ := k.c.pids() // of one that has ended there are none
		criu.HoldConnections(pids)
	}
	err = k.runCRIU(ctx, inspected)
	if err == nil && k.holds {
		err = criu.RestoreReleased(k.dumped.Set)
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, view.CRIUTimeout())
	defer cancel()
	dumped := k.dumped.Set
	if err := names.Numbers(dumped); err != nil {
		return err
	}
	if err := names.Sockets(ctx, dumped, k.tree); err != nil {
		return err
	}
	return names.Removed(ctx, dumped, k.c.pid, k.tree)
}

// release has the connections of a container that was to end, and goes on, take what comes. It is best while
// the processes stand still: a connection that is on its way between two has the filter for good.
func (k *checkpointing) release() {
	if k.holds {
		k.holds = false
		pids, _ := k.c.pids() // of one that has ended there are none
		criu.ReleaseConnections(pids)
	}
}

// endWriting ends what dump has begun.
func (k *checkpointing) endWriting(context.Context) error {
	k.writer.Close()
	k.release()
	return nil
}

// admit refuses a checkpoint that a restore by the container's own spec would refuse.
func (k *checkpointing) admit(ctx context.Context) (uint64, error) {
	view, err := k.read()
	if err != nil {
		return 0, err
	}
	file, err := bundle.Read(k.c.bundle)
	if err != nil {
		return 0, err
	}
	if _, err := rebindFiles(ctx, view.Node, file.Spec, k.dumped); err != nil {
		return 0, fmt.Errorf("its own restore would refuse it: %w", err)
	}
	return 0, guard.Own(ctx, k.c.bundle, k.read, k.dumped)
}

// drain waits until the GPU state that is on its way to the files still is there.
func (k *checkpointing) drain(ctx context.Context) (uint64, error) { return k.writer.Fill(ctx) }

// store waits until the files of the GPU state are complete.
func (k *checkpointing) store(context.Context) (uint64, error) {
	err := k.writer.Wait()
	k.writer.Close()
	return k.writer.Bytes(), err
}

// writeMetadata signs the checkpoint and makes it complete.
func (k *checkpointing) writeMetadata(ctx context.Context) (uint64, error) {
	k.writer.Describe(k.metadata)
	k.metadata.Phases = k.q.Phases()
	return 0, k.sealer.Complete(ctx, k.images.Path, k.metadata, k.memory.Digests())
}

// stop ends the container. It is frozen until then, so nothing runs in between.
func (k *checkpointing) stop(ctx context.Context) (uint64, error) {
	prepare := reaper.Reusable
	if k.keeps {
		prepare = reaper.Quiet
	}
	over := prepare(k.c.pids)
	err := k.s.endNow(ctx, k.c, "it has ended with its checkpoint")
	over(err == nil)
	if err == nil {
		log.G(ctx).Info("stopped after its checkpoint")
	}
	return 0, err
}

// endNow kills a container, which may be frozen, and gives up its GPU state, also what of it is on a
// disk. why is for those that want to exec in it. On an error it is as it was, or ends later.
func (s *Service) endNow(ctx context.Context, c *container, why string) error {
	defer reaper.Help(ctx, c.pids)()
	if err := s.kill(ctx, c); err != nil {
		return err
	}
	c.ended, c.paused, c.suspended, c.told = true, false, false, nil
	c.execs.End(why)
	c.gpu.Forget()
	c.removeSpill(ctx)
	return nil
}

// endLost ends a container whose GPU state the driver does not give back: its processes could only
// stay frozen for ever. The error says so then. Any other error is returned as it is, and nil.
func (s *Service) endLost(ctx context.Context, c *container, err error) error {
	if !errors.Is(err, gpustate.ErrLost) {
		return err
	}
	ctx = context.WithoutCancel(ctx)
	log.G(ctx).WithError(err).Error("ending the container")
	if kerr := s.endNow(ctx, c, gpustate.ErrLost.Error()); kerr != nil {
		return sequence.Join(err, kerr)
	}
	return fmt.Errorf("the container has ended: %w", err)
}

// runCRIU runs runc's checkpoint with this shim's CRIU settings, and says what
// CRIU had to say when it fails. A dump that has begun is not given up: CRIU has
// code of its own in the processes then, and would go on without runc. It waits until they are inspected.
func (k *checkpointing) runCRIU(ctx context.Context, inspected func() error) error {
	c, images, dumped := k.c, k.images.Path, k.dumped.Set
	view, err := k.read()
	if err != nil {
		return err
	}
	locks, err := filelocks.Find(c.pid, k.tree)
	if err != nil {
		return err
	}
	if _, err := c.writeSettings(ctx, view, locks.Break()); err != nil {
		return err
	}
	programs, err := tmpfs.Install(c.bundle, images)
	var tell *told.Told
	if err == nil {
		tell, err = told.Look(c.pid, k.tree)
	}
	if err := inspected(); err != nil {
		return fmt.Errorf("its own restore would refuse it: %w", err)
	}
	if err != nil {
		return err
	}
	dumpLog := criu.DumpLog(c.bundle, view.LogDir, c.namespace+"-"+c.id)
	if err = dumpLog.Remove(); err == nil {
		err = imagedir.BeginDump(images)
	}
	if err != nil {
		return err
	}
	back, err := c.steady()
	if err != nil {
		return err
	}
	k.memory.Begin()
	with, err := tell.Environment(k.memory.Environment(criu.WithPath(context.WithoutCancel(ctx), view.CRIU.Path, programs)))
	if err != nil {
		return back(err)
	}
	hidden := beside(func() error {
		image.Warm(true)
		return locks.Hidden(k.tree)
	})
	watch := criu.StartWatch(ctx, c.id, false, view.CRIUTimeout())
	err = k.s.runcDump(with, c, images, k.opts)
	none := hidden()
	if err = watch.Stop(err); err != nil {
		if err = dumpLog.Explain(err); adapt.IsUnsent(err) {
			err = fmt.Errorf("%w: %w", adapt.ErrUnsent, err)
		}
		err = sequence.Join(err, criu.EndDumps())
		c.unlockNetwork(ctx)
		return back(err)
	}
	if none != nil {
		return none
	}
	if err := locks.Complete(dumped); err != nil {
		return err
	}
	if err := tell.Complete(images, dumped); err != nil {
		return err
	}
	if n := len(tell.Closed); n > 0 {
		log.G(ctx).WithField("connections", tell.Closed[:min(n, 16)]).Infof("%d Unix sockets come back closed: their other ends are outside of the container", n)
	}
	if err := k.memory.Complete(); err != nil {
		return err
	}
	if err := openfiles.Save(images, dumped, c.pid, k.tree); err != nil {
		return err
	}
	lacks, err := scheduling.Save(images, k.tree)
	if err != nil {
		return err
	}
	return k.noteDifferent(ctx, len(tell.Closed), lacks)
}

// unlockNetwork removes from the container's network what a CRIU that was killed keeps packets away with.
func (c *container) unlockNetwork(ctx context.Context) {
	if removed, err := criu.Unlock(ctx, criu.Shim{}, c.bundle, c.pid); err != nil {
		log.G(ctx).WithError(err).Error("the container has no network after a dump that failed")
	} else if removed {
		log.G(ctx).Warn("CRIU was killed and had the container's network locked: it is unlocked")
	}
	if pids, err := c.pids(); err == nil { // else it has ended
		criu.ReleaseConnections(pids)
	}
}

// noteDifferent notes what of a container whose dump is made comes back different.
func (k *checkpointing) noteDifferent(ctx context.Context, closed int, lacks []string) (err error) {
	c := k.c
	if c.different, err = different.Look(k.dumped.Set, c.pid, k.tree); err != nil { // it reads what the restore will
		return fmt.Errorf("its own restore would refuse it: %w", err)
	}
	c.different = append(c.different, lacks...)
	if closed > 0 {
		c.different = append(c.different, fmt.Sprintf("%d Unix sockets that are connected to programs outside: closed", closed))
	}
	if len(c.different) > 0 {
		log.G(ctx).WithField("different", c.different).Warn("a restore brings back most, and this different")
	}
	return different.Save(k.images.Path, c.different)
}

// inspect refuses processes that a restore would refuse.
func (c *container) inspect() error {
	file, err := bundle.Read(c.bundle)
	if err != nil {
		return err
	}
	return inspect.Frozen(file.Spec, c.bundle, c.pid)
}

func (c *container) pastCRIU(ctx context.Context, dir string, read config.Source) *pages.Dump {
	return hostmemory.New(ctx, hostmemory.Container{Bundle: c.bundle, Init: c.pid, Pids: c.tree, Run: reap}, dir, read)
}

// writeSettings writes the settings of CRIU: for a dump if the container has processes, else
// for a restore. readsNoFile is for criu.Settings.
func (c *container) writeSettings(ctx context.Context, view config.View, readsNoFile bool) (criu.Settings, error) {
	settings := criu.Settings{Bundle: c.bundle, View: view}
	file, err := bundle.Read(c.bundle)
	if err != nil {
		return settings, err
	}
	_, settings.Outside = bundle.AtPlaces(file.Spec, bundle.RootOf(c.bundle, file.Spec))
	var devices []specs.LinuxDevice
	switch {
	case c.pid > 0:
		if devices, err = devnode.List(c.pid); err != nil {
			return settings, err
		}
		settings.GhostLimit = host.MemoryLimit(c.pid)
		settings.ReadsNoFile = readsNoFile
		within, cancel := context.WithTimeout(ctx, view.CRIUTimeout())
		defer cancel()
		if settings.Watched, err = names.Watched(within, c.pid, c.tree); err != nil {
			return settings, err
		}
	case c.restore != nil:
		settings.Gate = true
		settings.Sandbox = &criu.Sandbox{Spec: c.restore.gpus.Spec, Work: c.workDir, Programs: tmpfs.Programs(c.bundle), Root: filepath.Join(c.runcState, "criu-root"), Traces: c.restore.gpu != nil || c.restore.otherUsers || tmpfs.Carries(c.restore.gpus.Spec)}
		devices = c.restore.gpus.Nodes()
	}
	for _, d := range devices {
		settings.Devices = append(settings.Devices, criu.Device{Path: d.Path, Major: d.Major, Minor: d.Minor})
	}
	return settings, settings.Write(ctx, criu.Shim{})
}
