// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// statusLine is a line of a process's status: "T (stopped)" for State.
func statusLine(pid int, name string) string {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	_, rest, _ := strings.Cut("\n"+string(text), "\n"+name+":")
	line, _, _ := strings.Cut(rest, "\n")
	return strings.TrimSpace(line)
}

// stopChild stops the one child of a container's first process, as Ctrl-Z does, and returns its pid.
func stopChild(t *testing.T, k *harness.Container) int {
	t.Helper()
	pid := onlyChild(t, k)
	stop(t, pid)
	return pid
}

func onlyChild(t *testing.T, k *harness.Container) int {
	t.Helper()
	children := childrenOf(k.MustPid(t), "gpuwork")
	if len(children) != 1 {
		t.Fatalf("%d children", len(children))
	}
	return children[0]
}

func stop(t *testing.T, pid int) {
	t.Helper()
	if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	isStopped(t, pid)
}

func isStopped(t *testing.T, pid int) {
	t.Helper()
	harness.Within(t, "the process is stopped", func() bool { return statusLine(pid, "State") == "T (stopped)" })
}

// hurries runs what may not take as long as a wait that only its bound ends.
func hurries(t *testing.T, do func()) {
	t.Helper()
	began := time.Now()
	do()
	if took := time.Since(began); took > 45*time.Second {
		t.Errorf("it took %v", took)
	}
}

// A process that is stopped is checkpointed with its container, comes back stopped, and goes on with
// SIGCONT: in a container with CUDA and in one without, paused by its client and not, also twice in one
// pause. What is left running runs, and what was stopped is stopped.
func TestStoppedProcess(t *testing.T) {
	results.Add(t)
	testStopped(t, shared, map[string]harness.RunSpec{"beside": {GPUs: []int{0}}, "plainbeside": {}})
}

func testStopped(t *testing.T, c *harness.Containerd, programs map[string]harness.RunSpec) {
	for program, spec := range programs {
		for _, before := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, paused %v", program, before), func(t *testing.T) {
				k := c.Work(t, spec, program)
				paused := func(want bool) {
					if c == shared { // else this program does not see the cgroup
						isPaused(t, k, want)
					}
				}
				k.Expect(t, "count", "101")
				k.Process(1).Expect(t, "count", "101")
				pid := stopChild(t, k)
				dir := t.TempDir()
				if before {
					ctr(t, c, "tasks", "pause", k.ID)
					hurries(t, func() { checkpointInto(t, c, k, t.TempDir()) })
					paused(true)
				}
				hurries(t, func() { checkpointInto(t, c, k, dir) })
				paused(before)
				if before {
					ctr(t, c, "tasks", "resume", k.ID)
				}
				isStopped(t, pid)
				k.Expect(t, "count", "102")
				if err := unix.Kill(pid, unix.SIGCONT); err != nil {
					t.Fatal(err)
				}
				k.Process(1).Expect(t, "count", "102")
				endTask(t, c, k)

				if err := restoreTask(t, c, k, dir); err != nil {
					t.Fatalf("%v\n%s", err, c.LogTail(3000))
				}
				k.Expect(t, "count", "102")
				pid = onlyChild(t, k)
				isStopped(t, pid)
				if err := unix.Kill(pid, unix.SIGCONT); err != nil {
					t.Fatal(err)
				}
				k.Process(1).Expect(t, "count", "102")
			})
		}
	}
}

// A container whose checkpoint ends it may have a stopped process as well.
func TestStoppedProcessExit(t *testing.T) {
	results.Add(t)
	for program, spec := range map[string]harness.RunSpec{"beside": {GPUs: []int{0}}, "plainbeside": {}} {
		t.Run(program, func(t *testing.T) {
			k := shared.Work(t, spec, program)
			k.Expect(t, "count", "101")
			stopChild(t, k)
			dir := t.TempDir()
			hurries(t, func() {
				if _, err := k.CheckpointTask(t.Context(), harness.TaskCheckpoint{ImagePath: dir, Exit: true}); err != nil {
					t.Fatal(err)
				}
			})
			ctr(t, shared, "tasks", "delete", k.ID)
			if err := restoreTask(t, shared, k, dir); err != nil {
				t.Fatal(err)
			}
			isStopped(t, onlyChild(t, k))
			k.Expect(t, "count", "102")
		})
	}
}

