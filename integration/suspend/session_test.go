// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package suspend

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// gpuckpt runs the command line on a containerd.
func gpuckpt(t *testing.T, c *harness.Containerd, command string, args ...string) error {
	t.Helper()
	program, err := bins.Path("gpuckpt")
	if err != nil {
		t.Fatal(err)
	}
	args = append([]string{command, "--address", c.Address(), "--namespace", c.Namespace()}, args...)
	t.Logf("gpuckpt %s", strings.Join(args, " "))
	out, err := exec.CommandContext(t.Context(), program, args...).CombinedOutput()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return fmt.Errorf("exit code %d: %s", exit.ExitCode(), strings.TrimSpace(string(out)))
	}
	if err != nil {
		t.Fatal(err)
	}
	if len(out) > 0 {
		t.Fatalf("gpuckpt %s says %q", command, out)
	}
	return nil
}

// suspend and resume want to succeed.
func suspend(t *testing.T, c *harness.Containerd, k *harness.Container, flags ...string) {
	t.Helper()
	if err := gpuckpt(t, c, "suspend", append(flags, k.ID)...); err != nil {
		t.Fatalf("%v\n%s", err, c.LogTail(4000))
	}
	isPaused(t, c, k, true)
}

func resume(t *testing.T, c *harness.Containerd, k *harness.Container, flags ...string) {
	t.Helper()
	if err := gpuckpt(t, c, "resume", append(flags, k.ID)...); err != nil {
		t.Fatalf("%v\n%s", err, c.LogTail(4000))
	}
	isPaused(t, c, k, false)
}

// isPaused checks the container's state as "ctr tasks ls" lists it, and in the
// kernel's eyes.
func isPaused(t *testing.T, c *harness.Containerd, k *harness.Container, want bool) {
	t.Helper()
	listed, err := c.Ctr(t.Context(), "tasks", "ls")
	if err != nil {
		t.Fatal(err)
	}
	status := ""
	for line := range strings.Lines(listed) {
		if fields := strings.Fields(line); fields[0] == k.ID {
			status = fields[2]
		}
	}
	frozen, err := harness.Frozen(k.MustPid(t))
	if err != nil {
		t.Fatal(err)
	}
	words := map[bool]string{true: "PAUSED", false: "RUNNING"}
	if status != words[want] || frozen != want {
		t.Fatalf("%s is %s, frozen: %v; want it %s", k.ID, status, frozen, words[want])
	}
}

// survey asks NVML about the machine's GPUs, as nvidia-smi does.
func survey(t *testing.T) cuda.Survey {
	t.Helper()
	path, err := bins.Path(cuda.HelperName)
	if err != nil {
		t.Fatal(err)
	}
	h, err := cuda.Start(t.Context(), cuda.Options{Path: path, Env: shared.HostEnv()})
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	s, err := h.Survey(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// memory is one GPU's free memory, and what a container's process has of it.
func memory(t *testing.T, index int, k *harness.Container) (free, has uint64) {
	t.Helper()
	pid := k.MustPid(t)
	for _, d := range survey(t).Devices {
		if d.UUID != gpu.Devices[index].UUID {
			continue
		}
		for _, u := range d.Users {
			if u.PID == pid {
				has += u.Bytes
			}
		}
		return d.Free, has
	}
	t.Fatalf("NVML does not list GPU %d", index)
	return 0, 0
}

// hasNone checks by NVML that a suspended container has 0 MiB of a GPU, and
// that it is no user of it any more.
func hasNone(t *testing.T, index int, k *harness.Container, before uint64) {
	t.Helper()
	free, has := memory(t, index, k)
	if has != 0 {
		t.Errorf("NVML counts %d bytes for the suspended container", has)
	}
	if free <= before {
		t.Errorf("GPU %d has %d bytes free, as before the suspension (%d)", index, free, before)
	}
	for fd, name := range openFiles(t, k.MustPid(t)) {
		if strings.HasPrefix(name, "/dev/nvidia") {
			t.Errorf("the suspended process has %s open (%s)", name, fd)
		}
	}
}

// openFiles are the files that a process has open, by descriptor.
func openFiles(t *testing.T, pid int) map[string]string {
	t.Helper()
	fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil {
		t.Fatal(err)
	}
	files := make(map[string]string)
	for _, fd := range fds {
		if name, err := os.Readlink(fd); err == nil {
			files[fd] = name
		}
	}
	return files
}

// stagingMemory is the memory that GPU state takes on the host, in bytes; what
// the page cache has of files on disks is not counted.
func stagingMemory(t *testing.T, cgroup string) uint64 {
	t.Helper()
	root := "/sys/fs/cgroup/memory"
	if harness.CgroupVersion() == 2 {
		root = "/sys/fs/cgroup"
	}
	data, err := os.ReadFile(filepath.Join(root, shared.StagingCgroup(cgroup), "memory.stat"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		if text, ok := strings.CutPrefix(line, "shmem "); ok {
			n, err := strconv.ParseUint(strings.TrimSpace(text), 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatalf("no shmem in %q", data)
	return 0
}

// diskDir is a directory of the test's on a disk.
func diskDir(t *testing.T) string {
	t.Helper()
	dir := harness.DiskDir(t)
	t.Cleanup(func() {
		if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Errorf("left in the spill directory: %v, error %v", left, err)
		}
	})
	return dir
}
