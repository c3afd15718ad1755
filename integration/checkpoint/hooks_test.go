// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/pkg/oci"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/internal/operation/quota"
)

const (
	beforeCheckpoint = "dev.gpuckpt.hook.before-checkpoint"
	afterCheckpoint  = "dev.gpuckpt.hook.after-checkpoint"
	afterRestore     = "dev.gpuckpt.hook.after-restore"
	hookTimeout      = "dev.gpuckpt.hook.timeout"
)

// hooked is a counter with hooks, of which each that is "count" counts one: what the program has
// heard is in its memory on the GPU.
func hooked(t *testing.T, hooks map[string]string) *harness.Container {
	t.Helper()
	return hookedProgram(t, []int{0}, hooks, "counter")
}

// hookedProgram is hooked for a program that counts on these GPUs.
func hookedProgram(t *testing.T, gpus []int, hooks map[string]string, program string) *harness.Container {
	t.Helper()
	port, err := harness.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	hooks = maps.Clone(hooks)
	for key, value := range hooks {
		if value == "count" {
			hooks[key] = fmt.Sprintf("gpuwork send 127.0.0.1:%d count", port)
		}
	}
	k := shared.Work(t, harness.RunSpec{GPUs: gpus, Port: port, Annotations: hooks}, program)
	k.Expect(t, "count", "101")
	return k
}

// The program hears of a checkpoint before it, and in time for what it does to be in the checkpoint.
// Then it hears in the old container that it runs on, and in the new one that it was restored.
func TestHooks(t *testing.T) {
	results.Add(t)
	for program, gpus := range map[string][]int{"counter": {0}, "plain": nil} {
		t.Run(program, func(t *testing.T) { testHooks(t, program, gpus) })
	}
}

func testHooks(t *testing.T, program string, gpus []int) {
	k := hookedProgram(t, gpus, map[string]string{beforeCheckpoint: "count", afterCheckpoint: "count", afterRestore: "count"}, program)
	dir := t.TempDir()
	checkpointInto(t, shared, k, dir) // 102 in it, 103
	k.Expect(t, "count", "104")
	ref := takeCheckpoint(t, shared, k, "1") // ctr, which pauses: 105 in it, 106
	k.Expect(t, "count", "107")
	if gpus != nil {
		harness.Says(t, checkpointTask(t, shared, k, dir), "holds a GPU checkpoint already") // 108, 109
		k.Expect(t, "count", "110")
	}
	endTask(t, shared, k)
	if err := restoreTask(t, shared, k, dir); err != nil { // 103
		t.Fatalf("%v\n%s", err, shared.LogTail(3000))
	}
	k.Expect(t, "count", "104")
	k.MustRemove(t)
	r := restore(t, shared, k.ID, ref, k.Port) // 106
	r.Expect(t, "count", "107")
}

// A hook refuses a checkpoint without a GPU too.
func TestHookRefusesWithoutGPU(t *testing.T) {
	results.Add(t)
	k := hookedProgram(t, nil, map[string]string{beforeCheckpoint: "gpuwork exit 3", afterCheckpoint: "count"}, "plain")
	harness.Says(t, checkpointTask(t, shared, k, t.TempDir()), "hook before-checkpoint", "status 3")                                    // 102
	harness.Says(t, k.Checkpoint(t.Context(), "refused:1"), "status 3", "was not ready for a checkpoint when the container was paused") // 103
	isPaused(t, k, false)
	k.Expect(t, "count", "104")
}

