// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"cmp"
	"fmt"
	"path"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/internal/node/bundle"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
)

// pseudo are file systems of the kernel, one for all or one for each namespace: a mount of one of
// them shows no file of the host's disks.
var pseudo = []string{"proc", "sysfs", "cgroup", "cgroup2", "devtmpfs", "devpts", "mqueue", "securityfs", "debugfs", "tracefs", "bpf", "fusectl", "configfs", "binfmt_misc", "pstore", "efivarfs"}

// mounts compares the mounts of the container's first process with the spec's. With CAP_SYS_ADMIN a
// container could have mounted what it likes, but nothing of the host's.
func (c *checker) mounts() error {
	mounts := c.tables[c.first.namespaces["mnt"]]
	granted := make(map[string]bool) // file systems, by device
	for _, s := range c.spec.Mounts {
		if at, found := c.host.locate(c.System, s.Source); found && cdi.IsBind(s) {
			granted[at.device] = true
		}
	}
	var expected []expectation
	for _, m := range mounts {
		e := c.expected(m)
		if e.source != "" {
			e.from, e.found = c.host.locate(c.System, e.source)
			if e.found {
				granted[e.from.device] = true
			}
		}
		expected = append(expected, e)
	}
	fresh := make(map[string]bool) // file systems that the spec has made for the container
	for i, m := range mounts {
		if twice := slices.ContainsFunc(mounts[:i], func(o mount) bool { return o.point == m.point }); c.CRIU == 0 && twice && c.cameWith(m) != "" {
			return fmt.Errorf("mount %s of the container: something came with the mount %s there, which takes along what is mounted below its source (rbind), and CRIU does not restore both: unmount it", m.point, c.cameWith(m))
		}
		if c.CRIU == 0 && expected[i].known {
			continue // a restore makes it anew, or has compared it in the images
		}
		if e := expected[i]; e.own && m.kind == "tmpfs" {
			if fresh[m.device] {
				return fmt.Errorf("mount %s of the %scontainer: it is the file system of another mount, and in the spec one of its own", m.point, c.restored)
			}
			fresh[m.device] = true
		}
		if err := c.mount(m, expected[i], granted); err != nil {
			return fmt.Errorf("mount %s of the %scontainer: %w", m.point, c.restored, err)
		}
	}
	if c.CRIU == 0 {
		for i, m := range mounts {
			if expected[i].known || m.point == "/" {
				granted[m.device] = true
			}
		}
		return cmp.Or(c.shared(mounts), c.lost(granted))
	}
	return nil
}

// shared refuses a dump with mounts of one group (rshared) that CRIU does not bring together again: the kernel has one
// join the group of another whose root it is below. What CRIU binds over a masked file is the host's /dev/null.
func (c *checker) shared(mounts []mount) error {
	widest := make(map[string]mount)
	for _, m := range mounts {
		if w, is := widest[m.group]; !is || len(m.root) < len(w.root) {
			widest[m.group] = m
		}
	}
	for _, m := range mounts {
		w := widest[m.group]
		switch {
		case m.group == "":
		case w.root != "/" && m.root != w.root && !strings.HasPrefix(m.root, w.root+"/"):
			return fmt.Errorf("mounts %s and %s of the container are of one group (rshared, mountPropagation Bidirectional), and CRIU does not restore that: mount one of them rprivate or rslave", w.point, m.point)
		case m.root == "/null" && slices.Contains(c.spec.Linux.MaskedPaths, m.point):
			return fmt.Errorf("mount %s of the container, a masked path, is shared (rootfsPropagation rshared), and CRIU does not restore that: mask nothing, or have it shared", m.point)
		}
	}
	return nil
}

// notRestored are file systems that CRIU dumps, and does not restore: it does not find what an overlay
// lies on. A tracefs below a debugfs comes by itself.
var notRestored = []string{"overlay", "devtmpfs", "tracefs"}

// lost refuses a dump of processes that have mounted a file system which CRIU does not restore.
func (c *checker) lost(granted map[string]bool) error {
	for _, table := range c.tables {
		for _, m := range table {
			byItself := m.kind == "tracefs" && slices.ContainsFunc(table, func(d mount) bool { return d.kind == "debugfs" && strings.HasPrefix(m.point, d.point+"/") })
			if slices.Contains(notRestored, m.kind) && !granted[m.device] && !byItself {
				return fmt.Errorf("mount %s of the container: a program has mounted it there (type %s), and CRIU does not restore that: unmount it before the checkpoint", m.point, m.kind)
			}
		}
	}
	return nil
}

// expectation is what the spec has at a mount's path.
type expectation struct {
	known  bool
	source string   // of a bind mount, on the host
	from   location // where it lies
	found  bool     // whether that is known
	kinds  []string // types of a mount that is no bind mount
	flags  []string // options that it must have
	part   string   // for a read-only path of /proc or /sys: the path in that file system
	cgroup bool
	own    bool // a file system of its own
}

// consolePath is where runc mounts the terminal of a container that has one.
const consolePath = "/dev/console"

