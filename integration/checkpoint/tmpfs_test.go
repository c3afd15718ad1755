// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// eachKind runs a test with a container without CUDA and with one that has a GPU.
func eachKind(t *testing.T, test func(t *testing.T, spec harness.RunSpec, work string)) {
	t.Run("without a GPU", func(t *testing.T) { test(t, harness.RunSpec{}, "plain") })
	t.Run("with a GPU", func(t *testing.T) { test(t, harness.RunSpec{GPUs: []int{0}}, "counter") })
}

// The content of a container's tmpfs comes back, in memory that counts for the container: a file
// that the program has mapped, and one of 64 MiB. It is not CRIU that packs it.
func TestTmpfs(t *testing.T) {
	results.Add(t)
	eachKind(t, func(t *testing.T, spec harness.RunSpec, work string) {
		spec.MemoryLimit = 4 << 30
		spec.Amend = []oci.SpecOpts{oci.WithDevShmSize(256 << 10)}
		k := shared.Work(t, spec, work, "--shared", "/dev/shm/shared")
		k.Expect(t, "count", "101")
		large := make([]byte, 64<<20)
		if _, err := rand.Read(large); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(inShm(t, k, "large"), large, 0o640); err != nil {
			t.Fatal(err)
		}
		want := shmFiles(t, k)
		dir := t.TempDir()
		if err := checkpointTask(t, shared, k, dir); err != nil {
			t.Fatalf("%v\n%s", err, shared.LogTail(3000))
		}
		if n := ours(t, dir); n < 2 { // those of /dev and /dev/shm at least
			t.Errorf("%d images of a tmpfs are gpuckpt's", n)
		}
		if tar, err := os.Readlink(filepath.Join(shared.Bundle(k.ID), "criu-path", "tar")); err != nil || filepath.Base(tar) != "gpuckpt-tmpfs" {
			t.Errorf("CRIU's tar is %q, %v", tar, err)
		}
		ref := takeCheckpoint(t, shared, k, "1")
		k.Expect(t, "count", "102")
		k.MustRemove(t)
		r := restore(t, shared, k.ID, ref, k.Port)
		r.Expect(t, "count", "102")
		if got := shmFiles(t, r); !slices.Equal(got, want) {
			t.Errorf("the files are %q, want %q", got, want)
		}
		mappedShared(t, r)
		if charged := shmemOf(t, r); charged < 64<<20 {
			t.Errorf("the container's cgroup is charged for %d bytes of shared memory", charged)
		}
	})
}

// What is mounted at /dev/shm from outside, as a pod's is, is carried to another such mount. What
// is there already stays: another container of the pod may use it.
func TestOutsideShm(t *testing.T) {
	results.Add(t)
	eachKind(t, func(t *testing.T, spec harness.RunSpec, work string) {
		outside := t.TempDir()
		mountTmpfs(t, outside, "64m")
		spec.Amend = []oci.SpecOpts{withoutShm, oci.WithMounts([]specs.Mount{{
			Destination: "/dev/shm", Source: outside, Type: "bind", Options: []string{"rbind", "rw", "nosuid", "nodev", "noexec"},
		}})}
		k := shared.Work(t, spec, work, "--shared", "/dev/shm/shared", "--unlinked", "/dev/shm/unlinked")
		k.Expect(t, "count", "101")
		if err := os.Link(inShm(t, k, "shared"), inShm(t, k, "other")); err != nil {
			t.Fatal(err)
		}
		want := shmFiles(t, k)
		ref := takeCheckpoint(t, shared, k, "1")
		k.Expect(t, "count", "102")
		k.MustRemove(t)
		// A new pod's, with a file of another container's.
		mountTmpfs(t, outside, "64m")
		theirs := filepath.Join(outside, "theirs")
		if err := os.WriteFile(theirs, []byte("theirs"), 0o600); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			r := restore(t, shared, k.ID, ref, k.Port)
			r.Expect(t, "count", "102")
			got := slices.DeleteFunc(shmFiles(t, r), func(f string) bool { return strings.HasPrefix(f, "theirs") })
			if !slices.Equal(got, want) {
				t.Errorf("the files are %q, want %q", got, want)
			}
			mappedShared(t, r)
			r.MustRemove(t)
		}
		if text, err := os.ReadFile(theirs); err != nil || string(text) != "theirs" {
			t.Errorf("the other container's file is %q, %v", text, err)
		}
	})
}

