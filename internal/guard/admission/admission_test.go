// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	criucgroup "github.com/checkpoint-restore/go-criu/v8/crit/images/cgroup"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/creds"
	criucore "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/inventory"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mm"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mnt"
	packetsock "github.com/checkpoint-restore/go-criu/v8/crit/images/packet-sock"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/pstree"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/regfile"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/rlimit"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/seccomp"
	skinet "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-inet"
	sknetlink "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-netlink"
	skopts "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-opts"
	skpacket "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-packet"
	skunix "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-unix"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/timerfd"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/vma"
	"github.com/checkpoint-restore/go-criu/v8/magic"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/gpuckpt/gpuckpt/internal/criu"
)

// host is the machine of the tests: its own namespaces are those of that type in
// /proc/self/ns, and it has every file.
var host = Host{
	OwnsNamespace: func(ns specs.LinuxNamespace) bool {
		file := string(ns.Type)
		if ns.Type == specs.NetworkNamespace {
			file = "net"
		}
		return ns.Path == "/proc/self/ns/"+file
	},
	HasFile:    func(string) bool { return true },
	Direct:     func(string) error { return nil },
	PingGroups: func(string) (uint32, uint32, error) { return 1, 0, nil },
}

// specOfTest is a spec as ctr makes it, in short.
func specOfTest() *specs.Spec {
	caps := []string{"CAP_CHOWN", "CAP_SETUID", "CAP_SETGID", "CAP_NET_RAW"}
	return &specs.Spec{
		Process: &specs.Process{
			Capabilities:    &specs.LinuxCapabilities{Bounding: caps, Permitted: caps, Effective: caps},
			NoNewPrivileges: true,
			Rlimits:         []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Hard: 1024, Soft: 1024}},
		},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc"},
			{Destination: "/data", Type: "bind", Source: "/srv/data", Options: []string{"rbind", "ro"}},
			{Destination: "/scratch", Type: "bind", Source: "/srv/scratch", Options: []string{"rbind"}},
		},
		Linux: &specs.Linux{
			Namespaces:    []specs.LinuxNamespace{{Type: specs.PIDNamespace}, {Type: specs.MountNamespace}, {Type: specs.NetworkNamespace}},
			MaskedPaths:   []string{"/proc/interrupts"},
			ReadonlyPaths: []string{"/proc/sys"},
		},
	}
}

// dumpOfTest is a dump that fits it.
func dumpOfTest() *criu.Dump {
	const caps = 1<<0 | 1<<6 | 1<<7 | 1<<13
	ids := func(pid, net, ns uint32) *criucore.TaskKobjIdsEntry {
		return &criucore.TaskKobjIdsEntry{
			VmId: new(uint32), FilesId: new(uint32), FsId: new(uint32), SighandId: new(uint32),
			PidNsId: &pid, NetNsId: &net, MntNsId: &ns, UserNsId: proto.Uint32(7), IpcNsId: proto.Uint32(8), UtsNsId: proto.Uint32(9),
		}
	}
	var limits []*rlimit.RlimitEntry
	for range 16 {
		limits = append(limits, &rlimit.RlimitEntry{Cur: proto.Uint64(1024), Max: proto.Uint64(1024)})
	}
	thread := func() *criucore.ThreadCoreEntry {
		return &criucore.ThreadCoreEntry{FutexRla: new(uint64), FutexRlaLen: new(uint32), Creds: &creds.CredsEntry{
			Uid: new(uint32), Gid: new(uint32), Euid: new(uint32), Egid: new(uint32), Suid: new(uint32), Sgid: new(uint32), Fsuid: new(uint32), Fsgid: new(uint32),
			CapPrm: []uint32{caps, 0}, CapEff: []uint32{caps, 0}, CapBnd: []uint32{caps, 0}, CapInh: []uint32{0, 0}, Secbits: new(uint32), NoNewPrivs: proto.Uint32(1),
		}}
	}
	mount := func(id, parent uint32, at string, kind mnt.Fstype, flags uint32, key string) *mnt.MntEntry {
		dev, root := id, "/"
		if at == "/proc/sys" {
			dev, root = 2, "/sys"
		}
		m := &mnt.MntEntry{
			Fstype: new(uint32(kind)), MntId: &id, RootDev: &dev, ParentMntId: &parent, Flags: &flags,
			Root: &root, Mountpoint: &at, Source: new(""), Options: new(""),
		}
		if key != "" {
			m.ExtKey = &key
		}
		return m
	}
	return &criu.Dump{
		Inventory: &inventory.InventoryEntry{ImgVersion: proto.Uint32(2), RootIds: ids(1, 2, 3)},
		Tasks:     []criu.Task{{PID: 1, IDs: ids(11, 12, 13), Limits: limits, Threads: []*criucore.ThreadCoreEntry{thread(), thread()}}},
		Mounts: []*mnt.MntEntry{
			mount(1, 99, "/", mnt.Fstype_OVERLAYFS, 0, ""),
			mount(2, 1, "/proc", mnt.Fstype_PROC, 0, ""),
			mount(3, 2, "/proc/interrupts", mnt.Fstype_TMPFS, 0, "/dev/null"),
			mount(4, 2, "/proc/sys", mnt.Fstype_PROC, 1, ""),
			mount(5, 1, "/data", mnt.Fstype_UNSUPPORTED, 1, "/data"),
			mount(6, 1, "/scratch", mnt.Fstype_UNSUPPORTED, 0, "/scratch"),
		},
		Cgroups: &criucgroup.CgroupEntry{
			Sets: []*criucgroup.CgSetEntry{{Id: proto.Uint32(2), Ctls: []*criucgroup.CgMemberEntry{{Name: new("pids"), Path: new("/ns/job/inner")}}}},
			Controllers: []*criucgroup.CgControllerEntry{{
				Cnames: []string{"pids"}, Dirs: []*criucgroup.CgroupDirEntry{{DirName: new("ns/job")}},
			}},
		},
	}
}