func (c *checker) expected(m mount) expectation {
	if m.point == "/" {
		e := expectation{known: true, source: c.Rootfs}
		if c.spec.Root != nil && c.spec.Root.Readonly {
			e.flags = []string{"ro"}
		}
		return e
	}
	for _, s := range slices.Backward(c.spec.Mounts) {
		to := path.Clean("/" + s.Destination)
		isCgroup := strings.HasPrefix(s.Type, "cgroup")
		switch {
		case to != m.point && (!isCgroup || !strings.HasPrefix(m.point, to+"/")):
		case isCgroup:
			return expectation{known: true, kinds: []string{"cgroup", "cgroup2", "tmpfs"}, cgroup: true, flags: flagsOf(s, m.kind == "tmpfs")}
		case cdi.IsBind(s):
			return expectation{known: true, source: s.Source, flags: flagsOf(s, false)}
		default:
			return expectation{known: true, kinds: []string{s.Type}, flags: flagsOf(s, false), own: true}
		}
	}
	if slices.Contains(host.DefaultNodes, m.point) || slices.ContainsFunc(c.spec.Linux.Devices, func(d specs.LinuxDevice) bool { return path.Clean(d.Path) == m.point }) {
		return expectation{known: true, source: m.point}
	}
	if slices.ContainsFunc(c.spec.Linux.MaskedPaths, func(p string) bool { return path.Clean(p) == m.point }) {
		if m.kind == "tmpfs" && m.root == "/" { // a directory; the host's /dev may be a tmpfs too, as in a container that is a node
			return expectation{known: true, kinds: []string{"tmpfs"}, flags: []string{"ro"}}
		}
		return expectation{known: true, source: "/dev/null"}
	}
	if slices.ContainsFunc(c.spec.Linux.ReadonlyPaths, func(p string) bool { return path.Clean(p) == m.point }) {
		e := expectation{known: true, kinds: []string{m.kind}, flags: []string{"ro"}}
		for _, top := range []string{"/proc", "/sys"} {
			if part, ok := strings.CutPrefix(m.point, top+"/"); ok {
				e.kinds, e.part = []string{strings.Replace(top[1:], "sys", "sysfs", 1)}, "/"+part
			}
		}
		return e
	}
	if m.point == consolePath && c.spec.Process.Terminal {
		return expectation{known: true, kinds: []string{"devpts"}, part: m.root}
	}
	return expectation{}
}

// cameWith returns the recursive bind mount of the spec that a mount is below, "" for none.
func (c *checker) cameWith(m mount) string {
	for _, s := range c.spec.Mounts {
		if at := path.Clean("/" + s.Destination); slices.Contains(s.Options, "rbind") && strings.HasPrefix(m.point, at+"/") {
			return at
		}
	}
	return ""
}

// flagsOf returns the options of a spec's mount that must hold.
func flagsOf(s specs.Mount, writable bool) (flags []string) {
	for _, f := range bundle.Bars(s) {
		if f != "ro" || !writable {
			flags = append(flags, f)
		}
	}
	return flags
}

func (c *checker) mount(m mount, e expectation, granted map[string]bool) error {
	admin := c.has(unix.CAP_SYS_ADMIN)
	if !e.known {
		switch {
		case !admin && c.CRIU == 0 && c.cameWith(m) != "":
			return fmt.Errorf("it came with the mount %s, which takes along what is mounted below its source (rbind): unmount it, or mount %[1]s with bind", c.cameWith(m))
		case !admin && c.CRIU == 0:
			return fmt.Errorf("it is not in the spec (type %s): a symbolic link that leads to one of the spec's mounts was changed, or somebody has mounted it from outside; undo that", m.kind)
		case !admin:
			return fmt.Errorf("it is not in the spec (type %s), and the spec has no CAP_SYS_ADMIN", m.kind)
		case !slices.Contains(pseudo, m.kind) && c.host.devices[m.device] && !granted[m.device]:
			return fmt.Errorf("it is of a file system of the host's (%s, type %s) that the spec does not mount", m.device, m.kind)
		}
		return nil
	}
	if e.found && (m.device != e.from.device || m.root != e.from.root) {
		return fmt.Errorf("it is %s of the file system %s (type %s), and in the spec %s of %s", m.root, m.device, m.kind, e.from.root, e.from.device)
	}
	if len(e.kinds) > 0 && !slices.Contains(e.kinds, m.kind) {
		return fmt.Errorf("it is of the type %s, and in the spec %s", m.kind, e.kinds[0])
	}
	switch {
	case e.source != "":
	case e.cgroup:
		if err := c.cgroupRoot(m); err != nil {
			return err
		}
	case m.root != "/" && m.root != e.part:
		return fmt.Errorf("it is %s of a file system of the type %s, not all of it", m.root, m.kind)
	}
	if c.host.devices[m.device] && e.source == "" && !slices.Contains(pseudo, m.kind) {
		return fmt.Errorf("it is a file system of the host's (%s, type %s), and in the spec a new one", m.device, m.kind)
	}
	if admin {
		return nil // which may change the options
	}
	for _, f := range e.flags {
		if !m.is(f) {
			return fmt.Errorf("it is not %s, as the spec has it", f)
		}
	}
	return nil
}

// cgroupRoot refuses a mount of cgroups above the container's.
func (c *checker) cgroupRoot(m mount) error {
	if m.kind == "tmpfs" || m.root == "/" && m.kind == "cgroup2" && !c.ownsCgroups() {
		return nil
	}
	for _, at := range c.Cgroups {
		if m.root == at {
			return nil
		}
	}
	return fmt.Errorf("it is the cgroup %s, which is not the container's", m.root)
}

// ownsCgroups reports whether the spec has a cgroup namespace for the container.
func (c *checker) ownsCgroups() bool {
	return slices.ContainsFunc(c.spec.Linux.Namespaces, func(ns specs.LinuxNamespace) bool { return ns.Type == specs.CgroupNamespace })
}
