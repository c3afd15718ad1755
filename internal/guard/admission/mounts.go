// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
	"sync"

	criucgroup "github.com/checkpoint-restore/go-criu/v8/crit/images/cgroup"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mnt"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/internal/node/bundle"
)

// checkCgroups refuses what would lead out of the container's cgroup. CRIU puts each
// process into the cgroup that the images name, after it has replaced the first part
// of the path, which the images name too, by the container's new cgroup.
func checkCgroups(c *criucgroup.CgroupEntry) error {
	begin := make(map[string]string) // by hierarchy
	var dirs func([]*criucgroup.CgroupDirEntry) error
	dirs = func(list []*criucgroup.CgroupDirEntry) error {
		for _, d := range list {
			if leadsOut(d.GetDirName()) {
				return fmt.Errorf("cgroup %q leads elsewhere", d.GetDirName())
			}
			if err := dirs(d.GetChildren()); err != nil {
				return err
			}
		}
		return nil
	}
	for _, ctl := range c.GetControllers() {
		for _, name := range ctl.GetCnames() {
			if !controller().MatchString(name) {
				return fmt.Errorf("cgroups: %q is no controller", name)
			}
		}
		if err := dirs(ctl.GetDirs()); err != nil {
			return err
		}
		if len(ctl.GetDirs()) > 1 {
			return fmt.Errorf("it has %d cgroups of %s, not one", len(ctl.GetDirs()), strings.Join(ctl.GetCnames(), ","))
		}
		for _, d := range ctl.GetDirs() {
			for _, name := range ctl.GetCnames() {
				begin[name] = path.Clean("/" + d.GetDirName())
			}
		}
	}
	for _, set := range c.GetSets() {
		for _, m := range set.GetCtls() {
			at, known := path.Clean("/"+m.GetPath()), false
			if from, ok := begin[m.GetName()]; ok {
				known = at == from || strings.HasPrefix(at, strings.TrimSuffix(from, "/")+"/")
			}
			if int64(m.GetCgnsPrefix()) > int64(len(m.GetPath())) {
				return fmt.Errorf("cgroup %q has %d letters of a prefix", m.GetPath(), m.GetCgnsPrefix())
			}
			if !known || leadsOut(m.GetPath()) {
				return fmt.Errorf("cgroup %q of %q is not the container's", m.GetPath(), m.GetName())
			}
		}
	}
	return nil
}

