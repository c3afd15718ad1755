// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"strings"
	"testing"

	criucore "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mnt"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/seccomp"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/userns"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"

	"github.com/gpuckpt/gpuckpt/internal/criu"
)

// What is a pod's, and more than it seems.
func TestCheckOfPods(t *testing.T) {
	filtered := func(flags uint32) func(*criu.Dump) {
		return func(d *criu.Dump) {
			d.Seccomp = &seccomp.SeccompEntry{SeccompFilters: []*seccomp.SeccompFilter{{Flags: &flags}}}
			first := d.Tasks[0].Threads[0]
			first.SeccompMode, first.SeccompFilter = criucore.SeccompMode_filter.Enum(), proto.Uint32(0)
		}
	}
	hostUTS := func(path string) func(*specs.Spec) {
		return func(s *specs.Spec) {
			s.Linux.Namespaces = append(s.Linux.Namespaces, specs.LinuxNamespace{Type: specs.UTSNamespace, Path: path})
		}
	}
	inHostUTS := func(d *criu.Dump) { d.Inventory.RootIds.UtsNsId = d.Tasks[0].IDs.UtsNsId }
	cgroups := func(options ...string) func(*specs.Spec) {
		return func(s *specs.Spec) {
			s.Mounts = append(s.Mounts, specs.Mount{Destination: "/sys/fs/cgroup", Type: "cgroup", Options: options})
		}
	}
	cgroupMount := func(flags uint32) func(*criu.Dump) {
		return func(d *criu.Dump) {
			d.Mounts = append(d.Mounts, &mnt.MntEntry{
				Fstype: proto.Uint32(uint32(mnt.Fstype_TMPFS)), MntId: proto.Uint32(7), RootDev: proto.Uint32(7), ParentMntId: proto.Uint32(1),
				Flags: &flags, Root: new("/"), Mountpoint: new("/sys/fs/cgroup"), Source: new(""), Options: new(""),
			})
		}
	}
	// A hierarchy of the host's, whose mounts come to it, and go from it if it is shared.
	hierarchy := func(key string, shared uint32) func(*criu.Dump) {
		return func(d *criu.Dump) {
			cgroupMount(2)(d)
			m := &mnt.MntEntry{
				Fstype: proto.Uint32(uint32(mnt.Fstype_CGROUP)), MntId: proto.Uint32(8), RootDev: proto.Uint32(8), ParentMntId: proto.Uint32(7),
				Flags: proto.Uint32(3), Root: new("/"), Mountpoint: new("/sys/fs/cgroup/pids"), Source: new(""), Options: new(""), MasterId: proto.Uint32(30),
			}
			if key != "" {
				m.ExtKey = &key
			}
			if shared != 0 {
				m.SharedId = &shared
			}
			d.Mounts = append(d.Mounts, m)
		}
	}
	// A file of the host's, whose mounts come to it, as runc has it where systemd shares them; and the root.
	bound := func(options ...string) func(*specs.Spec) {
		return func(s *specs.Spec) {
			s.Mounts = append(s.Mounts, specs.Mount{Destination: "/etc/resolv.conf", Type: "bind", Source: "/etc/resolv.conf", Options: options})
		}
	}
	slave := func(key string, shared uint32) func(*criu.Dump) {
		return func(d *criu.Dump) {
			m := &mnt.MntEntry{
				Fstype: proto.Uint32(uint32(mnt.Fstype_UNSUPPORTED)), MntId: proto.Uint32(9), RootDev: proto.Uint32(9), ParentMntId: proto.Uint32(1),
				Flags: proto.Uint32(1), Root: new("/"), Mountpoint: new("/etc/resolv.conf"), Source: new(""), Options: new(""), MasterId: proto.Uint32(30), ExtKey: &key,
			}
			if shared != 0 {
				m.SharedId = &shared
			}
			d.Mounts = append(d.Mounts, m)
		}
	}
	rootSlave := func(d *criu.Dump) { d.Mounts[0].MasterId = proto.Uint32(30) }
	userNS := func(s *specs.Spec) {
		s.Linux.Namespaces = append(s.Linux.Namespaces, specs.LinuxNamespace{Type: specs.UserNamespace})
		s.Linux.UIDMappings = []specs.LinuxIDMapping{{ContainerID: 0, HostID: 100000, Size: 65536}}
		s.Linux.GIDMappings = s.Linux.UIDMappings
	}
	extent := func(first, lower, count uint32) []*userns.UidGidExtent {
		return []*userns.UidGidExtent{{First: &first, LowerFirst: &lower, Count: &count}}
	}
	maps := func(uids, gids []*userns.UidGidExtent) func(*criu.Dump) {
		return func(d *criu.Dump) {
			d.Tasks[0].IDs.UserNsId = proto.Uint32(17)
			d.UserNS = map[uint32]*userns.UsernsEntry{17: {UidMap: uids, GidMap: gids}}
		}
	}
	same := extent(0, 100000, 65536)
	seccompWanted := func(s *specs.Spec) { s.Linux.Seccomp = &specs.LinuxSeccomp{} }
	for name, c := range map[string]struct {
		spec func(*specs.Spec)
		dump func(*criu.Dump)
		says string // "" when it is granted
	}{
		"filters for all threads":           {seccompWanted, filtered(1), ""},
		"filters for the first alone":       {seccompWanted, filtered(0), "no seccomp filter"},
		"the host's own namespace, by path": {hostUTS("/proc/self/ns/uts"), inHostUTS, ""},
		"the host's, and not by path":       {hostUTS(""), inHostUTS, "host's uts namespace"},
		"the host's for another":            {hostUTS("/proc/self/ns/mnt"), inHostUTS, "host's uts namespace"},
		"hierarchies in a writable tmpfs":   {cgroups("ro", "nosuid"), cgroupMount(2), ""},
		"with set-user-id":                  {cgroups("ro", "nosuid"), cgroupMount(0), "not nosuid"},
		"a hierarchy of the host's":         {cgroups("ro", "nosuid"), hierarchy("/sys/fs/cgroup/pids", 0), ""},
		"one that the host's mounts follow": {cgroups("ro", "nosuid"), hierarchy("/sys/fs/cgroup/pids", 31), "the spec has it private"},
		"a file of the host's":              {bound("rbind", "ro"), slave("/etc/resolv.conf", 0), ""},
		"a file that was to be private":     {bound("rbind", "rprivate", "ro"), slave("/etc/resolv.conf", 0), "the spec has it private"},
		"a file that the host's follow":     {bound("rbind", "ro"), slave("/etc/resolv.conf", 31), "the spec has it private"},
		"a root that mounts come to":        {func(*specs.Spec) {}, rootSlave, ""},
		"a root that was to be private":     {func(s *specs.Spec) { s.Linux.RootfsPropagation = "private" }, rootSlave, "the spec has it private"},
		"one that is not from outside":      {cgroups("ro", "nosuid"), hierarchy("", 0), "the spec has it private"},
		"a user namespace":                  {userNS, maps(same, same), ""},
		"with fewer ids":                    {userNS, maps(extent(1000, 101000, 10), same), ""},
		"with the host's users":             {userNS, maps(extent(0, 0, 65536), same), "user ids from 0 are the host's from 0"},
		"with the host's groups":            {userNS, maps(same, extent(0, 0, 1)), "group ids from 0 are the host's from 0"},
		"with more ids":                     {userNS, maps(extent(0, 100000, 65537), same), "user ids from 0"},
		"with ids that wrap around":         {userNS, maps(extent(0, 100000, 1<<32-1), same), "user ids from 0"},
		"a user namespace of its own":       {func(*specs.Spec) {}, maps(same, same), "the spec has none"},
	} {
		t.Run(name, func(t *testing.T) {
			spec, d := specOfTest(), dumpOfTest()
			c.spec(spec)
			c.dump(d)
			_, err := Check(spec, d, host)
			if c.says == "" && err != nil || c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)) {
				t.Errorf("got %v, want %q", err, c.says)
			}
		})
	}
}
