// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/internal/cli/doctor"
)

// A driver that lies where no loader looks, as that of the GPU Operator does, is found by the
// configuration and by the CDI specification: doctor says where it is, and a container is
// checkpointed and goes on. Without either there is no driver.
func TestDriverRoot(t *testing.T) {
	if gpu.Kind != harness.SoftwareGPU {
		t.Skip("the driver of this machine is where its loader looks")
	}
	root, specs := t.TempDir(), t.TempDir()
	below, err := gpu.Below(root)
	if err != nil {
		t.Fatal(err)
	}
	c := session.Own(t, harness.Options{GPU: below})
	if err := c.WriteCDISpec(specs); err != nil {
		t.Fatal(err)
	}
	k := start(t, c, harness.RunSpec{ID: "job"}, "counter")
	k.RemoveAtEnd(t)
	none := fmt.Sprintf("cdi_spec_dirs = [%q]\n", t.TempDir())
	counted := 101 // start has asked once
	for _, test := range []struct{ settings, from string }{
		{fmt.Sprintf("driver_root = %q\n", root), "driver_root"},
		{fmt.Sprintf("cdi_spec_dirs = [%q]\n", specs), "CDI specification"},
	} {
		undo := c.Configured(t, test.settings)
		r, _ := report(t, c)
		is(t, find(t, r, "driver", "libraries"), doctor.OK, root+"/usr/lib/x86_64-linux-gnu", test.from)
		is(t, find(t, r, "driver", "version"), doctor.OK, gpu.Driver)
		if test.from == "CDI specification" {
			is(t, find(t, r, "cdi", "GPUs"), doctor.Failure, "/dev/nvidia0") // it reads the specification; the software GPU has no nodes
		}
		image := "gpuckpt.test/driver-root:" + filepath.Base(t.TempDir())
		if err := k.Checkpoint(t.Context(), image); err != nil {
			t.Fatalf("%s: %v\n%s", test.from, err, c.LogTail(4000))
		}
		k.MustRemove(t)
		if k, err = c.Restore(t.Context(), k.ID, image, k.Port); err != nil {
			t.Fatalf("%s: %v\n%s", test.from, err, c.LogTail(4000))
		}
		counted++
		k.Expect(t, "count", fmt.Sprint(counted))
		undo()
	}

	c.Configured(t, none)
	r, _ := report(t, c)
	is(t, find(t, r, "driver", "version"), doctor.Failure, "libcuda.so.1")
	c.Configured(t, "driver_root = \"/nowhere\"\n")
	r, _ = report(t, c)
	is(t, find(t, r, "driver", "version"), doctor.Failure, "no NVIDIA driver in driver_root", "/nowhere")
	if err := k.Checkpoint(t.Context(), "gpuckpt.test/driver-root:none"); err == nil {
		t.Error("a container was checkpointed without a driver")
	} else {
		harness.Says(t, err, "no NVIDIA driver in driver_root")
	}
	k.Expect(t, "count", fmt.Sprint(counted+1))
}
