// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"os/exec"
	"strconv"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// A checkpoint image against what ctr and runc's shim make, with the CUDA steps
// taken by hand, in turns on the same machine: times and sizes go into the
// results (GPUCKPT_RESULTS). GPUCKPT_TEST_SIZES says how much GPU memory;
// GPUCKPT_TEST_DIR is where containerd and the dumps are, a tmpfs say.
func TestSpeedAgainstStock(t *testing.T) {
	for _, size := range session.Sizes(t) {
		bytes := size.Bytes
		t.Run(strconv.FormatUint(bytes>>20, 10)+"MiB", func(t *testing.T) {
			result := results.Add(t)
			result.Number("gpu_memory_bytes", float64(bytes))
			for _, compression := range []string{"none", "zstd"} {
				speedOfImage(t, result, bytes, compression)
			}
			speedOfStock(t, result, bytes)
		})
	}
}

func timed(t *testing.T, result *harness.TestResult, step string, do func() error) {
	t.Helper()
	if err := result.Time(step, do); err != nil {
		t.Fatalf("%s: %v\n%s", step, err, shared.LogTail(2000))
	}
}

func pattern(t *testing.T, spec harness.RunSpec, bytes uint64) *harness.Container {
	t.Helper()
	k := start(t, shared, spec, "pattern", "--bytes", strconv.FormatUint(bytes, 10), "--seed", "7")
	k.Expect(t, "verify", "bad=0")
	return k
}

func speedOfImage(t *testing.T, result *harness.TestResult, bytes uint64, compression string) {
	k := pattern(t, harness.RunSpec{ID: harness.Name(t) + "-" + compression}, bytes)
	ref := "gpuckpt.test/speed:" + compression
	var made checkpointAnswer
	timed(t, result, "gpuckpt checkpoint --image, "+compression, func() error {
		made = asJSON[checkpointAnswer](t, shared, "checkpoint", k.ID, "--image", ref, "--compression", compression)
		return nil
	})
	result.Number("image bytes, "+compression, float64(made.Bytes))
	result.Number("its seconds until the shim had answered, "+compression, made.DumpSeconds)
	result.Number("its seconds making the image, "+compression, made.BuildSeconds)
	k.MustRemove(t)
	var r *harness.Container
	name, spec := harness.Name(t)+"-restored", cdiSpec(t, shared)
	timed(t, result, "gpuckpt restore, with unpacking, "+compression, func() error {
		gpuckpt(t, shared, "restore", ref, "--name", name, "--net-host", "--gpus", "0", "--cdi-spec-dirs", spec, "--snapshotter", shared.Snapshotter())
		r = adopt(t, shared, name, k.Port)
		return nil
	})
	r.Expect(t, "verify", "bad=0")
	r.MustRemove(t)
	// As on a node that has unpacked the image when it pulled it.
	timed(t, result, "resume with ctr, unpacked before, "+compression, func() error { r = resume(t, shared, ref, k.Port); return nil })
	r.Expect(t, "verify", "bad=0")
	r.MustRemove(t)
	forget(t, shared)
}

func speedOfStock(t *testing.T, result *harness.TestResult, bytes uint64) {
	k := pattern(t, harness.RunSpec{
		ID: harness.Name(t) + "-stock", Runtime: harness.RuncRuntime,
		Annotations: map[string]string{"org.criu.config": shared.CRIUConfigPath()},
	}, bytes)
	const ref = "gpuckpt.test/speed:stock"
	timed(t, result, "CUDA by hand and ctr containers checkpoint", func() error {
		for _, step := range []string{"lock", "checkpoint"} {
			if err := cudaStep(t, k, step); err != nil {
				return err
			}
		}
		return k.Checkpoint(t.Context(), ref)
	})
	k.MustRemove(t)
	var r *harness.Container
	timed(t, result, "ctr containers restore and CUDA by hand", func() (err error) {
		if r, err = shared.Restore(t.Context(), k.ID, ref, k.Port); err != nil {
			return err
		}
		r.RemoveAtEnd(t)
		for _, step := range []string{"restore", "unlock"} {
			if err := cudaStep(t, r, step); err != nil {
				return err
			}
		}
		return nil
	})
	r.Expect(t, "verify", "bad=0")
	r.MustRemove(t)
	forget(t, shared)
}

// cudaStep takes a container's first process one step further.
func cudaStep(t *testing.T, k *harness.Container, step string) error {
	t.Helper()
	pid, err := k.Pid(t.Context())
	if err != nil {
		return err
	}
	cmd := command(t.Context(), t, shared, shared.HostEnv(), "cuda", step, strconv.Itoa(pid))
	out, err := cmd.CombinedOutput()
	if _, ok := err.(*exec.ExitError); ok {
		t.Logf("gpuckpt cuda %s: %s", step, out)
	}
	return err
}
