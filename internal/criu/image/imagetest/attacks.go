// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package imagetest

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/cgroup"
	criucore "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fs"
	ghostfile "github.com/checkpoint-restore/go-criu/v8/crit/images/ghost-file"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mm"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mnt"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/regfile"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/seccomp"
	skinet "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-inet"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/vma"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
)

// Attack is a way to the host that the review of security found in CRIU's images (S1 to S8), or one of
// the same kind, for a dump of a container that
//   - has no capability, and containerd's seccomp profile;
//   - has a directory of the host mounted read-only at /zoo;
//   - has /tmp/file, /proc/1/status, /proc/meminfo and /dev/null open, and a socket of each kind.
type Attack struct {
	Name string
	// Rule is what refuses it: the name of a rule of package admission, or of a field. Several are
	// separated by commas.
	Rule string
	// Says is in the error; "" for what is left out of CRIU's copy.
	Says string
	// Known are those that took the host when the review was made, and others that are tried often.
	Known bool
	// image is a pattern of names, change changes the entries of one.
	image  string
	change func([]proto.Message) bool
}

// Apply makes the attack in a dump.
func (a Attack) Apply(dir string) error {
	paths, err := filepath.Glob(filepath.Join(dir, a.image))
	if err != nil {
		return err
	}
	for _, path := range paths {
		f, err := Parse(dir, filepath.Base(path))
		if err != nil {
			return err
		}
		var entries []proto.Message
		for _, e := range f.Entries {
			entries = append(entries, e.Message)
		}
		if a.change(entries) {
			return f.Write(dir)
		}
	}
	return fmt.Errorf("%s: the dump has nothing like it", a.Name)
}

