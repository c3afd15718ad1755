// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/pelletier/go-toml/v2"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/config"
	"github.com/gpuckpt/gpuckpt/internal/criu"
)

// memoryPatience is how long a restore waits for GPU memory that is in use: a
// driver may free that of a process some time after the process has ended.
const memoryPatience = 3 * time.Second

// gpuPlan is what becomes of a checkpoint's GPUs in the container that is
// restored from it.
type gpuPlan struct {
	// spec is the container's, made to fit.
	spec *specs.Spec
	// devices are those that the container gets; its spec may lack some (cdi.Rebind).
	devices []specs.LinuxDevice
	// stray are paths in the container at which CRIU mounts a node that the
	// spec does not grant, and that must go.
	stray []string
	// pairs lead from the GPUs of the checkpoint to those granted here, of
	// which there may be more.
	pairs   []cdi.Pair
	granted int
}

// same says that the container has the checkpoint's GPUs, and no others.
func (p *gpuPlan) same() bool { return cdi.IsIdentity(p.pairs) && p.granted == len(p.pairs) }

// fitSpec edits the bundle's config.json before anything is created of it: GPUs
// that hooks would give are put into the spec, where CRIU and this shim see
// them, and in the spec of a restore the numbers of nodes become this node's.
// Most containers are left as they are.
func (c *container) fitSpec(ctx context.Context) error {
	view, err := c.config()
	if err != nil {
		if c.restore == nil {
			return nil // a container that may never be checkpointed starts all the same
		}
		return err
	}
	return editSpec(c.bundle, func(spec *specs.Spec) error {
		if err := c.injectGPUs(ctx, view.Node, spec); err != nil {
			return err
		}
		c.request = cdi.Read(spec)
		if c.restore == nil {
			return nil
		}
		c.restore.gpus.spec = spec
		hookLoopback(spec)
		if err := refreshNodes(spec, deviceNumbers); err != nil {
			return refused(err)
		}
		return nil
	})
}

// fitFiles edits the bundle's config.json of a restore whose GPUs have been
// found to fit: the driver's files come to where the dump has them.
func (c *container) fitFiles(ctx context.Context, dump *criu.Images) error {
	view, err := c.config()
	if err != nil {
		return err
	}
	return editSpec(c.bundle, func(spec *specs.Spec) error {
		c.restore.gpus.spec = spec
		if spec.Linux != nil {
			c.restore.gpus.devices = slices.Clone(spec.Linux.Devices)
		}
		return c.rebindFiles(ctx, view.Node, spec, dump)
	})
}

// injectGPUs does what NVIDIA's container toolkit would do by hooks. Where that
// cannot be done a container starts with them, but none is restored: CRIU
// knows nothing of what they mount.
func (c *container) injectGPUs(ctx context.Context, node config.Node, spec *specs.Spec) error {
	if spec.Hooks == nil && !c.toolkit {
		return nil
	}
	injected, err := c.inject(node, spec)
	entry := log.G(ctx).WithField("id", c.id)
	switch {
	case err != nil && c.restore != nil:
		return refused(err)
	case err != nil:
		entry.WithError(err).Warn("the container gets its GPUs by a hook, outside its spec: it cannot be checkpointed")
	case injected:
		entry.WithField("gpus", cdi.Read(spec).String()).Info("GPUs put into the spec in place of a hook")
	}
	return nil
}

// inject is injectGPUs without its judgement of errors.
func (c *container) inject(node config.Node, spec *specs.Spec) (bool, error) {
	registry, err := cdi.Open(node.CDISpecDirs...)
	if err != nil {
		return false, err
	}
	toolkit, err := readToolkit(toolkitConfig)
	if err != nil {
		return false, err
	}
	toolkit.Runtime = c.toolkit
	return registry.Inject(spec, toolkit)
}

// toolkitConfig is the configuration of NVIDIA's container toolkit.
const toolkitConfig = "/etc/nvidia-container-runtime/config.toml"

// readToolkit reads what that says about whom to believe. The defaults are the
// toolkit's own. Of a file that cannot be understood nothing is believed.
func readToolkit(path string) (cdi.Toolkit, error) {
	file := struct {
		Variable bool `toml:"accept-nvidia-visible-devices-envvar-when-unprivileged"`
		Mounts   bool `toml:"accept-nvidia-visible-devices-as-volume-mounts"`
	}{Variable: true}
	data, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return cdi.Toolkit{}, fmt.Errorf("read the NVIDIA container toolkit's configuration: %w", err)
	}
	if err := toml.Unmarshal(data, &file); err != nil {
		return cdi.Toolkit{}, fmt.Errorf("read the NVIDIA container toolkit's configuration %s: %w", path, err)
	}
	return cdi.Toolkit{Variable: file.Variable, Mounts: file.Mounts}, nil
}

