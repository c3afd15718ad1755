// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// eachWay takes a checkpoint of a container and restores it in each of the ways that clients have: as an image, from
// which another container is made, and in place, after the request has ended the container.
func eachWay(t *testing.T, k *harness.Container, check func(*testing.T, *harness.Container)) {
	t.Helper()
	check(t, k)
	ref := takeCheckpoint(t, shared, k, "1")
	k.MustRemove(t)
	r := restore(t, shared, k.ID, ref, k.Port)
	check(t, r)
	dir := t.TempDir()
	exitInto(t, r, dir)
	ctr(t, shared, "tasks", "delete", r.ID)
	if err := restoreTask(t, shared, r, dir); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(3000))
	}
	check(t, r)
	isPaused(t, r, false)
}

// exitInto has a checkpoint into a directory end a container.
func exitInto(t *testing.T, k *harness.Container, dir string) {
	t.Helper()
	if _, err := k.CheckpointTask(t.Context(), harness.TaskCheckpoint{ImagePath: dir, Exit: true}); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(3000))
	}
	if _, err := k.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// refusedEachWay wants each kind of checkpoint refused in some words, and the container to run on as it did.
func refusedEachWay(t *testing.T, k *harness.Container, goesOn func(), words ...string) {
	t.Helper()
	goesOn()
	harness.Says(t, k.Checkpoint(t.Context(), "refused:1"), words...)
	isPaused(t, k, false)
	goesOn()
	for _, exit := range []bool{false, true} {
		dir := filepath.Join(t.TempDir(), "images")
		_, err := k.CheckpointTask(t.Context(), harness.TaskCheckpoint{ImagePath: dir, Exit: exit})
		harness.Says(t, err, words...)
		isPaused(t, k, false)
		goesOn()
		if _, err := os.Stat(dir); !os.IsNotExist(err) {
			t.Errorf("the directory of the images is left: %v", err)
		}
	}
}

// A server in a chroot, or in a mount namespace of its own with its program on the container's mounts, goes there and
// back, beside a program without CUDA and one with.
func TestApart(t *testing.T) {
	for apart, want := range map[string]string{"chroot": "/srv/jail", "mounts": "/"} {
		for workload, spec := range map[string]harness.RunSpec{"twice": {Ports: 2}, "forked": {GPUs: []int{0}, Ports: 2}} {
			t.Run(apart+"/"+workload, func(t *testing.T) {
				results.Add(t)
				if apart == "mounts" {
					spec.CtrFlags = []string{"--privileged"}
				}
				k := shared.Work(t, spec, workload, "--apart", apart)
				count := 100
				eachWay(t, k, func(t *testing.T, k *harness.Container) {
					t.Helper()
					count++
					for i := range 2 {
						k.Process(i).Expect(t, "count", strconv.Itoa(count))
					}
					link := func(pid int, name string) string {
						to, err := os.Readlink(fmt.Sprintf("/proc/%d/%s", pid, name))
						if err != nil {
							t.Error(err)
						}
						return to
					}
					first := k.MustPid(t)
					child := childOf(first, "gpuwork")
					if root := link(child, "root"); root != want {
						t.Errorf("its root is %s", root)
					}
					if own := link(child, "ns/mnt") != link(first, "ns/mnt"); own != (apart == "mounts") {
						t.Errorf("it has a mount namespace of its own: %v", own)
					}
				})
			})
		}
	}
}

// What a restore would refuse is refused before the container ends, whoever asks for the checkpoint: here what is found
// in the processes alone, and what is found in the images.
func TestInspectedBeforeItEnds(t *testing.T) {
	for _, test := range []struct {
		name, workload, apart, words string
		spec                         harness.RunSpec
	}{
		{"first process in a chroot", "plain", "chroot", "is in a chroot (/srv/jail)", harness.RunSpec{}},
		{"connected netlink socket", "twice", "netlink", "a netlink socket is connected", harness.RunSpec{Ports: 2}},
	} {
		t.Run(test.name, func(t *testing.T) {
			results.Add(t)
			k := shared.Work(t, test.spec, test.workload, "--apart", test.apart)
			count := 100
			refusedEachWay(t, k, func() {
				t.Helper()
				count++
				for i := range max(1, test.spec.Ports) {
					k.Process(i).Expect(t, "count", strconv.Itoa(count))
				}
			}, test.words, "its own restore would refuse it")
		})
	}
}

