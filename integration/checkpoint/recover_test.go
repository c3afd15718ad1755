// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// recordOf is the file with the record of a container.
func recordOf(c *harness.Containerd, id string) string {
	return filepath.Join(c.Records(), c.Namespace(), id+".json")
}

// atStep waits until a container's record names a step, and returns its shim and what else it tells.
// It fails if the operation ends before.
func atStep(t *testing.T, c *harness.Containerd, id, step string, done <-chan error) (shim int) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); {
		select {
		case err := <-done:
			t.Fatalf("it was over before %s: %v", step, err)
		default:
		}
		var rec struct {
			Step string `json:"step"`
			Shim struct {
				PID int `json:"pid"`
			} `json:"shim"`
		}
		data, err := os.ReadFile(recordOf(c, id))
		if err == nil && json.Unmarshal(data, &rec) == nil && rec.Step == step {
			return rec.Shim.PID
		}
	}
	t.Fatalf("no record names the step %s", step)
	return 0
}

// leftovers checks that nothing is left of a container whose shim was killed: no record, process,
// mount or runtime's state. The worker and the helper end by themselves.
func leftovers(t *testing.T, c *harness.Containerd, k *harness.Container) {
	t.Helper()
	defer func() {
		if t.Failed() {
			record, _ := os.ReadFile(recordOf(c, k.ID))
			t.Logf("%s\n%s", record, c.LogTail(3000))
		}
	}()
	harness.Within(t, "the record is gone", func() bool {
		_, err := os.Stat(recordOf(c, k.ID))
		return errors.Is(err, os.ErrNotExist)
	})
	harness.Within(t, "no process is left", func() bool { return len(processesOf(t, c, k)) == 0 })
	harness.Within(t, "no worker is left", func() bool {
		names, _ := filepath.Glob("/proc/[0-9]*/environ")
		return !slices.ContainsFunc(names, func(name string) bool {
			environ, _ := os.ReadFile(name)
			exe, _ := os.Readlink(filepath.Join(filepath.Dir(name), "exe"))
			return strings.Contains(string(environ), c.Dir()) && (strings.HasSuffix(exe, "/criu") || strings.HasSuffix(exe, "gpuckpt-cuda-helper"))
		})
	})
	harness.Within(t, "the bundle is gone", func() bool {
		_, err := os.Stat(c.Bundle(k.ID))
		return errors.Is(err, os.ErrNotExist)
	})
	if mounts, err := harness.MountsUnder(c.Bundle(k.ID)); err != nil || len(mounts) > 0 {
		t.Errorf("mounts are left: %v, error %v", mounts, err)
	}
}

// The shim is killed in the middle of a checkpoint: containerd ends the container, and what the
// checkpoint has written is gone, so that the next one can be made at the same place. The other steps
// are in integration/faults.
func TestShimKilledAtStep(t *testing.T) {
	for _, test := range []struct{ step, soft string }{
		{"save GPU state", "checkpoint_delay_ms=20000\n"},
		{"dump", "dump"},
		{"resume", "unlock_delay_ms=20000\n"},
	} {
		t.Run(test.step, func(t *testing.T) {
			results.Add(t)
			hurry := func() {}
			if test.step != "dump" {
				hurry = shared.SoftwareGPU(t, test.soft)
			}
			k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "64M")
			k.Expect(t, "verify", "bad=0")
			dir := filepath.Join(harness.DiskDir(t), "images")
			done := make(chan error, 1)
			go func() { done <- checkpointTask(t, shared, k, dir) }()
			shim := atStep(t, shared, k.ID, test.step, done)
			if err := unix.Kill(shim, unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
			hurry()
			harness.Says(t, <-done, "")
			leftovers(t, shared, k)
			if _, err := images.ReadMetadata(dir); err == nil {
				t.Log("the checkpoint was complete before")
			} else if left, err := os.ReadDir(dir); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the directory is left, with %v, error %v", left, err)
			}
			k.MustRemove(t)

			// The same name and the same place serve again.
			shared.Configured(t, "")
			n := shared.Work(t, harness.RunSpec{ID: k.ID, GPUs: []int{0}}, "counter")
			n.Expect(t, "count", "101")
			checkpointInto(t, shared, n, filepath.Join(filepath.Dir(dir), "next"))
			n.Expect(t, "count", "102")
		})
	}
}

