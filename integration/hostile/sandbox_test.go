// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/cgroup"
	criucore "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fs"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mnt"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/regfile"
	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	coci "github.com/containerd/containerd/v2/pkg/oci"
	"github.com/containerd/typeurl/v2"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// change reads an image of CRIU's, has its entries changed, and writes it.
func change[T any, M interface {
	*T
	proto.Message
}](t *testing.T, path string, do func([]M)) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	head := data[:8]
	var entries []M
	for data = data[8:]; len(data) > 0; {
		size := binary.LittleEndian.Uint32(data)
		m := M(new(T))
		if err := proto.Unmarshal(data[4:4+size], m); err != nil {
			t.Fatal(err)
		}
		entries, data = append(entries, m), data[4+size:]
	}
	do(entries)
	out := append([]byte{}, head...)
	for _, e := range entries {
		data, err := proto.Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		out = append(binary.LittleEndian.AppendUint32(out, uint32(len(data))), data...)
	}
	if err := os.WriteFile(path, out, 0o600); err != nil {
		t.Fatal(err)
	}
}

// up leads from anywhere to the root.
var up = strings.Repeat("/..", 30)

// hostFile is a path to a file of the host's by a descriptor that CRIU has open.
func hostFile(path string) string { return "/proc/self/fd/126" + up + path }

// restricted is a container without capabilities.
func restricted(t *testing.T) harness.RunSpec {
	return harness.RunSpec{ID: harness.Name(t), CtrFlags: []string{"--seccomp"}, Amend: []coci.SpecOpts{coci.WithCapabilities(nil), coci.WithNoNewPrivileges}}
}

// restoreOf is restoreFrom with a restricted container and the shim that believes images.
func restoreOf(t *testing.T, hostile func(dir string)) error {
	t.Helper()
	return restoreFrom(t, shared, restricted(t), hostile)
}