func TestADumpThatFitsIsTaken(t *testing.T) {
	notes, err := Check(specOfTest(), dumpOfTest(), host)
	if err != nil || len(notes) > 0 {
		t.Errorf("got %v, %v", notes, err)
	}
	dump := dumpOfTest()
	again := proto.Clone(dump.Mounts[4]).(*mnt.MntEntry)
	*again.MntId, *again.ParentMntId = 77, 5
	dump.Mounts = append(dump.Mounts, again)
	if notes, err := Check(specOfTest(), dump, host); err != nil || len(notes) > 0 {
		t.Errorf("a mount of the spec on itself: %v, %v", notes, err)
	}
	spec := specOfTest()
	spec.Mounts = append(spec.Mounts, specs.Mount{Destination: "/new", Type: "bind"})
	if notes, err := Check(spec, dumpOfTest(), host); err != nil || len(notes) != 1 || !strings.Contains(notes[0], "/new") {
		t.Errorf("a mount more: %v, %v", notes, err)
	}
}

func TestFiltered(t *testing.T) {
	dump := dumpOfTest()
	if Filtered(dump) {
		t.Error("no thread has a filter")
	}
	filter := criucore.SeccompMode_filter
	for _, thread := range dump.Tasks[0].Threads {
		thread.SeccompMode = &filter
	}
	if dump.Tasks = append(dump.Tasks, criu.Task{Dead: true}); !Filtered(dump) {
		t.Error("all threads have one")
	}
	dump.Tasks[0].Threads[1].SeccompMode = nil
	if Filtered(dump) {
		t.Error("a thread has none")
	}
}