// The shim is killed in the middle of a restore: nothing is left, and the same checkpoint is restored.
func TestShimKilledAtStepOfRestore(t *testing.T) {
	for _, test := range []struct{ step, soft string }{
		{"restore processes", ""},
		{"restore GPU state", "restore_delay_ms=20000\n"},
	} {
		t.Run(test.step, func(t *testing.T) {
			results.Add(t)
			k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "16M")
			k.Expect(t, "verify", "bad=0")
			ref := takeCheckpoint(t, shared, k, "1")
			k.MustRemove(t)
			hurry := func() {}
			if test.soft != "" {
				hurry = shared.SoftwareGPU(t, test.soft)
			}
			before := unpackedDirs(t)
			done := make(chan error, 1)
			go func() {
				_, err := shared.Restore(t.Context(), k.ID, ref, k.Port)
				done <- err
			}()
			if err := unix.Kill(atStep(t, shared, k.ID, test.step, done), unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
			harness.Says(t, <-done, "")
			leftovers(t, shared, k)
			if now := unpackedDirs(t); len(now) > len(before) {
				t.Errorf("unpacked checkpoints are left: %v, before %v", now, before)
			}
			if err := shared.Remove(t.Context(), k.ID); err != nil {
				t.Fatal(err)
			}
			hurry()
			goesOn(t, restore(t, shared, k.ID, ref, k.Port))
		})
	}
}

// unpackedDirs are the directories that containerd unpacks checkpoints into.
func unpackedDirs(t *testing.T) []string {
	t.Helper()
	dirs, err := filepath.Glob(filepath.Join(shared.Dir(), "*", "ctrd-checkpoint*"))
	if err != nil {
		t.Fatal(err)
	}
	return dirs
}

