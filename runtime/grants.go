// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/creds"
	criucore "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// A restore never grants more than the spec. CRIU runs as root and gives the
// processes whatever its images say, and who made the images may not be who is
// trusted to write specs; so what they ask for is compared first: namespaces,
// credentials, capabilities, no_new_privs, LSM profile, seccomp, limits,
// scheduling, cgroups, mounts. The rule is that a process may have what it
// could have got by itself in a container of the spec.

// checkGrants refuses a restore that asks for more than the spec of the
// container, or that CRIU could not do because a mount is missing.
func (c *container) checkGrants(ctx context.Context) error {
	d, err := readDumped(c.restore.images())
	if err != nil {
		return err
	}
	spec, err := loadSpec(c.bundle)
	if err != nil {
		return err
	}
	notes, err := compareGrants(spec, d)
	for _, n := range notes {
		log.G(ctx).WithField("id", c.id).Warn(n)
	}
	if err != nil {
		return fmt.Errorf("the checkpoint does not fit the container's spec: %w: %w", err, errdefs.ErrFailedPrecondition)
	}
	return nil
}

// loadSpec reads the bundle's config.json.
func loadSpec(bundle string) (*specs.Spec, error) {
	data, err := os.ReadFile(filepath.Join(bundle, "config.json"))
	if err != nil {
		return nil, fmt.Errorf("read the container's spec: %w", err)
	}
	spec := new(specs.Spec)
	if err := json.Unmarshal(data, spec); err != nil {
		return nil, fmt.Errorf("read the container's spec: %w", err)
	}
	if spec.Process == nil || spec.Linux == nil {
		return nil, fmt.Errorf("the container's spec has no process or is not for Linux: %w", errdefs.ErrInvalidArgument)
	}
	return spec, nil
}

// compareGrants is checkGrants on what was read. notes are for the log.
func compareGrants(spec *specs.Spec, d *dumped) (notes []string, err error) {
	g := grantsOf(spec)
	if err := g.network(d); err != nil {
		return nil, err
	}
	for _, t := range d.tasks {
		if t.core.GetTc().GetTaskState() == taskDead {
			continue // it only waits to be asked for its status
		}
		if err := g.task(d, t); err != nil {
			return nil, fmt.Errorf("process %d: %w", t.pid, err)
		}
	}
	if err := checkCgroups(d.cgroups); err != nil {
		return nil, err
	}
	return g.mounts(d.mounts)
}

// grants is what a spec grants.
type grants struct {
	spec                           *specs.Spec
	bounding, permitted, inherited uint64
	ambient                        uint64
}

func grantsOf(spec *specs.Spec) *grants {
	g := &grants{spec: spec}
	if caps := spec.Process.Capabilities; caps != nil {
		g.bounding, g.permitted = capabilitySet(caps.Bounding), capabilitySet(caps.Permitted)
		g.inherited, g.ambient = capabilitySet(caps.Inheritable), capabilitySet(caps.Ambient)
	}
	return g
}

func (g *grants) has(capability uint) bool { return g.bounding&(1<<capability) != 0 }

// attainable are the capabilities that a process can come to have: all of the
// bounding set by executing a program that has them, unless that is barred.
func (g *grants) attainable() uint64 {
	if g.spec.Process.NoNewPrivileges {
		return g.permitted | g.inherited | g.ambient
	}
	return g.bounding | g.permitted | g.inherited | g.ambient
}

// namespaces of a process by their type in the spec.
func namespaceIDs(ids *criucore.TaskKobjIdsEntry) map[specs.LinuxNamespaceType]uint32 {
	return map[specs.LinuxNamespaceType]uint32{
		specs.PIDNamespace: ids.GetPidNsId(), specs.NetworkNamespace: ids.GetNetNsId(), specs.IPCNamespace: ids.GetIpcNsId(),
		specs.UTSNamespace: ids.GetUtsNsId(), specs.MountNamespace: ids.GetMntNsId(), specs.UserNamespace: ids.GetUserNsId(),
		specs.CgroupNamespace: ids.GetCgroupNsId(), specs.TimeNamespace: ids.GetTimeNsId(),
	}
}

// isHosts says whether a spec's namespace is the host's own, by its path: CRI writes
// that of a pod with the host's network into its containers' specs.
func isHosts(ns specs.LinuxNamespace) bool {
	files := map[specs.LinuxNamespaceType]string{specs.NetworkNamespace: "net", specs.MountNamespace: "mnt"}
	file, ok := files[ns.Type]
	if !ok {
		file = string(ns.Type)
	}
	given, err := os.Stat(ns.Path)
	if ns.Path == "" || err != nil {
		return false
	}
	own, err := os.Stat("/proc/self/ns/" + file)
	return err == nil && os.SameFile(given, own)
}

