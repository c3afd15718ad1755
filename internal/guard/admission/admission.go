// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package admission decides whether a checkpoint may be restored into a container.
//
// CRIU runs as root and gives processes whatever its images ask for, and whoever
// made the images may not be whoever is trusted to write specs. So before CRIU
// starts, Check compares what the images ask for with the spec: namespaces,
// credentials, capabilities, no_new_privs, LSM profile, seccomp, limits, scheduling,
// cgroups and mounts. A process may have what it could have got by itself in a
// container of the spec.
//
// Entries compares the rest, entry by entry: open files, directories, mappings, sockets,
// terminals, watches, removed files. The list of fields (criu/image, fields.txt) names the
// rule of each field.
//
// The package opens no file and starts no program: it compares what it is handed.
package admission

import (
	"errors"
	"fmt"
	"slices"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/creds"
	criucore "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/rlimit"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/seccomp"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/criu"
	criuimage "github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/node/bundle"
)

// Host answers what a comparison must know of the machine.
type Host struct {
	// OwnsNamespace reports whether a spec's namespace is the host's own, by its
	// path.
	OwnsNamespace func(specs.LinuxNamespace) bool
	// HasFile reports whether a file of the kernel (/proc, /sys) is on the host.
	HasFile func(path string) bool
	// FirstPort returns the first port that anybody may bind in a network namespace, by its path; "" is the
	// host's.
	FirstPort func(namespace string) (uint32, error)
	// PingGroups returns the first and the last group that may make sockets of ping in one.
	PingGroups func(namespace string) (first, last uint32, err error)
	// OOMScore is the oom_score_adj that a new container gets if its spec has none.
	OOMScore int
	// DefaultNodes are the devices of every container, which runc binds in a user namespace.
	DefaultNodes []string
	// Direct refuses the path of a file in the container that a symbolic link is on the way of. It
	// is nil where the container's file system cannot be looked at. Then mounts are not compared: the
	// spec's may lead through links.
	Direct func(path string) error
}

// ErrTorn reports a dump that was made in the middle of a connection. The next one may succeed.
var ErrTorn = errors.New("a connection was just being made or handed on")

// Check refuses a dump that asks for more than the spec grants, or that CRIU could
// not restore because the spec lacks a mount. The spec has each mount at its place
// (bundle.AtPlaces). notes are for the log.
func Check(spec *specs.Spec, d *criu.Dump, host Host) (notes []string, err error) {
	a := allowanceOf(spec, host)
	a.filters = d.Seccomp.GetSeccompFilters()
	if err := a.network(d); err != nil && !criuimage.Without("network") {
		return nil, err
	}
	for _, t := range d.Tasks {
		if t.Dead || criuimage.Without("processes") {
			continue // it only waits to be asked for its status
		}
		if err := a.task(d, t); err != nil {
			return nil, fmt.Errorf("process %d: %w", t.PID, err)
		}
	}
	if len(d.Torn) > 0 && !criuimage.Without("torn") {
		return nil, fmt.Errorf("a Unix socket (inode %d) is connected to one that no process has (inode %d), because %w: try again", d.Torn[0].Inode, d.Torn[0].Peer, ErrTorn)
	}
	if err := checkCgroups(d.Cgroups); err != nil && !criuimage.Without("cgroups") {
		return nil, err
	}
	if host.Direct == nil {
		return nil, nil
	}
	if notes, err = a.mounts(d.Mounts); err != nil && criuimage.Without("mounts") {
		err = nil
	}
	return notes, err
}

// allowance is what a spec grants.
type allowance struct {
	spec *specs.Spec
	host Host
	// Sets of capabilities, a bit each.
	bounding, permitted, inherited, ambient uint64
	filters                                 []*seccomp.SeccompFilter // of the dump
	judged                                  map[string]error         // filters that were compared, by their programs
	first                                   *uint32                  // the first port that anybody may bind, once it was asked for
	pings                                   *bool                    // whether the container's group may ping, once it was asked for
}

func allowanceOf(spec *specs.Spec, host Host) *allowance {
	a := &allowance{spec: spec, host: host, judged: make(map[string]error)}
	if caps := spec.Process.Capabilities; caps != nil {
		a.bounding, a.permitted = bundle.Capabilities(caps.Bounding), bundle.Capabilities(caps.Permitted)
		a.inherited, a.ambient = bundle.Capabilities(caps.Inheritable), bundle.Capabilities(caps.Ambient)
	}
	return a
}

func (a *allowance) has(capability uint) bool { return a.bounding&(1<<capability) != 0 }

