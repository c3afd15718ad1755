// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// eachRuntime runs a test with this project's shim and with runc's own. A
// container of the latter needs to be told of CRIU settings that work on this
// machine, which this project's shim finds by itself.
func eachRuntime(t *testing.T, test func(t *testing.T, spec harness.RunSpec)) {
	for _, name := range []string{harness.Runtime, harness.RuncRuntime} {
		t.Run(name, func(t *testing.T) {
			spec := harness.RunSpec{Runtime: name}
			if name == harness.RuncRuntime {
				spec.Annotations = map[string]string{"org.criu.config": shared.CRIUConfigPath()}
			}
			test(t, spec)
		})
	}
}

// A container without CUDA is checkpointed and restored as with runc's shim:
// nothing is added to the checkpoint, and no helper is started for it.
func TestNoCUDA(t *testing.T) {
	results.Add(t)
	eachRuntime(t, func(t *testing.T, spec harness.RunSpec) {
		k := shared.Work(t, spec, "plain")
		k.Expect(t, "count", "101")
		from := len(shared.Log())
		ref := takeCheckpoint(t, shared, k, "1")
		if m := metadataOf(t, shared, ref); m != nil && len(m.GPUs)+len(m.Processes) > 0 { // it has one, to be signed
			t.Errorf("the checkpoint has GPU metadata: %+v", m)
		}
		k.Expect(t, "count", "102")
		k.MustRemove(t)
		r := restore(t, shared, k.ID, ref, k.Port)
		r.Expect(t, "count", "102")
		if left := unpacked(shared); spec.Runtime == harness.RuncRuntime {
			// What runc's shim does not clean up; containerd neither.
			for _, dir := range left {
				if err := os.RemoveAll(dir); err != nil {
					t.Error(err)
				}
			}
		}
		if log := shared.Log()[from:]; strings.Contains(log, "phase=lock") {
			t.Errorf("CUDA steps were taken:\n%s", log)
		}
	})
}

// What runc's shim refuses is refused in the same words.
func TestNoCUDAErrors(t *testing.T) {
	results.Add(t)
	said := map[string][]string{}
	eachRuntime(t, func(t *testing.T, spec harness.RunSpec) {
		spec.ID = "no-cuda-errors" // the same in both, since errors name it
		k := shared.Work(t, spec, "plain")
		k.Expect(t, "count", "101")
		note := func(args ...string) {
			t.Helper()
			_, err := shared.Ctr(t.Context(), args...)
			var failed *harness.CtrError
			if !errors.As(err, &failed) {
				t.Fatalf("ctr %v: error %v, want ctr's", args, err)
			}
			said[spec.Runtime] = append(said[spec.Runtime], failed.Error())
		}
		note("tasks", "resume", k.ID) // which is not paused
		ctr(t, shared, "tasks", "pause", k.ID)
		note("tasks", "pause", k.ID)
		ctr(t, shared, "tasks", "resume", k.ID)
		note("tasks", "start", "--detach", k.ID)
		if err := k.Kill(t.Context()); err != nil {
			t.Fatal(err)
		}
		note("tasks", "checkpoint", k.ID)
		note("tasks", "pause", k.ID)
		note("tasks", "resume", k.ID)
	})
	ours, theirs := said[harness.Runtime], said[harness.RuncRuntime]
	for i := range min(len(ours), len(theirs)) {
		if ours[i] != theirs[i] {
			t.Errorf("this shim: %s\nrunc's:    %s", ours[i], theirs[i])
		}
	}
}