// task compares one process.
func (g *grants) task(d *dumped, t dumpedTask) error {
	// A process whose namespace is CRIU's own is restored into the host's.
	host, own := namespaceIDs(d.inventory.GetRootIds()), namespaceIDs(t.ids)
	for _, ns := range g.spec.Linux.Namespaces {
		if (own[ns.Type] == 0 || own[ns.Type] == host[ns.Type]) && !isHosts(ns) {
			return fmt.Errorf("it would be in the host's %s namespace, and the spec has one for the container", ns.Type)
		}
	}
	if err := g.userNamespace(d, t); err != nil {
		return err
	}
	for _, thread := range t.threads {
		if err := g.credentials(thread.GetCreds()); err != nil {
			return err
		}
		if err := g.confinement(d.seccompMode(t, thread), thread); err != nil {
			return err
		}
	}
	return g.limits(t.core)
}

// credentials compares users, groups and capabilities.
func (g *grants) credentials(c *creds.CredsEntry) error {
	if c == nil {
		return fmt.Errorf("it has no credentials")
	}
	may := g.attainable()
	for _, set := range []struct {
		name  string
		words []uint32
		most  uint64
	}{
		{"bounding", c.GetCapBnd(), g.bounding}, {"permitted", c.GetCapPrm(), may}, {"effective", c.GetCapEff(), may},
		{"inheritable", c.GetCapInh(), may}, {"ambient", c.GetCapAmb(), may},
	} {
		have, err := capabilityWords(set.words)
		if err != nil {
			return fmt.Errorf("%s capabilities: %w", set.name, err)
		}
		if more := have &^ set.most; more != 0 {
			return fmt.Errorf("its %s capabilities have %s, which the spec does not grant", set.name, capabilityNames(more))
		}
	}
	user := g.spec.Process.User
	if may&(1<<unix.CAP_SETUID) == 0 {
		for _, uid := range []uint32{c.GetUid(), c.GetEuid(), c.GetSuid(), c.GetFsuid()} {
			if uid != user.UID {
				return fmt.Errorf("it has the user id %d, and the spec %d without CAP_SETUID", uid, user.UID)
			}
		}
	}
	if may&(1<<unix.CAP_SETGID) == 0 {
		for _, gid := range append([]uint32{c.GetGid(), c.GetEgid(), c.GetSgid(), c.GetFsgid()}, c.GetGroups()...) {
			if gid != user.GID && !slices.Contains(user.AdditionalGids, gid) {
				return fmt.Errorf("it has the group id %d, which the spec does not have, without CAP_SETGID", gid)
			}
		}
	}
	if g.spec.Process.NoNewPrivileges && c.GetNoNewPrivs() == 0 {
		return fmt.Errorf("it may gain privileges, which the spec forbids (no_new_privs)")
	}
	return nil
}

// confinement compares the LSM profile, seccomp and scheduling of a thread.
func (g *grants) confinement(mode criucore.SeccompMode, thread *criucore.ThreadCoreEntry) error {
	p := g.spec.Process
	if profile := thread.GetCreds().GetLsmProfile(); p.ApparmorProfile != "" && profile != p.ApparmorProfile {
		return fmt.Errorf("it has the AppArmor profile %q, and the spec %q", profile, p.ApparmorProfile)
	} else if p.SelinuxLabel != "" && profile != p.SelinuxLabel {
		return fmt.Errorf("it has the SELinux label %q, and the spec %q", profile, p.SelinuxLabel)
	}
	if g.spec.Linux.Seccomp != nil && mode != seccompFilter && mode != seccompStrict {
		return fmt.Errorf("it has no seccomp filter, and the spec has one")
	}
	if g.has(unix.CAP_SYS_NICE) {
		return nil
	}
	if policy := thread.GetSchedPolicy(); policy == unix.SCHED_FIFO || policy == unix.SCHED_RR || policy == unix.SCHED_DEADLINE {
		return fmt.Errorf("it has a real-time scheduling policy (%d), and the spec no CAP_SYS_NICE", policy)
	}
	if nice := thread.GetSchedNice(); nice < 0 {
		return fmt.Errorf("it has the nice value %d, and the spec no CAP_SYS_NICE", nice)
	}
	return nil
}

const (
	seccompStrict = criucore.SeccompMode_strict
	seccompFilter = criucore.SeccompMode_filter
)

// limits compares the limits that the spec sets.
func (g *grants) limits(core *criucore.CoreEntry) error {
	if g.has(unix.CAP_SYS_RESOURCE) {
		return nil
	}
	have := core.GetTc().GetRlimits().GetRlimits()
	for _, want := range g.spec.Process.Rlimits {
		n, ok := rlimitNumber(want.Type)
		if !ok || n >= len(have) {
			continue // the kernel's default, or one that CRIU leaves alone
		}
		if have[n].GetMax() > want.Hard {
			return fmt.Errorf("its %s is %d, and the spec's %d without CAP_SYS_RESOURCE", want.Type, have[n].GetMax(), want.Hard)
		}
	}
	return nil
}