// controller is the name of a hierarchy: CRIU makes a directory of that name. That of version 2 is
// empty.
var controller = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^(name=)?[a-zA-Z0-9_-]*$`) })

// leadsOut reports whether a path has a part "..".
func leadsOut(name string) bool { return slices.Contains(strings.Split(name, "/"), "..") }

// mounts compares the mounts. A container with CAP_SYS_ADMIN could mount what it
// likes, so that of its mounts only those are compared without which CRIU fails.
func (a *allowance) mounts(dumped []*mnt.MntEntry) (notes []string, err error) {
	var paths []string
	for _, m := range dumped {
		at := path.Clean("/" + m.GetMountpoint())
		paths = append(paths, at)
		if err := a.mount(m, at); err != nil {
			return nil, err
		}
	}
	switch console, terminal := slices.Contains(paths, consolePath), a.spec.Process.Terminal; {
	case a.specMount(consolePath) != nil || console == terminal:
	case console:
		return nil, fmt.Errorf("the container was dumped with a terminal, and the spec has none: run it with one (--tty)")
	default:
		return nil, fmt.Errorf("the container was dumped without a terminal, and the spec has one: run it without (no --tty)")
	}
	for _, m := range a.spec.Mounts {
		if at := path.Clean("/" + m.Destination); !slices.Contains(paths, at) {
			notes = append(notes, fmt.Sprintf("the spec's mount %s is not there after the restore: the dump has none", at))
		}
	}
	if a.admin() {
		return notes, a.mountForm(dumped)
	}
	if err := layered(dumped); err != nil {
		return nil, err
	}
	if at := a.bare(a.spec.Linux.ReadonlyPaths, dumped); at != "" {
		return nil, fmt.Errorf("%s is not read-only in the dump, as the spec has it", at)
	}
	return notes, a.mountForm(dumped)
}

// bare returns the first of a spec's paths that is a file of the kernel and no mount of the dump; "" for
// none. It may have come later, with a module or another node. A restore masks it before a process runs
// (devnode), and inspects what the processes have open there.
func (a *allowance) bare(paths []string, dumped []*mnt.MntEntry) string {
	for _, p := range paths {
		at := path.Clean("/" + p)
		there := slices.ContainsFunc(dumped, func(m *mnt.MntEntry) bool { return path.Clean("/"+m.GetMountpoint()) == at })
		if !there && (strings.HasPrefix(at, "/proc/") || strings.HasPrefix(at, "/sys/")) && a.host.HasFile(at) {
			return at
		}
	}
	return ""
}

// layered refuses mounts that hide others: two at one path, or a mount that is not
// on the mount that its path leads through. Below it, what the spec masks could be
// readable. A mount of the spec may be there more than once, a file on itself:
// destinations that are links to one another come to that, and nothing is hidden.
func layered(dumped []*mnt.MntEntry) error {
	place := func(m *mnt.MntEntry) string { return path.Clean("/" + m.GetMountpoint()) }
	all := make(map[uint32]*mnt.MntEntry)
	for _, m := range dumped {
		all[m.GetMntId()] = m
	}
	onItself := func(m *mnt.MntEntry) bool {
		on := all[m.GetParentMntId()]
		return on != nil && on != m && place(on) == place(m) && isOf(on, place(m)) && isOf(m, place(m))
	}
	dumped = slices.DeleteFunc(slices.Clone(dumped), onItself)
	byPath, byID := make(map[string]uint32), make(map[uint32]bool)
	for _, m := range dumped {
		at := place(m)
		if _, taken := byPath[at]; taken || byID[m.GetMntId()] {
			return fmt.Errorf("there are two mounts at %s, and the spec has no CAP_SYS_ADMIN", at)
		}
		byPath[at], byID[m.GetMntId()] = m.GetMntId(), true
	}
	for _, m := range dumped {
		at := place(m)
		if at == "/" {
			continue
		}
		on := path.Dir(at)
		for ; on != "/"; on = path.Dir(on) {
			if _, ok := byPath[on]; ok {
				break
			}
		}
		if byPath[on] != m.GetParentMntId() {
			return fmt.Errorf("mount %s is not on that at %s, and the spec has no CAP_SYS_ADMIN", at, on)
		}
	}
	return nil
}

// isOf reports whether CRIU takes what is mounted at a path from the spec's mount there.
func isOf(m *mnt.MntEntry, at string) bool { return path.Clean("/"+m.GetExtKey()) == at }

// mount compares one mount of the dump.
func (a *allowance) mount(m *mnt.MntEntry, at string) error {
	external := isExternal(m)
	if m.GetDeleted() {
		return fmt.Errorf("mount %s: what is mounted there was removed: unmount it, or start the container anew if it was replaced on the node", at)
	}
	if at == "/" {
		return nil // CRIU mounts the new root there, whatever it was
	}
	spec := a.specMount(at)
	masked, readonly := among(a.spec.Linux.MaskedPaths, at), among(a.spec.Linux.ReadonlyPaths, at)
	device := a.device(at)
	if external && spec == nil && !masked && !readonly && !device {
		return fmt.Errorf("mount %s of the dump is missing in the spec: add a mount there, from whatever source this container is to have", at)
	}
	if a.admin() {
		return nil
	}
	// By the key CRIU finds what is mounted there.
	key := path.Clean("/" + m.GetExtKey())
	nulled := masked && key == "/dev/null"
	if m.GetExtKey() != "" && key != at && !nulled {
		return fmt.Errorf("mount %s is what the spec has at %s", at, key)
	}
	kind := mnt.Fstype(m.GetFstype())
	switch {
	case spec != nil:
	case masked && (nulled || kind == mnt.Fstype_TMPFS && m.GetFlags()&unix.MS_RDONLY != 0):
		return nil
	case device && (external || at == consolePath && kind == mnt.Fstype_DEVPTS):
		return nil
	case readonly && kernels(m) && m.GetFlags()&unix.MS_RDONLY != 0:
		return nil
	case masked, readonly:
		return fmt.Errorf("mount %s neither masks it nor makes it read-only, as the spec has it", at)
	default:
		return fmt.Errorf("mount %s (type %s) is not in the spec, and the spec has no CAP_SYS_ADMIN", at, kind)
	}
	if !external && !slices.Contains(typesFor(spec), kind) {
		return fmt.Errorf("mount %s is of the type %s, and in the spec %s", at, kind, spec.Type)
	}
	if cdi.IsNode(at) {
		return nil // a device's mount says nothing of who may use it: the cgroup's rules do
	}
	flags := map[string]uint32{"ro": unix.MS_RDONLY, "nosuid": unix.MS_NOSUID, "nodev": unix.MS_NODEV, "noexec": unix.MS_NOEXEC}
	for _, bar := range bundle.Bars(*spec) {
		if bar == "ro" && kind == mnt.Fstype_TMPFS && strings.HasPrefix(spec.Type, "cgroup") {
			continue // what runc mounts the hierarchies of version 1 in is never read-only
		}
		if m.GetFlags()&flags[bar] == 0 { // CRIU gives a mount no other
			return fmt.Errorf("mount %s is not %s, as the spec has it", at, bar)
		}
	}
	return nil
}

// among reports whether one of a spec's paths is at.
func among(paths []string, at string) bool {
	return slices.ContainsFunc(paths, func(p string) bool { return path.Clean("/"+p) == at })
}

// specMount returns the spec's mount at a path. A mount of cgroups is also that of
// the mounts that runc makes below it for each controller.
func (a *allowance) specMount(at string) *specs.Mount {
	for i := range a.spec.Mounts {
		m := &a.spec.Mounts[i]
		to := path.Clean("/" + m.Destination)
		if to == at || m.Type == "cgroup" && strings.HasPrefix(at, to+"/") {
			return m
		}
	}
	return nil
}

// consolePath is where runc mounts the terminal of a container that has one.
const consolePath = "/dev/console"

// device reports whether a path is of a device that runc binds, or of the console.
func (a *allowance) device(at string) bool {
	if at == consolePath || at == "/dev/null" || a.host.ownUsers(a.spec) && slices.Contains(a.host.DefaultNodes, at) {
		return true
	}
	return slices.ContainsFunc(a.spec.Linux.Devices, func(d specs.LinuxDevice) bool { return path.Clean(d.Path) == at })
}

// typesFor returns the types of file systems that a spec's mount can have.
func typesFor(m *specs.Mount) []mnt.Fstype {
	switch m.Type {
	case "proc", "sysfs", "tmpfs", "devpts", "mqueue":
		return []mnt.Fstype{mnt.Fstype(mnt.Fstype_value[strings.ToUpper(m.Type)])}
	case "cgroup", "cgroup2":
		return []mnt.Fstype{mnt.Fstype_CGROUP, mnt.Fstype_CGROUP2, mnt.Fstype_TMPFS}
	}
	return nil // a bind mount is external
}
