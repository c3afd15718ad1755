// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/pkg/oci"
	"golang.org/x/sys/unix"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// held is what another program finds of the locks that gpuwork's --locks takes.
var held = []string{
	"flock: held", "flock-shared: held", "ofd: write 5+5", "mapped: write 120+1", "mapped: read 128+1",
	"posix: write 10+10", "posix: write 30+1", "posix: read 100+0", "lease: LEASE ACTIVE READ", "lease-write: LEASE ACTIVE WRITE",
}

// locksOf asks for the locks on the files in a directory of a container, as another program that
// wants them would.
func locksOf(t *testing.T, k *harness.Container, dir string) (found []string) {
	t.Helper()
	pid := k.MustPid(t)
	open := func(name string) int {
		fd, err := unix.Open(fmt.Sprintf("/proc/%d/root%s/%s", pid, dir, name), unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		return fd
	}
	for _, name := range []string{"flock", "flock-shared"} {
		fd := open(name)
		switch err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB); {
		case errors.Is(err, unix.EWOULDBLOCK):
			found = append(found, name+": held")
		case err != nil:
			t.Fatal(err)
		}
		unix.Close(fd)
	}
	for _, at := range []struct {
		name  string
		start int64
	}{{"ofd", 7}, {"mapped", 120}, {"mapped", 128}, {"posix", 15}, {"posix", 30}, {"posix", 50}, {"posix", 1000}} {
		fd := open(at.name)
		l := unix.Flock_t{Type: unix.F_WRLCK, Start: at.start, Len: 1}
		if err := unix.FcntlFlock(uintptr(fd), unix.F_GETLK, &l); err != nil {
			t.Fatal(err)
		}
		unix.Close(fd)
		if l.Type != unix.F_UNLCK {
			found = append(found, fmt.Sprintf("%s: %s %d+%d", at.name, map[int16]string{unix.F_RDLCK: "read", unix.F_WRLCK: "write"}[l.Type], l.Start, l.Len))
		}
	}
	// To open the file would break a lease.
	for _, name := range []string{"lease", "lease-write"} {
		links, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
		if err != nil {
			t.Fatal(err)
		}
		for _, link := range links {
			if to, _ := os.Readlink(link); to != dir+"/"+name {
				continue
			}
			info, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%s", pid, filepath.Base(link)))
			if err != nil {
				t.Fatal(err)
			}
			for line := range strings.Lines(string(info)) {
				if f := strings.Fields(line); f[0] == "lock:" {
					found = append(found, name+": "+strings.Join(f[2:5], " "))
				}
			}
		}
	}
	return found
}

func expectLocks(t *testing.T, k *harness.Container, dir string) {
	t.Helper()
	if got := locksOf(t, k, dir); !slices.Equal(got, held) {
		t.Errorf("%s holds\n%q, want\n%q", dir, got, held)
	}
}

// restoreInPlace starts a container anew from a directory, as nerdctl and Docker do.
func restoreInPlace(t *testing.T, k *harness.Container, dir string) {
	t.Helper()
	ctr(t, shared, "tasks", "delete", k.ID)
	container, err := shared.Client().LoadContainer(t.Context(), k.ID)
	if err != nil {
		t.Fatal(err)
	}
	task, err := container.NewTask(t.Context(), cio.LogFile(filepath.Join(t.TempDir(), "log")), client.WithRestoreImagePath(dir))
	if err == nil {
		err = task.Start(t.Context())
	}
	if err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(3000))
	}
}

// Locks of every kind come back, whatever the client says of them: those of the container's files and
// those on a volume, of one process and of several, and a POSIX lock on a file that is mapped as well.
func TestFileLocks(t *testing.T) {
	results.Add(t)
	eachKind(t, func(t *testing.T, spec harness.RunSpec, work string) {
		for _, dir := range []string{"/locks", "/volume"} {
			spec.Mounts, spec.ID = volume(t), harness.Name(t)+strings.ReplaceAll(dir, "/", "-")
			if dir == "/locks" {
				dir = "/" // the image has no folder to write to
			}
			k := shared.Work(t, spec, work, "--locks", dir)
			k.Expect(t, "count", "101")
			dir = strings.TrimSuffix(dir, "/")
			harness.Within(t, "all its processes have their locks", func() bool { return slices.Equal(locksOf(t, k, dir), held) })
			ref := takeCheckpoint(t, shared, k, "image"+strings.ReplaceAll(dir, "/", "-")) // its request asks for locks
			expectLocks(t, k, dir)
			k.MustRemove(t)
			k = restore(t, shared, k.ID, ref, k.Port)
			k.Expect(t, "count", "102")
			expectLocks(t, k, dir)
			images := t.TempDir()
			if _, err := k.CheckpointTask(t.Context(), harness.TaskCheckpoint{ImagePath: images, Exit: true}); err != nil {
				t.Fatalf("%v\n%s", err, shared.LogTail(3000))
			}
			restoreInPlace(t, k, images)
			k.Expect(t, "count", "103")
			expectLocks(t, k, dir)
			k.MustRemove(t)
		}
	})
}

