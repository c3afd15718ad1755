// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/content"
	ctdimages "github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/oci"
	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/internal/cli/doctor"
)

// On a node where checkpoints work there is no failure.
func TestDoctor(t *testing.T) {
	c := session.Own(t, harness.Options{})
	start(t, c, harness.RunSpec{ID: "ours"}, "pattern", "--bytes", "24M")

	r, code := report(t, c)
	if r.Failures != 0 || code != 0 {
		t.Errorf("%d failures, exit code %d, on a node where checkpoints work: %+v", r.Failures, code, r.Checks)
	}
	shim, err := bins.Path(doctor.ShimName)
	if err != nil {
		t.Fatal(err)
	}
	is(t, find(t, r, "gpuckpt", "shim"), doctor.OK, shim)
	is(t, find(t, r, "gpuckpt", "configuration"), doctor.OK, c.ShimConfigPath())
	is(t, find(t, r, "containerd", "daemon"), doctor.OK, "2.4", c.Address(), fmt.Sprint(c.Pid()))
	is(t, find(t, r, "containerd", "CRI"), doctor.OK, "off")
	is(t, find(t, r, "runc", "program"), doctor.OK, "1.")
	is(t, find(t, r, "criu", "program"), doctor.OK, "4.2")
	is(t, find(t, r, "criu", "check"), doctor.OK)
	is(t, find(t, r, "cgroup", "version"), doctor.OK, fmt.Sprint(harness.CgroupVersion()))
	is(t, find(t, r, "driver", "version"), doctor.OK, gpu.Driver, "CUDA 1")
	for _, d := range gpu.Devices {
		is(t, find(t, r, "gpu", fmt.Sprint(d.Index)), doctor.OK, d.UUID, d.Name)
	}
	is(t, find(t, r, "memory", "images meanwhile"), find(t, r, "memory", "images meanwhile").Status, filepath.Join(c.Dir(), "tmp"))
	if got := r.Annotations["dev.gpuckpt.driver"]; got != gpu.Driver {
		t.Errorf("the driver's annotation is %q", got)
	}

	text, code := runDoctor(t, c)
	if code != 0 || !strings.Contains(text, "0 failures") {
		t.Errorf("exit code %d: %s", code, text)
	}
	for _, check := range r.Checks {
		if !strings.Contains(text, check.Name) {
			t.Errorf("the text does not have the check %s %s:\n%s", check.Area, check.Name, text)
		}
	}
	keep(t, "doctor.txt", text)

	lines, code := runDoctor(t, c, "--annotations")
	if code != 0 || !strings.Contains(lines, "\ndev.gpuckpt.driver="+gpu.Driver+"\n") {
		t.Errorf("exit code %d: %s", code, lines)
	}
	keep(t, "doctor-annotations.txt", lines)
}

// Each program or setting that is missing is a failure of its own, with what
// does not work without it and how to mend it.
func TestDoctorFailures(t *testing.T) {
	for _, test := range []struct {
		name       string
		without    string // a program
		settings   string
		area, what string
		words      []string
	}{
		{name: "no CRIU", without: "criu", area: "criu", what: "program", words: []string{"none in containerd's $PATH", "can be suspended", "apt-get install"}},
		{name: "CRIU elsewhere", settings: "[criu]\npath = \"/no/such/criu\"\n", area: "criu", what: "program", words: []string{"/no/such/criu"}},
		{name: "no helper", without: "gpuckpt-cuda-helper", area: "gpuckpt", what: "helper", words: []string{"gpuckpt-cuda-helper", "make install"}},
		{name: "no CRIU plugin", without: "gpuckpt_criu.so", area: "gpuckpt", what: "CRIU plugin", words: []string{"gpuckpt_criu.so", "make install"}},
		{name: "no shim", without: "containerd-shim-gpuckpt-v2", area: "gpuckpt", what: "shim", words: []string{"containerd-shim-gpuckpt-v2", "make install"}},
		{name: "bad setting", settings: "lock_timeoot = \"1s\"\n", area: "gpuckpt", what: "configuration", words: []string{"lock_timeoot", "edit "}},
	} {
		t.Run(test.name, func(t *testing.T) {
			opts := harness.Options{}
			if test.without != "" {
				opts.Env = []string{"PATH=" + bins.PathWithout(t, t.TempDir(), test.without)}
			}
			c := session.Own(t, opts)
			if test.settings != "" {
				if err := c.SetShimConfig(test.settings); err != nil {
					t.Fatal(err)
				}
			}
			r, code := report(t, c)
			if code != 1 || r.Status != doctor.Failure {
				t.Errorf("exit code %d, status %s", code, r.Status)
			}
			is(t, find(t, r, test.area, test.what), doctor.Failure, test.words...)
			if test.without == "criu" {
				text, code := runDoctor(t, c)
				if code != 1 || r.Failures != 1 {
					t.Errorf("exit code %d, %d failures; want 1 and 1: %s", code, r.Failures, text)
				}
				keep(t, "doctor-no-criu.txt", text)
			}
		})
	}
}

