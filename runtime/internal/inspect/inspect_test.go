// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// fake is a /proc of one container with two processes: 100, and 101 with a second thread.
type fake struct {
	t    *testing.T
	dir  string
	stat map[string]unix.Statx_t // by path below dir

	policy, priority uint32 // of all threads
}

const (
	rootMount, procMount, devMount, dataMount, sharedMount = 50, 51, 52, 53, 9
	settingsMount, maskMount                               = 54, 55
	statusText                                             = `Name:	worker
State:	S (sleeping)
Uid:	1000	1000	1000	1000
Gid:	1000	1000	1000	1000
Groups:	2000
CapInh:	0000000000000000
CapPrm:	0000000000000000
CapEff:	0000000000000000
CapBnd:	0000000000000400
CapAmb:	0000000000000000
NoNewPrivs:	1
Seccomp:	2
`
	limitsText = `Limit                     Soft Limit           Hard Limit           Units     
Max cpu time              unlimited            unlimited            seconds   
Max open files            1024                 4096                 files     
`
	mountsText = `50 40 0:60 / / rw,relatime - overlay overlay rw,lowerdir=/x
51 50 0:61 / /proc rw,nosuid,nodev,noexec - proc proc rw
52 50 0:62 / /dev rw,nosuid - tmpfs tmpfs rw
53 50 8:1 /srv/data /data ro,relatime - ext4 /dev/sda1 rw
54 51 0:61 /sys /proc/sys ro,nosuid,nodev,noexec - proc proc rw
55 51 0:5 /null /proc/kcore rw,nosuid - devtmpfs devtmpfs rw
56 51 0:63 / /proc/acpi ro - tmpfs tmpfs ro
`
	hostMounts = `1 0 8:1 / / rw - ext4 /dev/sda1 rw
2 1 0:5 / /dev rw - devtmpfs devtmpfs rw
`
	// hostRootfs is where the container's root file system is mounted on the host.
	hostRootfs = "3 1 0:60 / %s rw - overlay overlay rw,lowerdir=/x\n"
)

func (f *fake) write(name, text string) {
	f.t.Helper()
	path := filepath.Join(f.dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		f.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		f.t.Fatal(err)
	}
}

func (f *fake) link(name, to string) {
	f.t.Helper()
	path := filepath.Join(f.dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		f.t.Fatal(err)
	}
	_ = os.Remove(path)
	if err := os.Symlink(to, path); err != nil {
		f.t.Fatal(err)
	}
}

// file is a link to a file on a mount.
func (f *fake) file(name, to string, mount uint64) {
	f.link(name, to)
	f.stat[name] = unix.Statx_t{Mnt_id: mount, Mode: unix.S_IFREG}
}

// edit replaces text in a file.
func (f *fake) edit(name, old, by string) {
	f.t.Helper()
	text, err := os.ReadFile(filepath.Join(f.dir, name))
	if err != nil || !strings.Contains(string(text), old) {
		f.t.Fatalf("%s has no %q: %v", name, old, err)
	}
	f.write(name, strings.Replace(string(text), old, by, 1))
}

func (f *fake) namespaces(pid string, base int) {
	for i, kind := range []string{"pid", "net", "ipc", "uts", "mnt", "user", "cgroup"} {
		n := base + i
		if kind == "user" {
			n = 5 // the host's
		}
		f.link(pid+"/ns/"+kind, fmt.Sprintf("%s:[%d]", kind, n))
	}
}