// Attacks returns all of them.
func Attacks() []Attack {
	up := strings.Repeat("/..", 30)
	host := "/proc/self/fd/126" + up
	const mounts = "mountpoints-*.img"
	return []Attack{
		{"S1: a property of a cgroup", "cgroup_dir_entry.properties", "", true, "cgroup.img", cgroups(func(c *cgroup.CgroupEntry) {
			for _, ctl := range c.Controllers {
				for _, d := range ctl.Dirs {
					d.Properties = append(d.Properties, &cgroup.CgroupPropEntry{Name: new(strings.Repeat("../", 30) + "tmp/x"), Value: new("x")})
				}
			}
		})},
		{"S1: the owner of a cgroup", "cgroup_dir_entry.dir_perms", "", false, "cgroup.img", cgroups(func(c *cgroup.CgroupEntry) {
			for _, ctl := range c.Controllers {
				for _, d := range ctl.Dirs {
					d.DirPerms = &cgroup.CgroupPerms{Mode: new(uint32(0o777)), Uid: new(uint32(1000)), Gid: new(uint32(1000))}
				}
			}
		})},
		{"S1: a controller's name", "cgroups", "is no controller", false, "cgroup.img", cgroups(func(c *cgroup.CgroupEntry) { c.Controllers[0].Cnames = []string{"../../x"} })},
		{"S5: a prefix of a cgroup", "cgroups", "prefix", false, "cgroup.img", cgroups(func(c *cgroup.CgroupEntry) { c.Sets[0].Ctls[0].CgnsPrefix = new(uint32(9999)) })},
		{"S2: a file by CRIU's descriptor", "files", "is not an absolute, clean path", true, "files.img", reg("/tmp/file", func(r *regfile.RegFileEntry) { r.Name = &host })},
		{"S2: CRIU's own program", "files", "leads to what another process has (exe)", false, "files.img", reg("/proc/1/status", func(r *regfile.RegFileEntry) { r.Name = new("/proc/self/exe") })},
		{"S2: CRIU's descriptors", "files", "leads to what another process has (fd)", false, "files.img", reg("/proc/1/status", func(r *regfile.RegFileEntry) { r.Name = new("/proc/self/fd") })},
		{"S2: one of a process's descriptors", "files", "leads to what another process has (fd)", false, "files.img", reg("/proc/1/status", func(r *regfile.RegFileEntry) { r.Name = new("/proc/1/fd/0") })},
		{"S2: by a link in /dev", "files", "symbolic link on the way", false, "files.img", reg("/dev/null", func(r *regfile.RegFileEntry) { r.Name = new("/dev/fd/126") })},
		{"S2: a writable sysctl", "files", "open for writing", false, "files.img", reg("/proc/meminfo", func(r *regfile.RegFileEntry) { r.Name, r.Flags = new("/proc/sysrq-trigger"), new(uint32(1)) })},
		{"S2: a file that is made", "files", "flags 01100", false, "files.img", reg("/tmp/file", func(r *regfile.RegFileEntry) { r.Flags = new(uint32(0o1101)) })},
		{"S2: a root of its own", "directories", "CAP_SYS_CHROOT", false, "fs-*.img", one(func(f *fs.FsEntry) bool { f.RootId = new(uint32(2)); return true })},
		{"S3: a mount's root", "mounts", "mount /run", true, mounts, mount("/run", func(m *mnt.MntEntry) { m.Root = &up })},
		{"S3: a clean root", "mounts", "it is /etc of its file system", false, mounts, mount("/run", func(m *mnt.MntEntry) { m.Root = new("/etc") })},
		{"S3: of a volume", "mounts", "of the file system of a mount from outside", false, mounts, volume},
		{"S3: a masked path", "mounts", "/proc/acpi", false, mounts, mount("/proc/acpi", func(m *mnt.MntEntry) { m.Root = new("/x") })},
		{"S3: options", "mounts", "mount /run", false, mounts, mount("/run", func(m *mnt.MntEntry) { m.Options = new("size=1t,x=y") })},
		{"S3: more memory", "mounts", "9999999k bytes", false, mounts, mount("/run", func(m *mnt.MntEntry) { m.Options = new("size=9999999k") })},
		{"S4: a volume's flag", "mounts", "mount /zoo is not ro", false, mounts, mount("/zoo", moved)},
		{"S4: the flag of /proc/sys", "mounts", "/proc/sys neither masks", true, mounts, mount("/proc/sys", moved)},
		{"S4: a mount at /dev/null", "mounts", "mount /dev/null", false, mounts, mount("/run", func(m *mnt.MntEntry) { m.Mountpoint = new("/dev/null") })},
		{"S4: an old external mount", "mounts,mnt_entry.ext_mount", "mnt_entry.ext_mount", false, mounts, mount("/run", func(m *mnt.MntEntry) { m.ExtMount = new(true) })},
		{"S5: a removed device", "removed files", "device", false, "ghost-file-*.img", ghost(unix.S_IFCHR | 0o666)},
		{"S5: a removed setuid file", "removed files", "setuid", false, "ghost-file-*.img", ghost(unix.S_IFREG | 0o4755)},
		{"S5: a privileged port", "sockets", "CAP_NET_BIND_SERVICE", false, "files.img", inet(func(s *skinet.InetSkEntry) { s.SrcPort = new(uint32(22)) })},
		{"S5: a raw socket", "sockets", "CAP_NET_RAW", true, "files.img", inet(func(s *skinet.InetSkEntry) { s.Type = new(uint32(unix.SOCK_RAW)) })},
		{"S5: a short address", "sockets", "words", false, "files.img", inet(func(s *skinet.InetSkEntry) { s.SrcAddr = nil })},
		{"S5: a login uid", "task_core_entry.loginuid", "", false, "core-1.img", one(func(c *criucore.CoreEntry) bool { c.Tc.Loginuid = new(uint32(4242)); return true })},
		{"S5: a seccomp filter that allows all", "seccomp", "weaker than the spec's profile", true, "seccomp.img", one(func(s *seccomp.SeccompEntry) bool {
			for _, f := range s.SeccompFilters {
				f.Filter = []byte{6, 0, 0, 0, 0, 0, 0xff, 0x7f}
			}
			return len(s.SeccompFilters) > 0
		})},
		{"S5: the host's namespace as a file", "namespace files", "none of the container's", false, "files.img", one(func(f *fdinfo.FileEntry) bool {
			if f.Nsf != nil {
				f.Nsf.NsId = new(uint32(4711))
			}
			return f.Nsf != nil
		})},
		{"S8: a shorter list of limits", "limits", "have no RLIMIT_NOFILE", true, "core-1.img", one(func(c *criucore.CoreEntry) bool { c.Tc.Rlimits.Rlimits = nil; return true })},
		{"S8: a soft limit", "limits", "RLIMIT_NOFILE", false, "core-1.img", one(func(c *criucore.CoreEntry) bool { c.Tc.Rlimits.Rlimits[7].Cur = new(uint64(1 << 20)); return true })},
		{"mappings over one another", "maps", "overlaps", false, "mm-1.img", one(func(m *mm.MmEntry) bool { m.Vmas[1].Start = m.Vmas[0].Start; return true })},
		{"a guard in no mapping", "maps", "in no mapping", false, "mm-1.img", guard(func(v *vma.VmaEntry) { v.Start, v.End = new(uint64(4096)), new(uint64(8192)) })},
		{"a guard of no pages", "maps", "no range of pages", false, "mm-1.img", guard(func(v *vma.VmaEntry) { v.Start = new(v.GetStart() + 1) })},
		{"a guard that ends behind its mapping", "maps", "in no mapping", false, "mm-1.img", guard(func(v *vma.VmaEntry) { v.End = new(uint64(1 << 47)) })},
		{"a guard that is a mapping", "maps", "unknown kind", false, "mm-1.img", guard(func(v *vma.VmaEntry) { v.Status = new(v.GetStatus() | 1) })},
		{"a watch by handle", "inotify", "CAP_DAC_READ_SEARCH", false, "files.img", one(func(f *fdinfo.FileEntry) bool {
			if f.Ify != nil {
				f.Ify.Wd[0].FHandle.Path = nil
			}
			return f.Ify != nil
		})},
		{"a file of another type", "files", "what describes a file of this type", false, "files.img", one(func(f *fdinfo.FileEntry) bool {
			if f.Efd == nil {
				return false
			}
			f.Type = fdinfo.FdTypes_SIGNALFD.Enum()
			return true
		})},
	}
}