// A CUDA process that is stopped is refused before anything is touched, with what to do. The container
// is as it was, and its checkpoint succeeds when the process goes on.
func TestStoppedCUDAProcess(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	pid := k.MustPid(t)
	stop(t, pid)
	words := []string{fmt.Sprintf("process %d (gpuwork) uses a GPU and is stopped", pid), "kill -CONT"}
	hurries(t, func() { harness.Says(t, checkpointTask(t, shared, k, t.TempDir()), words...) })
	isPaused(t, k, false)
	isStopped(t, pid)
	ctr(t, shared, "tasks", "pause", k.ID)
	hurries(t, func() { harness.Says(t, checkpointTask(t, shared, k, t.TempDir()), words...) })
	isPaused(t, k, true)
	ctr(t, shared, "tasks", "resume", k.ID)
	isStopped(t, pid)
	if err := unix.Kill(pid, unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	k.Expect(t, "count", "102")
	checkpointInto(t, shared, k, t.TempDir())
	k.Expect(t, "count", "103")
}

// A process that a debugger has is refused, at once and by its name, whether it runs or the debugger has
// stopped it. The container runs on.
func TestTracedProcess(t *testing.T) {
	results.Add(t)
	for program, spec := range map[string]harness.RunSpec{"beside": {GPUs: []int{0}}, "plainbeside": {}} {
		for _, stops := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, stopped %v", program, stops), func(t *testing.T) {
				runtime.LockOSThread() // ptrace is the thread's
				defer runtime.UnlockOSThread()
				k := shared.Work(t, spec, program)
				k.Expect(t, "count", "101")
				pid := onlyChild(t, k)
				if err := unix.PtraceSeize(pid); err != nil {
					t.Fatal(err)
				}
				interrupt := func() {
					if err := unix.PtraceInterrupt(pid); err != nil {
						t.Fatal(err)
					}
					if _, err := unix.Wait4(pid, nil, unix.WALL, nil); err != nil {
						t.Fatal(err)
					}
				}
				if stops {
					interrupt()
				}
				var err error
				hurries(t, func() { err = checkpointTask(t, shared, k, t.TempDir()) })
				isPaused(t, k, false)
				k.Expect(t, "count", "102")
				if !stops {
					interrupt()
				}
				if err := unix.PtraceDetach(pid); err != nil {
					t.Fatal(err)
				}
				harness.Says(t, err, fmt.Sprint(pid), fmt.Sprintf("is traced by process %d", os.Getpid()), "a debugger")
				checkpointInto(t, shared, k, t.TempDir())
				k.Process(1).Expect(t, "count", "101")
			})
		}
	}
}

// A CRIU that is killed leaves a container running that nobody had paused.
func TestKilledInDumpWithoutCUDA(t *testing.T) {
	results.Add(t)
	for try := 0; ; try++ {
		k := shared.Work(t, harness.RunSpec{}, "plainbeside")
		k.Expect(t, "count", "101")
		harness.Says(t, killInDump(t, k, func(_, criu int) int { return criu }), "CRIU was killed")
		if status, err := k.Status(t.Context()); err != nil || status == client.Stopped && try < tries {
			k.MustRemove(t) // it had CRIU's code in it: docs/limits.md
			continue
		}
		isPaused(t, k, false)
		k.Expect(t, "count", "102")
		return
	}
}

// Names that are no text, of a file and of the process, come out in words that can be seen, wherever
// they come out. The shim lives, and with it the container.
func TestOddNames(t *testing.T) {
	results.Add(t)
	for name, test := range map[string]struct {
		spec harness.RunSpec
		args []string
	}{
		"with CUDA": {harness.RunSpec{GPUs: []int{0}}, []string{"oddly"}},
		"without":   {harness.RunSpec{}, []string{"oddly", "--gpu", "-1"}},
	} {
		t.Run(name, func(t *testing.T) {
			test.spec.Mounts = volume(t)
			k := shared.Work(t, test.spec, test.args...)
			k.Expect(t, "count", "101")
			shim, from := shimOf(t, k), len(shared.Log())
			err := checkpointTask(t, shared, k, t.TempDir())
			// The kernel writes a new line in a mapping's name so.
			harness.Says(t, err, `write lock (flock) on /volume/odd\x1b[31m\012level=fatal msg=forged \xff, which it has not open`)
			if shimOf(t, k) != shim {
				t.Error("the shim has ended")
			}
			k.Expect(t, "count", "102")
			if test.spec.GPUs != nil {
				pid := k.MustPid(t)
				stop(t, pid)
				harness.Says(t, checkpointTask(t, shared, k, t.TempDir()), fmt.Sprintf(`process %d (\xff\x1b[31m) uses a GPU and is stopped`, pid))
				if err := unix.Kill(pid, unix.SIGCONT); err != nil {
					t.Fatal(err)
				}
			}
			k.Expect(t, "count", "103")
			if log := shared.Log()[from:]; strings.Contains(log, "\x1b[31m") || strings.Contains(log, "\nlevel=fatal msg=forged") {
				t.Errorf("containerd's log:\n%q", log)
			}
		})
	}
}