func newFake(t *testing.T) *fake {
	f := &fake{t: t, dir: t.TempDir(), stat: make(map[string]unix.Statx_t)}
	f.namespaces("self", 0)
	f.write("200/mountinfo", "90 1 0:90 / / rw - tmpfs gpuckpt rw\n")
	f.write("rootfs/file", "")
	f.stat["rootfs"] = unix.Statx_t{Mnt_id: 3}
	f.write("self/mountinfo", hostMounts+fmt.Sprintf(hostRootfs, filepath.Join(f.dir, "rootfs")))
	for pid, threads := range map[string][]string{"100": {"100"}, "101": {"101", "102"}} {
		f.namespaces(pid, 1000)
		for _, tid := range threads {
			f.write(pid+"/task/"+tid+"/status", statusText)
			f.write(pid+"/task/"+tid+"/attr/current", "profile (enforce)\n")
		}
		f.write(pid+"/status", statusText)
		f.write(pid+"/limits", limitsText)
		f.write(pid+"/cgroup", "4:memory:/pods/job\n0::/pods/job/below\n")
		f.write(pid+"/mountinfo", mountsText)
		f.write(pid+"/uid_map", "0 0 4294967295\n")
		f.write(pid+"/gid_map", "0 0 4294967295\n")
		f.file(pid+"/root", "/", rootMount)
		f.file(pid+"/cwd", "/srv", rootMount)
		f.file(pid+"/exe", "/bin/worker", rootMount)
		f.write(pid+"/maps", "1000-2000 r-xp 00000000 00:60 7 /bin/worker\n2000-3000 rw-s 00000000 00:01 8 /memfd:x (deleted)\n3000-4000 rw-p 00000000 00:00 0 \n")
		f.file(pid+"/map_files/1000-2000", "/bin/worker", rootMount)
		f.file(pid+"/map_files/2000-3000", "/memfd:x (deleted)", sharedMount)
		f.link(pid+"/fd/0", "pipe:[77]")
		f.write(pid+"/fdinfo/0", "pos:\t0\nflags:\t0100000\nmnt_id:\t15\n")
		f.file(pid+"/fd/3", "/data/file", dataMount)
		f.write(pid+"/fdinfo/3", "pos:\t0\nflags:\t0100000\nmnt_id:\t53\n")
		f.link(pid+"/fd/4", "socket:[4711]")
		f.write(pid+"/fdinfo/4", "flags:\t02\n")
		f.write(pid+"/net/packet", "sk       RefCnt Type Proto  Iface R Rmem   User   Inode\n")
	}
	return f
}

func (f *fake) system() System {
	status := func(path string) (unix.Statx_t, error) {
		if rel, err := filepath.Rel(f.dir, path); err == nil && !strings.HasPrefix(rel, "..") {
			st, ok := f.stat[rel]
			if !ok {
				return st, fmt.Errorf("no %s", rel)
			}
			return st, nil
		}
		if path == "/dev/null" {
			return unix.Statx_t{Mnt_id: 2}, nil
		}
		return unix.Statx_t{Mnt_id: 1}, nil // the host's
	}
	return System{
		Proc: f.dir, Status: status,
		Policy: func(int) (uint32, uint32, error) { return f.policy, f.priority, nil },
		Mounts: func(pid int) ([]byte, error) {
			return os.ReadFile(filepath.Join(f.dir, strconv.Itoa(pid), "mountinfo"))
		},
		Internal: func() (map[uint64]bool, error) { return map[uint64]bool{sharedMount: true}, nil },
	}
}

// restricted is the spec of that container. The places of its bind mounts are not on this machine,
// so that they are compared only where a test makes them.
func restricted() *specs.Spec {
	return &specs.Spec{
		Root: &specs.Root{},
		Process: &specs.Process{
			User: specs.User{UID: 1000, GID: 1000, AdditionalGids: []uint32{2000}}, NoNewPrivileges: true,
			Capabilities:    &specs.LinuxCapabilities{Bounding: []string{"CAP_NET_BIND_SERVICE"}},
			Rlimits:         []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Hard: 4096, Soft: 1024}},
			ApparmorProfile: "profile",
		},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Options: []string{"nosuid", "nodev", "noexec"}},
			{Destination: "/dev", Type: "tmpfs", Options: []string{"nosuid"}},
			{Destination: "/data", Type: "bind", Source: "/gpuckpt-test/none", Options: []string{"rbind", "ro"}},
		},
		Linux: &specs.Linux{
			Seccomp:       &specs.LinuxSeccomp{},
			MaskedPaths:   []string{"/proc/kcore", "/proc/acpi"},
			ReadonlyPaths: []string{"/proc/sys"},
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace}, {Type: specs.NetworkNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace}, {Type: specs.MountNamespace}, {Type: specs.CgroupNamespace},
			},
		},
	}
}

