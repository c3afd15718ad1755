// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/internal/gpu/interposer"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// withInterposer is a container with the interposer and a GPU.
func withInterposer() harness.RunSpec {
	return harness.RunSpec{GPUs: []int{0}, Annotations: map[string]string{annotations.Interposer: "true"}}
}

// interposerArea checks that the last checkpoint of a process has GPU state by the interposer, and by the
// driver.
func interposerArea(t *testing.T, ref string, want int) {
	t.Helper()
	if areas := metadataOf(t, shared, ref).Processes[0].Areas; len(areas) != want {
		t.Errorf("%s has %d areas, want %d", ref, len(areas), want)
	}
}

// A program whose memory its interposer makes, above the threshold and below: it runs on, is restored,
// checkpointed once more as the restored program that it is, and every bit is right each time.
func TestInterposer(t *testing.T) {
	spec := withInterposer()
	dirs := []string{"/opt", "/usr/local"} // the library needs none of them
	if gpu.Kind == harness.RealGPU {
		dirs = dirs[:1] // the driver's files may be mounted below the other
	}
	for _, dir := range dirs {
		spec.Mounts = append(spec.Mounts, specs.Mount{Type: "bind", Source: t.TempDir(), Destination: dir, Options: []string{"bind", "ro"}})
	}
	k := shared.Work(t, spec, "pattern", "--bytes", "24M", "--chunks", "3", "--seed", "7")
	k.Expect(t, "verify", "bad=0")
	k.Expect(t, "count", "101") // in memory of a module's
	first := takeCheckpoint(t, shared, k, "1")
	interposerArea(t, first, 2)
	k.Expect(t, "count", "102")
	k.Expect(t, "verify", "bad=0") // it was left running
	k.Expect(t, "write 250", "wrote 250")
	second := takeCheckpoint(t, shared, k, "2")
	k.MustRemove(t)

	r := restore(t, shared, k.ID, second, k.Port)
	r.Expect(t, "verify", "bad=0")
	r.Expect(t, "write 900", "wrote 900")
	third := takeCheckpoint(t, shared, r, "3")
	interposerArea(t, third, 2)
	r.Expect(t, "verify", "bad=0")
	r.MustRemove(t)
	for _, ref := range []string{third, first} {
		r = restore(t, shared, k.ID, ref, k.Port)
		r.Expect(t, "verify", "bad=0")
		r.MustRemove(t)
	}
}

// Two processes that share GPU memory by CUDA IPC or by a handle, with the interposer: they run on after a checkpoint, are
// restored, checkpointed once more as the restored programs that they are, and suspended. The memory is
// saved once, by the process that made it. In one case the two have a GPU each, if there are two.
func TestInterposerShared(t *testing.T) {
	for _, test := range []struct {
		way  string
		gpus []int
	}{{"large", []int{0}}, {"handles", allGPUs()}} {
		t.Run(fmt.Sprint(test.way, " ", len(test.gpus)), func(t *testing.T) {
			used := test.gpus
			spec := withInterposer()
			spec.GPUs, spec.Ports = used, 2
			k := shared.Work(t, spec, "ipc", "--share", test.way, "--bytes", "24M", "--gpus", strconv.Itoa(len(used)))
			k.Expect(t, "count", "101")
			both := func(k *harness.Container, next int) { t.Helper(); bothCount(t, k, next) }
			both(k, 102)
			takeCheckpoint(t, shared, k, "1")
			both(k, 104) // left running
			second := takeCheckpoint(t, shared, k, "2")
			for i, want := range []int{2, 1} {
				if areas := metadataOf(t, shared, second).Processes[i].Areas; len(areas) != want {
					t.Errorf("process %d has %d areas, want %d", i, len(areas), want)
				}
			}
			k.MustRemove(t)
			r := restore(t, shared, k.ID, second, k.Port)
			both(r, 106)
			third := takeCheckpoint(t, shared, r, "3")
			both(r, 108)
			r.MustRemove(t)
			r = restore(t, shared, k.ID, third, k.Port)
			both(r, 108)
			r.MustRemove(t)
		})
	}
}

// Two processes that hand memory to each other all the time, by events of CUDA IPC that are new now and then: with the
// interposer they run on after a checkpoint, are restored, and are checkpointed and restored twice more. Without it they
// are refused, and with it if they have the driver make the events.
func TestInterposerSharedEvents(t *testing.T) {
	spec := withInterposer()
	spec.Ports = 2
	k := shared.Work(t, spec, "ipc", "--share", "events", "--bytes", "24M")
	k.Expect(t, "count", "101")
	takeTurns(t, k)
	takeCheckpoint(t, shared, k, "1")
	takeTurns(t, k) // left running
	bothCount(t, k, 102)
	for i := range 3 {
		next := 104 + 2*i
		ref := takeCheckpoint(t, shared, k, strconv.Itoa(i+2))
		k.MustRemove(t)
		k = restore(t, shared, k.ID, ref, k.Port)
		takeTurns(t, k)
		bothCount(t, k, next)
	}
	k.MustRemove(t)

	spec.Env = []string{"GPUCKPT_INTERPOSER_EVENTS=off"}
	for _, spec := range []harness.RunSpec{spec, {GPUs: []int{0}, Ports: 2}} {
		without := shared.Work(t, spec, "ipc", "--share", "events", "--bytes", "24M")
		without.Expect(t, "count", "101")
		takeTurns(t, without)
		if err := checkpointTask(t, shared, without, t.TempDir()); err == nil {
			t.Fatal("a checkpoint with events of the driver's was accepted")
		} else if spec.Annotations == nil {
			harness.Says(t, err, "shares GPU memory")
		} else {
			harness.Says(t, err, "does not bring back", "GPUCKPT_INTERPOSER_EVENTS=off")
		}
		takeTurns(t, without)
		without.MustRemove(t)
	}
}

