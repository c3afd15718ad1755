// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	criucgroup "github.com/checkpoint-restore/go-criu/v8/crit/images/cgroup"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/creds"
	criucore "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/inventory"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mnt"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/pstree"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/rlimit"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/seccomp"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"

	"github.com/gpuckpt/gpuckpt/images"
)

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
func dumpOfTest() *dumped {
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
		m := &mnt.MntEntry{
			Fstype: proto.Uint32(uint32(kind)), MntId: &id, RootDev: new(uint32), ParentMntId: &parent, Flags: &flags,
			Root: proto.String("/"), Mountpoint: &at, Source: proto.String(""), Options: proto.String(""),
		}
		if key != "" {
			m.ExtKey = &key
		}
		return m
	}
	core := &criucore.CoreEntry{
		Mtype: criucore.CoreEntry_X86_64.Enum(), ThreadCore: thread(),
		Tc: &criucore.TaskCoreEntry{
			TaskState: proto.Uint32(1), ExitCode: new(uint32), Personality: new(uint32), Flags: new(uint32), BlkSigset: new(uint64), Comm: proto.String("job"),
			Rlimits: &criucore.TaskRlimitsEntry{Rlimits: limits}, OomScoreAdj: proto.Int32(0),
		},
	}
	return &dumped{
		inventory: &inventory.InventoryEntry{ImgVersion: proto.Uint32(2), RootIds: ids(1, 2, 3)},
		tasks:     []dumpedTask{{pid: 1, ids: ids(11, 12, 13), core: core, threads: []*criucore.ThreadCoreEntry{core.ThreadCore, thread()}}},
		mounts: []*mnt.MntEntry{
			mount(1, 99, "/", mnt.Fstype_OVERLAYFS, 0, ""),
			mount(2, 1, "/proc", mnt.Fstype_PROC, 0, ""),
			mount(3, 2, "/proc/interrupts", mnt.Fstype_TMPFS, 0, "/dev/null"),
			mount(4, 2, "/proc/sys", mnt.Fstype_PROC, 1, ""),
			mount(5, 1, "/data", mnt.Fstype_UNSUPPORTED, 1, "/data"),
			mount(6, 1, "/scratch", mnt.Fstype_UNSUPPORTED, 0, "/scratch"),
		},
		cgroups: &criucgroup.CgroupEntry{
			Sets: []*criucgroup.CgSetEntry{{Id: proto.Uint32(2), Ctls: []*criucgroup.CgMemberEntry{{Name: proto.String("pids"), Path: proto.String("/ns/job/inner")}}}},
			Controllers: []*criucgroup.CgControllerEntry{{
				Cnames: []string{"pids"}, Dirs: []*criucgroup.CgroupDirEntry{{DirName: proto.String("ns/job")}},
			}},
		},
	}
}

func TestADumpThatFitsIsTaken(t *testing.T) {
	notes, err := compareGrants(specOfTest(), dumpOfTest())
	if err != nil || len(notes) > 0 {
		t.Errorf("got %v, %v", notes, err)
	}
	spec := specOfTest()
	spec.Mounts = append(spec.Mounts, specs.Mount{Destination: "/new", Type: "bind"})
	if notes, err := compareGrants(spec, dumpOfTest()); err != nil || len(notes) != 1 || !strings.Contains(notes[0], "/new") {
		t.Errorf("a mount more: %v, %v", notes, err)
	}
}