// rebindFiles sees to it that there is a mount for each that the dump has.
func (c *container) rebindFiles(ctx context.Context, node config.Node, spec *specs.Spec, dump *criu.Images) error {
	mounted, err := dump.Mounts()
	if err != nil {
		return err
	}
	concerns := func(path string) bool { return cdi.IsDriverFile(path) || cdi.IsNode(path) }
	if !slices.ContainsFunc(mounted, concerns) &&
		!slices.ContainsFunc(spec.Mounts, func(m specs.Mount) bool { return concerns(m.Destination) }) {
		return nil
	}
	used, err := dump.Files()
	if err != nil {
		return err
	}
	registry, err := cdi.Open(node.CDISpecDirs...)
	if err != nil {
		return err
	}
	rebound, stray, err := cdi.Rebind(spec, mounted, used, registry.Files())
	if err != nil {
		return refused(err)
	}
	for _, r := range rebound {
		log.G(ctx).WithFields(log.Fields{"id": c.id, "path": r.Path, "from": r.Host}).Info("driver file mounted where the checkpoint had one")
	}
	c.restore.gpus.stray = stray
	return nil
}

// pairGPUs decides where the checkpoint's GPUs go, or refuses. helper is one
// that sees this node's GPUs, and info what it has said of them early. NVML's word
// is enough to agree; before anything is refused CUDA is asked.
func (c *container) pairGPUs(ctx context.Context, helper *cuda.Helper, info cuda.Info, m *images.Metadata) error {
	plan := &c.restore.gpus
	request := c.request
	switch {
	case request.MPS != "":
		return refused(fmt.Errorf("%w: the container is to share a GPU by MPS (%s), which NVIDIA's driver cannot restore to", cdi.ErrPairs, request.MPS))
	case request.MIG != "":
		return refused(fmt.Errorf("%w: the container is to get an instance of a partitioned GPU (MIG; %s), and NVIDIA's driver restores to whole GPUs only", cdi.ErrPairs, request.MIG))
	}
	patience, early := time.Now().Add(memoryPatience), true
	for {
		granted := grantedGPUs(request, info)
		plan.granted = len(granted)
		var err error
		plan.pairs, err = cdi.Pairs(demandOf(m), granted, c.annotations[cdi.PairsAnnotation])
		if err == nil {
			break
		}
		refusal := refused(fmt.Errorf("%w (it asks for %v)", err, request))
		if !early {
			if !errors.Is(err, cdi.ErrMemory) || time.Now().After(patience) {
				return refusal
			}
			select {
			case <-time.After(100 * time.Millisecond):
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		early = false
		if info, err = helper.InfoNow(ctx); err != nil {
			return fmt.Errorf("%w; %w", refusal, err)
		}
	}
	for _, p := range plan.pairs {
		log.G(ctx).WithFields(log.Fields{"id": c.id, "from": p.Old.UUID, "to": p.New.UUID}).Info("GPU of the checkpoint")
	}
	return nil
}

// refused gives an error the code for what the user must change.
func refused(err error) error { return fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition) }

// grantedGPUs are those of this node's GPUs that a spec grants.
func grantedGPUs(request cdi.Request, info cuda.Info) []cdi.GPU {
	var granted []cdi.GPU
	mig := map[int]bool{}
	for _, g := range info.Partitioned {
		mig[g.Minor] = true
	}
	for _, g := range slices.Concat(info.Partitioned, info.GPUs) {
		gpu := cdi.GPU{
			UUID: g.UUID, Name: g.Name, Memory: g.Memory, Index: g.Index, Minor: g.Minor,
			PCIBusID: g.PCIBusID, Free: g.Free, VGPU: g.VGPU, MIG: mig[g.Minor],
		}
		twice := slices.ContainsFunc(granted, func(have cdi.GPU) bool { return have.Minor == g.Minor })
		if request.Grants(gpu) && !twice {
			granted = append(granted, gpu)
		}
	}
	return granted
}

// demandOf is what a checkpoint needs. The state of a process is known for
// sure only where it is in files: what else the driver maps is in Bytes too.
func demandOf(m *images.Metadata) cdi.Demand {
	var demand cdi.Demand
	for _, g := range m.GPUs {
		demand.GPUs = append(demand.GPUs, cdi.GPU{UUID: g.UUID, Name: g.Name, Memory: g.Memory, Index: g.Index})
	}
	for _, p := range m.Processes {
		use := cdi.Use{GPUs: p.GPUs}
		for _, a := range p.Areas {
			use.Bytes += a.Bytes
		}
		demand.Processes = append(demand.Processes, use)
	}
	return demand
}

// restoreOnto has the driver restore the processes onto the GPUs of the plan.
// Where all return to those that they had, the helper that is there can ask for it;
// others only one inside the container's namespaces can ask for.
func (c *container) restoreOnto(ctx context.Context, node config.Node, procs []cuda.Process) error {
	if c.restore.gpus.same() {
		if err := cuda.RestoreAll(ctx, c.restore.helper, procs, nil); !cuda.IsWrongSet(err) {
			return err
		}
	}
	inside, err := startHelper(ctx, node, cuda.Options{Join: c.pid, Visible: c.visibleGPUs()})
	if err != nil {
		return err
	}
	defer dismiss(inside)
	tries := c.restore.gpuTries()
	taken, err := cuda.RestoreAllOnto(ctx, inside, insidePIDs(procs), tries)
	for pid, set := range taken {
		if pairs := tries[pid]; set < len(pairs) && pairs[set] != nil {
			log.G(ctx).WithFields(log.Fields{"id": c.id, "pid": pid, "pairs": pairs[set], "refused": set}).Info("GPU pairs taken by the driver")
		}
	}
	return err
}

// insidePIDs are processes as a helper in their pid namespace counts them.
func insidePIDs(procs []cuda.Process) []cuda.Process {
	procs = slices.Clone(procs)
	for i := range procs {
		procs[i].PID = procs[i].NSPID
	}
	return procs
}

// gpuTries are the sets of GPU pairs to restore each process with, by its pid
// in the container: pairs of the GPUs that it could see at the checkpoint. Where
// the spec did not tell those, the metadata names the ones it had open, and the
// checkpoint's GPUs all together come nearer, so they are tried next. No pairs
// at all, which leaves every GPU its place, come first where nothing has changed.
func (r *restoreState) gpuTries() map[int][][]cuda.Pair {
	tries := map[int][][]cuda.Pair{}
	pairsOf := func(uuids []string) []cuda.Pair {
		var pairs []cuda.Pair
		for _, p := range r.gpus.pairs {
			if uuids == nil || slices.Contains(uuids, p.Old.UUID) {
				pairs = append(pairs, cuda.Pair{Old: p.Old.UUID, New: p.New.UUID})
			}
		}
		return pairs
	}
	identity := cdi.IsIdentity(r.gpus.pairs)
	for _, p := range r.metadata.Processes {
		var sets [][]cuda.Pair
		if r.gpus.same() {
			sets = append(sets, nil)
		}
		if len(p.GPUs) > 0 {
			sets = append(sets, pairsOf(p.GPUs))
		}
		if len(p.GPUs) != len(r.gpus.pairs) && len(r.gpus.pairs) > 0 {
			sets = append(sets, pairsOf(nil))
		}
		if identity && r.gpus.granted != len(r.gpus.pairs) {
			sets = append(sets, nil)
		}
		tries[p.PID] = sets
	}
	return tries
}

// refreshNodes gives the nodes in a spec whose major number is each kernel's
// own choice (nvidia-uvm) the numbers that they have here, in the cgroup's rules
// as well: a spec out of a checkpoint image is another node's.
//
// numbers gives those of a node here, by its path; os.ErrNotExist if there is
// none, which is refused.
func refreshNodes(spec *specs.Spec, numbers func(path string) (deviceNode, error)) error {
	if spec.Linux == nil {
		return nil
	}
	for i, d := range spec.Linux.Devices {
		if !cdi.HasDynamicMajor(d.Path) {
			continue
		}
		here, err := numbers(d.Path)
		if errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("the container's spec has %s and this node has none: load the driver's module (nvidia-modprobe -u -c 0)", d.Path)
		}
		if err != nil {
			return err
		}
		if here.major == d.Major && here.minor == d.Minor {
			continue
		}
		spec.Linux.Devices[i].Major, spec.Linux.Devices[i].Minor = here.major, here.minor
		if spec.Linux.Resources == nil {
			continue
		}
		for j, rule := range spec.Linux.Resources.Devices {
			if rule.Allow && rule.Major != nil && *rule.Major == d.Major && rule.Minor != nil && *rule.Minor == d.Minor {
				spec.Linux.Resources.Devices[j].Major, spec.Linux.Resources.Devices[j].Minor = &here.major, &here.minor
			}
		}
	}
	return nil
}