// admin reports whether the container could mount what it likes.
func (a *allowance) admin() bool { return a.has(unix.CAP_SYS_ADMIN) }

// attainable returns the capabilities that a process can come to have: by executing
// a program that has them all of the bounding set, unless the spec bars that.
func (a *allowance) attainable() uint64 {
	if a.spec.Process.NoNewPrivileges {
		return a.permitted | a.inherited | a.ambient
	}
	return a.bounding | a.permitted | a.inherited | a.ambient
}

// namespaceIDs returns the namespaces of a process by their type in the spec.
func namespaceIDs(ids *criucore.TaskKobjIdsEntry) map[specs.LinuxNamespaceType]uint32 {
	return map[specs.LinuxNamespaceType]uint32{
		specs.PIDNamespace: ids.GetPidNsId(), specs.NetworkNamespace: ids.GetNetNsId(), specs.IPCNamespace: ids.GetIpcNsId(),
		specs.UTSNamespace: ids.GetUtsNsId(), specs.MountNamespace: ids.GetMntNsId(), specs.UserNamespace: ids.GetUserNsId(),
		specs.CgroupNamespace: ids.GetCgroupNsId(), specs.TimeNamespace: ids.GetTimeNsId(),
	}
}

// task compares one process.
func (a *allowance) task(d *criu.Dump, t criu.Task) error {
	// A process whose namespace is CRIU's own is restored into the host's.
	host, own := namespaceIDs(d.Inventory.GetRootIds()), namespaceIDs(t.IDs)
	for _, ns := range a.spec.Linux.Namespaces {
		if (own[ns.Type] == 0 || own[ns.Type] == host[ns.Type]) && !a.host.OwnsNamespace(ns) {
			return fmt.Errorf("it would be in the host's %s namespace, and the spec has one for the container", ns.Type)
		}
	}
	if err := a.userNamespace(d, t); err != nil {
		return err
	}
	if err := a.otherNamespaces(d, t); err != nil {
		return err
	}
	for _, thread := range t.Threads {
		if err := a.credentials(thread.GetCreds()); err != nil {
			return err
		}
		mode, filter := seccompOf(d, t, thread)
		if err := a.confinement(mode, filter, thread); err != nil {
			return err
		}
	}
	return a.limits(t.Limits)
}

// credentials compares users, groups and capabilities.
func (a *allowance) credentials(c *creds.CredsEntry) error {
	if c == nil {
		return fmt.Errorf("it has no credentials")
	}
	may := a.attainable()
	for _, set := range []struct {
		name  string
		words []uint32
		most  uint64
	}{
		{"bounding", c.GetCapBnd(), a.bounding}, {"permitted", c.GetCapPrm(), may}, {"effective", c.GetCapEff(), may},
		{"inheritable", c.GetCapInh(), may}, {"ambient", c.GetCapAmb(), may},
	} {
		have, err := capabilityWords(set.words)
		if err != nil {
			return fmt.Errorf("%s capabilities: %w", set.name, err)
		}
		if more := have &^ set.most; more != 0 {
			return fmt.Errorf("its %s capabilities have %s, which the spec does not grant", set.name, bundle.CapabilityNames(more))
		}
	}
	user := a.spec.Process.User
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
	if bits := c.GetSecbits(); bits&^secbitKeepCaps != 0 && may&(1<<unix.CAP_SETPCAP) == 0 {
		return fmt.Errorf("it has the secure bits %#x, and the spec no CAP_SETPCAP", bits)
	}
	if a.spec.Process.NoNewPrivileges && c.GetNoNewPrivs() == 0 {
		return fmt.Errorf("it may gain privileges, which the spec forbids (no_new_privs)")
	}
	return nil
}

// secbitKeepCaps is the one secure bit that every process may set (linux/securebits.h).
const secbitKeepCaps = 1 << 4