// What a hostile checkpoint asks for, or a spec does not grant.
func TestADumpThatAsksForMoreIsRefused(t *testing.T) {
	second := func(d *dumped) *creds.CredsEntry { return d.tasks[0].threads[1].Creds }
	mount := func(d *dumped, at string) *mnt.MntEntry {
		for _, m := range d.mounts {
			if m.GetMountpoint() == at {
				return m
			}
		}
		t.Fatalf("no mount %s", at)
		return nil
	}
	for name, c := range map[string]struct {
		spec func(*specs.Spec)
		dump func(*dumped)
		says string
	}{
		"host's pid namespace": {dump: func(d *dumped) { *d.tasks[0].ids.PidNsId = 1 }, says: "host's pid namespace"},
		"host's network":       {dump: func(d *dumped) { *d.tasks[0].ids.NetNsId = 2 }, says: "host's network namespace"},
		"host's mounts":        {dump: func(d *dumped) { d.inventory.RootIds.MntNsId = d.tasks[0].ids.MntNsId }, says: "host's mount namespace"},
		"no namespace at all":  {dump: func(d *dumped) { d.tasks[0].ids.PidNsId = nil }, says: "host's pid namespace"},
		"user namespace": {spec: func(s *specs.Spec) {
			s.Linux.Namespaces = append(s.Linux.Namespaces, specs.LinuxNamespace{Type: specs.UserNamespace})
		}, says: "host's user namespace"},
		"CAP_SYS_ADMIN":         {dump: func(d *dumped) { second(d).CapEff[0] |= 1 << 21 }, says: "effective capabilities have CAP_SYS_ADMIN"},
		"CAP_BPF":               {dump: func(d *dumped) { second(d).CapBnd[1] |= 1 << 7 }, says: "bounding capabilities have CAP_BPF"},
		"an unknown capability": {dump: func(d *dumped) { second(d).CapPrm[1] |= 1 << 30 }, says: "capability 62"},
		"an ambient one":        {dump: func(d *dumped) { second(d).CapAmb = []uint32{1 << 12} }, says: "ambient capabilities have CAP_NET_ADMIN"},
		"words too many":        {dump: func(d *dumped) { second(d).CapInh = []uint32{0, 0, 1} }, says: "more than two"},
		"dropped capability": {spec: func(s *specs.Spec) {
			s.Process.Capabilities.Bounding = []string{"CAP_CHOWN", "CAP_SETUID", "CAP_SETGID"}
		}, says: "CAP_NET_RAW"},
		"root":           {spec: noCaps(1000), dump: bare, says: "user id 0"},
		"root's group":   {spec: noCaps(0, 5), dump: bare, says: "group id 0"},
		"a group more":   {spec: noCaps(0, 0), dump: func(d *dumped) { bare(d); second(d).Groups = []uint32{42} }, says: "group id 42"},
		"may gain":       {dump: func(d *dumped) { second(d).NoNewPrivs = nil }, says: "no_new_privs"},
		"no credentials": {dump: func(d *dumped) { d.tasks[0].threads[1].Creds = nil }, says: "no credentials"},
		"no AppArmor":    {spec: func(s *specs.Spec) { s.Process.ApparmorProfile = "cri-containerd.apparmor.d" }, says: "AppArmor"},
		"no SELinux":     {spec: func(s *specs.Spec) { s.Process.SelinuxLabel = "system_u:system_r:container_t:s0" }, says: "SELinux"},
		"no seccomp":     {spec: func(s *specs.Spec) { s.Linux.Seccomp = &specs.LinuxSeccomp{} }, says: "no seccomp filter"},
		"no seccomp in a thread": {spec: func(s *specs.Spec) { s.Linux.Seccomp = &specs.LinuxSeccomp{} }, dump: func(d *dumped) {
			d.tasks[0].threads[0].SeccompMode = criucore.SeccompMode_filter.Enum()
			second := d.tasks[0].threads[1]
			second.SeccompMode = criucore.SeccompMode_disabled.Enum()
		}, says: "no seccomp filter"},
		"a thread without the first's": {spec: func(s *specs.Spec) { s.Linux.Seccomp = &specs.LinuxSeccomp{} }, dump: func(d *dumped) {
			d.tasks[0].threads[0].SeccompMode, d.tasks[0].threads[0].SeccompFilter = criucore.SeccompMode_filter.Enum(), new(uint32)
			d.seccomp = &seccomp.SeccompEntry{SeccompFilters: []*seccomp.SeccompFilter{{Flags: new(uint32)}}} // not for all threads
		}, says: "no seccomp filter"},
		"real time":          {dump: func(d *dumped) { d.tasks[0].threads[1].SchedPolicy = proto.Uint32(1) }, says: "real-time"},
		"nice":               {dump: func(d *dumped) { d.tasks[0].threads[1].SchedNice = proto.Int32(-5) }, says: "nice"},
		"open files":         {dump: func(d *dumped) { *d.tasks[0].core.Tc.Rlimits.Rlimits[7].Max = 4096 }, says: "RLIMIT_NOFILE is 4096"},
		"a cgroup elsewhere": {dump: func(d *dumped) { *d.cgroups.Sets[0].Ctls[0].Path = "/other" }, says: "not the container's"},
		"a cgroup above":     {dump: func(d *dumped) { *d.cgroups.Sets[0].Ctls[0].Path = "/ns/job/../.." }, says: "not the container's"},
		"a cgroup's name":    {dump: func(d *dumped) { *d.cgroups.Controllers[0].Dirs[0].DirName = "ns/../job" }, says: "leads elsewhere"},
		"an unknown cgroup":  {dump: func(d *dumped) { d.cgroups.Controllers = nil }, says: "not the container's"},
		"two cgroups": {dump: func(d *dumped) {
			c := d.cgroups.Controllers[0]
			c.Dirs = append(c.Dirs, &criucgroup.CgroupDirEntry{DirName: proto.String("")})
		}, says: "not one"},
		"mount missing in the spec": {spec: func(s *specs.Spec) { s.Mounts = s.Mounts[:2] }, says: "mount /scratch of the dump is missing in the spec"},
		"a mount of its own": {dump: func(d *dumped) {
			d.mounts = append(d.mounts, &mnt.MntEntry{Mountpoint: proto.String("/x"), Fstype: proto.Uint32(uint32(mnt.Fstype_DEVTMPFS)), MntId: proto.Uint32(9), ParentMntId: proto.Uint32(1)})
		}, says: "mount /x (type DEVTMPFS) is not in the spec"},
		"another type":     {dump: func(d *dumped) { *mount(d, "/proc").Fstype = uint32(mnt.Fstype_SYSFS) }, says: "mount /proc is of the type SYSFS"},
		"writable":         {dump: func(d *dumped) { *mount(d, "/data").Flags = 0 }, says: "mount /data is not ro"},
		"by another's key": {dump: func(d *dumped) { *mount(d, "/scratch").ExtKey = "/data" }, says: "mount /scratch is what the spec has at /data"},
		"not masked":       {dump: func(d *dumped) { d.mounts = append(d.mounts[:2], d.mounts[3:]...) }, says: "/proc/interrupts is neither masked"},
		"masked by itself": {dump: func(d *dumped) { m := mount(d, "/proc/interrupts"); m.ExtKey = nil; *m.Fstype = 1 }, says: "mount /proc/interrupts neither masks"},
		"writable sysctls": {dump: func(d *dumped) { *mount(d, "/proc/sys").Flags = 0 }, says: "mount /proc/sys neither masks"},
		"covered": {dump: func(d *dumped) {
			m := proto.Clone(mount(d, "/proc")).(*mnt.MntEntry)
			*m.MntId = 77
			d.mounts = append(d.mounts, m)
		}, says: "two mounts at /proc"},
		"masked underneath": {dump: func(d *dumped) { *mount(d, "/proc/interrupts").ParentMntId = 1 }, says: "mount /proc/interrupts is not on that at /proc"},
	} {
		t.Run(name, func(t *testing.T) {
			spec, dump := specOfTest(), dumpOfTest()
			if c.spec != nil {
				c.spec(spec)
			}
			if c.dump != nil {
				c.dump(dump)
			}
			if _, err := compareGrants(spec, dump); err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v, want %q", err, c.says)
			}
		})
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
func bare(d *dumped) {
	for _, t := range d.tasks[0].threads {
		t.Creds.CapPrm, t.Creds.CapEff, t.Creds.CapBnd = nil, nil, nil
	}
}

// image is one of CRIU's images.
func image(t testing.TB, magic uint32, entries ...proto.Message) []byte {
	t.Helper()
	var b []byte
	if magic != magicInventory {
		b = binary.LittleEndian.AppendUint32(b, magicCommon)
	}
	b = binary.LittleEndian.AppendUint32(b, magic)
	for _, e := range entries {
		data, err := proto.Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		b = binary.LittleEndian.AppendUint32(b, uint32(len(data)))
		b = append(b, data...)
	}
	return b
}

// dumpDir writes a dump as CRIU does.
func dumpDir(t testing.TB, d *dumped) string {
	t.Helper()
	dir := t.TempDir()
	var mounts []proto.Message
	for _, m := range d.mounts {
		mounts = append(mounts, m)
	}
	task := d.tasks[0]
	thread := proto.Clone(task.core).(*criucore.CoreEntry)
	thread.ThreadCore = task.threads[1]
	for name, data := range map[string][]byte{
		"inventory.img":     image(t, magicInventory, d.inventory),
		"cgroup.img":        image(t, magicCgroup, d.cgroups),
		"pstree.img":        image(t, magicPstree, &pstree.PstreeEntry{Pid: proto.Uint32(1), Ppid: new(uint32), Pgid: new(uint32), Sid: new(uint32), Threads: []uint32{1, 2}}),
		"core-1.img":        image(t, magicCore, task.core),
		"core-2.img":        image(t, magicCore, thread),
		"ids-1.img":         image(t, magicIDs, task.ids),
		"mountpoints-1.img": image(t, magicMounts, mounts...),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestReadDumped(t *testing.T) {
	dir := dumpDir(t, dumpOfTest())
	d, err := readDumped(dir)
	if err != nil {
		t.Fatal(err)
	}
	if notes, err := compareGrants(specOfTest(), d); err != nil || len(notes) > 0 {
		t.Errorf("got %v, %v", notes, err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		good, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		damaged := map[string][]byte{"empty": {}, "cut": good[:len(good)-1], "another's": image(t, 0x12345678)}
		if e.Name() != "pstree.img" && e.Name() != "mountpoints-1.img" {
			damaged["twice"] = append(append([]byte{}, good...), image(t, 0, &criucore.ThreadSasEntry{SsSp: new(uint64), SsSize: new(uint64), SsFlags: new(uint32)})[8:]...)
		}
		for name, data := range damaged {
			if err := os.WriteFile(path, data, 0o600); err != nil {
				t.Fatal(err)
			}
			if _, err := readDumped(dir); !errors.Is(err, images.ErrDamaged) || !strings.Contains(err.Error(), e.Name()) {
				t.Errorf("%s %s: got %v", e.Name(), name, err)
			}
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		if _, err := readDumped(dir); !errors.Is(err, images.ErrDamaged) {
			t.Errorf("%s missing: got %v", e.Name(), err)
		}
		if err := os.Symlink("/dev/zero", path); err != nil {
			t.Fatal(err)
		}
		if _, err := readDumped(dir); !errors.Is(err, images.ErrDamaged) {
			t.Errorf("%s a link: got %v", e.Name(), err)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, good, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// A small tree that names one large image over and over does not fill the memory.
func TestReadDumpedIsBounded(t *testing.T) {
	process := func(pid uint32, threads ...uint32) proto.Message {
		return &pstree.PstreeEntry{Pid: &pid, Ppid: new(uint32), Pgid: new(uint32), Sid: new(uint32), Threads: threads}
	}
	for name, tree := range map[string][]proto.Message{
		"process": {process(1), process(1)}, "thread": {process(1, 1, 2, 2)}, "thread of another": {process(1, 1, 2), process(2)},
	} {
		dir := dumpDir(t, dumpOfTest())
		if err := os.WriteFile(filepath.Join(dir, "pstree.img"), image(t, magicPstree, tree...), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := readDumped(dir); !errors.Is(err, images.ErrDamaged) || !strings.Contains(err.Error(), "twice") {
			t.Errorf("%s: got %v", name, err)
		}
	}
	dir := &imageDir{path: dumpDir(t, dumpOfTest()), left: 10}
	if _, err := all[criucore.CoreEntry](dir, "core-1.img", magicCore); !errors.Is(err, images.ErrDamaged) {
		t.Errorf("more than may be read: got %v", err)
	}
}

// Whatever CRIU's images say, comparing them ends with an answer.
func FuzzCompareGrants(f *testing.F) {
	d := dumpOfTest()
	var mounts []proto.Message
	for _, m := range d.mounts {
		mounts = append(mounts, m)
	}
	f.Add(image(f, magicInventory, d.inventory), image(f, magicCgroup, d.cgroups), image(f, magicCore, d.tasks[0].core), image(f, magicIDs, d.tasks[0].ids), image(f, magicMounts, mounts...))
	f.Fuzz(func(t *testing.T, inv, cg, core, ids, mounts []byte) {
		i, err := parseImage[inventory.InventoryEntry](inv, magicInventory)
		if err != nil || len(i) != 1 {
			return
		}
		c, err := parseImage[criucgroup.CgroupEntry](cg, magicCgroup)
		if err != nil || len(c) != 1 {
			return
		}
		p, err := parseImage[criucore.CoreEntry](core, magicCore)
		if err != nil || len(p) != 1 {
			return
		}
		k, err := parseImage[criucore.TaskKobjIdsEntry](ids, magicIDs)
		if err != nil || len(k) != 1 {
			return
		}
		m, err := parseImage[mnt.MntEntry](mounts, magicMounts)
		if err != nil {
			return
		}
		_, err = compareGrants(specOfTest(), &dumped{
			inventory: i[0], cgroups: c[0], mounts: m,
			tasks: []dumpedTask{{pid: 1, ids: k[0], core: p[0], threads: []*criucore.ThreadCoreEntry{p[0].GetThreadCore()}}},
		})
		if err != nil {
			return
		}
		// The rules that all others rest upon.
		if p[0].GetTc().GetTaskState() == taskDead {
			return
		}
		have, err := capabilityWords(p[0].GetThreadCore().GetCreds().GetCapEff())
		if err != nil || have&(1<<21) != 0 || k[0].GetPidNsId() == i[0].GetRootIds().GetPidNsId() {
			t.Fatal("a process of the host's got through")
		}
	})
}
