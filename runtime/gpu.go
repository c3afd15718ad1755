// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/config"
	"github.com/gpuckpt/gpuckpt/internal/host"
	"github.com/gpuckpt/gpuckpt/trace"
)

// helperIdle is how long a paused container keeps its CUDA helper for a
// checkpoint that may follow. The helper has the driver loaded (0.3 s to do
// again, some 100 MB of memory meanwhile).
const helperIdle = 30 * time.Second

// gpuState is the CUDA state of a container between its lock and its unlock.
// container.mu guards it.
type gpuState struct {
	config config.Node
	info   cuda.Info
	// request is what the container's spec grants, visible the UUIDs of those
	// GPUs, for helpers; nil for all.
	request cdi.Request
	visible []string
	procs   []cuda.Process // by pid; State is what each was found in
	// saved says that the processes are checkpointed, not just locked.
	saved bool
	// lock is the phase of locking, which a later checkpoint's timeline shows.
	lockBegan time.Time
	lockTook  time.Duration

	tracer     *trace.Session // nil while nothing is traced or saved
	tracerDied *bool          // the container's
	areas      []savedArea    // state that is in files, not in the processes
	// inImages says that those files are the image's own.
	inImages bool
	// window is the memory, in bytes, by which each process's state is written
	// through to the images' directory; 0 when it goes into memory.
	window uint64
	// copiers is how many threads copy in each process, see copyThreads.
	copiers int

	suspended bool              // a suspension has it, see suspend.go
	spilled   *spilled          // where the areas are on a disk; nil when they are not
	use       map[string]uint64 // bytes of GPU memory by UUID at the lock; nil if not known
	useEach   map[int]uint64    // the same by pid
	pairs     []cuda.Pair       // GPUs to resume on; nil for those it had
	lend      []cuda.GPU        // of them, those that the container has no access to
	take      []cuda.GPU        // that it is to have no access to in their place

	helper *cuda.Helper // nil once idle
	idle   *time.Timer
}

// startHelper starts a helper as the config says.
func startHelper(ctx context.Context, node config.Node, opts cuda.Options) (*cuda.Helper, error) {
	opts.Path, opts.Run = node.Helper, reap
	return cuda.Start(ctx, opts)
}

// dismiss ends a helper and does not wait for it: the driver takes 0.1 to 0.2 s
// to come down when nothing else holds a GPU. The end is logged by nobody: it
// holds nothing that anyone would miss, and goes with this process.
func dismiss(h *cuda.Helper) { go h.Close() }

// mayUseCUDA picks the processes that could be CUDA processes, by a look at
// /proc that costs a container without CUDA next to nothing.
func mayUseCUDA(pids []int) ([]int, error) {
	var may []int
	for _, pid := range pids {
		ok, err := cuda.MayUse(pid)
		if err != nil {
			return nil, err
		}
		if ok {
			may = append(may, pid)
		}
	}
	return may, nil
}

// lockGPU finds the container's CUDA processes and locks them all. It gives
// nil when there are none. The container must be running. On an error they are
// as they were.
func lockGPU(ctx context.Context, c *container, read config.Source) (*gpuState, error) {
	cg, err := host.CgroupOf(c.pid)
	if err != nil {
		return nil, err
	}
	pids, err := cg.Pids()
	if err != nil {
		return nil, err
	}
	may, err := mayUseCUDA(pids)
	if err != nil || len(may) == 0 {
		return nil, err
	}
	began := time.Now()
	view, err := read()
	if err != nil {
		return nil, err
	}
	if view.Staging.WhenShort, err = view.WhenShort(); err != nil {
		return nil, err
	}
	g := &gpuState{config: view.Node, lockBegan: began, request: c.request, visible: c.visibleGPUs(), tracerDied: &c.tracerDied}
	if err := g.lock(ctx, may); err != nil || len(g.procs) == 0 {
		g.close()
		return nil, err
	}
	g.lockTook = time.Since(began)
	locked := make([]int, len(g.procs))
	for i, p := range g.procs {
		locked[i] = p.PID
	}
	g.copiers = c.copyThreads(view.Node, locked)
	g.rest(c)
	log.G(ctx).WithFields(log.Fields{"id": c.id, "phase": "lock", "took": g.lockTook, "processes": len(g.procs)}).Info("phase")
	return g, nil
}

