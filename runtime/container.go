// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"sync"
	"sync/atomic"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/config"
	"github.com/gpuckpt/gpuckpt/internal/host"
	"github.com/gpuckpt/gpuckpt/internal/proc"
)

// container is what this service remembers of a container beyond what runc's
// service does.
type container struct {
	id, namespace, bundle string
	annotations           map[string]string
	// config is of Create and Start, which are one operation.
	config config.Source
	// criuBase is the CRIU settings file that the container would have without
	// this shim; "" for none.
	criuBase string
	// runcRoot is where runc keeps its state; "" for the usual place.
	runcRoot string
	// deviceRules were set since the container was created, see setDevice.
	deviceRules []specs.LinuxDeviceCgroup
	// request is what the container's spec grants: the client's, before mounts
	// are added to it for CRIU's sake. Empty where Create could not tell.
	request cdi.Request
	// toolkit says that the OCI runtime is NVIDIA's container toolkit's.
	toolkit bool
	// workDir is where runc lets CRIU log during a restore.
	workDir string

	// checkpointing is set while a checkpoint is made of a container that its
	// client has paused; to be read without mu.
	checkpointing atomic.Bool

	mu  sync.Mutex // one change at a time: Start, Pause, Resume, Checkpoint, Delete
	pid int        // the init process, 0 before Start
	// paused is set between a client's Pause and its Resume.
	paused bool
	// workPath is the directory that claimWorkDir has noted.
	workPath string
	// gpu is the locked CUDA state, nil when there is none to unlock.
	gpu *gpuState
	// tracerDied says that a tracer did while it traced the container, which may
	// have something of it open since.
	tracerDied bool
	// lockErr is why Pause froze a CUDA container without its lock.
	lockErr error
	// restore is set when the container was created from a checkpoint.
	restore *restoreState
	// cgroup of a restored container, which runc's service does not know. It is
	// asked for statistics in the middle of anything.
	cgroup atomic.Pointer[host.Cgroup]
	// execs are those of Start.
	execs execs
}

// restoreState is what a container created from a checkpoint is made of.
type restoreState struct {
	dir string
	// unpacked says that containerd made dir for this restore alone.
	unpacked bool
	// checkpoint is what open gives, nil before it was called.
	checkpoint *images.Checkpoint
	// mounted is the root file system in which the checkpoint of an image can
	// be read once it is mounted; "" where it can be read before.
	mounted string
	// metadata is nil for a checkpoint without GPU state.
	metadata *images.Metadata
	// gpus is where its GPUs go.
	gpus gpuPlan
	// helper keeps the driver initialised from Create until the GPU state is
	// back: without anybody on a GPU the driver takes 0.25 to 0.5 s longer to
	// begin. nil before and after.
	helper *cuda.Helper
}

// closeHelper ends the helper that Create left for the restore.
func (r *restoreState) closeHelper() {
	if r != nil && r.helper != nil {
		dismiss(r.helper)
		r.helper = nil
	}
}

// outsiders gives those of the processes that are no descendants of init: what
// was exec'd into the container, and its children. CRIU dumps a tree from its
// root and would leave them out.
func outsiders(init int, pids []int) ([]int, error) {
	parent := make(map[int]int)
	for _, pid := range pids {
		status, err := proc.StatusOf(pid)
		if proc.Ended(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		parent[pid] = status.Parent()
	}
	var out []int
	for _, pid := range pids {
		p, known := pid, true
		for p != init && known {
			p, known = parent[p]
		}
		if _, lives := parent[pid]; lives && p != init {
			out = append(out, pid)
		}
	}
	return out, nil
}