// takeTurns waits until two processes have handed their memory to each other some times more, each time rightly.
func takeTurns(t *testing.T, k *harness.Container) {
	t.Helper()
	for _, p := range []*harness.Container{k, k.Process(1)} {
		first := -1
		for began := time.Now(); ; time.Sleep(10 * time.Millisecond) {
			n, wrong := 0, 0
			reply := p.Answer(t, "turns")
			if _, err := fmt.Sscanf(reply, "turns=%d wrong=%d", &n, &wrong); err != nil || wrong != 0 {
				t.Fatalf("%q: %v", reply, err)
			}
			if first < 0 {
				first = n
			}
			if n >= first+20 {
				break
			}
			if time.Since(began) > 30*time.Second {
				t.Fatal("they take no turns any more: ", reply)
			}
		}
	}
}

// A process that is on its way to memory of one that is checkpointed has it then.
func TestInterposerSharedStarting(t *testing.T) {
	spec := withInterposer()
	spec.Ports = 2
	spec.Env = []string{"SOFTCUDA_CONTEXT_DELAY_MS=400"}
	k := shared.Work(t, spec, "ipc", "--share", "large", "--bytes", "8M")
	k.Expect(t, "count", "101")
	ref := takeCheckpoint(t, shared, k, "starting")
	bothCount(t, k, 102)
	if gpu.Kind != harness.SoftwareGPU { // which would have it in cuInit: docs/limits.md
		return
	}
	k.MustRemove(t)
	bothCount(t, restore(t, shared, k.ID, ref, k.Port), 102)
}

// bothCount checks that two processes that share memory, which the second imports, go on with it.
func bothCount(t *testing.T, k *harness.Container, next int) {
	t.Helper()
	k.Process(1).Expect(t, "count", strconv.Itoa(next))
	k.Expect(t, "count", strconv.Itoa(next+1))
	k.Expect(t, "verify", "bad=0")
	k.Process(1).Expect(t, "verify", "bad=0")
}

// Failures on the way leave processes that share GPU memory by their interposers as they were.
func TestInterposerSharedUndone(t *testing.T) {
	if gpu.Kind != harness.SoftwareGPU {
		t.Skip("a real driver makes no faults on demand")
	}
	spec := withInterposer()
	spec.Ports = 2
	k := shared.Work(t, spec, "ipc", "--share", "large", "--bytes", "8M")
	k.Expect(t, "count", "101")
	next := 102
	for _, step := range []string{"lock", "checkpoint"} {
		undo := shared.SoftwareGPU(t, "fail="+step+":304:1\n")
		err := k.Checkpoint(t.Context(), "undone:1")
		undo()
		harness.Says(t, err, step)
		bothCount(t, k, next)
		next += 2
	}
	takeCheckpoint(t, shared, k, "undone")
	bothCount(t, k, next)
}

// What the interposer does not make itself is refused as without it: CUDA IPC of memory below its threshold,
// and host memory.
func TestInterposerSharedRefused(t *testing.T) {
	for way, words := range map[string][]string{
		"ipc":  {"shares GPU memory", "NCCL_P2P_DISABLE=1"},
		"host": {"has host memory of the driver", "NCCL_CUMEM_HOST_ENABLE=0"},
	} {
		spec := withInterposer()
		spec.Ports = 2
		k := shared.Work(t, spec, "ipc", "--share", way)
		k.Expect(t, "count", "101")
		k.Process(1).Expect(t, "count", "102")
		harness.Says(t, checkpointTask(t, shared, k, t.TempDir()), words...)
		k.Expect(t, "count", "103")
		k.Process(1).Expect(t, "count", "104")
		k.MustRemove(t)
	}
}