// one changes the first entry for which change reports that it has.
func one[T any, M interface {
	*T
	proto.Message
}](change func(M) bool) func([]proto.Message) bool {
	return func(entries []proto.Message) bool {
		return slices.ContainsFunc(entries, func(m proto.Message) bool {
			e, ok := m.(M)
			return ok && change(e)
		})
	}
}

func cgroups(change func(*cgroup.CgroupEntry)) func([]proto.Message) bool {
	return one(func(c *cgroup.CgroupEntry) bool { change(c); return true })
}

func reg(name string, change func(*regfile.RegFileEntry)) func([]proto.Message) bool {
	return one(func(f *fdinfo.FileEntry) bool {
		if f.GetReg().GetName() != name {
			return false
		}
		f.Reg.Size, f.Reg.Mode = nil, nil // which CRIU compares
		change(f.Reg)
		return true
	})
}

func inet(change func(*skinet.InetSkEntry)) func([]proto.Message) bool {
	return one(func(f *fdinfo.FileEntry) bool {
		if f.Isk == nil || f.Isk.GetType() != unix.SOCK_DGRAM {
			return false
		}
		change(f.Isk)
		return true
	})
}

func mount(at string, change func(*mnt.MntEntry)) func([]proto.Message) bool {
	return one(func(m *mnt.MntEntry) bool {
		if m.GetMountpoint() != at {
			return false
		}
		change(m)
		return true
	})
}

// volume makes the spec's tmpfs at /run one of the volume's file system.
func volume(entries []proto.Message) bool {
	var dev *uint32
	mount("/zoo", func(m *mnt.MntEntry) { dev = m.RootDev })(entries)
	return dev != nil && mount("/run", func(m *mnt.MntEntry) { m.RootDev = dev })(entries)
}

// moved takes the read-only flag to where CRIU does not look for a bind mount's.
func moved(m *mnt.MntEntry) {
	m.Flags, m.SbFlags = new(m.GetFlags()&^1), new(m.GetSbFlags()|1)
}

func ghost(mode uint32) func([]proto.Message) bool {
	return one(func(g *ghostfile.GhostFileEntry) bool { g.Mode = &mode; return true })
}

// guard adds a guard, of the first page of the first mapping until it is changed.
func guard(change func(*vma.VmaEntry)) func([]proto.Message) bool {
	return one(func(m *mm.MmEntry) bool {
		v := proto.CloneOf(m.Vmas[0])
		v.End, v.Status = new(v.GetStart()+4096), new(uint32(1<<16))
		change(v)
		m.Vmas = append(m.Vmas, v)
		return true
	})
}