func (g *gpuState) lock(ctx context.Context, pids []int) error {
	if err := g.find(ctx, pids); err != nil {
		return err
	}
	if g.visible != nil && !g.listsAll() { // someone got a GPU past the spec
		g.close()
		g.visible = nil
		if err := g.find(ctx, pids); err != nil {
			return err
		}
	}
	// The container's order: its own pids, not the host's.
	slices.SortFunc(g.procs, func(a, b cuda.Process) int { return cmp.Compare(a.NSPID, b.NSPID) })
	surveyed := make(chan error, 1)
	go func() { // which takes as long as the lock
		var err error
		g.use, g.useEach, err = useOf(ctx, g.helper, g.procs)
		surveyed <- err
	}()
	err := cuda.LockAll(ctx, g.helper, g.procs, time.Duration(g.config.LockTimeout))
	if serr := <-surveyed; serr != nil {
		log.G(ctx).WithError(serr).Warn("how much GPU memory the processes have is not known: whether there is room for it will be seen")
	}
	return err
}

// find starts the helper and asks it for the GPUs and the processes.
func (g *gpuState) find(ctx context.Context, pids []int) error {
	var err error
	if g.helper, g.info, err = startHost(ctx, g.config, g.visible, (*cuda.Helper).Info); err != nil {
		return err
	}
	g.procs, err = cuda.Find(ctx, g.helper, pids)
	return err
}

// listsAll says whether the helper listed every GPU that the processes have open.
func (g *gpuState) listsAll() bool {
	for _, p := range g.procs {
		for _, minor := range p.GPUs {
			if !slices.ContainsFunc(g.info.GPUs, func(d cuda.GPU) bool { return d.Minor == minor }) {
				return false
			}
		}
	}
	return true
}

// rest gives the helper up when nobody needs it for a while.
func (g *gpuState) rest(c *container) {
	g.idle = time.AfterFunc(helperIdle, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if g.idle != nil { // else someone woke it meanwhile
			g.close()
		}
	})
}

// wake gives a helper that stays until rest or close.
func (g *gpuState) wake(ctx context.Context) (*cuda.Helper, error) {
	if g.idle != nil {
		g.idle.Stop()
		g.idle = nil
	}
	if g.helper != nil {
		if g.helper.Alive() {
			return g.helper, nil
		}
		g.close() // it died; a fresh one goes on
	}
	var err error
	g.helper, _, err = startHost(ctx, g.config, g.visible, (*cuda.Helper).Info)
	return g.helper, err
}

// close ends the helper and the tracer. The state stays, and a later wake
// starts another.
func (g *gpuState) close() {
	g.closeTracer()
	if g.idle != nil {
		g.idle.Stop()
		g.idle = nil
	}
	if g.helper != nil {
		dismiss(g.helper)
		g.helper = nil
	}
}

// unlock ends the lock; the container must not be frozen. Processes that have
// ended are no error.
func (g *gpuState) unlock(ctx context.Context) error {
	helper, err := g.wake(ctx)
	if err != nil {
		return err
	}
	defer g.close()
	return cuda.UnlockAll(ctx, helper, g.living())
}

// living leaves out the processes that have ended since they were found.
func (g *gpuState) living() []cuda.Process {
	return slices.DeleteFunc(slices.Clone(g.procs), func(p cuda.Process) bool {
		may, err := cuda.MayUse(p.PID)
		return err == nil && !may
	})
}

// save has the driver move the GPU state of all processes into memory of
// theirs, one area each, and takes the areas it could steer out into files: in
// dir, if that is on a tmpfs, else into memory. It gives the bytes of each
// process, by its place in procs. The container is frozen before and after;
// while it is thawed every thread but the driver's is held. On an error the
// state is where it was.
func (g *gpuState) save(ctx context.Context, c *container, dir string) ([]uint64, error) {
	helper, err := g.wake(ctx)
	if err != nil {
		return nil, err
	}
	defer c.execs.close()()
	if err := c.execs.refuseStarting(); err != nil {
		return nil, err
	}
	var sizes []uint64
	err = g.thawed(ctx, c, func() error { return g.steerAll(ctx, dir) }, func() error {
		before, err := g.memory()
		if err != nil {
			return joinBack(err, g.tracer.Abandon())
		}
		if err := cuda.CheckpointAll(ctx, helper, g.procs); err != nil {
			err = joinBack(err, g.tracer.Abandon())
			g.saved = g.anySaved(context.WithoutCancel(ctx))
			return err
		}
		g.saved = true
		if err := g.collect(ctx); err != nil {
			return err
		}
		after, err := g.memory()
		if err != nil {
			return err
		}
		for i := range g.procs {
			sizes = append(sizes, total(cuda.NewAreas(before[i], after[i])))
		}
		return nil
	})
	if err != nil && g.saved {
		err = joinBack(err, g.giveBack(context.WithoutCancel(ctx), c))
	}
	return sizes, err
}

