// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package inspect compares restored processes with the container's spec before they run.
//
// Package admission compares the images that CRIU is about to read. It cannot know all that CRIU
// makes of them. So when CRIU has restored the processes and still holds every thread at the gate
// (internal/criu), Check reads from /proc what they really have: credentials, capabilities,
// no_new_privs, seccomp, scheduling, limits, namespaces, cgroups, root, working directory, program,
// open and mapped files, and mounts. It refuses what a process could not have got by itself in a
// container of the spec. The caller then ends the processes: none has executed an instruction.
//
// Before a checkpoint ends a container, Frozen compares its processes in the same way: what a restore
// would refuse is refused while they can still run on.
//
// Check changes nothing and opens no file of the container's: it reads text files of /proc, and links
// there and in the container's root file system, and asks for the status of files (statx).
package inspect

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/bundle"
)

// Container is what Check looks at.
type Container struct {
	// Spec is the container's, as runc has it.
	Spec *specs.Spec
	// Rootfs is the container's root file system on the host.
	Rootfs string
	// PIDs are its processes, the container's first one first.
	PIDs []int
	// Cgroups are the container's cgroups by controller, "" for the unified hierarchy, as
	// /proc/PID/cgroup has them. A controller that is missing is not compared.
	Cgroups map[string]string
	// CRIU is the process that restored them, whose own file systems none of them may have; 0 for those
	// that were not restored, whose mounts of the spec's are as runc made them.
	CRIU int
}

// Check refuses processes that have more than the spec grants. The error names the process and what
// it has.
func Check(of Container, system System) error {
	of.Spec, _ = bundle.AtPlaces(of.Spec, of.Rootfs)
	c := checker{Container: of, System: system, allowance: allowanceOf(of.Spec), tables: make(map[string][]mount), points: make(map[uint64]mount)}
	if of.CRIU != 0 {
		c.restored = "restored "
	}
	var err error
	if c.host, err = system.readHost(of.CRIU); err != nil {
		return fmt.Errorf("inspect the %sprocesses: %w", c.restored, err)
	}
	for _, pid := range of.PIDs {
		if err := c.readTable(pid); err != nil {
			return fmt.Errorf("inspect %sprocess %d: %w", c.restored, pid, err)
		}
	}
	for i, pid := range of.PIDs {
		p, err := system.read(pid)
		if err != nil {
			return fmt.Errorf("inspect %sprocess %d: %w", c.restored, pid, err)
		}
		if p.ended {
			continue
		}
		if i == 0 {
			c.first = p
		}
		if c.first == nil {
			break
		}
		if err := c.process(p); err != nil {
			return fmt.Errorf("%sprocess %d (%s): %w", c.restored, pid, p.name, err)
		}
	}
	if c.first == nil {
		return fmt.Errorf("inspect the %sprocesses: the first, %d, has ended", c.restored, of.PIDs[0])
	}
	if of.CRIU == 0 && c.first.root.link != "/" {
		return fmt.Errorf("the container's first process, %d (%s), is in a chroot (%s), where CRIU does not see the container's mounts: start it by another program, such as an init", of.PIDs[0], c.first.name, c.first.root.link)
	}
	return c.mounts()
}

type checker struct {
	Container
	System
	allowance
	host     *hostView
	first    *process
	tables   map[string][]mount // by mount namespace
	points   map[uint64]mount   // all of them, by their ids
	restored string             // what they are, in errors
}

// readTable reads the mounts of a process's mount namespace, once.
func (c *checker) readTable(pid int) error {
	namespaces, err := c.readNamespaces(strconv.Itoa(pid))
	if err != nil {
		return err
	}
	namespace := namespaces["mnt"]
	if _, known := c.tables[namespace]; known || namespace == "" { // it has none any more, if it has ended
		return nil
	}
	text, err := c.System.Mounts(pid)
	if err != nil {
		return fmt.Errorf("read its mounts: %w", err)
	}
	table, err := parseMounts(bytes.NewReader(text))
	if err != nil {
		return err
	}
	c.tables[namespace] = table
	for _, m := range table {
		c.points[m.id] = m
	}
	return nil
}

// allowance is what a spec grants. Sets of capabilities have a bit each.
type allowance struct {
	spec                 *specs.Spec
	bounding, attainable uint64
}

func allowanceOf(spec *specs.Spec) allowance {
	a := allowance{spec: spec}
	caps := spec.Process.Capabilities
	if caps == nil {
		return a
	}
	a.bounding = bundle.Capabilities(caps.Bounding)
	a.attainable = bundle.Capabilities(slices.Concat(caps.Permitted, caps.Inheritable, caps.Ambient))
	if !spec.Process.NoNewPrivileges {
		// By executing a program a process has all of the bounding set.
		a.attainable |= a.bounding
	}
	return a
}

