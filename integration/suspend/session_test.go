// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package suspend

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/runtime"
)

// patience bounds the wait for something that takes milliseconds as a rule.
const patience = 30 * time.Second

// within waits until something is so.
func within(t *testing.T, what string, so func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !so(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %v", what, patience)
		}
	}
}

// start runs a workload of gpuwork with a port to ask it on. It is removed when
// the test ends.
func start(t *testing.T, c *harness.Containerd, spec harness.RunSpec, args ...string) *harness.Container {
	t.Helper()
	if spec.Port == 0 {
		port, err := harness.FreePort()
		if err != nil {
			t.Fatal(err)
		}
		spec.Port = port
	}
	if spec.ID == "" {
		spec.ID = id(t)
	}
	spec.Args = append(append([]string{"gpuwork"}, args...), "--port", strconv.Itoa(spec.Port))
	k, err := c.Run(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := k.Remove(ctx); err != nil {
			t.Error(err)
		}
	})
	return k
}

// expect asks and wants that answer.
func expect(t *testing.T, k *harness.Container, question, want string) {
	t.Helper()
	if got, err := k.Ask(t.Context(), question); err != nil || got != want {
		t.Fatalf("%q: got %q, error %v; want %q\nits output: %s", question, got, err, want, k.Logs())
	}
}

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

// says checks that an error is there and has all the words.
func says(t *testing.T, err error, words ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error, want one that says %q", words)
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Fatalf("the error does not say %q:\n%v", word, err)
		}
	}
	t.Logf("refused, as it should be: %v", err)
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
	frozen, err := harness.Frozen(pidOf(t, k))
	if err != nil {
		t.Fatal(err)
	}
	words := map[bool]string{true: "PAUSED", false: "RUNNING"}
	if status != words[want] || frozen != want {
		t.Fatalf("%s is %s, frozen: %v; want it %s", k.ID, status, frozen, words[want])
	}
}

func pidOf(t *testing.T, k *harness.Container) int {
	t.Helper()
	pid, err := k.Pid(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return pid
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
	pid := pidOf(t, k)
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
	for fd, name := range openFiles(t, pidOf(t, k)) {
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
func stagingMemory(t *testing.T) uint64 {
	t.Helper()
	root := "/sys/fs/cgroup/memory"
	if harness.CgroupVersion() == 2 {
		root = "/sys/fs/cgroup"
	}
	data, err := os.ReadFile(filepath.Join(root, stagingCgroup(shared), "memory.stat"))
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

// bundleOf is the directory of a container's shim.
func bundleOf(c *harness.Containerd, id string) string {
	return filepath.Join(c.Dir(), "state", "io.containerd.runtime.v2.task", c.Namespace(), id)
}

// notePhases puts the phases of a container's last operation into the results.
func notePhases(t *testing.T, result *harness.TestResult, c *harness.Containerd, id string) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(bundleOf(c, id), runtime.TimelineName))
	if err != nil {
		t.Fatal(err)
	}
	var line runtime.Timeline
	if err := json.Unmarshal(data, &line); err != nil {
		t.Fatal(err)
	}
	for _, p := range line.Phases {
		name := line.Operation + "/" + p.Name
		result.Times[name] = p.Took.Seconds()
		if p.Bytes > 0 {
			result.Number(strings.ReplaceAll(name, " ", "_")+"_bytes", float64(p.Bytes))
		}
	}
	result.Times[line.Operation+"/whole"] = line.Took.Seconds()
}

// diskDir is a directory of the test's on a disk.
func diskDir(t *testing.T) string {
	t.Helper()
	for _, parent := range []string{shared.Dir(), os.TempDir(), "/var/tmp"} {
		var st unix.Statfs_t
		if err := unix.Statfs(parent, &st); err != nil || st.Type == unix.TMPFS_MAGIC {
			continue
		}
		dir, err := os.MkdirTemp(parent, "spill")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			left, err := os.ReadDir(dir)
			if err != nil || len(left) > 0 {
				t.Errorf("left in the spill directory: %v, error %v", left, err)
			}
			if err := os.RemoveAll(dir); err != nil {
				t.Error(err)
			}
		})
		return dir
	}
	t.Fatal("this machine has no disk to spill to: set GPUCKPT_TEST_DIR")
	return ""
}