// A file that never had a name goes there and back.
func TestUnnamedFile(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{}, "plain", "--unnamed", "/tmp")
	count := 100
	eachWay(t, k, func(t *testing.T, k *harness.Container) {
		t.Helper()
		count++
		k.Expect(t, "count", strconv.Itoa(count))
		if text, err := os.ReadFile(fmt.Sprintf("/proc/%d/fd/3", k.MustPid(t))); err != nil || string(text) != "unnamed" {
			t.Errorf("the file has %q, %v", text, err)
		}
	})
}

// hasGuards reports whether the kernel has guard pages (Linux 6.13).
func hasGuards(t *testing.T) bool {
	mem, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(mem) }()
	const guardInstall = 102
	return unix.Madvise(mem, guardInstall) == nil
}

// Guard pages come back, in the stacks of threads, as glibc 2.42 makes them, and in memory that goes past CRIU: a touch
// faults as it did.
func TestGuardPages(t *testing.T) {
	if !hasGuards(t) {
		t.Skip("the kernel is older than 6.13")
	}
	for _, test := range []struct{ workload, bytes string }{
		{"memory", "32M"},    // with CRIU
		{"memory", "288M"},   // past CRIU, and more of them than it looks for at once
		{"gpumemory", "32M"}, // beside a GPU
	} {
		t.Run(test.workload+"-"+test.bytes, func(t *testing.T) {
			results.Add(t)
			var spec harness.RunSpec
			if test.workload == "gpumemory" {
				spec.GPUs = []int{0}
			}
			k := shared.Work(t, spec, test.workload, "--bytes", test.bytes)
			if k.Answer(t, "guards") == "0" {
				t.Fatal("it has made no guards")
			}
			eachWay(t, k, func(t *testing.T, k *harness.Container) {
				t.Helper()
				k.Expect(t, "verify", "bad=0,0")
			})
		})
	}
}

// restoreAmended ends a container after a checkpoint, and restores it in place by a changed spec.
func restoreAmended(t *testing.T, k *harness.Container, io cio.Creator, amend func(*specs.Spec)) {
	t.Helper()
	dir := t.TempDir()
	checkpointInto(t, shared, k, dir)
	ctr(t, shared, "tasks", "delete", "--force", k.ID)
	container, err := shared.Client().LoadContainer(t.Context(), k.ID)
	if err != nil {
		t.Fatal(err)
	}
	spec, err := container.Spec(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	amend(spec)
	if err := container.Update(t.Context(), client.UpdateContainerOpts(client.WithSpec(spec))); err != nil {
		t.Fatal(err)
	}
	task, err := container.NewTask(t.Context(), io, client.WithRestoreImagePath(dir))
	if err == nil {
		err = task.Start(t.Context())
	}
	if err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(3000))
	}
}

// The node of the restore has files of the kernel that the spec masks and that were not there before, or its
// spec masks more. They are masked as runc masks them, and stay so.
func TestMaskedSince(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{CtrFlags: []string{"--cap-drop", "CAP_SYS_ADMIN"}}, "plain")
	hidden := []string{"/proc/uptime", "/proc/tty", "/sys/kernel/mm"}
	k.Expect(t, "count", "101")
	for i, count := range []string{"102", "103"} {
		restoreAmended(t, k, cio.LogFile(filepath.Join(t.TempDir(), "log")), func(s *specs.Spec) {
			if i == 0 {
				s.Linux.MaskedPaths = append(s.Linux.MaskedPaths, hidden...)
			}
		})
		k.Expect(t, "count", count)
		mountedAt(t, k, hidden)
		root := fmt.Sprintf("/proc/%d/root", k.MustPid(t))
		text, err := os.ReadFile(root + hidden[0])
		entries, derr := os.ReadDir(root + hidden[2])
		if len(text) > 0 || len(entries) > 0 || err != nil || derr != nil {
			t.Errorf("not masked: %q, %v, %v, %v", text, entries, err, derr)
		}
	}
}

// A program that has copied its standard output is restored where the client has none, again and again.
func TestCopiedOutput(t *testing.T) {
	results.Add(t)
	k := odd(t, harness.RunSpec{}, "copied-output", "/none")
	answer(t, k)
	for range 2 {
		restoreAmended(t, k, cio.NullIO, func(*specs.Spec) {})
		answer(t, k)
	}
}