// Without gpuckpt-tmpfs everything works, slower.
func TestDoctorWithoutTmpfsHelper(t *testing.T) {
	c := session.Own(t, harness.Options{Env: []string{"PATH=" + bins.PathWithout(t, t.TempDir(), "gpuckpt-tmpfs")}})
	r, _ := report(t, c)
	is(t, find(t, r, "gpuckpt", "tmpfs helper"), doctor.Warning, "gpuckpt-tmpfs", "make install")
}

// Without a containerd it says what it can of the rest.
func TestDoctorNoContainerd(t *testing.T) {
	c := session.Own(t, harness.Options{})
	r, code := report(t, c, "--address", filepath.Join(t.TempDir(), "none.sock"))
	if code != 1 {
		t.Errorf("exit code %d", code)
	}
	is(t, find(t, r, "containerd", "daemon"), doctor.Failure, "none.sock")
	is(t, find(t, r, "cgroup", "version"), doctor.OK)
}

// The CRI plugin's runtimes are looked at where it is on.
func TestDoctorCRI(t *testing.T) {
	const table = "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.gpu]\nruntime_type = 'io.containerd.runc.v2'\n"
	shim, err := bins.Path(doctor.ShimName)
	if err != nil {
		t.Fatal(err)
	}
	path := fmt.Sprintf("runtime_path = %q\n", shim)
	for _, test := range []struct {
		name, config string
		check        string
		status       doctor.Status
		words        []string
	}{
		{name: "none", check: "CRI", status: doctor.Warning, words: []string{"no runtime", "gpuckpt install --restart --containerd-config /"}},
		{name: "by name", config: "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.gpu]\nruntime_type = 'io.containerd.gpuckpt.v2'\n", check: "CRI runtime gpu", status: doctor.Warning, words: []string{"SystemdCgroup", "runtime_path = '" + shim + "'", "conf.d/zz-gpu.toml"}},
		{name: "annotations", config: table + path, check: "CRI runtime gpu", status: doctor.Warning, words: []string{"not passed on", "pod_annotations = ['dev.gpuckpt.*']", "conf.d/zz-gpu.toml"}},
		{name: "good", config: table + path + "pod_annotations = ['dev.gpuckpt.*']\n", check: "CRI runtime gpu", status: doctor.OK, words: []string{shim}},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := session.Own(t, harness.Options{CRI: true, Config: harness.OwnCNI(t) + test.config})
			r, _ := report(t, c)
			is(t, find(t, r, "containerd", test.check), test.status, test.words...)
		})
	}
}

