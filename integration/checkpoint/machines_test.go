// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// What a machine may have otherwise than this one, as far as it can be made here: a container is
// checkpointed, suspended, resumed and restored.
func TestOtherMachines(t *testing.T) {
	t.Run("native snapshotter", func(t *testing.T) {
		thereAndBack(t, session.Own(t, harness.Options{Snapshotter: "native"}), harness.RunSpec{GPUs: []int{0}})
	})
	t.Run("mounts that systemd shares", func(t *testing.T) {
		if err := unix.Access("/run/systemd/system", unix.F_OK); err == nil {
			t.Skip("every test has them here")
		}
		c := session.Own(t, harness.Options{Bins: inMounts(t, "mount --make-rshared /")})
		k := thereAndBack(t, c, harness.RunSpec{GPUs: []int{0}})
		k.MustRemove(t)
		k = c.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
		k.Expect(t, "count", "101")
		if got := propagationOf(t, k.MustPid(t), "/etc/resolv.conf"); !strings.HasPrefix(got, "master:") {
			t.Errorf("%q, want that mounts come to it", got)
		}
	})
	t.Run("cgroup version 2", func(t *testing.T) {
		c := shared
		if harness.CgroupVersion() != 2 {
			c = session.Own(t, harness.Options{Bins: unified(t)})
		}
		k := thereAndBack(t, c, harness.RunSpec{GPUs: []int{0}})
		cgroups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", k.MustPid(t)))
		if err != nil || !strings.Contains(string(cgroups), "0::/"+c.Namespace()+"/"+k.ID) {
			t.Errorf("the container's cgroups are %s, error %v; want one of version 2", cgroups, err)
		}
		killedWhileFrozen(t, c, k)
		testStopped(t, c, map[string]harness.RunSpec{"beside": {GPUs: []int{0}}, "plainbeside": {}})
	})
}

// killedWhileFrozen has the first process of a suspended container killed, as the kernel does when
// memory is short. The task can be deleted, though runc finds its cgroup frozen.
func killedWhileFrozen(t *testing.T, c *harness.Containerd, k *harness.Container) {
	t.Helper()
	if _, err := c.OutputEnv(t.Context(), env(c), "gpuckpt", "suspend", k.ID); err != nil {
		t.Fatal(errors.Join(err, errors.New(c.LogTail(3000))))
	}
	exit, err := taskOf(t, c, k).Wait(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	shim := shimOf(t, k)
	if err := unix.Kill(k.MustPid(t), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if code := (<-exit).ExitCode(); code != 128+9 {
		t.Errorf("exit code %d, want 137", code)
	}
	// Something may have thawed it by now, and that is not to be relied on.
	freezer := fmt.Sprintf("/proc/%d/root/sys/fs/cgroup/%s/%s/cgroup.freeze", shim, c.Namespace(), k.ID)
	if err := os.WriteFile(freezer, []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Ctr(t.Context(), "tasks", "delete", k.ID); err != nil {
		t.Fatal(errors.Join(err, errors.New(c.LogTail(3000))))
	}
}

// unified returns the programs with a containerd that sees cgroups of version 2 alone. The kernel has
// its controllers of version 1 in use, so there is the freezer and no limit.
//
// CRIU reads all that lies below a process's cgroups, those of version 1 too. There the containers are
// in cgroups of their own: below the root, another suite's come and go while CRIU reads.
func unified(t *testing.T) harness.Bins {
	t.Helper()
	name := "gpuckpt-unified-" + strconv.Itoa(os.Getpid())
	t.Cleanup(func() {
		left, _ := filepath.Glob("/sys/fs/cgroup/*/" + name)
		for _, dir := range left {
			if err := os.Remove(dir); err != nil {
				t.Error(err)
			}
		}
	})
	return inMounts(t, `for v1 in /sys/fs/cgroup/*/cgroup.clone_children; do
	d=${v1%/*}
	mkdir $d/`+name+` || exit
	for f in cpuset.cpus cpuset.mems; do
		[ ! -e $d/$f ] || cat $d/$f > $d/`+name+`/$f || exit
	done
	echo $$ > $d/`+name+`/cgroup.procs || exit
done
mount --make-rprivate / && umount -lR /sys/fs/cgroup && mount -t cgroup2 cgroup2 /sys/fs/cgroup`)
}

// inMounts returns the programs with a containerd that has a mount namespace of its own, in which a
// command changes the mounts first.
func inMounts(t *testing.T, command string) harness.Bins {
	t.Helper()
	program, err := bins.Path("containerd")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	script := "#!/bin/sh\nexec unshare --mount sh -c '" + command + " && exec " + program + " \"$@\"' containerd \"$@\"\n"
	write(t, filepath.Join(dir, "containerd"), script, 0o755)
	b, err := bins.Before(dir)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// propagationOf returns the optional fields of a process's mount at a path, such as "master:3".
func propagationOf(t *testing.T, pid int, at string) string {
	t.Helper()
	mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		before, _, _ := strings.Cut(line, " - ")
		if fields := strings.Fields(before); len(fields) > 5 && fields[4] == at {
			return strings.Join(fields[6:], " ")
		}
	}
	t.Fatalf("nothing is mounted at %s: %s", at, mounts)
	return ""
}

// thereAndBack takes a container through every operation, and returns it as it was restored.
func thereAndBack(t *testing.T, c *harness.Containerd, spec harness.RunSpec) *harness.Container {
	t.Helper()
	results.Add(t)
	k := c.Work(t, spec, "counter")
	k.Expect(t, "count", "101")
	dir := t.TempDir()
	checkpointInto(t, c, k, dir)
	k.Expect(t, "count", "102")
	for _, operation := range []string{"suspend", "resume"} {
		if _, err := c.OutputEnv(t.Context(), env(c), "gpuckpt", operation, k.ID); err != nil {
			t.Fatal(errors.Join(err, errors.New(c.LogTail(3000))))
		}
	}
	k.Expect(t, "count", "103")
	endTask(t, c, k)
	if err := restoreTask(t, c, k, dir); err != nil {
		t.Fatalf("%v\n%s", err, c.LogTail(3000))
	}
	k.Expect(t, "count", "102")
	return k
}