// A hook that fails before a checkpoint refuses it, whoever has paused, and the program hears that
// it runs on.
func TestHookRefuses(t *testing.T) {
	results.Add(t)
	for _, test := range []struct {
		name  string
		hooks map[string]string
		says  []string
	}{
		{"status", map[string]string{beforeCheckpoint: "gpuwork exit 3"}, []string{"hook before-checkpoint", `"gpuwork exit 3"`, "status 3"}},
		{"no such program", map[string]string{beforeCheckpoint: `["nothing","there"]`}, []string{"hook before-checkpoint", "nothing"}},
		{"late", map[string]string{beforeCheckpoint: "gpuwork sleep", hookTimeout: "5s"}, []string{"longer than 5s"}},
		{"mistyped", map[string]string{beforeCheckpoint + "s": "gpuwork exit 0"}, []string{"only the hooks"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			hooks := maps.Clone(test.hooks)
			hooks[afterCheckpoint] = "count"
			k := hooked(t, hooks)
			heard := 1
			if test.name == "mistyped" {
				heard = 0 // the annotations say nothing for sure
			}
			err := checkpointTask(t, shared, k, t.TempDir())
			paused := k.Checkpoint(t.Context(), "refused:1")
			harness.Says(t, err, test.says...)
			harness.Says(t, paused, test.says...)
			if heard > 0 {
				harness.Says(t, paused, "was not ready for a checkpoint when the container was paused")
			}
			isPaused(t, k, false)
			k.Expect(t, "count", fmt.Sprint(101+2*heard+1))
			if pid := childOf(shimOf(t, k), "gpuwork sleep"); pid != 0 {
				t.Errorf("the hook's process %d is left", pid)
			}
		})
	}
}

// turns returns the turns that operations have in a cgroup of [staging].
func turns(t *testing.T, cgroup string) []os.DirEntry {
	t.Helper()
	all, err := os.ReadDir(filepath.Join(quota.Dir, "memory"+strings.ReplaceAll("/"+shared.StagingCgroup(cgroup), "/", ":")))
	if err != nil { // each that begins makes it
		t.Fatal(err)
	}
	return all
}

// A hook that does not end holds no turn: other containers of the node are checkpointed meanwhile.
func TestHookHoldsNoTurn(t *testing.T) {
	shared.Configured(t, shared.Staging("turns", fmt.Sprintf("memory_limit = %d", 4<<30)))
	other := shared.Work(t, harness.RunSpec{ID: harness.Name(t) + "-other", GPUs: []int{0}}, "counter")
	other.Expect(t, "count", "101")
	const refused = "after a refused checkpoint"
	for _, when := range []string{beforeCheckpoint, afterCheckpoint, refused, afterRestore} {
		t.Run(when, func(t *testing.T) {
			results.Add(t)
			hook := when
			if when == refused {
				hook = afterCheckpoint
			}
			k := hooked(t, map[string]string{hook: "gpuwork sleep", "dev.gpuckpt.hook.timeout": "1m"})
			dir, do := t.TempDir(), func(dir string) error { return checkpointTask(t, shared, k, dir) }
			switch when {
			case refused:
				write(t, filepath.Join(dir, images.MetadataName), "{}", 0o600)
			case afterRestore:
				checkpointInto(t, shared, k, dir)
				endTask(t, shared, k)
				do = func(dir string) error { return restoreTask(t, shared, k, dir) }
			}
			ended, from := make(chan error, 1), len(shared.Log())
			go func() { ended <- do(dir) }()
			sleeper := 0
			harness.Within(t, "the hook runs", func() bool {
				if pid, err := k.Pid(t.Context()); err == nil && pid > 0 {
					sleeper = childOf(shimOf(t, k), "gpuwork sleep")
				}
				return sleeper != 0
			})
			if when == afterCheckpoint { // beside which files are written, by whom has the turn
				harness.Within(t, "the files are written", func() bool {
					for line := range strings.Lines(shared.Log()[from:]) {
						if strings.Contains(line, "id="+k.ID+" ") && strings.Contains(line, `phase="write metadata"`) {
							return true
						}
					}
					return false
				})
			}
			if had := turns(t, "turns"); len(had) > 0 {
				t.Errorf("while the hook runs its operation has the turn %v", had)
			} else if err := checkpointTask(t, shared, other, t.TempDir()); err != nil {
				t.Errorf("a checkpoint beside the hook: %v", err)
			}
			select {
			case err := <-ended:
				t.Errorf("the hook did not last: %v", err)
			default:
			}
			if err := unix.Kill(sleeper, unix.SIGKILL); err != nil {
				t.Error(err)
			}
			if err := <-ended; (err != nil) != (when == beforeCheckpoint || when == refused) {
				t.Errorf("the operation whose hook was killed: %v", err)
			}
			k.Expect(t, "count", "102")
		})
	}
}