// So do those of a process that is stopped, and it stays so.
func TestLocksOfStopped(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{}, "plain", "--locks", "/")
	k.Expect(t, "count", "101")
	stop(t, k.MustPid(t))
	dir := t.TempDir()
	hurries(t, func() {
		if _, err := k.CheckpointTask(t.Context(), harness.TaskCheckpoint{ImagePath: dir, Exit: true}); err != nil {
			t.Fatalf("%v\n%s", err, shared.LogTail(3000))
		}
	})
	hurries(t, func() { restoreInPlace(t, k, dir) })
	pid := k.MustPid(t)
	isStopped(t, pid)
	expectLocks(t, k, "")
	if err := unix.Kill(pid, unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	k.Expect(t, "count", "102")
	expectLocks(t, k, "")
}

// So do those of another user's processes, of whom CRIU's sandbox may else read nothing.
func TestLocksOfAnotherUser(t *testing.T) {
	results.Add(t)
	spec := harness.RunSpec{Mounts: volume(t), Amend: []oci.SpecOpts{oci.WithUIDGID(1000, 1000), oci.WithCapabilities(nil)}}
	if err := os.Chmod(spec.Mounts[0].Source, 0o777); err != nil {
		t.Fatal(err)
	}
	k := shared.Work(t, spec, "plain", "--locks", "/volume")
	k.Expect(t, "count", "101")
	harness.Within(t, "all its processes have their locks", func() bool { return slices.Equal(locksOf(t, k, "/volume"), held) })
	dir := t.TempDir()
	if _, err := k.CheckpointTask(t.Context(), harness.TaskCheckpoint{ImagePath: dir, Exit: true}); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(3000))
	}
	restoreInPlace(t, k, dir)
	k.Expect(t, "count", "102")
	expectLocks(t, k, "/volume")
}

// A command without options for locks takes them as well.
func TestFileLocksByCommand(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{}, "plain", "--locks", "/")
	k.Expect(t, "count", "101")
	ref := "checkpoint.test/" + k.ID + ":1"
	var made struct{}
	if err := shared.Gpuckpt(t.Context(), &made, "checkpoint", k.ID, "--image", ref); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(3000))
	}
	removeImageAtEnd(t, shared, ref)
	k.MustRemove(t)
	r := shared.Work(t, harness.RunSpec{ID: k.ID, Image: ref, Port: k.Port, Annotations: map[string]string{"dev.gpuckpt.restore": "true"}}, "plain", "--locks", "/")
	r.Expect(t, "count", "102")
	expectLocks(t, r, "")
}

// A lock on a volume that another program has taken meanwhile ends the restore, at once and with the
// names of the file and of the program. Once that has let go the same checkpoint is restored.
func TestLockTaken(t *testing.T) {
	results.Add(t)
	eachKind(t, func(t *testing.T, spec harness.RunSpec, work string) {
		spec.Mounts, spec.ID = volume(t), ""
		k := shared.Work(t, spec, work, "--locks", "/volume")
		k.Expect(t, "count", "101")
		ref := takeCheckpoint(t, shared, k, "1")
		k.MustRemove(t)
		for name, take := range map[string]func(fd int) error{
			"flock": func(fd int) error { return unix.Flock(fd, unix.LOCK_SH) },
			"mapped": func(fd int) error {
				return unix.FcntlFlock(uintptr(fd), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK})
			},
		} {
			fd, err := unix.Open(filepath.Join(spec.Mounts[0].Source, name), unix.O_RDWR|unix.O_CLOEXEC, 0)
			if err == nil {
				err = take(fd)
			}
			if err != nil {
				t.Fatal(err)
			}
			_, err = shared.Restore(t.Context(), k.ID, ref, k.Port)
			harness.Says(t, err, "on /volume/"+name, "process "+strconv.Itoa(os.Getpid()), "let go")
			unix.Close(fd)
			if err := shared.Remove(t.Context(), k.ID); err != nil {
				t.Fatal(err)
			}
		}
		k = restore(t, shared, k.ID, ref, k.Port)
		k.Expect(t, "count", "102")
		expectLocks(t, k, "/volume")
	})
}

// A lock without a descriptor, on a file that is mapped alone, would be lost: the checkpoint is
// refused, also one that was to end the container, which runs on.
func TestHiddenLock(t *testing.T) {
	results.Add(t)
	eachKind(t, func(t *testing.T, spec harness.RunSpec, work string) {
		spec.Mounts, spec.ID = volume(t), "" // in overlayfs a mapping keeps no lock
		k := shared.Work(t, spec, work, "--hidden-lock", "/volume/hidden")
		k.Expect(t, "count", "101")
		err := k.Checkpoint(t.Context(), "checkpoint.test/"+k.ID+":1")
		harness.Says(t, err, "write lock (flock) on /volume/hidden, which it has not open")
		_, err = k.CheckpointTask(t.Context(), harness.TaskCheckpoint{ImagePath: t.TempDir(), Exit: true})
		harness.Says(t, err, "write lock (flock) on /volume/hidden, which it has not open")
		k.Expect(t, "count", "102")
	})
}