// Managed memory that host and GPU both count in: a little of it is left running, restored, and checkpointed once more as
// the restored program's. More is refused, and runs on.
func TestInterposerManaged(t *testing.T) {
	k := shared.Work(t, withInterposer(), "managed", "--bytes", "64K")
	k.Expect(t, "count", "101")
	takeCheckpoint(t, shared, k, "managed-1")
	k.Expect(t, "count", "102") // left running
	second := takeCheckpoint(t, shared, k, "managed-2")
	k.Expect(t, "count", "103")
	k.MustRemove(t)
	r := restore(t, shared, k.ID, second, k.Port)
	r.Expect(t, "count", "103")
	third := takeCheckpoint(t, shared, r, "managed-3")
	r.MustRemove(t)
	r = restore(t, shared, k.ID, third, k.Port)
	r.Expect(t, "count", "104")
	r.MustRemove(t)

	large := shared.Work(t, withInterposer(), "managed", "--bytes", "4M")
	large.Expect(t, "count", "101")
	harness.Says(t, checkpointTask(t, shared, large, t.TempDir()), "CUDA_ERROR_NOT_SUPPORTED", "managed memory", annotations.Interposer)
	large.Expect(t, "count", "102")
	large.MustRemove(t)
}

// An interposer without memory of its own does nothing, and a container without the annotation has none.
func TestInterposerWithoutWork(t *testing.T) {
	for name, spec := range map[string]harness.RunSpec{"small": withInterposer(), "none": {GPUs: []int{0}}} {
		k := shared.Work(t, spec, "pattern", "--bytes", "1M", "--chunks", "1")
		k.Expect(t, "verify", "bad=0")
		ref := takeCheckpoint(t, shared, k, "without-work-"+name)
		interposerArea(t, ref, 1)
		k.Expect(t, "verify", "bad=0")
		maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", k.MustPid(t)))
		if err != nil {
			t.Fatal(err)
		}
		if has := strings.Contains(string(maps), interposer.InContainer); has != (name == "small") {
			t.Errorf("%s: the program has the interposer: %v", name, has)
		}
		k.MustRemove(t)
	}
}

// Failures on the way, and the death of who works for the shim, cost the program nothing: it runs on with
// its memory, and the next checkpoint is good.
func TestInterposerUndone(t *testing.T) {
	if gpu.Kind != harness.SoftwareGPU {
		t.Skip("a real driver makes no faults on demand")
	}
	k := shared.Work(t, withInterposer(), "pattern", "--bytes", "16M", "--chunks", "2")
	k.Expect(t, "verify", "bad=0") // it uses CUDA from here on
	for _, test := range []struct{ name, soft, words string }{
		{"lock", "fail=lock:304:1\n", "lock"},
		{"unlock", "fail=unlock:304:1\n", "unlock"},
		{"checkpoint", "fail=checkpoint:304:1\n", "checkpoint"},
	} {
		undo := shared.SoftwareGPU(t, test.soft)
		err := k.Checkpoint(t.Context(), "undone:1")
		undo()
		harness.Says(t, err, test.words)
		goesOn(t, k)
	}
	for _, kill := range []struct {
		name string
		do   func(t *testing.T, shim int)
	}{{"helper", killHelper}, {"tracer", killTracer}} {
		for _, delay := range []string{"lock_delay_ms=500", "checkpoint_delay_ms=20000"} { // the interposer has saved its memory before either
			undo := shared.SoftwareGPU(t, delay+"\n")
			done := make(chan error, 1)
			go func() { done <- k.Checkpoint(t.Context(), "killed:1") }()
			inCheckpoint(t, k)
			kill.do(t, shimOf(t, k))
			undo()
			if err := <-done; err == nil {
				removeImageAtEnd(t, shared, "killed:1")
			}
			goesOn(t, k)
		}
	}
	interposerArea(t, takeCheckpoint(t, shared, k, "undone"), 2)
	goesOn(t, k)
}

// A pause alone moves no GPU memory and keeps the program off the GPU. Checkpoints in one pause, also after
// one that failed, have the interposer's memory each.
func TestInterposerPaused(t *testing.T) {
	k := shared.Work(t, withInterposer(), "pattern", "--bytes", "16M", "--chunks", "2")
	k.Expect(t, "verify", "bad=0")
	before := resident(t, k.MustPid(t))
	ctr(t, shared, "tasks", "pause", k.ID)
	if now := resident(t, k.MustPid(t)); now > before+8<<20 {
		t.Errorf("the paused program has %d bytes of memory, and had %d", now, before)
	}
	ctr(t, shared, "tasks", "resume", k.ID)
	goesOn(t, k)
	ctr(t, shared, "tasks", "pause", k.ID)
	for range 2 {
		checkpointInto(t, shared, k, t.TempDir())
	}
	if gpu.Kind == harness.SoftwareGPU {
		for _, fault := range []string{"fail=lock:304\n", "fail=checkpoint:304:1\n"} {
			undo := shared.SoftwareGPU(t, fault)
			harness.Says(t, checkpointTask(t, shared, k, t.TempDir()), "save GPU state")
			undo()
		}
	}
	checkpointInto(t, shared, k, t.TempDir())
	ctr(t, shared, "tasks", "resume", k.ID)
	goesOn(t, k)
	interposerArea(t, takeCheckpoint(t, shared, k, "paused"), 2)
	goesOn(t, k)
}

// resident returns the bytes of memory that a process has.
func resident(t *testing.T, pid int) (bytes uint64) {
	t.Helper()
	status, err := proc.StatusOf(pid)
	if err != nil {
		t.Fatal(err)
	}
	return status.Bytes("VmRSS")
}