// A hook that fails after a restore ends the container if it is to refuse.
func TestHookAfterRestore(t *testing.T) {
	results.Add(t)
	for _, onFailure := range []string{"log", "refuse"} {
		k := hooked(t, map[string]string{afterRestore: "gpuwork exit 3", afterRestore + ".on-failure": onFailure})
		dir := t.TempDir()
		checkpointInto(t, shared, k, dir)
		endTask(t, shared, k)
		err := restoreTask(t, shared, k, dir)
		if onFailure == "refuse" {
			harness.Says(t, err, "tell restored", "hook after-restore", "status 3")
			nothingRuns(t, shared, k)
		} else if err != nil {
			t.Error(err)
		} else {
			k.Expect(t, "count", "102")
		}
		k.MustRemove(t)
	}
}

func TestHookSignal(t *testing.T) {
	results.Add(t)
	k := hooked(t, map[string]string{afterRestore: "signal:SIGSTOP"})
	dir := t.TempDir()
	checkpointInto(t, shared, k, dir)
	endTask(t, shared, k)
	if err := restoreTask(t, shared, k, dir); err != nil {
		t.Fatal(err)
	}
	pid := k.MustPid(t)
	harness.Within(t, "the program has the signal", func() bool {
		state, err := harness.ProcessState(pid)
		return err == nil && state == "T"
	})
	if err := unix.Kill(pid, unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	k.Expect(t, "count", "102")
}

// restored is what a program can read of its restores.
type restored struct {
	Restores int
	ID       string
	Time     time.Time
}

// restoredOf reads it as the program does; the zero value if there is no file.
func restoredOf(t *testing.T, k *harness.Container) (r restored) {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/root/run/gpuckpt/restored", k.MustPid(t)))
	if errors.Is(err, os.ErrNotExist) {
		return r
	}
	if err == nil {
		err = json.Unmarshal(data, &r)
	}
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// A program can see that it was restored, how often, and which restore of several it is: with ctr's
// tmpfs on /run, without it as nerdctl and CRI have it, and with a root that is read-only.
func TestRestoredFile(t *testing.T) {
	results.Add(t)
	for name, spec := range map[string]harness.RunSpec{
		"tmpfs":     {},
		"root":      {Amend: []oci.SpecOpts{oci.WithoutRunMount}},
		"read-only": {Amend: []oci.SpecOpts{oci.WithoutRunMount, oci.WithRootFSReadonly()}},
	} {
		t.Run(name, func(t *testing.T) {
			spec.GPUs = []int{0}
			k := shared.Work(t, spec, "counter")
			k.Expect(t, "count", "101")
			if r := restoredOf(t, k); r.Restores != 0 {
				t.Errorf("before any restore: %+v", r)
			}
			dirs := []string{t.TempDir(), t.TempDir()}
			checkpointInto(t, shared, k, dirs[0])
			ids := make(map[string]bool)
			for i, dir := range []string{dirs[0], dirs[0], dirs[1], dirs[1]} {
				if i == 2 {
					checkpointInto(t, shared, k, dirs[1]) // of a restored container
				}
				endTask(t, shared, k)
				if err := restoreTask(t, shared, k, dir); err != nil {
					t.Fatalf("%v\n%s", err, shared.LogTail(3000))
				}
				k.Expect(t, "count", fmt.Sprint(102+i/2))
				r := restoredOf(t, k)
				if want := 1 + i/2; name == "tmpfs" && r.Restores != want || r.Restores == 0 || len(r.ID) != 32 || ids[r.ID] || time.Since(r.Time) > time.Minute {
					t.Errorf("restore %d: %+v, other ids %v", i, r, ids)
				}
				ids[r.ID] = true
			}
		})
	}
}
