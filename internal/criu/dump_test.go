// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/cgroup"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/creds"
	criucore "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/inventory"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/netdev"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/pstree"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/rlimit"
	"google.golang.org/protobuf/proto"

	"github.com/gpuckpt/gpuckpt/images"
)

// coreOf is a thread with an effective capability of that number.
func coreOf(capability uint32) *criucore.CoreEntry {
	return &criucore.CoreEntry{
		Mtype: criucore.CoreEntry_X86_64.Enum(),
		ThreadCore: &criucore.ThreadCoreEntry{FutexRla: new(uint64), FutexRlaLen: new(uint32), Creds: &creds.CredsEntry{
			Uid: new(uint32), Gid: new(uint32), Euid: new(uint32), Egid: new(uint32), Suid: new(uint32), Sgid: new(uint32), Fsuid: new(uint32), Fsgid: new(uint32),
			CapEff: []uint32{1 << capability}, Secbits: new(uint32),
		}},
		Tc: &criucore.TaskCoreEntry{
			TaskState: proto.Uint32(1), ExitCode: new(uint32), Personality: new(uint32), Flags: new(uint32), BlkSigset: new(uint64), Comm: new("job"),
			Rlimits: &criucore.TaskRlimitsEntry{Rlimits: []*rlimit.RlimitEntry{{Cur: proto.Uint64(1), Max: proto.Uint64(2)}}}, OomScoreAdj: proto.Int32(0),
		},
	}
}

// processOf is a process whose parent is the first one.
func processOf(pid uint32, threads ...uint32) *pstree.PstreeEntry {
	return &pstree.PstreeEntry{Pid: &pid, Ppid: new(min(pid-1, 1)), Pgid: new(uint32), Sid: new(uint32), Threads: threads}
}

// dumpDir writes the dump of a process with two threads, as CRIU does.
func dumpDir(t testing.TB) string {
	t.Helper()
	ids := &criucore.TaskKobjIdsEntry{VmId: new(uint32), FilesId: new(uint32), FsId: new(uint32), SighandId: new(uint32), NetNsId: proto.Uint32(12)}
	dir := t.TempDir()
	for name, data := range map[string][]byte{
		"inventory.img":     imageOf(t, "INVENTORY", &inventory.InventoryEntry{ImgVersion: proto.Uint32(2), RootIds: ids}),
		"cgroup.img":        imageOf(t, "CGROUP", &cgroup.CgroupEntry{}),
		"pstree.img":        imageOf(t, "PSTREE", processOf(1, 1, 2)),
		"core-1.img":        imageOf(t, "CORE", coreOf(3)),
		"core-2.img":        imageOf(t, "CORE", coreOf(4)),
		"ids-1.img":         imageOf(t, "IDS", ids),
		"mountpoints-1.img": imageOf(t, "MNTS", mountOf("/", "")),
	} {
		writeFile(t, filepath.Join(dir, name), string(data))
	}
	return dir
}