// What a hostile checkpoint asks for, or a spec does not grant.
func TestADumpThatAsksForMoreIsRefused(t *testing.T) {
	second := func(d *criu.Dump) *creds.CredsEntry { return d.Tasks[0].Threads[1].Creds }
	mount := func(d *criu.Dump, at string) *mnt.MntEntry {
		for _, m := range d.Mounts {
			if m.GetMountpoint() == at {
				return m
			}
		}
		t.Fatalf("no mount %s", at)
		return nil
	}
	for name, c := range map[string]struct {
		spec func(*specs.Spec)
		dump func(*criu.Dump)
		says string
	}{
		"half a connection":    {dump: func(d *criu.Dump) { d.Torn = []criu.TornSocket{{Inode: 20, Peer: 21}} }, says: "one that no process has (inode 21)"},
		"host's pid namespace": {dump: func(d *criu.Dump) { *d.Tasks[0].IDs.PidNsId = 1 }, says: "host's pid namespace"},
		"host's network":       {dump: func(d *criu.Dump) { *d.Tasks[0].IDs.NetNsId = 2 }, says: "host's network namespace"},
		"host's mounts":        {dump: func(d *criu.Dump) { d.Inventory.RootIds.MntNsId = d.Tasks[0].IDs.MntNsId }, says: "host's mount namespace"},
		"no namespace at all":  {dump: func(d *criu.Dump) { d.Tasks[0].IDs.PidNsId = nil }, says: "host's pid namespace"},
		"user namespace": {spec: func(s *specs.Spec) {
			s.Linux.Namespaces = append(s.Linux.Namespaces, specs.LinuxNamespace{Type: specs.UserNamespace})
		}, says: "host's user namespace"},
		"CAP_SYS_ADMIN":         {dump: func(d *criu.Dump) { second(d).CapEff[0] |= 1 << 21 }, says: "effective capabilities have CAP_SYS_ADMIN"},
		"CAP_BPF":               {dump: func(d *criu.Dump) { second(d).CapBnd[1] |= 1 << 7 }, says: "bounding capabilities have CAP_BPF"},
		"an unknown capability": {dump: func(d *criu.Dump) { second(d).CapPrm[1] |= 1 << 30 }, says: "capability 62"},
		"an ambient one":        {dump: func(d *criu.Dump) { second(d).CapAmb = []uint32{1 << 12} }, says: "ambient capabilities have CAP_NET_ADMIN"},
		"words too many":        {dump: func(d *criu.Dump) { second(d).CapInh = []uint32{0, 0, 1} }, says: "more than two"},
		"dropped capability": {spec: func(s *specs.Spec) {
			s.Process.Capabilities.Bounding = []string{"CAP_CHOWN", "CAP_SETUID", "CAP_SETGID"}
		}, says: "CAP_NET_RAW"},
		"root":           {spec: noCaps(1000), dump: bare, says: "user id 0"},
		"root's group":   {spec: noCaps(0, 5), dump: bare, says: "group id 0"},
		"a group more":   {spec: noCaps(0, 0), dump: func(d *criu.Dump) { bare(d); second(d).Groups = []uint32{42} }, says: "group id 42"},
		"may gain":       {dump: func(d *criu.Dump) { second(d).NoNewPrivs = nil }, says: "no_new_privs"},
		"no credentials": {dump: func(d *criu.Dump) { d.Tasks[0].Threads[1].Creds = nil }, says: "no credentials"},
		"no AppArmor":    {spec: func(s *specs.Spec) { s.Process.ApparmorProfile = "cri-containerd.apparmor.d" }, says: "AppArmor"},
		"no SELinux":     {spec: func(s *specs.Spec) { s.Process.SelinuxLabel = "system_u:system_r:container_t:s0" }, says: "SELinux"},
		"no seccomp":     {spec: func(s *specs.Spec) { s.Linux.Seccomp = &specs.LinuxSeccomp{} }, says: "no seccomp filter"},
		"no seccomp in a thread": {spec: func(s *specs.Spec) { s.Linux.Seccomp = &specs.LinuxSeccomp{} }, dump: func(d *criu.Dump) {
			d.Tasks[0].Threads[0].SeccompMode = criucore.SeccompMode_filter.Enum()
			second := d.Tasks[0].Threads[1]
			second.SeccompMode = criucore.SeccompMode_disabled.Enum()
		}, says: "no seccomp filter"},
		"a thread without the first's": {spec: func(s *specs.Spec) { s.Linux.Seccomp = &specs.LinuxSeccomp{} }, dump: func(d *criu.Dump) {
			d.Tasks[0].Threads[0].SeccompMode, d.Tasks[0].Threads[0].SeccompFilter = criucore.SeccompMode_filter.Enum(), new(uint32)
			d.Seccomp = &seccomp.SeccompEntry{SeccompFilters: []*seccomp.SeccompFilter{{Flags: new(uint32)}}} // not for all threads
		}, says: "no seccomp filter"},
		"real time": {dump: func(d *criu.Dump) { d.Tasks[0].Threads[1].SchedPolicy = proto.Uint32(1) }, says: "real-time"},
		"a higher priority": {spec: realTime, dump: func(d *criu.Dump) {
			d.Tasks[0].Threads[1].SchedPolicy, d.Tasks[0].Threads[1].SchedPrio = proto.Uint32(1), proto.Uint32(51)
		}, says: "priority 51"},
		"not for children":   {dump: func(d *criu.Dump) { d.Tasks[0].Threads[1].SchedPolicy = proto.Uint32(1 | unix.SCHED_RESET_ON_FORK) }, says: "real-time"},
		"a deadline":         {spec: realTime, dump: func(d *criu.Dump) { d.Tasks[0].Threads[1].SchedPolicy = proto.Uint32(6) }, says: "does not restore"},
		"nice":               {dump: func(d *criu.Dump) { d.Tasks[0].Threads[1].SchedNice = proto.Int32(-5) }, says: "nice"},
		"nicer":              {spec: realTime, dump: func(d *criu.Dump) { d.Tasks[0].Threads[1].SchedNice = proto.Int32(-11) }, says: "nice"},
		"open files":         {dump: func(d *criu.Dump) { *d.Tasks[0].Limits[7].Max = 4096 }, says: "RLIMIT_NOFILE is 1024 to 4096"},
		"a cgroup elsewhere": {dump: func(d *criu.Dump) { *d.Cgroups.Sets[0].Ctls[0].Path = "/other" }, says: "not the container's"},
		"a cgroup above":     {dump: func(d *criu.Dump) { *d.Cgroups.Sets[0].Ctls[0].Path = "/ns/job/../.." }, says: "not the container's"},
		"a cgroup's name":    {dump: func(d *criu.Dump) { *d.Cgroups.Controllers[0].Dirs[0].DirName = "ns/../job" }, says: "leads elsewhere"},
		"an unknown cgroup":  {dump: func(d *criu.Dump) { d.Cgroups.Controllers = nil }, says: "not the container's"},
		"two cgroups": {dump: func(d *criu.Dump) {
			c := d.Cgroups.Controllers[0]
			c.Dirs = append(c.Dirs, &criucgroup.CgroupDirEntry{DirName: new("")})
		}, says: "not one"},
		"mount missing in the spec": {spec: func(s *specs.Spec) { s.Mounts = s.Mounts[:2] }, says: "mount /scratch of the dump is missing in the spec"},
		"a mount of its own": {dump: func(d *criu.Dump) {
			d.Mounts = append(d.Mounts, &mnt.MntEntry{Mountpoint: new("/x"), Fstype: proto.Uint32(uint32(mnt.Fstype_DEVTMPFS)), MntId: proto.Uint32(9), ParentMntId: proto.Uint32(1)})
		}, says: "mount /x (type DEVTMPFS) is not in the spec"},
		"another type": {dump: func(d *criu.Dump) { *mount(d, "/proc").Fstype = uint32(mnt.Fstype_SYSFS) }, says: "mount /proc is of the type SYSFS"},
		"writable":     {dump: func(d *criu.Dump) { *mount(d, "/data").Flags = 0 }, says: "mount /data is not ro"},
		"recursively": {
			spec: func(s *specs.Spec) {
				for i, m := range s.Mounts {
					if m.Destination == "/data" {
						s.Mounts[i].Options = []string{"rbind", "rro"} // recursiveReadOnly of Kubernetes
					}
				}
			},
			dump: func(d *criu.Dump) { *mount(d, "/data").Flags = 0 }, says: "mount /data is not ro",
		},
		"by another's key": {dump: func(d *criu.Dump) { *mount(d, "/scratch").ExtKey = "/data" }, says: "mount /scratch is what the spec has at /data"},
		"not read-only":    {dump: func(d *criu.Dump) { d.Mounts = append(d.Mounts[:3], d.Mounts[4:]...) }, says: "/proc/sys is not read-only"},
		"masked by itself": {dump: func(d *criu.Dump) { m := mount(d, "/proc/interrupts"); m.ExtKey = nil; *m.Fstype = 1 }, says: "mount /proc/interrupts neither masks"},
		"writable sysctls": {dump: func(d *criu.Dump) { *mount(d, "/proc/sys").Flags = 0 }, says: "mount /proc/sys neither masks"},
		"covered": {dump: func(d *criu.Dump) {
			m := proto.Clone(mount(d, "/proc")).(*mnt.MntEntry)
			*m.MntId = 77
			d.Mounts = append(d.Mounts, m)
		}, says: "two mounts at /proc"},
		"masked underneath": {dump: func(d *criu.Dump) { *mount(d, "/proc/interrupts").ParentMntId = 1 }, says: "mount /proc/interrupts is not on that at /proc"},
	} {
		t.Run(name, func(t *testing.T) {
			spec, dump := specOfTest(), dumpOfTest()
			if c.spec != nil {
				c.spec(spec)
			}
			if c.dump != nil {
				c.dump(dump)
			}
			if _, err := Check(spec, dump, host); err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v, want %q", err, c.says)
			}
		})
	}
}