// containerd and the shim are killed while the container is locked and frozen: nobody would let it
// go. gpuckpt recover does, and the program counts on. A containerd that starts then ends it.
func TestRecoverLetsGo(t *testing.T) {
	results.Add(t)
	c := session.Own(t, harness.Options{})
	var all []*harness.Container
	var pids []int
	for i, spec := range []harness.RunSpec{{GPUs: []int{0}}, withInterposer(), withInterposer()} { // the last one within its checkpoint
		spec.ID = harness.Name(t) + strconv.Itoa(i)
		k := c.Work(t, spec, "pattern", "--bytes", "16M")
		k.Expect(t, "verify", "bad=0")
		ctr(t, c, "tasks", "pause", k.ID)
		pids = append(pids, k.MustPid(t))
		harness.Says(t, errors.New(recoverText(t, c, k.ID)), "paused", "its shim lives", "tasks resume "+k.ID)
		all = append(all, k)
	}
	shims := []int{shimOf(t, all[0]), shimOf(t, all[1]), shimOf(t, all[2])}
	const locking = time.Second
	// Memory that the interposer keeps on the GPU would be lost with the shim: there is no room for that.
	undo := c.SoftwareGPU(t, fmt.Sprintf("lock_delay_ms=%d\ntaken_mib=1500\n", locking.Milliseconds()))
	dir, over := t.TempDir(), make(chan error, 1)
	go func() { over <- checkpointTask(t, c, all[2], dir) }()
	inCheckpoint(t, all[2])
	killBoth(t, c, shims[0])
	for _, shim := range shims[1:] {
		if err := unix.Kill(shim, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
			t.Fatal(err)
		}
		harness.Within(t, "the other shim ends", func() bool {
			state, err := harness.ProcessState(shim)
			return err != nil || state == "Z"
		})
	}
	if err := <-over; err == nil {
		t.Error("the checkpoint did not fail")
	}
	undo()
	time.Sleep(locking + time.Second/2) // the driver's call ends by itself, if it had begun
	for i, k := range all {
		frozen, err := harness.Frozen(pids[i])
		if err != nil || frozen != (i < 2) {
			t.Fatalf("frozen: %v, error %v", frozen, err)
		}
		text := recoverText(t, c, k.ID)
		says := []string{"runs on without a shim"}
		if i < 2 {
			says = append(says, "thawed", "unlocked CUDA processes: 1")
		}
		harness.Says(t, errors.New(text), says...)
		k.Expect(t, "verify", "bad=0")
		k.Expect(t, "write 500", "wrote 500")
		k.Expect(t, "verify", "bad=0")
		if _, err := os.Stat(recordOf(c, k.ID)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the record is still there: %v", err)
		}
	}
	if err := c.StartAgain(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, k := range all {
		harness.Within(t, "containerd ends the container", func() bool { return len(processesOf(t, c, k)) == 0 })
	}
}

// The same when GPU state was out of the processes: recover says what a person must do. What lies on
// disks goes once the processes have ended.
func TestRecoverSaysWhatIsLost(t *testing.T) {
	results.Add(t)
	c := session.Own(t, harness.Options{})
	k := c.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "16M")
	k.Expect(t, "verify", "bad=0")
	dir := harness.DiskDir(t)
	if _, err := c.OutputEnv(t.Context(), env(c), "gpuckpt", "suspend", "--spill", dir, k.ID); err != nil {
		t.Fatal(err)
	}
	killBoth(t, c, shimOf(t, k))
	harness.Says(t, errors.New(recoverText(t, c, k.ID)), "so it cannot go on", "gpuckpt recover --kill")
	harness.Says(t, errors.New(recoverText(t, c, k.ID, "--kill")), "ended", "removed GPU state that is of no use")
	if left := processesOf(t, c, k); len(left) > 0 {
		t.Errorf("processes are left: %v", left)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left on the disk: %v, error %v", left, err)
	}
	if text := recoverText(t, c, ""); text != "" {
		t.Errorf("there is still something to recover: %s", text)
	}
	if err := c.StartAgain(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// killBoth kills containerd, and then a shim.
func killBoth(t *testing.T, c *harness.Containerd, shim int) {
	t.Helper()
	if err := c.Halt(t.Context(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(shim, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	harness.Within(t, "the shim ends", func() bool {
		state, err := harness.ProcessState(shim)
		return err != nil || state == "Z"
	})
}

func env(c *harness.Containerd) []string {
	return []string{"CONTAINERD_ADDRESS=" + c.Address(), "CONTAINERD_NAMESPACE=" + c.Namespace(), "GPUCKPT_CONFIG=" + c.ShimConfigPath()}
}

// recoverText is what gpuckpt recover prints of a container; "" for all of the namespace's.
func recoverText(t *testing.T, c *harness.Containerd, id string, flags ...string) string {
	t.Helper()
	args := append([]string{"recover"}, flags...)
	if id != "" {
		args = append(args, id)
	}
	out, err := c.OutputEnv(t.Context(), env(c), "gpuckpt", args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// What a node that died has left is removed by the next shim of the namespace, which says nothing
// where containerd reads its answer.
func TestNextShimSweeps(t *testing.T) {
	results.Add(t)
	dir := filepath.Join(harness.DiskDir(t), "images")
	record := map[string]any{
		"schema": 1, "namespace": shared.Namespace(), "container": "gone", "boot": "another", "operation": "checkpoint", "step": "dump",
		"images": map[string]any{"path": dir, "made": true},
	}
	data, err := json.Marshal(record)
	if err != nil {
		t.Fatal(err)
	}
	path := recordOf(shared, "gone")
	for _, dir := range []string{dir, filepath.Dir(path)} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	write(t, filepath.Join(dir, images.AreaFile(1, 0)), "half of it", 0o600)
	write(t, path, string(data), 0o600)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	for _, gone := range []string{path, dir} {
		if _, err := os.Stat(gone); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is still there: %v", gone, err)
		}
	}
}