// Whether a checkpoint can be restored here is told of a directory, by its
// gpuckpt.json, and of an image, by its annotations.
func TestDoctorImage(t *testing.T) {
	c := session.Own(t, harness.Options{})
	k := start(t, c, harness.RunSpec{ID: "job"}, "pattern", "--bytes", "24M")
	dir := t.TempDir()
	if _, err := k.CheckpointTask(t.Context(), harness.TaskCheckpoint{ImagePath: dir}); err != nil {
		t.Fatal(err)
	}
	r, code := report(t, c, "--image", dir)
	if code != 0 || r.Failures != 0 {
		t.Errorf("exit code %d: %+v", code, r.Checks)
	}
	is(t, find(t, r, "checkpoint", "driver"), doctor.OK, gpu.Driver)
	is(t, find(t, r, "checkpoint", "GPUs"), doctor.OK, "needs 1 of")

	// An image that says the same of itself by annotations.
	m, err := images.ReadMetadata(dir)
	if err != nil {
		t.Fatal(err)
	}
	annotate(t, c, "checkpoint.test/job:1", oci.Facts(m))
	if r, code := report(t, c, "--image", "checkpoint.test/job:1"); code != 0 || r.Failures != 0 || find(t, r, "checkpoint", "driver").Found != gpu.Driver {
		t.Errorf("exit code %d: %+v", code, r.Checks)
	}

	if out, code := runDoctor(t, c, "--image", harness.WorkloadImage); code != 1 || !strings.Contains(out, "no dev.gpuckpt.* annotations") {
		t.Errorf("exit code %d: %s", code, out)
	}
	if _, err := c.Ctr(t.Context(), "containers", "checkpoint", "--image", "--task", "job", "checkpoint.test/stock:1"); err != nil {
		t.Fatal(err)
	}
	if out, code := runDoctor(t, c, "--image", "checkpoint.test/stock:1"); code != 1 || !strings.Contains(out, "gpuckpt image convert") {
		t.Errorf("exit code %d: %s", code, out)
	}
	if out, code := runDoctor(t, c, "--image", "no.such/image:1"); code != 1 || !strings.Contains(out, "not found") {
		t.Errorf("exit code %d: %s", code, out)
	}

	t.Run("made elsewhere", func(t *testing.T) {
		if gpu.Kind != harness.SoftwareGPU {
			t.Skip("only the software GPU can be another one")
		}
		if err := c.SetSoftwareGPU("driver=590.1\ngpu0.name=Another GPU\ngpu1.name=Another GPU\n"); err != nil {
			t.Fatal(err)
		}
		r, code := report(t, c, "--image", dir)
		if code != 1 || r.Failures != 2 {
			t.Errorf("exit code %d: %+v", code, r.Checks)
		}
		is(t, find(t, r, "checkpoint", "driver"), doctor.Failure, gpu.Driver, "590.1")
		is(t, find(t, r, "checkpoint", "model"), doctor.Failure, "Software GPU", "Another GPU")
	})
}

// run runs a program and wants it to succeed.
func run(t *testing.T, program string, args ...string) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), program, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %s: %v: %s", program, strings.Join(args, " "), err, out)
	}
}

// annotate makes an image of the workload's, with annotations on its manifest.
func annotate(t *testing.T, c *harness.Containerd, name string, annotations map[string]string) {
	t.Helper()
	ctx, done, err := c.Client().WithLease(namespaces.WithNamespace(t.Context(), c.Namespace())) // until the image holds the manifest
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = done(ctx) }()
	image, err := c.Client().GetImage(ctx, harness.WorkloadImage)
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := ctdimages.Manifest(ctx, image.ContentStore(), image.Target(), image.Platform())
	if err != nil {
		t.Fatal(err)
	}
	manifest.Annotations = annotations
	data, err := json.Marshal(manifest)
	if err != nil {
		t.Fatal(err)
	}
	target := ocispec.Descriptor{MediaType: ocispec.MediaTypeImageManifest, Digest: digest.FromBytes(data), Size: int64(len(data))}
	labels := map[string]string{"containerd.io/gc.ref.content.config": manifest.Config.Digest.String()}
	for i, l := range manifest.Layers {
		labels[fmt.Sprintf("containerd.io/gc.ref.content.l.%d", i)] = l.Digest.String()
	}
	if err := content.WriteBlob(ctx, image.ContentStore(), name, bytes.NewReader(data), target, content.WithLabels(labels)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Client().ImageService().Create(ctx, ctdimages.Image{Name: name, Target: target}); err != nil {
		t.Fatal(err)
	}
}