// restoreFrom checkpoints a container, has the images changed, and restores it from them.
func restoreFrom(t *testing.T, c *harness.Containerd, spec harness.RunSpec, hostile func(dir string)) error {
	t.Helper()
	k := c.Work(t, spec, "plain")
	defer k.MustRemove(t)
	k.Expect(t, "count", "101")
	dir := t.TempDir()
	opts, err := typeurl.MarshalAnyToProto(&options.CheckpointOptions{ImagePath: dir, Exit: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Client().TaskService().Checkpoint(t.Context(), &tasks.CheckpointTaskRequest{ContainerID: k.ID, Options: opts}); err != nil {
		t.Fatalf("%v\n%s", err, c.LogTail(3000))
	}
	hostile(dir)
	container, err := c.Client().LoadContainer(t.Context(), k.ID)
	if err != nil {
		t.Fatal(err)
	}
	old, err := container.Task(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := old.Delete(t.Context(), client.WithProcessKill); err != nil {
		t.Fatal(err)
	}
	task, err := container.NewTask(t.Context(), cio.LogFile(filepath.Join(t.TempDir(), "log")), client.WithRestoreImagePath(dir))
	if err != nil {
		return err
	}
	return task.Start(t.Context())
}

func firstCore(t *testing.T, dir string, do func(*criucore.CoreEntry)) {
	t.Helper()
	change(t, filepath.Join(dir, "core-1.img"), func(entries []*criucore.CoreEntry) { do(entries[0]) })
}

func mounts(t *testing.T, dir string, do func(byPath map[string]*mnt.MntEntry)) {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "mountpoints-*.img"))
	if err != nil || len(names) != 1 {
		t.Fatal(names, err)
	}
	change(t, names[0], func(entries []*mnt.MntEntry) {
		byPath := make(map[string]*mnt.MntEntry)
		for _, m := range entries {
			byPath[filepath.Clean("/"+m.GetMountpoint())] = m
		}
		do(byPath)
	})
}

// workingDirectory changes the file that the first process has as its working directory.
func workingDirectory(t *testing.T, dir string, do func(*regfile.RegFileEntry)) {
	t.Helper()
	var id uint32
	change(t, filepath.Join(dir, "fs-1.img"), func(entries []*fs.FsEntry) { id = entries[0].GetCwdId() })
	change(t, filepath.Join(dir, "files.img"), func(entries []*fdinfo.FileEntry) {
		for _, e := range entries {
			if e.GetId() == id {
				e.Reg.Size, e.Reg.Mode = nil, nil
				do(e.Reg)
			}
		}
	})
}

// aboveMount makes a mount of the spec's what lies above another one.
func aboveMount(t *testing.T, dir, _ string) {
	t.Helper()
	mounts(t, dir, func(m map[string]*mnt.MntEntry) {
		dev, run := m["/dev"], m["/run"]
		run.RootDev, run.Source, run.Options, run.Root = dev.RootDev, dev.Source, dev.Options, new(up)
	})
}

// What CRIU has restored is compared with the spec before the program runs.
func TestInspected(t *testing.T) {
	for _, test := range []struct {
		name    string
		hostile func(t *testing.T, dir string)
		refusal string
	}{
		{"limits that are left out", func(t *testing.T, dir string) {
			firstCore(t, dir, func(c *criucore.CoreEntry) { c.Tc.Rlimits.Rlimits = nil })
		}, "RLIMIT_NOFILE"},
		{"capabilities", func(t *testing.T, dir string) {
			firstCore(t, dir, func(c *criucore.CoreEntry) {
				creds := c.ThreadCore.Creds
				for _, set := range [][]uint32{creds.CapBnd, creds.CapPrm, creds.CapEff} {
					set[0] |= 1 << unix.CAP_SYS_ADMIN
				}
			})
		}, "CAP_SYS_ADMIN"},
		{"no_new_privs", func(t *testing.T, dir string) {
			firstCore(t, dir, func(c *criucore.CoreEntry) { c.ThreadCore.Creds.NoNewPrivs = proto.Uint32(0) })
		}, "no_new_privs"},
		{"seccomp", func(t *testing.T, dir string) {
			firstCore(t, dir, func(c *criucore.CoreEntry) {
				none := criucore.SeccompMode_disabled
				c.ThreadCore.SeccompMode, c.ThreadCore.SeccompFilter = &none, nil
			})
		}, "no seccomp filter"},
		{"settings that are writable", func(t *testing.T, dir string) {
			mounts(t, dir, func(m map[string]*mnt.MntEntry) {
				sys := m["/proc/sys"]
				sys.Flags, sys.SbFlags = new(sys.GetFlags()&^unix.MS_RDONLY), new(sys.GetSbFlags()|unix.MS_RDONLY)
			})
		}, "mount /proc/sys of the restored container: it is not ro"},
		{"a mount of another file system", func(t *testing.T, dir string) {
			mounts(t, dir, func(m map[string]*mnt.MntEntry) {
				dev, run := m["/dev"], m["/run"]
				run.RootDev, run.Source, run.Options = dev.RootDev, dev.Source, dev.Options
			})
		}, "mount /run of the restored container"},
		{"working directory", func(t *testing.T, dir string) {
			workingDirectory(t, dir, func(r *regfile.RegFileEntry) { r.Name = new(hostFile("/")) })
		}, "on no mount of the container"},
	} {
		t.Run(test.name, func(t *testing.T) {
			err := restoreOf(t, func(dir string) { test.hostile(t, dir) })
			harness.Says(t, err, test.refusal)
			if pids, _ := filepath.Glob("/sys/fs/cgroup/pids/" + shared.Namespace() + "/*/cgroup.procs"); len(pids) > 0 {
				t.Errorf("cgroups are left: %v", pids)
			}
		})
	}
	t.Run("unchanged", func(t *testing.T) {
		if err := restoreOf(t, func(string) {}); err != nil {
			t.Errorf("%v\n%s", err, shared.LogTail(3000))
		}
	})
}

// What leads out of the container ends in CRIU's own root: the host's files stay as they are.
func TestNoHost(t *testing.T) {
	for _, test := range []struct {
		name    string
		hostile func(t *testing.T, dir, canary string)
	}{
		{"a property of a cgroup", func(t *testing.T, dir, canary string) {
			change(t, filepath.Join(dir, "cgroup.img"), func(entries []*cgroup.CgroupEntry) {
				for _, ctl := range entries[0].Controllers {
					if len(ctl.Dirs) == 0 {
						continue
					}
					ctl.Dirs[0].Children = append(ctl.Dirs[0].Children, &cgroup.CgroupDirEntry{
						DirName: new("x"), DirPerms: &cgroup.CgroupPerms{Mode: proto.Uint32(0o755), Uid: proto.Uint32(0), Gid: proto.Uint32(0)},
						Properties: []*cgroup.CgroupPropEntry{{
							Name: new(strings.Repeat("../", 30) + canary), Value: new("written"),
							Perms: &cgroup.CgroupPerms{Mode: proto.Uint32(0o4777), Uid: proto.Uint32(1000), Gid: proto.Uint32(1000)},
						}},
					})
				}
			})
		}},
		{"a file that is emptied when it is opened", func(t *testing.T, dir, canary string) {
			workingDirectory(t, dir, func(r *regfile.RegFileEntry) {
				r.Name, r.Flags = new(hostFile(canary)), proto.Uint32(unix.O_RDWR|unix.O_TRUNC)
			})
		}},
		// CRIU has /proc open, and this program is a process of the host's.
		{"a file by a process of the host's", func(t *testing.T, dir, canary string) {
			workingDirectory(t, dir, func(r *regfile.RegFileEntry) {
				r.Name, r.Flags = new(fmt.Sprintf("/proc/self/fd/121/%d/root%s", os.Getpid(), canary)), proto.Uint32(unix.O_RDWR|unix.O_TRUNC)
			})
		}},
		{"a mount of what is above", aboveMount},
	} {
		t.Run(test.name, func(t *testing.T) {
			canary := filepath.Join(t.TempDir(), "canary")
			if err := os.WriteFile(canary, []byte("as the host has it"), 0o600); err != nil {
				t.Fatal(err)
			}
			err := restoreOf(t, func(dir string) { test.hostile(t, dir, canary) })
			t.Logf("the restore: %v", err)
			// A container that goes on sees nothing of it either.
			seen, gerr := filepath.Glob("/proc/[0-9]*/root/run" + canary)
			if gerr != nil || len(seen) > 0 {
				t.Errorf("it is seen as %v, %v", seen, gerr)
			}
			data, rerr := os.ReadFile(canary)
			info, serr := os.Stat(canary)
			if rerr != nil || serr != nil || string(data) != "as the host has it" || info.Mode() != 0o600 {
				t.Errorf("the host's file has %q, %v, %v, %v", data, info.Mode(), rerr, serr)
			}
		})
	}
}

// A file system that the host has too is not mounted, whatever an image says: its flags would be the
// host's. These mounts have the flags that the host's has, so that nothing is lost if they come through.
func TestHostsFileSystems(t *testing.T) {
	shared.Configured(t, harness.AnyCheckpoint) // and the usual patience: what CRIU says counts
	before := mounted("/proc/self/mountinfo")
	for name, hostile := range map[string]func(m *mnt.MntEntry){
		"devtmpfs": func(m *mnt.MntEntry) { m.Fstype = proto.Uint32(uint32(mnt.Fstype_DEVTMPFS)) },
		"by its name": func(m *mnt.MntEntry) {
			m.Fstype, m.Fsname = proto.Uint32(uint32(mnt.Fstype_AUTO)), new("securityfs")
		},
		"debugfs": func(m *mnt.MntEntry) { m.Fstype = proto.Uint32(uint32(mnt.Fstype_DEBUGFS)) },
	} {
		t.Run(name, func(t *testing.T) {
			err := restoreOf(t, func(dir string) {
				mounts(t, dir, func(m map[string]*mnt.MntEntry) { hostile(m["/run"]) })
			})
			harness.Says(t, err, "CRIU said: ", "it is not the container's alone")
			if now := mounted("/proc/self/mountinfo"); now != before {
				t.Errorf("mounted was\n%s\nand is\n%s", before, now)
			}
		})
	}
}
