// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	taskAPI "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/log"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/criu/different"
	"github.com/gpuckpt/gpuckpt/internal/criu/pages"
	"github.com/gpuckpt/gpuckpt/internal/criu/tmpfs"
	"github.com/gpuckpt/gpuckpt/internal/guard"
	"github.com/gpuckpt/gpuckpt/internal/node/bundle"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
	"github.com/gpuckpt/gpuckpt/internal/operation/imagedir"
	"github.com/gpuckpt/gpuckpt/internal/operation/journal"
	"github.com/gpuckpt/gpuckpt/internal/operation/quota"
	"github.com/gpuckpt/gpuckpt/internal/operation/sequence"
	"github.com/gpuckpt/gpuckpt/runtime/internal/charged"
	"github.com/gpuckpt/gpuckpt/runtime/internal/hooks"
	"github.com/gpuckpt/gpuckpt/runtime/internal/inspect"
	"github.com/gpuckpt/gpuckpt/runtime/internal/openfiles"
	"github.com/gpuckpt/gpuckpt/runtime/internal/scheduling"
	"github.com/gpuckpt/gpuckpt/runtime/internal/told"
)

// Start starts a container or an exec'd process, or restores a container that was created from a
// checkpoint. After a restore that failed no process of the container is left.
func (s *Service) Start(ctx context.Context, r *taskAPI.StartRequest) (*taskAPI.StartResponse, error) {
	c := s.container(r.ID)
	if c == nil {
		return s.TTRPCTaskService.Start(ctx, r)
	}
	if r.ExecID != "" {
		return s.startExec(ctx, c, r)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.restore == nil {
		resp, err := s.TTRPCTaskService.Start(ctx, r)
		if err == nil {
			c.pid = int(resp.Pid)
		}
		return resp, err
	}
	ctx, began := c.logged(ctx), time.Now()
	resp, err := (&restoring{s: s, c: c, request: r}).run(ctx)
	s.announce.Over(ctx, "restore", c.id, began, 0, c.different, err)
	return resp, toGRPC(err)
}

// restoring is one restore of a container. Its steps leave their results in it.
type restoring struct {
	s       *Service
	c       *container
	request *taskAPI.StartRequest

	view    config.View
	told    hooks.Hooks
	turn    *quota.Memory
	from    *guard.Copied
	threads scheduling.Threads
	sockets openfiles.Sockets
	systemV openfiles.SystemV
	watches told.Watches
	gate    *criu.Gate
	inside  map[int]int // of inspect: the processes by their own pids, as proc.Inside has them
	watch   *criu.Watch
	first   int           // a pidfd of the first process, for when no file can be opened any more; -1 before it is there
	within  time.Duration // that CRIU may take, from since on
	since   time.Time
	started chan struct{} // closed when runc's Start has ended; resp and err are its results
	resp    *taskAPI.StartResponse
	err     error
	over    sync.Once // of awaitRunc; why is what it returns
	why     error
}

// run takes the steps. There is no second try with a container, so what was made
// for the restore goes in any case: CRIU has read everything it needs when it returns.
func (k *restoring) run(ctx context.Context) (_ *taskAPI.StartResponse, err error) {
	c := k.c
	q := sequence.New("restore", c.id)
	k.view, err = c.config()
	if err != nil {
		return nil, err
	}
	if k.told, err = c.readHooks(c.config); err != nil {
		return nil, err
	}
	if k.turn, err = quota.TakeMemory(ctx, quota.Who{Operation: "restore", Container: c.id}, c.config); err != nil {
		return nil, err
	}
	var removed imagedir.Removed // the turn is over when their room is free
	defer func() { removed.Free(k.turn.Give) }()
	rec := journal.Record{Operation: "restore", Work: c.workDir, RuncState: c.runcState}
	if c.restore.unpacked {
		rec.Unpacked = c.restore.dir
	}
	if err := c.begin(ctx, c.config, rec); err != nil {
		return nil, err
	}
	defer func() { c.end(context.WithoutCancel(ctx), q.Stuck) }()
	settings, err := c.writeSettings(ctx, k.view, false)
	if err != nil {
		return nil, err
	}
	defer func() { q.Save(context.WithoutCancel(ctx), c.bundle) }()
	defer func() { removed = c.removeRestoreDir(context.WithoutCancel(ctx)) }()
	defer c.restore.close()
	defer func() { k.from.Close() }()
	k.first = -1
	defer func() { _ = unix.Close(k.first) }()
	if err := c.restore.reopen(); err != nil {
		return nil, err
	}
	steps := []sequence.Step{
		{Name: "copy images", Do: k.copyImages},
		{Name: "restore processes", Do: k.restoreProcesses, Back: "kill", Undo: k.kill},
		{Name: "watch cgroup", Do: k.watchCgroup},
		{Name: "device nodes", Do: k.fixNodes},
		{Name: "inspect", Do: k.inspect},
		{Name: "fill memory", Do: k.fillMemory},
	}
	if k.gate, err = criu.ListenGate(settings.PluginDir()); err != nil {
		return nil, err
	}
	defer k.gate.Close()
	if gpu := c.restore.gpu; gpu != nil {
		q.Journal = &c.journal
		// Before there is a process that could change anything.
		if err := gpu.Load(ctx, c.restore.checkpoint, k.gate, c.gpuOptions(k.view.Node)); err != nil {
			return nil, err
		}
		steps = append(steps,
			sequence.Step{Name: "map GPU state", Do: gpu.Map},
			sequence.Step{Name: "restore GPU state", Do: gpu.Restore},
		)
	}
	steps = append(steps,
		sequence.Step{Name: "note", Do: k.note},
		sequence.Step{Name: "open the gate", Do: k.openGate},
		sequence.Step{Name: "tell restored", Do: k.tell},
	)
	if err := q.Run(ctx, steps...); err != nil {
		return nil, sequence.Join(err, k.from.RemoveLogs())
	}
	return k.resp, nil
}

// copyImages writes the images again, for CRIU alone, and admits what CRIU will read.
func (k *restoring) copyImages(ctx context.Context) (_ uint64, err error) {
	dumped := cmp.Or(k.c.restore.dumped, k.c.restore.read()) // a second start reads them again
	k.c.restore.dumped = nil
	if k.threads, err = scheduling.Read(dumped.Set); err != nil {
		return 0, err
	}
	if k.sockets, err = openfiles.Read(dumped.Set); err != nil {
		return 0, err
	}
	if k.systemV, err = openfiles.ReadSystemV(dumped.Set); err != nil {
		return 0, err
	}
	if k.watches, err = told.ReadWatches(dumped.Set); err != nil {
		return 0, err
	}
	if k.c.different, err = different.Read(dumped.Set); err != nil {
		return 0, err
	}
	if k.from, err = guard.Copy(ctx, dumped, criu.Settings{Bundle: k.c.bundle, View: k.view}); err != nil {
		return 0, err
	}
	// One that the user names is the user's to keep as it was.
	if dir := filepath.Join(k.c.bundle, "rootfs"); bundle.RootOf(k.c.bundle, k.c.restore.gpus.Spec) == dir {
		if err := openfiles.RestoreRoot(dumped.Set, dir); err != nil {
			return 0, fmt.Errorf("the mode and owner of the root directory: %w", err)
		}
	}
	k.c.different = append(k.c.different, k.from.Different...)
	return 0, k.c.restore.rest.Need(ctx, k.from.Memory.Parts)
}

// restoreProcesses has runc and CRIU restore the processes. It returns when CRIU has restored them
// and holds each of their threads. CRIU is not given up once begun: it would go on without runc.
func (k *restoring) restoreProcesses(ctx context.Context) (uint64, error) {
	bytes, err := imagedir.Size(k.from.Images.Path())
	if err != nil {
		return 0, err
	}
	k.within = criu.Patience(k.view.CRIUTimeout(), bytes)
	k.since = time.Now()
	programs, err := tmpfs.Install(k.c.bundle, k.from.Images.Path())
	if err != nil {
		return 0, err
	}
	flushed := k.c.journal.FlushBeside()
	k.watch, k.started = criu.StartWatch(ctx, k.c.id, true, 0), make(chan struct{})
	ended, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	go func() {
		defer close(k.started)
		with := criu.WithPlugin(criu.WithPath(context.WithoutCancel(ctx), k.view.CRIU.Path, programs), k.c.bundle, k.from.Ended, k.from.Free)
		k.resp, k.err = k.s.TTRPCTaskService.Start(with, k.request)
		cancel(errors.New("CRIU ended"))
	}()
	if pid, err := k.gate.Await(ended, k.within); err == nil {
		k.c.pid = pid
		k.first, _ = unix.PidfdOpen(pid, 0) // where that fails, so will a step before the gate opens
		// From here on there is something that a crash would leave.
		if err := flushed(); err != nil {
			return 0, sequence.Join(err, k.kill(context.WithoutCancel(ctx)))
		}
	} else {
		k.gate.Close()
		// Which is why CRIU's plugin did not come, if runc says so.
		return 0, sequence.Join(cmp.Or(k.awaitRunc(), err), k.kill(context.WithoutCancel(ctx)))
	}
	return bytes, nil
}

// awaitRunc waits until runc and CRIU have ended, and ends a CRIU whose time is over. It returns why they failed,
// each time: kill then removes what is left.
func (k *restoring) awaitRunc() error {
	k.over.Do(func() { k.why = k.await() })
	return k.why
}

func (k *restoring) await() error {
	var hung error
	select {
	case <-k.started:
	case <-time.After(time.Until(k.since.Add(k.within))):
		hung = sequence.Join(criu.Hangs(k.within), criu.EndRestoring(k.c.id))
		<-k.started
	}
	err := errgrpc.ToNative(k.err)
	if hung == nil {
		err = k.watch.Stop(err)
	} else if _ = k.watch.Stop(nil); err != nil { // which needs no other reason
		err = fmt.Errorf("%w: %w", hung, err)
	}
	if err != nil {
		return criu.RestoreLog(k.c.bundle, k.c.workDir, k.view.LogDir, k.c.namespace+"-"+k.c.id).Explain(err)
	}
	k.c.pid = int(k.resp.Pid)
	return nil
}

// inspect compares what CRIU has restored, and holds, with the spec, and then gives the processes what
// CRIU does not: how their threads are scheduled, and options of sockets and file locks, which they set and
// take themselves.
func (k *restoring) inspect(ctx context.Context) (_ uint64, err error) {
	if err := inspect.Held(k.c.restore.gpus.Fixed(), k.c.bundle, k.c.pid, k.gate); err != nil {
		return 0, err
	}
	if k.inside, err = proc.Inside(k.c.pids, k.c.pid); err != nil {
		return 0, err
	}
	if err := k.threads.Restore(k.c.pids, k.gate); err != nil {
		log.G(ctx).WithError(err).Warn("threads do not run as they did")
		k.c.different = append(k.c.different, "how threads run: containerd's log has what each of them lacks")
	}
	if err := k.sockets.Restore(k.inside, k.gate); err != nil {
		log.G(ctx).WithError(err).Warn("sockets are not as they were")
		k.c.different = append(k.c.different, "options of sockets: containerd's log has what each of them lacks")
	}
	if err := k.systemV.Restore(k.inside, k.gate); err != nil {
		log.G(ctx).WithError(err).Warn("System V IPC is not as it was")
		k.c.different = append(k.c.different, "System V IPC: containerd's log has what is not as it was")
	}
	if err := k.watches.Restore(k.inside); err != nil {
		return 0, err
	}
	return 0, k.from.Locks.Restore(k.inside, k.gate)
}

// fillMemory gives the processes the memory that CRIU has left to this shim. No thread of theirs
// runs, the driver's included, before all of the memory is compared with what was signed.
func (k *restoring) fillMemory(ctx context.Context) (uint64, error) {
	if k.c.restore.inPieces() { // which may be anybody's until they are compared
		if err := k.c.restore.rest.Wait(ctx); err != nil {
			return 0, err
		}
	}
	filled, err := k.from.Memory.Fill(func() (*pages.Worker, error) {
		return charged.Start(ctx, reap, k.view.Staging, pages.StartWorker)
	}, k.inside)
	return filled, cmp.Or(k.c.restore.rest.Wait(ctx), err)
}

// openGate lets all threads of the restored processes run. Their memory is watched while CRIU and runc end: as
// runc's shim does, when the program runs already.
func (k *restoring) openGate(ctx context.Context) (uint64, error) {
	k.since = time.Now()
	if err := k.gate.Open(); err != nil {
		return 0, err
	}
	// While mounts come and go, the kernel may leave out that of a version 1 hierarchy.
	if err := k.s.oom.Add(k.c.id, k.c.cgroup.Load()); err != nil {
		log.G(ctx).WithError(err).Warn("no events will tell of its memory")
	}
	return 0, k.awaitRunc()
}

// kill ends the restored processes, and removes what runc and CRIU have left where they failed. Processes that wait
// at the gate are killed by CRIU's plugin, and CRIU and runc then fail: that is no error.
func (k *restoring) kill(ctx context.Context) error {
	k.gate.Close()
	k.since = time.Now()
	if k.awaitRunc() == nil {
		return k.s.kill(ctx, k.c)
	}
	k.c.pid = 0
	if k.first >= 0 {
		_ = unix.PidfdSendSignal(k.first, unix.SIGKILL, nil, 0) // or it has ended
	}
	return k.c.removeHalf(k.watch)
}

// watchCgroup does what runc's service does for a container that it has started, but for OOM events.
func (k *restoring) watchCgroup(ctx context.Context) (uint64, error) {
	cg, err := host.CgroupOf(k.c.pid)
	if errdefs.IsNotFound(err) {
		if status, gone := proc.StatusOf(k.c.pid); gone == nil && !status.Ended() {
			return 0, fmt.Errorf("restored process %d: it is in the root of all cgroups, and in none of the container's: %w", k.c.pid, errdefs.ErrFailedPrecondition)
		}
		return 0, fmt.Errorf("restored process %d was killed before its program went on, possibly out of memory (see dmesg); try again: %w", k.c.pid, err)
	}
	if err != nil {
		return 0, err
	}
	k.c.cgroup.Store(cg)
	if adj := k.c.restore.gpus.Spec.Process.OOMScoreAdj; adj != nil {
		if err := cg.RaiseOOMScores(*adj); err != nil {
			return 0, err
		}
	}
	return 0, nil
}

// fixNodes gives the container the device nodes of its spec.
func (k *restoring) fixNodes(context.Context) (uint64, error) {
	return 0, k.c.restore.gpus.Fix(k.c.pid)
}

// killTimeout bounds the wait for a container that was killed: SIGKILL needs no more
// than the kernel's time.
const killTimeout = 30 * time.Second

// kill kills a container and waits for its end. For a frozen one it needs no runc, which takes 20 ms.
func (s *Service) kill(ctx context.Context, c *container) error {
	ctx, cancel := context.WithTimeout(ctx, killTimeout)
	defer cancel()
	// When a paused container has ended, runc's service has runc resume it (containerd, process/init_state.go).
	// That takes 6 ms, and whoever asks the service of the container waits for it. So nobody has to here.
	resumes := make(chan struct{})
	s.monitor.resumes.Store(c.id, resumes)
	defer s.monitor.resumes.Delete(c.id)
	if cg := c.frozen.Load(); cg != nil {
		if err := cg.Kill(); err != nil {
			return fmt.Errorf("kill the container: %w", err)
		}
	} else if _, err := s.TTRPCTaskService.Kill(ctx, &taskAPI.KillRequest{ID: c.id, Signal: uint32(unix.SIGKILL), All: true}); err != nil {
		if err := errgrpc.ToNative(err); !errdefs.IsNotFound(err) {
			return fmt.Errorf("kill the container: %w", err)
		}
	}
	ended := make(chan error, 1)
	go func() {
		_, err := s.TTRPCTaskService.Wait(ctx, &taskAPI.WaitRequest{ID: c.id})
		ended <- err
	}()
	select {
	case err := <-ended:
		if err != nil {
			return fmt.Errorf("wait for the container's end: %w", err)
		}
	case <-resumes:
	}
	return nil
}

// removeHalf removes what a restore that failed may have left, if CRIU or runc was
// killed: CRIU, the container, half restored and waiting for CRIU, and mounts.
func (c *container) removeHalf(watch *criu.Watch) error {
	asked := ""
	if spec := c.restore.gpus.Spec; spec != nil && spec.Linux != nil {
		asked = spec.Linux.CgroupsPath
	}
	ours := func(pid int) ([]int, error) {
		cg, err := host.CgroupOf(pid)
		if err != nil || !cg.IsNamed(asked, c.id) {
			return nil, nil // it has ended, or is of another container of this shim
		}
		return cg.Pids()
	}
	return sequence.Join(criu.EndAll(), watch.EndHalfRestored(ours), criu.RemoveMounts(c.workDir, c.runcState), host.RemoveCgroup(asked))
}
