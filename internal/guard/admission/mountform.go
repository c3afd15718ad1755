// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"fmt"
	"math"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/mnt"
	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// CRIU takes a mount from outside by its key, binds a mount from another one with the same device
// number, and else makes a new file system. What decides which, and from where, are the fields
// that are compared here.

// isExternal reports whether CRIU takes a mount from outside.
func isExternal(m *mnt.MntEntry) bool { return m.GetExtMount() || m.GetExtKey() != "" }

// mountForm refuses mounts of a form that CRIU does not write, or that leads out of the container.
func (a *allowance) mountForm(dumped []*mnt.MntEntry) error {
	byID, outside := make(map[uint32]*mnt.MntEntry), make(map[uint32]bool)
	for _, m := range dumped {
		byID[m.GetMntId()] = m
		if at := path.Clean("/" + m.GetMountpoint()); at == "/" || isExternal(m) && m.GetExtKey() != "/dev/null" {
			outside[m.GetRootDev()] = true
		}
	}
	for _, m := range dumped {
		for _, p := range []string{m.GetMountpoint(), m.GetRoot()} {
			if err := cleanPath(p); err != nil {
				return fmt.Errorf("mount %s: %w", m.GetMountpoint(), err)
			}
		}
		if _, ok := mnt.Fstype_name[int32(m.GetFstype())]; !ok {
			return fmt.Errorf("mount %s is of the unknown type %d", m.GetMountpoint(), m.GetFstype())
		}
		if a.admin() {
			continue
		}
		if err := a.form(m, byID, outside); err != nil {
			return fmt.Errorf("mount %s: %w", m.GetMountpoint(), err)
		}
	}
	return nil
}

// terminalNode is the root of a terminal's mount, of devpts.
var terminalNode = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^/[0-9]{1,10}$`) })

// form compares what a mount is made from, in a container without CAP_SYS_ADMIN.
func (a *allowance) form(m *mnt.MntEntry, byID map[uint32]*mnt.MntEntry, outside map[uint32]bool) error {
	at, kind := m.GetMountpoint(), mnt.Fstype(m.GetFstype())
	if (m.GetSharedId() != 0 || m.GetMasterId() != 0) && !a.propagates(at) && !a.fromHost(m) {
		return fmt.Errorf("mounts come to it or from it, and the spec has it private")
	}
	if at == "/" || isExternal(m) {
		return nil
	}
	if outside[m.GetRootDev()] && kind != mnt.Fstype_SYSFS && kind != mnt.Fstype_CGROUP && kind != mnt.Fstype_CGROUP2 {
		return fmt.Errorf("it is of the file system of a mount from outside")
	}
	if m.GetFsname() != "" {
		return fmt.Errorf("it is of the file system %q", m.GetFsname())
	}
	// The part of proc or sysfs that it has by its place, a terminal, or all of it.
	parent := path.Clean("/" + byID[m.GetParentMntId()].GetMountpoint())
	part := "/" + strings.TrimPrefix(strings.TrimPrefix(at, parent), "/")
	switch {
	case at == consolePath && kind == mnt.Fstype_DEVPTS && terminalNode().MatchString(m.GetRoot()):
	case m.GetRoot() == "/":
	case among(a.spec.Linux.ReadonlyPaths, at) && kernels(m) && m.GetRoot() == part:
	default:
		return fmt.Errorf("it is %s of its file system", m.GetRoot())
	}
	return options(m, a.specMount(at))
}

// fromHost reports whether a mount of the host's may be one that mounts come to, and none go from: runc
// makes it so where the host shares it, as systemd shares all, and the spec does not say private.
func (a *allowance) fromHost(m *mnt.MntEntry) bool {
	at := m.GetMountpoint()
	if m.GetSharedId() != 0 || at != "/" && !isExternal(m) {
		return false
	}
	return !slices.ContainsFunc(a.propagation(at), func(mode string) bool {
		return slices.Contains([]string{"private", "rprivate", "unbindable", "runbindable"}, mode)
	})
}

// propagation returns the modes that the spec has for a place, among other options.
func (a *allowance) propagation(at string) []string {
	modes := []string{a.spec.Linux.RootfsPropagation}
	if m := a.specMount(at); m != nil {
		modes = append(modes, m.Options...)
	}
	return modes
}

// propagates reports whether the spec has mounts come to a place or from it.
func (a *allowance) propagates(at string) bool {
	return slices.ContainsFunc(a.propagation(at), func(mode string) bool {
		return slices.Contains([]string{"shared", "rshared", "slave", "rslave"}, mode)
	})
}

// fileSystemOptions are the options of file systems that a container makes; what follows "=" is not
// compared but for size.
var fileSystemOptions = map[mnt.Fstype][]string{
	mnt.Fstype_TMPFS:  {"size", "mode", "uid", "gid", "nr_inodes", "inode32", "inode64", "huge", "mpol", "noswap"},
	mnt.Fstype_DEVPTS: {"gid", "mode", "ptmxmode", "newinstance", "max", "uid"},
	mnt.Fstype_PROC:   {"hidepid", "gid", "subset"},
	mnt.Fstype_MQUEUE: nil,
	mnt.Fstype_SYSFS:  nil,
}

// options compares the options of a file system that CRIU makes.
func options(m *mnt.MntEntry, spec *specs.Mount) error {
	kind := mnt.Fstype(m.GetFstype())
	known, compared := fileSystemOptions[kind]
	for o := range strings.SplitSeq(m.GetOptions(), ",") {
		name, value, _ := strings.Cut(o, "=")
		if compared && name != "" && !slices.Contains(known, name) {
			return fmt.Errorf("it has the option %q", o)
		}
		if kind != mnt.Fstype_TMPFS || name != "size" || spec == nil {
			continue
		}
		for _, has := range spec.Options {
			most, limited := strings.CutPrefix(has, "size=")
			limit, compared := bytesOf(most)
			if bytes, known := bytesOf(value); limited && compared && (!known || bytes > limit) {
				return fmt.Errorf("it has %s bytes, and in the spec %s", value, most)
			}
		}
	}
	return nil
}

// bytesOf returns the bytes that a size of a tmpfs comes to: whole pages, and for 0 any number. A part of the
// memory is none: nodes have more and less of it, and the cgroup bounds what is used.
func bytesOf(text string) (bytes uint64, ok bool) {
	shift := 0
	if n := len(text); n > 0 {
		if shift = 10 * (1 + strings.IndexByte("kmgtpe", text[n-1]|' ')); shift > 0 {
			text = text[:n-1]
		}
	}
	bytes, err := strconv.ParseUint(text, 10, 63-shift)
	switch {
	case err != nil:
		return 0, false
	case bytes == 0:
		return math.MaxUint64, true
	}
	return (bytes<<shift + pageSize - 1) &^ (pageSize - 1), true
}