// realTime grants a priority of 50 and a nice value of -10.
func realTime(s *specs.Spec) {
	s.Process.Rlimits = append(s.Process.Rlimits, specs.POSIXRlimit{Type: "RLIMIT_RTPRIO", Hard: 50}, specs.POSIXRlimit{Type: "RLIMIT_NICE", Hard: 30})
}

// What the kernel lets a process do by the limits of its spec is granted.
func TestLimitsThatGrant(t *testing.T) {
	spec, dump := specOfTest(), dumpOfTest()
	realTime(spec)
	for i, limit := range []uint64{13: 30, 14: 50} {
		if limit > 0 {
			dump.Tasks[0].Limits[i] = &rlimit.RlimitEntry{Cur: &limit, Max: &limit}
		}
	}
	first, second := dump.Tasks[0].Threads[0], dump.Tasks[0].Threads[1]
	first.SchedPolicy, first.SchedPrio, second.SchedNice = proto.Uint32(unix.SCHED_RR), proto.Uint32(50), proto.Int32(-10)
	if _, err := Check(spec, dump, host); err != nil {
		t.Error(err)
	}
}

// A path that the spec masks may have come after the dump, or during the life of the container: a restore
// masks it. But then no file may come out of a socket's queue, where no inspection sees it.
func TestMaskedPathThatIsNew(t *testing.T) {
	masked, bare := dumpOfTest(), dumpOfTest()
	bare.Mounts = append(bare.Mounts[:2], bare.Mounts[3:]...)
	if _, err := Check(specOfTest(), bare, host); err != nil {
		t.Error(err)
	}
	for _, c := range []struct {
		dump    *criu.Dump
		right   uint32
		refused bool
	}{{masked, 7, false}, {bare, 7, true}, {bare, 8, false}} {
		e := EntriesOf(specOfTest(), c.dump, host)
		if err := e.regular(&regfile.RegFileEntry{Id: new(uint32(7)), Name: new("/dev/core"), MntId: proto.Int32(1)}); err != nil {
			t.Fatal(err)
		}
		if _, err := e.check(&skpacket.SkPacketEntry{Scm: []*skpacket.ScmEntry{{Rights: []uint32{c.right}}}}); (err != nil) != c.refused {
			t.Errorf("right %d with %d mounts: error %v", c.right, len(c.dump.Mounts), err)
		}
	}
}

