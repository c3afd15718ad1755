// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/containerd/go-runc"
	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/feed"
	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
	"github.com/gpuckpt/gpuckpt/internal/guard/trust"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
	"github.com/gpuckpt/gpuckpt/internal/operation/journal"
	"github.com/gpuckpt/gpuckpt/runtime/internal/burden"
	"github.com/gpuckpt/gpuckpt/runtime/internal/clientpause"
	"github.com/gpuckpt/gpuckpt/runtime/internal/cudahelper"
	"github.com/gpuckpt/gpuckpt/runtime/internal/devnode"
	"github.com/gpuckpt/gpuckpt/runtime/internal/execs"
	"github.com/gpuckpt/gpuckpt/runtime/internal/gpustate"
)

// container is what this service remembers of a container beyond what runc's
// service does.
type container struct {
	id, namespace, bundle string
	annotations           map[string]string
	// config is of Create and Start, which are one operation.
	config config.Source
	// runcState is where runc keeps the container's state.
	runcState string
	// runc is as runc's service has it, for what the service cannot do beside others.
	runc *runc.Runc
	// devices is what the container may use.
	devices devnode.Access
	// request is what the container's spec grants: the client's, before mounts
	// are added to it for CRIU's sake. Empty where Create could not tell.
	request cdi.Request
	// toolkit says that the OCI runtime is NVIDIA's container toolkit's.
	toolkit bool
	// workDir is where runc lets CRIU log during a restore.
	workDir string

	exclusive clientpause.Checkpoints
	// journal has the record of what is being changed, for whoever finds it after a crash.
	journal journal.Journal

	mu  sync.Mutex // one change at a time: Start, Pause, Resume, Checkpoint, Delete
	pid int        // the init process, 0 before Start
	// paused is set between a client's Pause and its Resume.
	paused bool
	// frozen is the cgroup of a paused container. Delete reads it in the middle of anything.
	frozen atomic.Pointer[host.Cgroup]
	// gpu is the state that the container's processes have on GPUs.
	gpu *gpustate.State
	// suspended is set between a suspension and the resume; spill is then the
	// directory with the GPU state, nil if that is in memory.
	suspended bool
	spill     *staging.SpillDir
	// lockErr is why Pause froze a CUDA container without its lock, and hookErr why a checkpoint
	// may not follow.
	lockErr, hookErr error
	// told is set between a client's Pause and its Resume, if the program's hooks were run.
	told *pausing
	// restore is set when the container was created from a checkpoint.
	restore *restoreState
	// cgroup of a restored container, which runc's service does not know. It is
	// asked for statistics in the middle of anything.
	cgroup atomic.Pointer[host.Cgroup]
	// different is what the last checkpoint or the restore did not carry.
	different []string
	// ended is set when this service has ended the container, see endNow.
	ended bool
	// execs is the gate of exec'd processes.
	execs execs.Gate
}

// restoreState is what a container created from a checkpoint is made of.
type restoreState struct {
	dir string
	// blobs has the pieces of an image, see images.OpenImage.
	blobs string
	// unpacked says that containerd made dir for this restore alone.
	unpacked bool
	// checkpoint is what open returned, nil before it was called.
	checkpoint *images.Checkpoint
	// dumped are CRIU's images, as Create has read them.
	dumped *criu.Images
	// arriving tells what of the checkpoint has arrived; nil if all of it is here.
	arriving *feed.Source
	// rest compares the memory that the checkpoint has.
	rest trust.Rest
	// mounted is the root file system in which the checkpoint of an image can
	// be read once it is mounted; "" where it can be read before.
	mounted string
	// gpu brings the GPU state back; nil for a checkpoint without GPU state.
	gpu *gpustate.Restoration
	// gpus is what the spec grants of GPUs.
	gpus devnode.Restored
	// otherUsers is criu.Dump's.
	otherUsers bool
}

// close ends what Create has begun for the restore.
func (r *restoreState) close() {
	if r != nil && r.gpu != nil {
		r.gpu.Close()
	}
	if r != nil {
		r.rest.Close()
		r.arriving.Close()
	}
}

// newContainer returns a container that is not known to the service yet.
func newContainer(id, bundle string) *container {
	c := &container{id: id, bundle: bundle}
	c.gpu = gpustate.New(target{c}, reap)
	return c
}

// logged returns a context whose logger names the container.
func (c *container) logged(ctx context.Context) context.Context {
	return log.WithLogger(ctx, log.G(ctx).WithField("id", c.id))
}

// pids lists the container's processes, those of cgroups below its own as well.
func (c *container) pids() ([]int, error) {
	cg, err := host.CgroupOf(c.pid)
	if err != nil {
		return nil, err
	}
	return cg.Pids()
}

// tree lists those of the container's processes that CRIU dumps: the first one and all below it. One that
// was exec'd into the container is not among them.
func (c *container) tree() ([]int, error) {
	pids, err := c.pids()
	if err != nil {
		return nil, err
	}
	execed, err := proc.NotBelow(c.pid, pids)
	return slices.DeleteFunc(pids, func(pid int) bool {
		_, is := slices.BinarySearch(execed, pid)
		return is
	}), err
}

// hasGPU reports whether the container's checkpoint needs the CUDA steps.
func (c *container) hasGPU() (bool, error) {
	locked := c.gpu.Phase() != gpustate.Unlocked || c.lockErr != nil
	if locked || c.pid == 0 {
		return locked, nil
	}
	may, err := c.candidates()
	return len(may) > 0, err
}

// candidates returns the processes that could use CUDA. It refuses a container with too many files,
// mappings or threads to look at.
func (c *container) candidates() ([]int, error) {
	pids, err := c.pids()
	if err == nil {
		err = burden.RefuseMany(pids)
	}
	if err != nil && !proc.Ended(err) {
		return nil, err
	}
	return c.gpu.Candidates()
}

// gpuOptions returns what the GPU state needs to know of an operation.
func (c *container) gpuOptions(node config.Node) gpustate.Options {
	opts := gpustate.Options{Config: node, Request: c.request}
	if !c.toolkit { // which may give more than the spec says
		opts.Visible = cudahelper.Visible(c.request)
	}
	return opts
}

// target is what the GPU state of a container may do to the container.
type target struct{ c *container }

func (t target) Init() int { return t.c.pid }

func (t target) Cgroup() (gpustate.Cgroup, error) { return host.CgroupOf(t.c.pid) }

func (t target) CloseExecs() (reopen func()) { return t.c.execs.Close() }

func (t target) RefuseStartingExecs() error { return t.c.execs.RefuseStarting() }