// anySaved says whether the driver still has one of the processes checkpointed
// after a step that was undone: undoing may have failed. What cannot be found
// out counts as that: giving back is tried, and tells. The container is thawed.
func (g *gpuState) anySaved(ctx context.Context) bool {
	helper, err := g.wake(ctx)
	if err != nil {
		return true
	}
	for _, p := range g.living() {
		if p.State == cuda.Checkpointed {
			continue // by hand, before
		}
		state, err := helper.State(ctx, p.PID)
		if (err != nil || state == cuda.Checkpointed) && !errors.Is(err, cuda.ErrNotCUDA) {
			return true
		}
	}
	return false
}

// giveBack has the driver move the GPU state back. The container is frozen
// before and after, as in save. It does nothing when nothing is saved.
func (g *gpuState) giveBack(ctx context.Context, c *container) error {
	if !g.saved {
		return nil
	}
	helper, err := g.wake(ctx)
	if err != nil {
		return err
	}
	defer c.execs.close()()
	err = g.thawed(ctx, c, func() error { return nil }, func() error {
		if err := g.mapBack(ctx, helper); err != nil {
			return err
		}
		err := g.restoreAll(ctx, c, helper)
		calm(ctx, g.tracer)
		if err != nil {
			return err
		}
		g.saved = false
		return nil
	})
	if !g.saved {
		// The tracer has their memory too. A client may leave the container paused
		// for as long as it packs the images.
		g.dropAreas()
		g.closeTracer()
	}
	return err
}

// thawed runs do while the container is thawed but every thread in it, except
// the driver's own, is held by ptrace: frozen, held, before, thawed, do, frozen,
// let go. No other instruction in user space runs between the two freezes.
func (g *gpuState) thawed(ctx context.Context, c *container, before, do func() error) error {
	cg, err := host.CgroupOf(c.pid)
	if err != nil {
		return err
	}
	pids, err := cg.Pids()
	if err != nil {
		return err
	}
	var drivers []int
	for _, p := range g.procs {
		drivers = append(drivers, p.RestoreThread)
	}
	tracer, err := g.startedTracer(ctx)
	if err != nil {
		return err
	}
	if err := tracer.Hold(pids, drivers); err != nil {
		return err
	}
	if err := before(); err != nil {
		g.closeTracer() // what is frozen lets go of no other
		return err
	}
	if err := cg.Thaw(); err != nil {
		err = joinBack(err, cg.Freeze())
		g.closeTracer() // as above
		return err
	}
	err = do()
	return joinBack(err, cg.Freeze(), tracer.Release(), cg.ThawIfKilled(c.pid))
}

// memory gives the anonymous areas of each process.
func (g *gpuState) memory() ([][]cuda.Area, error) {
	all := make([][]cuda.Area, len(g.procs))
	for i, p := range g.procs {
		var err error
		if all[i], err = cuda.AnonymousAreas(p.PID); err != nil {
			return nil, err
		}
	}
	return all, nil
}

func total(areas []cuda.Area) (bytes uint64) {
	for _, a := range areas {
		bytes += a.Bytes()
	}
	return bytes
}

// metadata describes the locked processes and their GPUs; sizes, areas and
// phases are not known yet.
//
// A process's GPUs are all that it could open, used or not, and also those that
// CUDA_VISIBLE_DEVICES hid from it: the driver wants a place for each (measured,
// driver 580). One that somebody has checkpointed by hand is left to them.
func (g *gpuState) metadata(began time.Time) (*images.Metadata, error) {
	m := &images.Metadata{
		SchemaVersion: images.SchemaVersion,
		Created:       began.UTC(),
		DriverVersion: g.info.DriverVersion,
		CUDAVersion:   g.info.CUDAVersion,
	}
	used := make(map[string]bool)
	for _, p := range g.procs {
		q := images.Process{PID: p.NSPID, State: p.State.String(), RestoreThread: p.NSRestoreThread}
		for _, minor := range p.GPUs {
			if !slices.ContainsFunc(g.info.GPUs, func(d cuda.GPU) bool { return d.Minor == minor }) {
				return nil, fmt.Errorf("process %d has /dev/nvidia%d open, a GPU that the driver does not list: %w", p.PID, minor, errdefs.ErrFailedPrecondition)
			}
		}
		for _, d := range g.info.GPUs {
			granted := p.State != cuda.Checkpointed && d.Minor >= 0 && g.request.Grants(cdi.GPU{Minor: d.Minor})
			if granted || slices.Contains(p.GPUs, d.Minor) {
				q.GPUs = append(q.GPUs, d.UUID)
				used[d.UUID] = true
			}
		}
		m.Processes = append(m.Processes, q)
	}
	for _, d := range g.info.GPUs {
		if used[d.UUID] {
			m.GPUs = append(m.GPUs, images.GPU{UUID: d.UUID, Name: d.Name, Memory: d.Memory, Index: d.Index})
		}
	}
	return m, nil
}