// A tmpfs at /dev/shm that is smaller than the one that was saved fails the restore, and the error
// says what to do.
func TestOutsideShmTooSmall(t *testing.T) {
	results.Add(t)
	outside := t.TempDir()
	mountTmpfs(t, outside, "64m")
	k := shared.Work(t, harness.RunSpec{Amend: []oci.SpecOpts{withoutShm, oci.WithMounts([]specs.Mount{{
		Destination: "/dev/shm", Source: outside, Type: "bind", Options: []string{"rbind", "rw"},
	}})}}, "plain", "--shared", "/dev/shm/shared")
	k.Expect(t, "count", "101")
	ref := takeCheckpoint(t, shared, k, "1")
	k.MustRemove(t)
	mountTmpfs(t, outside, "1m")
	_, err := shared.Restore(t.Context(), k.ID, ref, k.Port)
	harness.Says(t, err, "a tmpfs is smaller than the one that was saved", "it does not fit")
	if err := shared.Remove(t.Context(), k.ID); err != nil {
		t.Error(err)
	}
}

// mountTmpfs mounts a new tmpfs of a size at a directory until the test ends, over one that is there.
func mountTmpfs(t *testing.T, dir, size string) {
	t.Helper()
	if err := unix.Mount("shm", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=1777,size="+size); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
}

// withoutShm takes away what the client mounts at /dev/shm.
func withoutShm(ctx context.Context, c oci.Client, k *containers.Container, s *oci.Spec) error {
	return oci.WithoutMounts("/dev/shm")(ctx, c, k, s)
}

// inShm returns the host's path of a file in a container's /dev/shm.
func inShm(t *testing.T, k *harness.Container, name string) string {
	t.Helper()
	return filepath.Join(fmt.Sprintf("/proc/%d/root/dev/shm", k.MustPid(t)), name)
}

// shmFiles describes each file in a container's /dev/shm.
func shmFiles(t *testing.T, k *harness.Container) (files []string) {
	t.Helper()
	entries, err := os.ReadDir(inShm(t, k, ""))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		data, err := os.ReadFile(inShm(t, k, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		var st unix.Stat_t
		if err := unix.Stat(inShm(t, k, e.Name()), &st); err != nil {
			t.Fatal(err)
		}
		files = append(files, fmt.Sprintf("%s mode %o owner %d:%d names %d time %d bytes %x", e.Name(), st.Mode, st.Uid, st.Gid, st.Nlink, st.Mtim.Nano(), sha256.Sum256(data)))
	}
	return files
}

// mappedShared fails the test unless the program has /dev/shm/shared open: that very file.
func mappedShared(t *testing.T, k *harness.Container) {
	t.Helper()
	named, err := os.Stat(inShm(t, k, "shared"))
	if err != nil {
		t.Fatal(err)
	}
	links, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", k.MustPid(t)))
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(links, func(link string) bool {
		st, err := os.Stat(link)
		return err == nil && os.SameFile(st, named)
	}) {
		t.Error("the program does not have the file open")
	}
}

// ours returns how many images of a tmpfs in a directory are not CRIU's.
func ours(t *testing.T, dir string) (n int) {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "tmpfs-dev-*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if bytes.HasPrefix(data, []byte("gpuckpt-tmpfs-")) {
			n++
		}
	}
	return n
}

// shmemOf returns the bytes of shared memory that a container's cgroup is charged with.
func shmemOf(t *testing.T, k *harness.Container) uint64 {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", k.MustPid(t)))
	if err != nil {
		t.Fatal(err)
	}
	line, _, _ := strings.Cut(string(text), "\n")
	dirs, err := harness.CgroupsOf(line[strings.LastIndex(line, ":")+1:])
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range dirs {
		stat, err := os.ReadFile(filepath.Join(dir, "memory.stat"))
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(stat)) {
			var bytes uint64
			if _, err := fmt.Sscanf(line, "shmem %d", &bytes); err == nil {
				return bytes
			}
		}
	}
	t.Fatalf("no cgroup in %q says how much shared memory it has", dirs)
	return 0
}