func (a allowance) has(capability uint) bool { return a.attainable&(1<<capability) != 0 }

func (c *checker) process(p *process) error {
	for _, check := range []func(*process) error{c.namespaces, c.children, c.cgroups, c.limits, c.places, c.sockets} {
		if err := check(p); err != nil {
			return err
		}
	}
	for _, t := range p.threads {
		if err := c.thread(t); err != nil {
			return fmt.Errorf("thread %d: %w", t.tid, err)
		}
	}
	return nil
}

// thread compares credentials, confinement and scheduling.
func (c *checker) thread(t thread) error {
	for _, set := range []struct {
		name       string
		have, most uint64
	}{
		{"bounding", t.bounding, c.bounding}, {"permitted", t.permitted, c.attainable}, {"effective", t.effective, c.attainable},
		{"inheritable", t.inheritable, c.attainable}, {"ambient", t.ambient, c.attainable},
	} {
		if more := set.have &^ set.most; more != 0 {
			return fmt.Errorf("its %s capabilities have %s, which the spec does not grant", set.name, bundle.CapabilityNames(more))
		}
	}
	user := c.spec.Process.User
	if !c.has(unix.CAP_SETUID) {
		for _, uid := range t.uids {
			if want := bundle.HostID(user.UID, c.spec.Linux.UIDMappings); uid != want {
				return fmt.Errorf("it has the user id %d, and the spec %d without CAP_SETUID", uid, want)
			}
		}
	}
	if !c.has(unix.CAP_SETGID) {
		allowed := []uint32{bundle.HostID(user.GID, c.spec.Linux.GIDMappings)}
		for _, gid := range user.AdditionalGids {
			allowed = append(allowed, bundle.HostID(gid, c.spec.Linux.GIDMappings))
		}
		for _, gid := range slices.Concat(t.gids, t.groups) {
			if !slices.Contains(allowed, gid) {
				return fmt.Errorf("it has the group id %d, which the spec does not have, without CAP_SETGID", gid)
			}
		}
	}
	if c.spec.Process.NoNewPrivileges && !t.noNewPrivileges {
		return fmt.Errorf("it may gain privileges, which the spec forbids (no_new_privs)")
	}
	if c.spec.Linux.Seccomp != nil && t.seccomp == 0 {
		return fmt.Errorf("it has no seccomp filter, and the spec has one")
	}
	if want := c.spec.Process.ApparmorProfile; want != "" && t.label != want {
		return fmt.Errorf("it has the AppArmor profile %q, and the spec %q", t.label, want)
	}
	if want := c.spec.Process.SelinuxLabel; want != "" && t.label != want {
		return fmt.Errorf("it has the SELinux label %q, and the spec %q", t.label, want)
	}
	if more := t.inheritable &^ t.bounding; more != 0 && c.CRIU == 0 {
		return fmt.Errorf("its inheritable capabilities have %s, and its bounding ones do not, which CRIU cannot restore: have it drop both before a checkpoint", bundle.CapabilityNames(more))
	}
	if t.policy >= unix.SCHED_DEADLINE { // or SCHED_EXT
		return fmt.Errorf("it has the scheduling policy %d (SCHED_DEADLINE, SCHED_EXT), which CRIU cannot restore: have it use another one before a checkpoint", t.policy)
	}
	if !c.has(unix.CAP_SYS_NICE) && !bundle.MayRun(c.spec, t.policy, t.priority) {
		return fmt.Errorf("it has a real-time scheduling policy (%d, priority %d), and the spec neither CAP_SYS_NICE nor such an RLIMIT_RTPRIO", t.policy, t.priority)
	}
	return nil
}

// limits compares the hard limits.
func (c *checker) limits(p *process) error {
	if c.has(unix.CAP_SYS_RESOURCE) {
		return nil
	}
	for _, want := range c.spec.Process.Rlimits {
		if have, known := p.limits[want.Type]; known && have > want.Hard {
			return fmt.Errorf("its %s is %d, and the spec's %d without CAP_SYS_RESOURCE", want.Type, have, want.Hard)
		}
	}
	return nil
}

// kinds are the namespaces by their names in /proc/PID/ns.
var kinds = map[specs.LinuxNamespaceType]string{
	specs.PIDNamespace: "pid", specs.NetworkNamespace: "net", specs.IPCNamespace: "ipc", specs.UTSNamespace: "uts",
	specs.MountNamespace: "mnt", specs.UserNamespace: "user", specs.CgroupNamespace: "cgroup",
}