func TestCheck(t *testing.T) {
	status := "101/task/102/status"
	for _, test := range []struct {
		name    string
		change  func(f *fake, spec *specs.Spec)
		refusal string // "" for none
	}{
		{name: "as the spec has it", change: func(*fake, *specs.Spec) {}},
		{"all have ended", func(f *fake, _ *specs.Spec) {
			f.edit("100/status", "S (sleeping)", "Z (zombie)")
			f.edit("101/status", "S (sleeping)", "Z (zombie)")
		}, "the first, 100, has ended"},
		{name: "a zombie", change: func(f *fake, _ *specs.Spec) { f.edit("101/status", "S (sleeping)", "Z (zombie)") }},

		{"user", func(f *fake, _ *specs.Spec) { f.edit(status, "Uid:	1000	1000", "Uid:	1000	0") }, "user id 0"},
		{"user, with the capability", func(f *fake, s *specs.Spec) {
			f.edit(status, "Uid:	1000	1000", "Uid:	1000	0")
			s.Process.Capabilities.Permitted = []string{"CAP_SETUID"}
		}, ""},
		{"group", func(f *fake, _ *specs.Spec) { f.edit(status, "Gid:	1000	1000	1000", "Gid:	1000	1000	0") }, "group id 0"},
		{"more groups", func(f *fake, _ *specs.Spec) { f.edit(status, "2000", "2000 27") }, "group id 27"},
		{"permitted", func(f *fake, _ *specs.Spec) { f.edit(status, "CapPrm:	0000000000000000", "CapPrm:	0000000000200000") }, "permitted capabilities have CAP_SYS_ADMIN"},
		{"effective", func(f *fake, _ *specs.Spec) { f.edit(status, "CapEff:	0000000000000000", "CapEff:	0000000000000400") }, "effective capabilities have CAP_NET_BIND"},
		{"inheritable", func(f *fake, _ *specs.Spec) { f.edit(status, "CapInh:	0", "CapInh:	8") }, "inheritable"},
		{"ambient", func(f *fake, _ *specs.Spec) { f.edit(status, "CapAmb:	0", "CapAmb:	8") }, "ambient"},
		{"bounding", func(f *fake, _ *specs.Spec) { f.edit(status, "CapBnd:	0000000000000400", "CapBnd:	0000000000000401") }, "bounding capabilities have CAP_CHOWN"},
		{"no_new_privs", func(f *fake, _ *specs.Spec) { f.edit(status, "NoNewPrivs:	1", "NoNewPrivs:	0") }, "no_new_privs"},
		{"seccomp", func(f *fake, _ *specs.Spec) { f.edit(status, "Seccomp:	2", "Seccomp:	0") }, "no seccomp filter"},
		{"AppArmor", func(f *fake, _ *specs.Spec) { f.write("101/task/102/attr/current", "unconfined\n") }, `AppArmor profile "unconfined"`},
		{"real time", func(f *fake, _ *specs.Spec) { f.policy, f.priority = unix.SCHED_FIFO, 1 }, "real-time scheduling policy (1, priority 1)"},
		{"real time by the spec's limit", func(f *fake, s *specs.Spec) {
			f.policy, f.priority = unix.SCHED_FIFO, 50
			s.Process.Rlimits = append(s.Process.Rlimits, specs.POSIXRlimit{Type: "RLIMIT_RTPRIO", Hard: 50})
		}, ""},
		{"a policy that CRIU does not restore", func(f *fake, s *specs.Spec) {
			f.policy = unix.SCHED_DEADLINE
			s.Process.Capabilities.Permitted = []string{"CAP_SYS_NICE"}
		}, "scheduling policy 6"},
		{"limit", func(f *fake, _ *specs.Spec) {
			f.edit("101/limits", "4096                 files", "1048576              files")
		}, "RLIMIT_NOFILE is 1048576"},
		{"limit, none", func(f *fake, _ *specs.Spec) {
			f.edit("101/limits", "4096                 files", "unlimited            files")
		}, "RLIMIT_NOFILE"},

		{"host's namespace", func(f *fake, _ *specs.Spec) { f.namespaces("100", 0) }, "the host's"},
		{"another namespace", func(f *fake, _ *specs.Spec) { f.link("101/ns/net", "net:[4712]") }, "net namespace net:[4712]"},
		{"user namespace", func(f *fake, _ *specs.Spec) { f.link("101/ns/user", "user:[4712]") }, "user namespace"},
		{"given namespace", func(f *fake, s *specs.Spec) { s.Linux.Namespaces[1].Path = filepath.Join(f.dir, "100/ns/net") }, ""},
		{"given by a mount", func(f *fake, s *specs.Spec) {
			f.write("cni-1", "")
			f.stat["cni-1"] = unix.Statx_t{Ino: 1001}
			for _, pid := range []string{"100", "101"} {
				f.link(pid+"/ns/net", "net:[1001]")
			}
			s.Linux.Namespaces[1].Path = filepath.Join(f.dir, "cni-1")
		}, ""},
		{"another than that of the mount", func(f *fake, s *specs.Spec) {
			f.write("cni-1", "")
			f.stat["cni-1"] = unix.Statx_t{Ino: 4711}
			s.Linux.Namespaces[1].Path = filepath.Join(f.dir, "cni-1")
		}, "the spec's is net:[4711]"},
		{"not the given one", func(f *fake, s *specs.Spec) {
			f.link("pod", "net:[33]")
			s.Linux.Namespaces[1].Path = filepath.Join(f.dir, "pod")
		}, "the spec's is net:[33]"},
		{"ids", func(f *fake, s *specs.Spec) {
			s.Linux.Namespaces = append(s.Linux.Namespaces, specs.LinuxNamespace{Type: specs.UserNamespace})
			s.Linux.UIDMappings = []specs.LinuxIDMapping{{ContainerID: 0, HostID: 100000, Size: 65536}}
			for _, pid := range []string{"100", "101"} {
				f.link(pid+"/ns/user", "user:[77]")
			}
		}, "user ids from 0 are the host's from 0"},
		{"cgroup", func(f *fake, _ *specs.Spec) { f.edit("101/cgroup", "memory:/pods/job", "memory:/pods") }, "cgroup /pods of"},
		{"cgroup of another name", func(f *fake, _ *specs.Spec) { f.edit("101/cgroup", "memory:/pods/job", "memory:/pods/job2") }, "cgroup /pods/job2"},

		{"root", func(f *fake, _ *specs.Spec) { f.file("101/root", "/", 1) }, "its root (/) is on no mount"},
		{"root below the container's", func(f *fake, _ *specs.Spec) {
			f.file("101/root", "/srv/jail", rootMount)
			f.write("101/mountinfo", "")
		}, ""},
		{"root of the mount namespace before", func(f *fake, s *specs.Spec) {
			f.link("101/ns/mnt", "mnt:[4712]")
			f.write("101/mountinfo", "")
			s.Process.Capabilities.Bounding = append(s.Process.Capabilities.Bounding, "CAP_SYS_ADMIN")
			s.Process.NoNewPrivileges = false
		}, ""},
		{"program of no mount namespace of the container's", func(f *fake, s *specs.Spec) {
			f.link("101/ns/mnt", "mnt:[4712]")
			f.file("101/exe", "/usr/sbin/criu", 1)
			s.Process.Capabilities.Bounding = append(s.Process.Capabilities.Bounding, "CAP_SYS_ADMIN")
			s.Process.NoNewPrivileges = false
		}, "its exe (/usr/sbin/criu) is on no mount of the container"},
		{"working directory", func(f *fake, _ *specs.Spec) { f.file("101/cwd", "/", 1) }, "its cwd"},
		{"program", func(f *fake, _ *specs.Spec) { f.file("101/exe", "/usr/sbin/criu", 1) }, "its exe (/usr/sbin/criu)"},
		{"open file", func(f *fake, _ *specs.Spec) { f.file("101/fd/3", "/etc/shadow", 1) }, "its file 3 (/etc/shadow) is on no mount"},
		{"no standard input", func(f *fake, _ *specs.Spec) {
			f.file("101/fd/0", "/dev/null", 1)
			f.stat["101/fd/0"] = unix.Statx_t{Mnt_id: 1, Mode: unix.S_IFCHR, Rdev_major: 1, Rdev_minor: 3}
		}, ""},
		{"a copy of what was no standard input", func(f *fake, _ *specs.Spec) {
			f.file("101/fd/3", "/dev/null", 1)
			f.stat["101/fd/3"] = unix.Statx_t{Mnt_id: 1, Mode: unix.S_IFCHR, Rdev_major: 1, Rdev_minor: 3}
		}, ""},
		{"a file of the host's as standard input", func(f *fake, _ *specs.Spec) { f.file("101/fd/0", "/dev/null", 1) }, "its file 0 (/dev/null) is on no mount"},
		{"a disk of the host's as standard input", func(f *fake, _ *specs.Spec) {
			f.file("101/fd/0", "/dev/null", 1)
			f.stat["101/fd/0"] = unix.Statx_t{Mnt_id: 1, Mode: unix.S_IFBLK, Rdev_major: 1, Rdev_minor: 3}
		}, "its file 0 (/dev/null) is on no mount"},
		{"mapped file", func(f *fake, _ *specs.Spec) { f.file("101/map_files/1000-2000", "/etc/shadow", 1) }, "its mapped file (/etc/shadow)"},
		{"namespace held open", func(f *fake, _ *specs.Spec) { f.link("101/fd/4", "mnt:[4]") }, "is the host's mnt namespace"},
		{"raw socket", func(f *fake, _ *specs.Spec) {
			f.write("101/net/packet", "sk       RefCnt Type Proto  Iface R Rmem   User   Inode\n0000 3 3 0003 0 1 0 0 4711\n")
		}, "raw socket"},
		{"device", func(f *fake, _ *specs.Spec) {
			f.file("101/fd/3", "/dev/sda", devMount)
			f.stat["101/fd/3"] = unix.Statx_t{Mnt_id: devMount, Mode: unix.S_IFBLK, Rdev_major: 8}
		}, "device 8:0"},
		{"device of every container", func(f *fake, _ *specs.Spec) {
			f.file("101/fd/3", "/dev/null", devMount)
			f.stat["101/fd/3"] = unix.Statx_t{Mnt_id: devMount, Mode: unix.S_IFCHR, Rdev_major: 1, Rdev_minor: 3}
		}, ""},
		{"device of the spec", func(f *fake, s *specs.Spec) {
			f.file("101/fd/3", "/dev/nvidia0", devMount)
			f.stat["101/fd/3"] = unix.Statx_t{Mnt_id: devMount, Mode: unix.S_IFCHR, Rdev_major: 195}
			s.Linux.Devices = []specs.LinuxDevice{{Path: "/dev/nvidia0", Type: "c", Major: 195}}
		}, ""},
		{"setting", func(f *fake, _ *specs.Spec) {
			f.file("101/fd/3", "/proc/sys/kernel/core_pattern", procMount)
			f.write("101/fdinfo/3", "flags:\t01\n")
		}, "open for writing"},
		{"setting, read", func(f *fake, _ *specs.Spec) { f.file("101/fd/3", "/proc/sys/kernel/core_pattern", procMount) }, ""},
		{"masked", func(f *fake, _ *specs.Spec) { f.file("101/fd/3", "/proc/kcore", procMount) }, "which the spec masks"},
		{"masked below a read-only path", func(f *fake, s *specs.Spec) {
			f.file("101/fd/3", "/proc/sys/hidden/x", settingsMount)
			s.Linux.MaskedPaths = append(s.Linux.MaskedPaths, "/proc/sys/hidden")
		}, "which the spec masks"},
		{"what masks", func(f *fake, _ *specs.Spec) { f.file("101/fd/3", "/proc/kcore", maskMount) }, ""},

		{"mount of the host's root", func(f *fake, _ *specs.Spec) { f.edit("100/mountinfo", "0:62 / /dev", "8:1 / /dev") }, "mount /dev"},
		{"part of a file system", func(f *fake, _ *specs.Spec) { f.edit("100/mountinfo", "0:61 / /proc", "0:61 /1 /proc") }, "not all of it"},
		{"mask of a host whose /dev is a tmpfs", func(f *fake, _ *specs.Spec) {
			f.edit("self/mountinfo", "0:5 / /dev rw - devtmpfs devtmpfs", "0:5 / /dev rw - tmpfs tmpfs")
			f.edit("100/mountinfo", "0:5 /null /proc/kcore rw,nosuid - devtmpfs devtmpfs", "0:5 /null /proc/kcore rw,nosuid - tmpfs tmpfs")
		}, ""},
		{"mask that is another file of a tmpfs", func(f *fake, _ *specs.Spec) {
			f.edit("100/mountinfo", "0:5 /null /proc/kcore rw,nosuid - devtmpfs devtmpfs", "0:62 /null /proc/kcore rw,nosuid - tmpfs tmpfs")
		}, "mount /proc/kcore of the restored container"},
		{"mount that is not in the spec", func(f *fake, _ *specs.Spec) {
			f.edit("100/mountinfo", "56 51", "57 50 0:64 / /mnt rw - tmpfs tmpfs rw\n56 51")
		}, "mount /mnt of the restored container: it is not in the spec"},
		{"mount of the spec at a link", func(f *fake, s *specs.Spec) {
			f.link("rootfs/var/run", "/run")
			f.edit("100/mountinfo", "56 51", "57 50 8:1 /usr /run/x rw - ext4 /dev/sda1 rw\n56 51")
			s.Mounts = append(s.Mounts, specs.Mount{Destination: "/var/run/x", Type: "bind", Source: "/usr"})
		}, ""},
		{"mount of the spec at another place than its link's", func(f *fake, s *specs.Spec) {
			f.link("rootfs/var/run", "/srv")
			f.edit("100/mountinfo", "56 51", "57 50 8:1 /usr /run/x rw - ext4 /dev/sda1 rw\n56 51")
			s.Mounts = append(s.Mounts, specs.Mount{Destination: "/var/run/x", Type: "bind", Source: "/usr"})
		}, "mount /run/x of the restored container: it is not in the spec"},
		{"mount of the spec at a link, writable", func(f *fake, s *specs.Spec) {
			f.link("rootfs/var/run", "/run")
			f.edit("100/mountinfo", "56 51", "57 50 8:1 /usr /run/x rw - ext4 /dev/sda1 rw\n56 51")
			s.Mounts = append(s.Mounts, specs.Mount{Destination: "/var/run/x", Type: "bind", Source: "/usr", Options: []string{"ro"}})
		}, "mount /run/x of the restored container: it is not ro"},
		{"the host's, with the right to mount", func(f *fake, s *specs.Spec) {
			f.edit("100/mountinfo", "56 51", "57 50 8:1 / /mnt rw - ext4 /dev/sda1 rw\n56 51")
			s.Process.Capabilities.Permitted = []string{"CAP_SYS_ADMIN"}
		}, "file system of the host's"},
		{"file system of another mount", func(f *fake, s *specs.Spec) {
			f.edit("100/mountinfo", "56 51", "57 50 0:62 / /run rw - tmpfs tmpfs rw\n56 51")
			s.Mounts = append(s.Mounts, specs.Mount{Destination: "/run", Type: "tmpfs"})
		}, "mount /run of the restored container: it is the file system of another mount"},
		{"file system of CRIU's", func(f *fake, s *specs.Spec) {
			f.edit("100/mountinfo", "56 51", "57 50 0:90 / /run rw - tmpfs tmpfs rw\n56 51")
			s.Mounts = append(s.Mounts, specs.Mount{Destination: "/run", Type: "tmpfs"})
		}, "it is a file system of the host's (0:90"},
		{"writable", func(f *fake, _ *specs.Spec) { f.edit("100/mountinfo", "/data ro", "/data rw") }, "mount /data of the restored container: it is not ro"},
		{"no nosuid", func(f *fake, _ *specs.Spec) { f.edit("100/mountinfo", "/dev rw,nosuid", "/dev rw") }, "it is not nosuid"},
		{"writable settings", func(f *fake, _ *specs.Spec) { f.edit("100/mountinfo", "/proc/sys ro", "/proc/sys rw") }, "mount /proc/sys"},
		{"settings of another place", func(f *fake, _ *specs.Spec) { f.edit("100/mountinfo", "/sys /proc/sys", "/bus /proc/sys") }, "mount /proc/sys"},
		{"mask that is none", func(f *fake, _ *specs.Spec) {
			f.edit("100/mountinfo", "0:5 /null /proc/kcore rw,nosuid - devtmpfs", "0:61 /kcore /proc/kcore rw - proc")
		}, "mount /proc/kcore"},
		{"another source", func(f *fake, s *specs.Spec) { s.Mounts[2].Source = "/usr" }, "/srv/data of the file system 8:1 (type ext4), and in the spec /usr of 8:1"},
		{"another root", func(f *fake, _ *specs.Spec) { f.edit("100/mountinfo", "0:60 / /", "8:1 / /") }, "mount / of"},
		{"writable root", func(_ *fake, s *specs.Spec) { s.Root.Readonly = true }, "mount / of the restored container: it is not ro"},
	} {
		t.Run(test.name, func(t *testing.T) {
			f, spec := newFake(t), restricted()
			test.change(f, spec)
			err := Check(Container{Spec: spec, Rootfs: filepath.Join(f.dir, "rootfs"), PIDs: []int{100, 101}, Cgroups: map[string]string{"memory": "/pods/job", "": "/pods/job"}, CRIU: 200}, f.system())
			switch {
			case test.refusal == "" && err != nil:
				t.Errorf("refused: %v", err)
			case test.refusal != "" && (err == nil || !strings.Contains(err.Error(), test.refusal)):
				t.Errorf("error %v, want one with %q", err, test.refusal)
			}
		})
	}
}