func TestDump(t *testing.T) {
	dir := dumpDir(t)
	d, err := Open(dir).Dump()
	if err != nil {
		t.Fatal(err)
	}
	if len(d.Tasks) != 1 || d.Tasks[0].PID != 1 || len(d.Tasks[0].Threads) != 2 || d.Tasks[0].Threads[1].Creds.CapEff[0] != 1<<4 ||
		d.Tasks[0].Limits[0].GetMax() != 2 || d.Tasks[0].IDs.GetNetNsId() != 12 || len(d.Mounts) != 1 {
		t.Errorf("got %+v", d)
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
		damaged := map[string]string{"empty": "", "cut": string(good[:len(good)-1]), "another's": string(imageOf(t, "FILES"))}
		if e.Name() != "pstree.img" && e.Name() != "mountpoints-1.img" {
			again := imageOf(t, "CORE", &criucore.ThreadSasEntry{SsSp: new(uint64), SsSize: new(uint64), SsFlags: new(uint32)})[8:]
			damaged["twice"] = string(good) + string(again)
		}
		for name, data := range damaged {
			writeFile(t, path, data)
			if _, err := Open(dir).Dump(); !errors.Is(err, images.ErrDamaged) || !strings.Contains(err.Error(), e.Name()) {
				t.Errorf("%s %s: got %v", e.Name(), name, err)
			}
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(dir).Dump(); !errors.Is(err, images.ErrDamaged) {
			t.Errorf("%s missing: got %v", e.Name(), err)
		}
		if err := os.Symlink("/dev/zero", path); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(dir).Dump(); !errors.Is(err, images.ErrDamaged) {
			t.Errorf("%s a link: got %v", e.Name(), err)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		writeFile(t, path, string(good))
	}
}

// A small tree that names one large image over and over does not fill the memory.
func TestDumpIsBounded(t *testing.T) {
	for name, tree := range map[string][]proto.Message{
		"process": {processOf(1), processOf(1)}, "thread": {processOf(1, 1, 2, 2)}, "thread of another": {processOf(1, 1, 2), processOf(2)},
	} {
		dir := dumpDir(t)
		writeFile(t, filepath.Join(dir, "pstree.img"), string(imageOf(t, "PSTREE", tree...)))
		if _, err := Open(dir).Dump(); !errors.Is(err, images.ErrDamaged) || !strings.Contains(err.Error(), "twice") {
			t.Errorf("%s: got %v", name, err)
		}
	}
	for name, parent := range map[string]uint32{"none": 0, "itself": 2, "a later one": 3} {
		dir, orphan := dumpDir(t), processOf(2)
		orphan.Ppid = &parent
		for _, name := range []string{"core", "ids"} {
			if err := os.Link(filepath.Join(dir, name+"-1.img"), filepath.Join(dir, name+"-2.img")); err != nil && !errors.Is(err, os.ErrExist) {
				t.Fatal(err)
			}
		}
		writeFile(t, filepath.Join(dir, "pstree.img"), string(imageOf(t, "PSTREE", processOf(1, 1), orphan)))
		if _, err := Open(dir).Dump(); !errors.Is(err, images.ErrDamaged) || !strings.Contains(err.Error(), "the parent of process 2") {
			t.Errorf("parent %s: got %v", name, err)
		}
	}
	dir, threads := dumpDir(t), make([]uint32, MaxThreads+1)
	for i := range threads {
		threads[i] = uint32(i + 1)
	}
	writeFile(t, filepath.Join(dir, "pstree.img"), string(imageOf(t, "PSTREE", processOf(1, threads...))))
	if _, err := Open(dir).Dump(); !errors.Is(err, images.ErrDamaged) || !strings.Contains(err.Error(), "threads") {
		t.Errorf("too many threads: got %v", err)
	}
}

// CRIU wants to be given a network for which it has a key.
func TestNetworkGiven(t *testing.T) {
	dir := dumpDir(t)
	for name, c := range map[string]struct {
		data    []byte
		given   bool
		damaged bool
	}{
		"CRIU's own":     {imageOf(t, "NETNS", &netdev.NetnsEntry{}), false, false},
		"to be given":    {imageOf(t, "NETNS", &netdev.NetnsEntry{ExtKey: new("extRootNetNS")}), true, false},
		"another's":      {imageOf(t, "CORE", &netdev.NetnsEntry{}), false, true},
		"twice":          {imageOf(t, "NETNS", &netdev.NetnsEntry{}, &netdev.NetnsEntry{}), false, true},
		"without any":    {imageOf(t, "NETNS"), false, true},
		"nothing at all": {nil, false, true},
	} {
		writeFile(t, filepath.Join(dir, "netns-12.img"), string(c.data))
		d, err := Open(dir).Dump()
		if errors.Is(err, images.ErrDamaged) != c.damaged || err != nil && !c.damaged || err == nil && d.NetworkGiven != c.given {
			t.Errorf("%s: got %+v, %v", name, d, err)
		}
	}
}

// CRIU writes whatever was in its memory for the thread of a process that has ended and waits for its
// parent.
func TestEndedProcess(t *testing.T) {
	for name, test := range map[string]struct {
		threads []uint32
		good    bool
	}{
		"number never set": {[]uint32{3893707904}, true}, "its own number": {[]uint32{2}, true}, "none": {nil, true},
		"several": {[]uint32{2, 3893707904}, false},
	} {
		dir, ended := dumpDir(t), coreOf(4)
		ended.ThreadCore, ended.Tc.TaskState = nil, proto.Uint32(taskDead)
		writeFile(t, filepath.Join(dir, "core-2.img"), string(imageOf(t, "CORE", ended)))
		writeFile(t, filepath.Join(dir, "pstree.img"), string(imageOf(t, "PSTREE", processOf(1, 1), processOf(2, test.threads...))))
		d, err := Open(dir).Dump()
		if (err == nil) != test.good || test.good && (!d.Tasks[1].Dead || len(d.Tasks[1].Threads) != 0) {
			t.Errorf("%s: %+v, %v", name, d, err)
		}
	}
}