// children refuses a thread whose children would be in another PID namespace than it is itself (unshare): CRIU restores
// it without. The link is not there before the first child.
func (c *checker) children(p *process) error {
	if c.CRIU != 0 || !c.has(unix.CAP_SYS_ADMIN) {
		return nil
	}
	for _, t := range p.threads {
		dir := filepath.Join(c.Proc, strconv.Itoa(t.tid), "ns")
		to, err := os.Readlink(filepath.Join(dir, "pid_for_children"))
		if err == nil && to == p.namespaces["pid"] {
			continue
		}
		if _, ended := os.Readlink(filepath.Join(dir, "uts")); ended == nil {
			return errors.New("its children would be in a PID namespace of their own (unshare), which CRIU cannot dump: end it before the checkpoint")
		}
	}
	return nil
}

// namespaces refuses a process in a namespace of the host's that the spec has one for, or in
// another than the container's first one. A process that may make namespaces may be in one of its
// own.
func (c *checker) namespaces(p *process) error {
	asked := make(map[string]string)
	for _, ns := range c.spec.Linux.Namespaces {
		if kind := kinds[ns.Type]; kind != "" {
			asked[kind] = ns.Path
		}
	}
	for _, kind := range kinds {
		path, wanted := asked[kind]
		is, host := p.namespaces[kind], c.host.namespaces[kind]
		if is == "" {
			continue // a kernel without such namespaces
		}
		switch given := c.System.Namespace(kind, path); {
		case c.CRIU == 0 && wanted && path != "" && kind == "user" && given != host:
			return errors.New("it is in the user namespace of its pod, and CRIU makes a new one: run the pod without hostUsers: false")
		case wanted && path != "" && given != host:
			if p == c.first && is != given {
				return fmt.Errorf("it is in the %s namespace %s, and the spec's is %s", kind, is, given)
			}
		case wanted && path == "" && is == host:
			return fmt.Errorf("it is in the host's %s namespace, and the spec has one for the container", kind)
		case !wanted && kind == "user" && is != host:
			return fmt.Errorf("it is in a user namespace of its own (unshare -r, the sandbox of a browser), and the container has none: end it before a checkpoint")
		}
		if is != c.first.namespaces[kind] && (!c.has(unix.CAP_SYS_ADMIN) || wanted && is == host) {
			return fmt.Errorf("it is in the %s namespace %s, and the container's first process in %s", kind, is, c.first.namespaces[kind])
		}
	}
	for _, m := range []struct {
		kind string
		have []specs.LinuxIDMapping
		spec []specs.LinuxIDMapping
	}{{"user", p.uidMap, c.spec.Linux.UIDMappings}, {"group", p.gidMap, c.spec.Linux.GIDMappings}} {
		if _, own := asked["user"]; own && p.namespaces["user"] == c.first.namespaces["user"] {
			if err := within(m.kind, m.have, m.spec); err != nil {
				return err
			}
		}
	}
	return nil
}

// within refuses a map of ids that has more than the spec's.
func within(kind string, have, spec []specs.LinuxIDMapping) error {
	for _, h := range have {
		ok := slices.ContainsFunc(spec, func(s specs.LinuxIDMapping) bool {
			from := uint64(h.ContainerID) - uint64(s.ContainerID)
			return h.ContainerID >= s.ContainerID && from+uint64(h.Size) <= uint64(s.Size) && uint64(h.HostID)-from == uint64(s.HostID)
		})
		if !ok && len(spec) > 0 {
			return fmt.Errorf("its %s ids from %d are the host's from %d, %d of them, as the spec does not have them", kind, h.ContainerID, h.HostID, h.Size)
		}
	}
	return nil
}

// cgroups refuses a process outside of the container's cgroups.
func (c *checker) cgroups(p *process) error {
	for controller, want := range c.Cgroups {
		have, known := p.cgroups[controller]
		if known && have != want && !strings.HasPrefix(have, strings.TrimSuffix(want, "/")+"/") {
			return fmt.Errorf("it is in the cgroup %s of %q, and the container's is %s", have, controller, want)
		}
	}
	return nil
}

// sockets refuses sockets that only CAP_NET_RAW makes.
func (c *checker) sockets(p *process) error {
	if c.has(unix.CAP_NET_RAW) {
		return nil
	}
	for _, f := range p.files {
		if inode, ok := strings.CutPrefix(f.link, "socket:"); ok && p.rawSockets[strings.Trim(inode, "[]")] {
			return fmt.Errorf("its file %s is a raw socket, and the spec has no CAP_NET_RAW", f.name)
		}
	}
	return nil
}
