// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/contrib/apparmor"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/pkg/oci"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// keepsIdentity checkpoints a program that counts, removes it and restores it. has is asked of the process before and after, and must answer the same.
func keepsIdentity(t *testing.T, spec harness.RunSpec, program string, has func(t *testing.T, pid int) string) {
	t.Helper()
	k := shared.Work(t, spec, program)
	k.Expect(t, "count", "101")
	before := has(t, k.MustPid(t))
	ref := strings.ToLower(harness.Name(t)) + ":1"
	if err := k.Checkpoint(t.Context(), ref); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(4000))
	}
	removeImageAtEnd(t, shared, ref)
	k.Expect(t, "count", "102") // it was left running
	k.MustRemove(t)
	r := restore(t, shared, k.ID, ref, k.Port)
	if after := has(t, r.MustPid(t)); after != before {
		t.Errorf("the restored process has %q, and had %q", after, before)
	}
	r.Expect(t, "count", "102") // as at the checkpoint
	r.Expect(t, "count", "103")
}

// credentials returns the users, groups and capabilities of a process.
func credentials(t *testing.T, pid int) string {
	t.Helper()
	status, err := proc.StatusOf(pid)
	if err != nil {
		t.Fatal(err)
	}
	var words []string
	for _, name := range []string{"Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp"} {
		words = append(words, name+"="+strings.Join(strings.Fields(status.Field(name)), ","))
	}
	return strings.Join(words, " ")
}

// A program of a user of its own, without any capability, goes on as that user, also where root has no
// CAP_SYS_RESOURCE, and the kernel does not tell CRIU that user's limits.
func TestAnotherUser(t *testing.T) {
	keepsIdentity(t, harness.RunSpec{GPUs: []int{0}, Amend: []oci.SpecOpts{
		oci.WithUIDGID(1000, 1000), oci.WithAdditionalGIDs("2000"), oci.WithCapabilities(nil), oci.WithNoNewPrivileges,
	}}, "counter", func(t *testing.T, pid int) string {
		got := credentials(t, pid)
		if !strings.Contains(got, "Uid=1000,1000,1000,1000 Gid=1000,1000,1000,1000") || !strings.Contains(got, "CapBnd=0000000000000000") {
			t.Errorf("it runs with %q", got)
		}
		return got
	})
}

// Under an AppArmor profile the program goes on under that profile.
func TestAppArmor(t *testing.T) {
	if text, err := os.ReadFile("/sys/module/apparmor/parameters/enabled"); err != nil || strings.TrimSpace(string(text)) != "Y" {
		t.Skip("the kernel has no AppArmor here")
	}
	const profile = "gpuckpt-test"
	if err := apparmor.LoadDefaultProfile(profile); err != nil {
		t.Skipf("no profile can be loaded here: %v", err)
	}
	keepsIdentity(t, harness.RunSpec{GPUs: []int{0}, Amend: []oci.SpecOpts{oci.WithApparmorProfile(profile)}}, "counter", func(t *testing.T, pid int) string {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/attr/current", pid))
		if err != nil || !strings.HasPrefix(string(text), profile+" ") {
			t.Errorf("it runs under %q, %v", text, err)
		}
		return string(text)
	})
}

// On cgroup v2 the program goes on in the container's cgroup, under its limit, and not frozen.
func TestCgroup2(t *testing.T) {
	var st unix.Statfs_t
	if err := unix.Statfs("/sys/fs/cgroup", &st); err != nil || st.Type != unix.CGROUP2_SUPER_MAGIC {
		t.Skip("the cgroups here are not those of version 2 alone")
	}
	const limit = 2 << 30
	keepsIdentity(t, harness.RunSpec{GPUs: []int{0}, MemoryLimit: limit}, "counter", func(t *testing.T, pid int) string {
		path, err := host.CgroupPath(pid, "")
		if err != nil {
			t.Fatal(err)
		}
		for name, want := range map[string]string{"memory.max": fmt.Sprint(limit), "cgroup.freeze": "0"} {
			text, err := os.ReadFile(filepath.Join("/sys/fs/cgroup", path, name))
			if err != nil || strings.TrimSpace(string(text)) != want {
				t.Errorf("%s of %s is %q, %v; want %s", name, path, text, err, want)
			}
		}
		return path
	})
}

// In a user namespace of its own, as of a pod with hostUsers: false, the program goes on with the
// same users, on the host and inside. runc binds the nodes of GPUs there, which the software
// GPU does not have: the program uses none there.
func TestUserNamespace(t *testing.T) {
	ids := []specs.LinuxIDMapping{{ContainerID: 0, HostID: 200000, Size: 65536}}
	spec := harness.RunSpec{Amend: []oci.SpecOpts{
		oci.WithUserNamespace(ids, ids), ownedBy(200000),
		oci.WithoutMounts("/sys"), // which a user of another network namespace may not mount
		oci.WithMaskedPaths(nil), oci.WithReadonlyPaths(nil),
	}}
	program := "plain"
	if gpu.Kind != harness.SoftwareGPU {
		spec.GPUs, program = []int{0}, "counter"
	}
	keepsIdentity(t, spec, program, func(t *testing.T, pid int) string {
		got := credentials(t, pid)
		if !strings.Contains(got, "Uid=200000,200000,200000,200000") {
			t.Errorf("it runs with %q", got)
		}
		maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/uid_map", pid))
		if err != nil {
			t.Fatal(err)
		}
		return got + " " + string(maps)
	})
}

// ownedBy hands all files of a container's file system to one user, as containerd's clients do
// for a user namespace. ctr makes such a container with "run" alone, which also starts it.
func ownedBy(id int) oci.SpecOpts {
	return func(ctx context.Context, c oci.Client, container *containers.Container, _ *oci.Spec) error {
		mounts, err := c.SnapshotService(container.Snapshotter).Mounts(ctx, container.SnapshotKey)
		if err != nil {
			return err
		}
		return mount.WithTempMount(ctx, mounts, func(root string) error {
			return filepath.WalkDir(root, func(name string, _ fs.DirEntry, err error) error {
				return errors.Join(err, os.Lchown(name, id, id))
			})
		})
	}
}