// confinement compares the LSM profile, seccomp and scheduling of a thread.
func (a *allowance) confinement(mode criucore.SeccompMode, filter *uint32, thread *criucore.ThreadCoreEntry) error {
	p := a.spec.Process
	if profile := thread.GetCreds().GetLsmProfile(); p.ApparmorProfile != "" && profile != p.ApparmorProfile {
		return fmt.Errorf("it has the AppArmor profile %q, and the spec %q", profile, p.ApparmorProfile)
	} else if p.SelinuxLabel != "" && profile != p.SelinuxLabel {
		return fmt.Errorf("it has the SELinux label %q, and the spec %q", profile, p.SelinuxLabel)
	}
	if err := a.seccomp(mode, filter); err != nil && !criuimage.Without("seccomp") {
		return err
	}
	policy, priority := thread.GetSchedPolicy()&^unix.SCHED_RESET_ON_FORK, thread.GetSchedPrio()
	if policy > unix.SCHED_IDLE {
		return fmt.Errorf("it has the scheduling policy %d (6 is SCHED_DEADLINE), which CRIU does not restore: give it another one first (chrt)", policy)
	}
	if a.has(unix.CAP_SYS_NICE) {
		return nil
	}
	if !bundle.MayRun(a.spec, policy, priority) {
		return fmt.Errorf("it has a real-time scheduling policy (%d, priority %d), and the spec neither CAP_SYS_NICE nor such an RLIMIT_RTPRIO", policy, priority)
	}
	if nice := thread.GetSchedNice(); !bundle.MayBeNice(a.spec, nice) {
		return fmt.Errorf("it has the nice value %d, and the spec neither CAP_SYS_NICE nor such an RLIMIT_NICE", nice)
	}
	return nil
}

// limits compares the limits that the spec sets.
func (a *allowance) limits(have []*rlimit.RlimitEntry) error {
	if a.has(unix.CAP_SYS_RESOURCE) || criuimage.Without("limits") {
		return nil
	}
	for _, want := range a.spec.Process.Rlimits {
		n := slices.Index(rlimits, want.Type)
		switch {
		case n < 0: // none that the kernel has
		case n >= len(have):
			return fmt.Errorf("its images have no %s, and the spec has one", want.Type)
		case have[n].GetMax() > want.Hard || have[n].GetCur() > want.Hard:
			return fmt.Errorf("its %s is %d to %d, and the spec's %d without CAP_SYS_RESOURCE", want.Type, have[n].GetCur(), have[n].GetMax(), want.Hard)
		}
	}
	return nil
}

// Filtered reports whether all threads of a dump have a seccomp filter.
func Filtered(d *criu.Dump) bool {
	return !slices.ContainsFunc(d.Tasks, func(t criu.Task) bool {
		return !t.Dead && slices.ContainsFunc(t.Threads, func(thread *criucore.ThreadCoreEntry) bool { return !filtered(d, t, thread) })
	})
}

func filtered(d *criu.Dump, t criu.Task, thread *criucore.ThreadCoreEntry) bool {
	mode, _ := seccompOf(d, t, thread)
	return mode == criucore.SeccompMode_filter || mode == criucore.SeccompMode_strict
}

// seccompOf returns the mode that CRIU restores a thread with, and the number of its last filter.
// Threads with the filters of the first thread have none in the images: CRIU has the kernel apply
// the filters of the first to all (seccomp(2), SECCOMP_FILTER_FLAG_TSYNC).
func seccompOf(d *criu.Dump, t criu.Task, thread *criucore.ThreadCoreEntry) (criucore.SeccompMode, *uint32) {
	if thread.SeccompMode != nil {
		return thread.GetSeccompMode(), thread.SeccompFilter
	}
	if first := t.Threads[0]; first.GetSeccompMode() == criucore.SeccompMode_filter && synced(d.Seccomp, first.SeccompFilter) {
		return criucore.SeccompMode_filter, first.SeccompFilter
	}
	return criucore.SeccompMode_disabled, nil
}

// synced reports whether the filter of that number is applied to all threads.
func synced(all *seccomp.SeccompEntry, number *uint32) bool {
	filters := all.GetSeccompFilters()
	return number != nil && int64(*number) < int64(len(filters)) && filters[*number].GetFlags()&unix.SECCOMP_FILTER_FLAG_TSYNC != 0
}

// capabilityWords returns CRIU's words, 32 capabilities each, as a set of bits.
func capabilityWords(words []uint32) (set uint64, err error) {
	if len(words) > 2 {
		return 0, fmt.Errorf("%d words, more than two", len(words))
	}
	for i, w := range words {
		set |= uint64(w) << (32 * i)
	}
	return set, nil
}

// rlimits are the resource limits by their numbers (asm-generic/resource.h).
var rlimits = []string{
	"RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_DATA", "RLIMIT_STACK", "RLIMIT_CORE", "RLIMIT_RSS", "RLIMIT_NPROC", "RLIMIT_NOFILE",
	"RLIMIT_MEMLOCK", "RLIMIT_AS", "RLIMIT_LOCKS", "RLIMIT_SIGPENDING", "RLIMIT_MSGQUEUE", "RLIMIT_NICE", "RLIMIT_RTPRIO", "RLIMIT_RTTIME",
}