// Processes that were not restored are compared as well, but for what a restore makes anew: their cgroups and the mounts
// of the spec.
func TestBeforeTheDump(t *testing.T) {
	for name, test := range map[string]struct {
		change  func(f *fake)
		refusal string
	}{
		"as runc made it": {func(f *fake) {
			f.edit("100/mountinfo", "0:5 /null /proc/kcore rw,nosuid - devtmpfs", "0:62 /null /proc/kcore rw - tmpfs")
		}, ""},
		"another source":       {func(f *fake) { f.edit("100/mountinfo", "/srv/data /data", "/srv/data//deleted /data") }, ""},
		"a cgroup of its own":  {func(f *fake) { f.edit("101/cgroup", "memory:/pods/job", "memory:/pods/other") }, ""},
		"a user":               {func(f *fake) { f.edit("101/task/102/status", "Uid:	1000	1000", "Uid:	1000	0") }, "process 101 (worker): thread 102: it has the user id 0"},
		"a mount":              {func(f *fake) { f.edit("100/mountinfo", "56 51", "57 50 0:64 / /mnt rw - tmpfs tmpfs rw\n56 51") }, "mount /mnt of the container: it is not in the spec"},
		"of the program's own": {func(f *fake) { f.edit("100/mountinfo", "56 51", "57 50 0:64 / /mnt rw - overlay none rw\n56 51") }, "mount /mnt of the container: "},
		"a chroot":             {func(f *fake) { f.file("100/root", "/srv/jail", rootMount) }, "the container's first process, 100 (worker), is in a chroot (/srv/jail)"},
	} {
		f := newFake(t)
		test.change(f)
		err := Check(Container{Spec: restricted(), Rootfs: filepath.Join(f.dir, "rootfs"), PIDs: []int{100, 101}}, f.system())
		if (err == nil) != (test.refusal == "") || err != nil && !strings.HasPrefix(err.Error(), test.refusal) {
			t.Errorf("%s: error %v, want one that begins with %q", name, err, test.refusal)
		}
	}
}