// A timer or a connection that a process has open may be on its way to another one as well, and one that nobody
// has open not, but for a connection to elsewhere.
func TestOnItsWay(t *testing.T) {
	tcp := func(state, from, to uint32) *fdinfo.FileEntry {
		return &fdinfo.FileEntry{Id: new(6 + from), Type: fdinfo.FdTypes_INETSK.Enum(), Isk: &skinet.InetSkEntry{
			Family: new(uint32(unix.AF_INET)), Proto: new(uint32(unix.IPPROTO_TCP)), State: &state, SrcAddr: []uint32{from}, DstAddr: []uint32{to},
		}}
	}
	raw := tcp(1, 1, 2) // of TCP, and no connection
	raw.Isk.Type, raw.Isk.Opts = new(uint32(unix.SOCK_RAW)), &skopts.SkOptsEntry{}
	timer := &fdinfo.FileEntry{Id: new(uint32(7)), Type: fdinfo.FdTypes_TIMERFD.Enum(), Tfd: &timerfd.TimerfdEntry{}}
	for _, test := range []struct {
		file          *fdinfo.FileEntry
		opened, taken bool
	}{{timer, true, true}, {timer, false, false}, {tcp(1, 1, 2), true, true}, {tcp(1, 1, 2), false, false}, {tcp(1, 1, 3), false, true}, {tcp(10, 1, 2), false, true}, {raw, false, true}} {
		e := EntriesOf(specOfTest(), dumpOfTest(), host)
		if test.opened {
			if _, err := e.check(&fdinfo.FdinfoEntry{Id: new(uint32(7))}); err != nil {
				t.Fatal(err)
			}
		}
		for _, file := range []*fdinfo.FileEntry{test.file, tcp(1, 2, 1)} {
			if _, err := e.check(file); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := e.check(&skpacket.SkPacketEntry{Scm: []*skpacket.ScmEntry{{Rights: []uint32{7}}}}); (err == nil) != test.taken {
			t.Errorf("%v: error %v", test, err)
		}
	}
}

// The kernel rounds the size of a tmpfs up to pages, and takes 0 for no bound.
func TestSizeOfTmpfs(t *testing.T) {
	for _, c := range []struct {
		spec, dump string
		refused    bool
	}{
		{"100000", "100k", false}, {"100000", "104k", true}, {"1000000000", "976564k", false}, {"64m", "65536k", false}, {"64m", "65540k", true},
		{"50%", "8182536k", false}, {"1t", "1073741824k", false}, {"1T", "1073741828k", true}, {"0", "99999999k", false},
		{"64m", "0k", true}, {"64m", "50%", true}, {"64m", "9999999999t", true}, {"64m", "64m,nr_blocks=99999", true},
	} {
		m := &mnt.MntEntry{Fstype: new(uint32(mnt.Fstype_TMPFS)), Options: new("size=" + c.dump)}
		if err := options(m, &specs.Mount{Options: []string{"nosuid", "size=" + c.spec}}); (err != nil) != c.refused {
			t.Errorf("%s in the spec, %s in the dump: error %v", c.spec, c.dump, err)
		}
	}
}

// noCaps is a spec of a user without capabilities.
func noCaps(uid uint32, gid ...uint32) func(*specs.Spec) {
	return func(s *specs.Spec) {
		s.Process.Capabilities = &specs.LinuxCapabilities{}
		s.Process.User.UID = uid
		if len(gid) > 0 {
			s.Process.User.GID = gid[0]
		}
	}
}

// bare takes all capabilities away.
func bare(d *criu.Dump) {
	for _, t := range d.Tasks[0].Threads {
		t.Creds.CapPrm, t.Creds.CapEff, t.Creds.CapBnd = nil, nil, nil
	}
}

// imageOf is one of CRIU's images.
func imageOf(t testing.TB, kind string, entries ...proto.Message) []byte {
	t.Helper()
	magics := magic.LoadMagic().ByName
	var b []byte
	if kind != "INVENTORY" {
		b = binary.LittleEndian.AppendUint32(b, uint32(magics["IMG_COMMON"]))
	}
	b = binary.LittleEndian.AppendUint32(b, uint32(magics[kind]))
	for _, e := range entries {
		data, err := proto.Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		b = append(binary.LittleEndian.AppendUint32(b, uint32(len(data))), data...)
	}
	return b
}

// Whatever CRIU's images say, comparing them ends with an answer.
func FuzzCheck(f *testing.F) {
	d := dumpOfTest()
	var mounts []proto.Message
	for _, m := range d.Mounts {
		mounts = append(mounts, m)
	}
	task := d.Tasks[0]
	f.Add(imageOf(f, "INVENTORY", d.Inventory), imageOf(f, "CGROUP", d.Cgroups), imageOf(f, "CORE", &criucore.CoreEntry{
		Mtype: criucore.CoreEntry_X86_64.Enum(), ThreadCore: task.Threads[0],
		Tc: &criucore.TaskCoreEntry{
			TaskState: proto.Uint32(1), ExitCode: new(uint32), Personality: new(uint32), Flags: new(uint32), BlkSigset: new(uint64), Comm: new("job"),
			Rlimits: &criucore.TaskRlimitsEntry{Rlimits: task.Limits}, OomScoreAdj: proto.Int32(0),
		},
	}), imageOf(f, "IDS", task.IDs), imageOf(f, "MNTS", mounts...))
	tree := imageOf(f, "PSTREE", &pstree.PstreeEntry{Pid: proto.Uint32(1), Ppid: new(uint32), Pgid: new(uint32), Sid: new(uint32), Threads: []uint32{1}})
	f.Fuzz(func(t *testing.T, inv, cg, core, ids, mounts []byte) {
		dir := t.TempDir()
		for name, data := range map[string][]byte{
			"inventory.img": inv, "cgroup.img": cg, "core-1.img": core, "ids-1.img": ids, "mountpoints-1.img": mounts, "pstree.img": tree,
		} {
			if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		d, err := criu.Open(dir).Dump()
		if err != nil {
			return
		}
		if _, err := Check(specOfTest(), d, host); err != nil || d.Tasks[0].Dead {
			return
		}
		// The rules that all others rest upon.
		have, err := capabilityWords(d.Tasks[0].Threads[0].GetCreds().GetCapEff())
		if err != nil || have&(1<<21) != 0 || d.Tasks[0].IDs.GetPidNsId() == d.Inventory.GetRootIds().GetPidNsId() {
			t.Fatal("a process of the host's got through")
		}
	})
}

// Guards lie in mappings, behind all of them.
func TestMaps(t *testing.T) {
	const page, regular, guard = 4096, 1, 1 << 16
	type vmas [][3]uint64 // first page, end, status
	two := vmas{{10, 20, regular}, {20, 30, regular}, {40, 50, regular}}
	for name, test := range map[string]struct {
		vmas    vmas
		refusal string
	}{
		"none":                    {two, ""},
		"guards":                  {append(two[:3:3], [][3]uint64{{10, 11, guard}, {49, 50, guard}, {12, 13, guard}}...), ""},
		"over neighbours":         {append(two[:3:3], [3]uint64{19, 21, guard}), ""},
		"all of a mapping":        {append(two[:3:3], [3]uint64{40, 50, guard}), ""},
		"over a hole":             {append(two[:3:3], [3]uint64{29, 41, guard}), "in no mapping"},
		"behind its mapping":      {append(two[:3:3], [3]uint64{49, 51, guard}), "in no mapping"},
		"of no page":              {append(two[:3:3], [3]uint64{12, 12, guard}), "no range of pages"},
		"before its mapping":      {vmas{{10, 11, guard}, {10, 20, regular}}, "in no mapping"},
		"a mapping behind guards": {append(two[:3:3], [][3]uint64{{10, 11, guard}, {60, 61, regular}}...), "overlaps"},
		"a wide one":              {vmas{{16, 16 + mostPrivate/page, regular}}, ""},
		"a too wide one":          {vmas{{16, 17 + mostPrivate/page, regular}}, "a sanitizer"},
		"a mapping that is one":   {append(two[:3:3], [3]uint64{60, 61, guard | regular}), "unknown kind"},
	} {
		m := new(mm.MmEntry)
		for _, v := range test.vmas {
			m.Vmas = append(m.Vmas, &vma.VmaEntry{Start: new(v[0] * page), End: new(v[1] * page), Status: new(uint32(v[2])), Flags: new(uint32(unix.MAP_PRIVATE)), Fdflags: new(uint32(unix.O_TMPFILE &^ unix.O_DIRECTORY))})
		}
		if err := maps(m, nil); (err == nil) != (test.refusal == "") || err != nil && !strings.Contains(err.Error(), test.refusal) {
			t.Errorf("%s: error %v, want one with %q", name, err, test.refusal)
		}
	}
}

// CRIU attaches a segment of System V memory whole.
func TestSegments(t *testing.T) {
	for name, test := range map[string]struct {
		vmas  [][3]uint64 // first page, end, page of the segment
		taken bool
	}{
		"whole": {[][3]uint64{{10, 14, 0}}, true}, "in two": {[][3]uint64{{10, 12, 0}, {12, 14, 2}}, true}, "twice": {[][3]uint64{{10, 14, 0}, {14, 18, 0}}, true},
		"no head": {[][3]uint64{{11, 14, 1}}, false}, "a hole": {[][3]uint64{{10, 12, 0}, {13, 14, 3}}, false}, "no tail": {[][3]uint64{{10, 13, 0}}, false},
	} {
		m := new(mm.MmEntry)
		for _, v := range test.vmas {
			m.Vmas = append(m.Vmas, &vma.VmaEntry{Start: new(v[0] * 4096), End: new(v[1] * 4096), Pgoff: new(v[2] * 4096), Shmid: new(uint64(7)), Status: new(uint32(1 | mapSysV)), Flags: new(uint32(unix.MAP_SHARED))})
		}
		if err := maps(m, map[uint64]uint64{7: 4*4096 - 100}); (err == nil) != test.taken {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

// A mark is what CAP_NET_RAW may set (Linux 5.17), or CAP_NET_ADMIN.
func TestMark(t *testing.T) {
	for capability, refused := range map[string]bool{"CAP_NET_RAW": false, "CAP_NET_ADMIN": false, "CAP_NET_BIND_SERVICE": true} {
		spec := &specs.Spec{Process: &specs.Process{Capabilities: &specs.LinuxCapabilities{Bounding: []string{capability}}}}
		e := &Entries{allowance: allowanceOf(spec, Host{})}
		if err := e.socketOptions(&skopts.SkOptsEntry{SoMark: new(uint32(7))}); (err != nil) != refused {
			t.Errorf("%s: error %v", capability, err)
		}
		if err := e.socketOptions(&skopts.SkOptsEntry{SoBoundDev: new("eth0")}); err != nil { // which anybody may do
			t.Errorf("%s: a device: %v", capability, err)
		}
	}
}

// A raw, ping or packet socket comes back where a program of the container can make one: with CAP_NET_RAW of the spec, and
// not of a bounding set that no_new_privs keeps from everybody. So does no other than CRIU restores.
func TestRawSockets(t *testing.T) {
	inet := func(kind, proto, to uint32) *fdinfo.FileEntry {
		return &fdinfo.FileEntry{Type: fdinfo.FdTypes_INETSK.Enum(), Isk: &skinet.InetSkEntry{
			Family: new(uint32(unix.AF_INET)), Type: &kind, Proto: &proto, SrcAddr: []uint32{0}, DstAddr: []uint32{0}, SrcPort: &proto, DstPort: &to, Opts: &skopts.SkOptsEntry{},
		}}
	}
	packet := func(priority uint32) *fdinfo.FileEntry {
		return &fdinfo.FileEntry{Type: fdinfo.FdTypes_PACKETSK.Enum(), Psk: &packetsock.PacketSockEntry{Opts: &skopts.SkOptsEntry{SoPriority: &priority}}}
	}
	const missing = "does not grant CAP_NET_RAW"
	for name, test := range map[string]struct {
		file          *fdinfo.FileEntry
		with, without string // what the refusal says, "" for none
	}{
		"raw":               {inet(unix.SOCK_RAW, unix.IPPROTO_ICMP, 0), "", missing},
		"raw, of MPTCP":     {inet(unix.SOCK_RAW, unix.IPPROTO_MPTCP, 0), "", missing},
		"raw, of UDP":       {inet(unix.SOCK_RAW, unix.IPPROTO_UDP, 7), "", missing},
		"a raw connection":  {inet(unix.SOCK_RAW, unix.IPPROTO_TCP, 7), "CRIU takes for a connection", missing},
		"ping":              {inet(unix.SOCK_DGRAM, unix.IPPROTO_ICMP, 0), "", missing},
		"ping of IPv6":      {inet(unix.SOCK_DGRAM, unix.IPPROTO_ICMPV6, 0), "", missing},
		"SCTP":              {inet(unix.SOCK_STREAM, unix.IPPROTO_SCTP, 0), "protocol 132", "protocol 132"},
		"packet":            {packet(6), "", missing},
		"a packet's rights": {packet(7), "no CAP_NET_ADMIN", missing},
	} {
		raw := []string{"CAP_NET_RAW"}
		for i, process := range []struct {
			specs.Process
			says string
		}{
			{specs.Process{Capabilities: &specs.LinuxCapabilities{Bounding: raw}}, test.with},
			{specs.Process{Capabilities: &specs.LinuxCapabilities{Bounding: raw, Permitted: raw}, NoNewPrivileges: true}, test.with},
			{specs.Process{}, test.without},
			{specs.Process{Capabilities: &specs.LinuxCapabilities{Bounding: []string{"CAP_NET_BIND_SERVICE", "CAP_SYS_ADMIN"}}}, test.without},
			{specs.Process{Capabilities: &specs.LinuxCapabilities{Bounding: raw}, NoNewPrivileges: true}, test.without},
		} {
			spec := specOfTest()
			spec.Process = &process.Process
			_, err := EntriesOf(spec, dumpOfTest(), host).check(test.file)
			if (err == nil) != (process.says == "") || err != nil && !strings.Contains(err.Error(), process.says) {
				t.Errorf("%s, process %d: error %v, want one with %q", name, i, err, process.says)
			}
		}
	}
}

// A port is free from the one on that the container's network namespace says: a pod's, which is not the
// container's to set, as well.
func TestPorts(t *testing.T) {
	asked := Host{FirstPort: func(namespace string) (uint32, error) {
		return map[string]uint32{"": 90, "/pod": 0}[namespace], nil
	}}
	network := func(path string) []specs.LinuxNamespace {
		return []specs.LinuxNamespace{{Type: specs.PIDNamespace}, {Type: specs.NetworkNamespace, Path: path}}
	}
	for name, test := range map[string]struct {
		namespaces []specs.LinuxNamespace
		sysctl     string
		first      uint32
	}{
		"of its own":          {network(""), "", 1024},
		"of its own, and set": {network(""), "81", 81},
		"of a pod":            {network("/pod"), "", 1},
		"the host's":          {nil, "", 90},
	} {
		e := &Entries{allowance: allowanceOf(&specs.Spec{Process: &specs.Process{}, Linux: &specs.Linux{Namespaces: test.namespaces, Sysctl: map[string]string{}}}, asked)}
		if test.sysctl != "" {
			e.spec.Linux.Sysctl["net.ipv4.ip_unprivileged_port_start"] = test.sysctl
		}
		for port, taken := range map[uint32]bool{0: true, test.first: true, 1024: true, 65535: true, 65536: false, test.first - 1: test.first == 1} {
			s := &skinet.InetSkEntry{Family: new(uint32(unix.AF_INET)), SrcAddr: []uint32{0}, DstAddr: []uint32{0}, SrcPort: new(port), Opts: &skopts.SkOptsEntry{}}
			if err := e.inet(s); (err == nil) != taken {
				t.Errorf("%s, port %d: %v", name, port, err)
			}
		}
	}
}

// A socket of ping comes back without CAP_NET_RAW where the container's group may make one, and root's.
func TestPing(t *testing.T) {
	asked := Host{PingGroups: func(namespace string) (uint32, uint32, error) {
		if namespace == "/pod" {
			return 0, 1000, nil
		}
		return 1, 0, nil
	}}
	for name, test := range map[string]struct {
		namespace *specs.LinuxNamespace
		sysctl    string
		group     uint32
		taken     bool
	}{
		"of a pod":            {&specs.LinuxNamespace{Type: specs.NetworkNamespace, Path: "/pod"}, "", 1000, true},
		"of another group":    {&specs.LinuxNamespace{Type: specs.NetworkNamespace, Path: "/pod"}, "", 1001, false},
		"of its own":          {&specs.LinuxNamespace{Type: specs.NetworkNamespace}, "", 0, false},
		"of its own, and set": {&specs.LinuxNamespace{Type: specs.NetworkNamespace}, "0 2147483647", 1001, true},
		"not for root":        {&specs.LinuxNamespace{Type: specs.NetworkNamespace}, "1 2147483647", 1001, false},
		"the host's":          {nil, "", 0, false},
	} {
		spec := &specs.Spec{Process: &specs.Process{User: specs.User{GID: test.group}}, Linux: &specs.Linux{Sysctl: map[string]string{}}}
		if test.namespace != nil {
			spec.Linux.Namespaces = []specs.LinuxNamespace{*test.namespace}
		}
		if test.sysctl != "" {
			spec.Linux.Sysctl["net.ipv4.ping_group_range"] = test.sysctl
		}
		for kind, taken := range map[uint32]bool{unix.SOCK_DGRAM: test.taken, unix.SOCK_RAW: false} {
			e := &Entries{allowance: allowanceOf(spec, asked)}
			s := &skinet.InetSkEntry{Family: new(uint32(unix.AF_INET)), Type: &kind, Proto: new(uint32(unix.IPPROTO_ICMP)), SrcAddr: []uint32{0}, DstAddr: []uint32{0}, Opts: &skopts.SkOptsEntry{}}
			if err := e.inet(s); (err == nil) != taken {
				t.Errorf("%s, type %d: %v", name, kind, err)
			}
		}
	}
}

// A netlink socket comes back as anybody could have made it; a group or a destination that needs a
// capability does not without that.
func TestNetlink(t *testing.T) {
	const net, all = "CAP_NET_ADMIN", "CAP_NET_ADMIN CAP_SYS_ADMIN"
	for name, test := range map[string]struct {
		protocol     uint32
		groups       []uint32
		state, group uint32
		granted      string // the least capabilities with which it is taken; "-" for none
	}{
		"alone":                       {unix.NETLINK_ROUTE, nil, 7, 0, ""},
		"links and addresses":         {unix.NETLINK_ROUTE, []uint32{0x111}, 7, 0, ""},
		"next hops":                   {unix.NETLINK_ROUTE, []uint32{1 << 31}, 7, 0, ""},
		"a rule of multicast routes":  {unix.NETLINK_ROUTE, []uint32{1 << 29}, 7, 0, net},
		"one of IPv6":                 {unix.NETLINK_ROUTE, []uint32{1<<30 | 1}, 7, 0, net},
		"more groups than CRIU knows": {unix.NETLINK_ROUTE, []uint32{1, 1}, 7, 0, "-"},
		"devices":                     {unix.NETLINK_KOBJECT_UEVENT, []uint32{1}, 7, 0, ""},
		"packets":                     {unix.NETLINK_NETFILTER, nil, 7, 0, ""},
		"connections of others":       {unix.NETLINK_NETFILTER, []uint32{1}, 7, 0, net},
		"the audit log":               {unix.NETLINK_AUDIT, []uint32{1}, 7, 0, net}, // the kernel asks CRIU for CAP_AUDIT_READ, which it has if the spec has it
		"a generic group":             {unix.NETLINK_GENERIC, []uint32{1 << 15}, 7, 0, all},
		"a destination":               {unix.NETLINK_ROUTE, nil, 1, 1, net},
		"the kernel as one":           {unix.NETLINK_ROUTE, nil, 1, 0, "-"},
		"a destination too high":      {unix.NETLINK_ROUTE, nil, 1, 33, "-"},
	} {
		taken := false
		for _, capabilities := range []string{"", net, all} {
			taken = taken || capabilities == test.granted
			spec := &specs.Spec{Process: &specs.Process{Capabilities: &specs.LinuxCapabilities{Bounding: strings.Fields(capabilities)}}}
			e := &Entries{allowance: allowanceOf(spec, Host{})}
			err := e.netlink(&sknetlink.NetlinkSkEntry{Protocol: &test.protocol, Groups: test.groups, State: &test.state, DstGroup: &test.group})
			if (err == nil) != taken {
				t.Errorf("%s, with %q: error %v", name, capabilities, err)
			}
		}
	}
	e := &Entries{allowance: allowanceOf(specOfTest(), Host{})}
	if err := e.netlink(&sknetlink.NetlinkSkEntry{Opts: &skopts.SkOptsEntry{SoPriority: new(uint32(7))}}); err == nil {
		t.Error("a priority that needs CAP_NET_ADMIN is taken")
	}
}

// A directory of links of a process of the container may be open, and nothing that one of them leads to. So
// may its memory, also for writing, as Julia has its own.
func TestKernelFile(t *testing.T) {
	e := EntriesOf(specOfTest(), dumpOfTest(), host)
	writable := []string{"/1/mem", "/1/task/1/mem", "/1/oom_score_adj", "/1/task/1/comm", "/1/attr/current", "/1/autogroup", "/1/sched", "/1/task/1/sched"}
	for name, taken := range map[string]bool{
		"/meminfo": true, "/1/status": true, "/1/fd": true, "/1/ns": true, "/1/map_files": true, "/1/task/1/fd": true, "/1/fdinfo": true,
		"/2/fd": false, "/self/fd": false, "/thread-self/fd": false, "/01/fd": false, "/1/fd/3": false, "/1/fd/3/etc": false, "/1/task/1/fd/3": false,
		"/1/task/x/fd": false, "/1/cwd": false, "/1/root": false, "/1/root/proc/1/fd": false, "/1/exe": false, "/1/mem": true, "/1/task/1/mem": true, "/2/mem": false, "/mem": false, "/1/ns/net": false,
		"/1/oom_score_adj": true, "/1/task/1/comm": true, "/1/task/5/comm": false, "/2/oom_score_adj": true, "/oom_score_adj": true, "/1/setgroups": true, "/1/attr/current": true, "/1/attr/../setgroups": true, "/1/autogroup": true, "/1/sched": true, "/1/task/1/sched": true, "/sched": true,
		"/1/map_files/1000-2000": false, "/x/1/fd": false, "/1/fd/": false, "/fd": false, "/ns": false,
	} {
		if err := e.kernelFile(name, unix.O_RDONLY, false); (err == nil) != taken {
			t.Errorf("%s: error %v", name, err)
		}
		if err := e.kernelFile(name, unix.O_RDWR, false); (err == nil) != slices.Contains(writable, name) {
			t.Errorf("%s, open for writing: error %v", name, err)
		}
	}
	for name, flags := range map[string]uint32{"/1/fd": unix.O_RDONLY, "/1/mem": unix.O_RDONLY, "/1/oom_score_adj": unix.O_WRONLY} {
		if err := e.kernelFile(name, flags, true); err == nil {
			t.Errorf("%s of a process of the host's is taken", name)
		}
	}
}

// A Unix socket has the name that its program gave it, unless that leads elsewhere than it says.
func TestUnixName(t *testing.T) {
	dir := new("/run")
	for name, test := range map[string]struct {
		dir   *string
		taken bool
	}{
		"":              {nil, true},
		"\x00abstract":  {nil, true},
		"/run/a/s\x00":  {nil, true},
		"/run//a/s\x00": {nil, true}, // Kamailio's
		"//run/./s\x00": {nil, true},
		"./s\x00":       {dir, true},
		"s\x00":         {nil, false},
		"/s\x00":        {dir, false},
		"/run/../s\x00": {nil, false},
		"../s\x00":      {dir, false},
		"/run/s":        {nil, false},
		"/r\x00/s\x00":  {nil, false},
	} {
		e := &Entries{allowance: allowanceOf(specOfTest(), Host{})}
		if err := e.unix(&skunix.UnixSkEntry{Name: []byte(name), NameDir: test.dir}); (err == nil) != test.taken {
			t.Errorf("%q: error %v", name, err)
		}
	}
	for n, taken := range map[int]bool{106: true, 107: false} { // and the NUL
		e := &Entries{allowance: allowanceOf(specOfTest(), Host{})}
		if err := e.unix(&skunix.UnixSkEntry{Name: []byte("/" + strings.Repeat("s", n) + "\x00")}); (err == nil) != taken {
			t.Errorf("a name of %d bytes: error %v", 1+n, err)
		}
	}
}
