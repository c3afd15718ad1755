// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// atOnce calls do n times at the same time and gives the errors.
func atOnce(n int, do func(i int) error) []error {
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			errs[i] = do(i)
		})
	}
	wg.Wait()
	return errs
}

// Two containers are checkpointed at once.
func TestTwoContainersAtOnce(t *testing.T) {
	results.Add(t)
	gpus := allGPUs()
	var ks []*harness.Container
	for i := range 2 {
		k := shared.Work(t, harness.RunSpec{ID: fmt.Sprintf("%s-%d", harness.Name(t), i), GPUs: gpus[i%len(gpus) : i%len(gpus)+1]}, "counter")
		k.Expect(t, "count", "101")
		ks = append(ks, k)
	}
	ref := func(i int) string { return fmt.Sprintf("checkpoint.test/%s:%d", harness.Name(t), i) }
	for i, err := range atOnce(2, func(i int) error { return ks[i].Checkpoint(t.Context(), ref(i)) }) {
		if err != nil {
			t.Fatalf("container %d: %v\n%s", i, err, shared.LogTail(4000))
		}
		removeImageAtEnd(t, shared, ref(i))
	}
	for i, k := range ks {
		k.Expect(t, "count", "102")
		k.MustRemove(t)
		r := restore(t, shared, k.ID, ref(i), k.Port)
		r.Expect(t, "count", "102")
	}
}

// Of two checkpoints of one container at once both succeed, one after the other.
func TestOneContainerTwiceAtOnce(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	dirs := []string{t.TempDir(), t.TempDir()}
	for i, err := range atOnce(2, func(i int) error { return checkpointTask(t, shared, k, dirs[i]) }) {
		if err != nil {
			t.Fatalf("checkpoint %d: %v\n%s", i, err, shared.LogTail(4000))
		}
	}
	isPaused(t, k, false)
	k.Expect(t, "count", "102")
	for _, dir := range dirs {
		if _, err := images.ReadMetadata(dir); err != nil {
			t.Fatal(err)
		}
		endTask(t, shared, k)
		if err := restoreTask(t, shared, k, dir); err != nil {
			t.Fatal(err)
		}
		k.Expect(t, "count", "102")
	}
}

// Two ctr that each pause the container for their checkpoint get in each
// other's way: the later one may be told so. The container comes to no harm.
func TestTwoClientsAtOnce(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	done := 0
	ref := func(i int) string { return fmt.Sprintf("checkpoint.test/%s:%d", harness.Name(t), i) }
	for i, err := range atOnce(2, func(i int) error { return k.Checkpoint(t.Context(), ref(i)) }) {
		switch {
		case err == nil:
			removeImageAtEnd(t, shared, ref(i))
			done++
		case !strings.Contains(err.Error(), "cannot pause a paused"):
			t.Errorf("%v\n%s", err, shared.LogTail(4000))
		}
	}
	if done == 0 {
		t.Error("neither of the two was served")
	}
	isPaused(t, k, false)
	k.Expect(t, "count", "102")
	takeCheckpoint(t, shared, k, "after")
	k.Expect(t, "count", "103")
}

// Containers of one pod share a shim. Each is checkpointed by itself, and the
// end of one does not touch the other.
func TestOneShim(t *testing.T) {
	results.Add(t)
	var ks []*harness.Container
	for i := range 2 {
		k := shared.Work(t, harness.RunSpec{
			ID: fmt.Sprintf("%s-%d", harness.Name(t), i), GPUs: []int{0},
			Annotations: map[string]string{"io.containerd.runc.v2.group": harness.Name(t)},
		}, "counter")
		k.Expect(t, "count", "101")
		ks = append(ks, k)
	}
	if a, b := shimOf(t, ks[0]), shimOf(t, ks[1]); a != b {
		t.Fatalf("shims %d and %d, want one", a, b)
	}
	dirs := []string{t.TempDir(), t.TempDir()}
	for i, err := range atOnce(2, func(i int) error { return checkpointTask(t, shared, ks[i], dirs[i]) }) {
		if err != nil {
			t.Fatalf("container %d: %v\n%s", i, err, shared.LogTail(4000))
		}
	}
	endTask(t, shared, ks[0])
	ks[1].Expect(t, "count", "102")
	checkpointInto(t, shared, ks[1], t.TempDir())
	ks[1].Expect(t, "count", "103")
	if err := restoreTask(t, shared, ks[0], dirs[0]); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(4000))
	}
	ks[0].Expect(t, "count", "102")
	ks[1].Expect(t, "count", "104")
}

// Where the cgroup of [staging] has room for the workers of one operation, many at once take turns.
// The kernel would kill workers otherwise, and their checkpoints fail.
func TestTurnsUnderALimit(t *testing.T) {
	results.Add(t)
	var ks []*harness.Container
	var dirs []string
	for i := range 8 {
		ks = append(ks, shared.Work(t, harness.RunSpec{ID: fmt.Sprintf("%s-%d", harness.Name(t), i), GPUs: []int{0}}, "counter"))
		dirs = append(dirs, t.TempDir())
	}
	for _, k := range ks {
		k.Expect(t, "count", "101")
	}
	limit := 40 << 20
	if session.GPU.Kind != harness.SoftwareGPU {
		// Half a gigabyte for each context, which checkpoints on a tmpfs keep there.
		limit = 8 << 30
	}
	shared.Configured(t, shared.Staging("turns", fmt.Sprintf("memory_limit = %d", limit)))
	for i, err := range atOnce(len(ks), func(i int) error { return checkpointTask(t, shared, ks[i], dirs[i]) }) {
		if err != nil {
			t.Errorf("container %d: %v\n%s", i, err, shared.LogTail(3000))
		}
	}
	for _, k := range ks {
		k.Expect(t, "count", "102")
		endTask(t, shared, k)
	}
	for i, err := range atOnce(3, func(i int) error { return restoreTask(t, shared, ks[i], dirs[i]) }) {
		if err != nil {
			t.Errorf("container %d: %v\n%s", i, err, shared.LogTail(3000))
			continue
		}
		ks[i].Expect(t, "count", "102")
	}
}