// A process whose children would be in another PID namespace, which is there or not yet, is refused before a dump. One
// whose first thread has ended, and a program that cannot have done it, are not.
func TestChildren(t *testing.T) {
	for name, test := range map[string]struct {
		link    string
		lives   bool
		refused bool
	}{
		"its own":     {"pid:[1000]", true, false},
		"another one": {"pid:[4712]", true, true},
		"none yet":    {"", true, true},
		"ended":       {"", false, false},
	} {
		f, spec := newFake(t), restricted()
		own, err := os.Readlink(filepath.Join(f.dir, "101/ns/pid"))
		if err != nil {
			t.Fatal(err)
		}
		if test.link == "pid:[1000]" {
			test.link = own
		}
		f.link("100/ns/pid_for_children", own)
		if test.link != "" {
			f.link("101/ns/pid_for_children", test.link)
		}
		if !test.lives {
			if err := os.Remove(filepath.Join(f.dir, "101/ns/uts")); err != nil {
				t.Fatal(err)
			}
		}
		check := func() error {
			return Check(Container{Spec: spec, Rootfs: filepath.Join(f.dir, "rootfs"), PIDs: []int{100, 101}}, f.system())
		}
		if err := check(); err != nil {
			t.Errorf("%s, without CAP_SYS_ADMIN: %v", name, err)
		}
		spec.Process.Capabilities.Bounding = append(spec.Process.Capabilities.Bounding, "CAP_SYS_ADMIN")
		spec.Process.Capabilities.Permitted = append(spec.Process.Capabilities.Permitted, "CAP_SYS_ADMIN")
		if err := check(); (err != nil) != test.refused || err != nil && !strings.Contains(err.Error(), "its children would be in a PID namespace") {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

// CRIU makes a user namespace, and enters none that is there.
func TestUsersOfAPod(t *testing.T) {
	f, spec := newFake(t), restricted()
	f.link("pod", "user:[77]")
	for _, pid := range []string{"100", "101"} {
		f.link(pid+"/ns/user", "user:[77]")
	}
	spec.Linux.Namespaces = append(spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.UserNamespace, Path: filepath.Join(f.dir, "pod")})
	err := Check(Container{Spec: spec, Rootfs: filepath.Join(f.dir, "rootfs"), PIDs: []int{100, 101}}, f.system())
	if err == nil || !strings.Contains(err.Error(), "run the pod without hostUsers: false") {
		t.Errorf("error %v", err)
	}
}

// What the kernel really says of a process is understood.
func TestKernel(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root, to see map_files")
	}
	// cat, which has answered once: a program that the loader still works on opens and closes files meanwhile.
	cmd := exec.Command("cat")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	if _, err := in.Write([]byte{'\n'}); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(out, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	s := Kernel()
	p, err := s.read(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	host, err := s.readHost(0)
	if err != nil {
		t.Fatal(err)
	}
	c := checker{Container: Container{Spec: &specs.Spec{Process: &specs.Process{}, Linux: &specs.Linux{}}}, System: s, host: host, first: p, tables: make(map[string][]mount), points: make(map[uint64]mount)}
	c.allowance = allowanceOf(c.Spec)
	for _, f := range append(p.mapped, p.exe, p.cwd, p.root) {
		if f.mount == 0 {
			t.Errorf("%s has no mount", f.link)
		}
	}
	if err := c.readTable(p.pid); err != nil {
		t.Error(err)
	}
	if err := c.places(p); err != nil {
		t.Error(err)
	}
	mounts := c.tables[p.namespaces["mnt"]]
	if len(p.threads) == 0 || len(mounts) == 0 || len(p.limits) < 16 || len(p.namespaces) < 6 || len(p.mapped) == 0 {
		t.Errorf("%d threads, %d mounts, %d limits, %d namespaces, %d mapped files", len(p.threads), len(mounts), len(p.limits), len(p.namespaces), len(p.mapped))
	}
}

// Mounts of one group are restored where one has the roots of the others below its own, and no masked path is among them.
func TestShared(t *testing.T) {
	c := &checker{allowance: allowance{spec: &specs.Spec{Linux: &specs.Linux{MaskedPaths: []string{"/proc/keys"}}}}}
	for name, test := range map[string]struct{ mounts, says string }{
		"apart":    {"53 50 8:1 /srv/a /a rw shared:1 - ext4 /dev/sda1 rw\n54 50 8:1 /srv/b /b rw shared:1 - ext4 /dev/sda1 rw\n", "mounts /a and /b"},
		"names":    {"53 50 8:1 /srv/a /a rw shared:1 - ext4 /dev/sda1 rw\n54 50 8:1 /srv/ab /b rw shared:1 - ext4 /dev/sda1 rw\n", "mounts /a and /b"},
		"below":    {"53 50 8:1 /srv/a/b /b rw shared:1 - ext4 /dev/sda1 rw\n54 50 8:1 /srv/a /a rw shared:1 - ext4 /dev/sda1 rw\n", ""},
		"twice":    {"53 50 8:1 /srv/a /a rw shared:1 - ext4 /dev/sda1 rw\n54 50 8:1 /srv/a /b rw shared:1 - ext4 /dev/sda1 rw\n", ""},
		"groups":   {"53 50 8:1 /srv/a /a rw shared:1 - ext4 /dev/sda1 rw\n54 50 8:1 /srv/b /b rw shared:2 - ext4 /dev/sda1 rw\n", ""},
		"slaves":   {"53 50 8:1 /srv/a /a rw master:1 - ext4 /dev/sda1 rw\n54 50 8:1 /srv/b /b rw master:1 - ext4 /dev/sda1 rw\n", ""},
		"of all":   {"53 50 0:9 / /dev rw shared:1 - tmpfs tmpfs rw\n54 50 0:9 /null /proc/other rw shared:1 - tmpfs tmpfs rw\n", ""},
		"masked":   {"53 50 0:9 / /dev rw shared:1 - tmpfs tmpfs rw\n54 50 0:9 /null /proc/keys rw shared:1 - tmpfs tmpfs rw\n", "mount /proc/keys of the container, a masked path"},
		"unshared": {"53 50 0:9 / /dev rw - tmpfs tmpfs rw\n54 50 0:9 /null /proc/keys rw - tmpfs tmpfs rw\n", ""},
	} {
		mounts, err := parseMounts(strings.NewReader(test.mounts))
		if err == nil {
			err = c.shared(mounts)
		}
		if (err == nil) != (test.says == "") || err != nil && !strings.Contains(err.Error(), test.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
