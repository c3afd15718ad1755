// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"archive/tar"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/validate"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// tool runs a program of others and gives what it printed.
func tool(t *testing.T, program string, args ...string) string {
	t.Helper()
	path, err := bins.Path(program)
	if err != nil {
		t.Fatalf("%v; run hack/setup", err)
	}
	t.Logf("%s %s", program, strings.Join(args, " "))
	out, err := exec.CommandContext(t.Context(), path, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", program, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// Programs that know nothing of checkpoints take a checkpoint image for what it
// is: in a registry, in a layout, in an archive. Of zstd go-containerregistry's
// validate knows the digests alone, so it reads the layers of gzip.
func TestOthersAcceptTheImage(t *testing.T) {
	t.Run("zstd", func(t *testing.T) { othersAccept(t, "zstd", validate.Fast) })
	t.Run("gzip", func(t *testing.T) { othersAccept(t, "gzip") })
}

func othersAccept(t *testing.T, compression string, checks ...validate.Option) {
	s := serve(t, false)
	k := start(t, shared, harness.RunSpec{}, "pattern", "--bytes", "100663296", "--seed", "7")
	ref := s.ref("job:1")
	made := asJSON[harness.CheckpointAnswer](t, shared, "checkpoint", k.ID, "--image", ref, "--leave-running", "--compression", compression)
	gpuckpt(t, shared, "image", "push", ref)

	var inspected struct {
		Digest string
		Layers []string
	}
	out := tool(t, "skopeo", "inspect", "--tls-verify=false", "docker://"+ref)
	if err := json.Unmarshal([]byte(out), &inspected); err != nil || inspected.Digest != made.Digest || len(inspected.Layers) < 4 {
		t.Errorf("skopeo inspect: %v\n%s", err, out)
	}
	dir := filepath.Join(t.TempDir(), "layout")
	tool(t, "skopeo", "--insecure-policy", "copy", "--src-tls-verify=false", "docker://"+ref, "oci:"+dir+":1")
	path, err := layout.FromPath(dir)
	if err != nil {
		t.Fatal(err)
	}
	index, err := path.ImageIndex()
	if err != nil {
		t.Fatal(err)
	}
	if err := validate.Index(index, checks...); err != nil {
		t.Errorf("go-containerregistry about skopeo's copy: %v", err)
	}
	gpuckpt(t, shared, "image", "verify", dir+"@1")

	named, err := name.ParseReference(ref, name.Insecure)
	if err != nil {
		t.Fatal(err)
	}
	image, err := remote.Image(named)
	if err != nil {
		t.Fatal(err)
	}
	if err := validate.Image(image, checks...); err != nil {
		t.Errorf("go-containerregistry about the registry's: %v", err)
	}
	// ... and back to containerd by skopeo's archive.
	archive := filepath.Join(t.TempDir(), "job.tar")
	tool(t, "skopeo", "--insecure-policy", "copy", "oci:"+dir+":1", "oci-archive:"+archive+":1")
	gpuckpt(t, shared, "image", "verify", archive)
	copied := s.ref("copied:1")
	gpuckpt(t, shared, "image", "convert", archive, copied)
	if got := asJSON[struct{ Image struct{ Digest string } }](t, shared, "image", "inspect", copied); got.Image.Digest != made.Digest {
		t.Errorf("the image came back as %s, it was %s", got.Image.Digest, made.Digest)
	}
	k.MustRemove(t)
	r := resume(t, shared, copied, k.Port)
	r.Expect(t, "verify", "bad=0")
}

// A checkpoint image goes into a layout and an archive and back as it is.
func TestConvertKeepsTheDigest(t *testing.T) {
	k := start(t, shared, harness.RunSpec{}, "pattern", "--bytes", "50331648", "--seed", "9")
	const ref = "gpuckpt.test/converted:1"
	made := asJSON[harness.CheckpointAnswer](t, shared, "checkpoint", k.ID, "--image", ref, "--compression", "gzip")
	k.MustRemove(t)
	dir := t.TempDir()
	oci, tarball := filepath.Join(dir, "layout"), filepath.Join(dir, "job.tar")
	gpuckpt(t, shared, "image", "convert", ref, "oci:"+oci)
	gpuckpt(t, shared, "image", "convert", oci, "oci-archive:"+tarball)
	path, err := layout.FromPath(oci)
	if err != nil {
		t.Fatal(err)
	}
	hash, err := v1.NewHash(made.Digest)
	if err != nil {
		t.Fatal(err)
	}
	image, err := path.Image(hash)
	if err != nil {
		t.Fatal(err)
	}
	if err := validate.Image(image); err != nil {
		t.Error(err)
	}
	if out := gpuckpt(t, shared, "image", "inspect", tarball); !strings.Contains(out, made.Digest) || !strings.Contains(out, "Process 1") {
		t.Errorf("gpuckpt image inspect printed %s", out)
	}
	// Damage is found, and named.
	data, err := os.ReadFile(tarball)
	if err != nil {
		t.Fatal(err)
	}
	data[len(data)/2] ^= 1
	damaged := filepath.Join(dir, "damaged.tar")
	if err := os.WriteFile(damaged, data, 0o600); err != nil {
		t.Fatal(err)
	}
	fails(t, shared, nil, []string{"sha256:"}, "image", "verify", damaged)
	fails(t, shared, nil, []string{"can be built"}, "image", "build", tarball, "gpuckpt.test/built:1")

	forget(t, shared)
	const back = "gpuckpt.test/back:1"
	if got := asJSON[struct{ Digest string }](t, shared, "image", "convert", tarball, back); got.Digest != made.Digest {
		t.Errorf("it came back as %s, it was %s", got.Digest, made.Digest)
	}
	r := resume(t, shared, back, k.Port)
	r.Expect(t, "verify", "bad=0")
}

// What ctr makes of a checkpoint becomes an image that resumes, and an archive.
func TestConvertContainerdsCheckpoint(t *testing.T) {
	k := start(t, shared, harness.RunSpec{}, "counter")
	k.Expect(t, "next", "101")
	const stock, ref = "gpuckpt.test/stock:1", "gpuckpt.test/built:1"
	if err := k.Checkpoint(t.Context(), stock); err != nil {
		t.Fatal(err)
	}
	k.MustRemove(t)
	gpuckpt(t, shared, "image", "verify", stock)
	gpuckpt(t, shared, "image", "build", stock, ref)
	gpuckpt(t, shared, "image", "verify", ref)
	archive := filepath.Join(t.TempDir(), "checkpoint.tar")
	gpuckpt(t, shared, "image", "convert", stock, "kubernetes-archive:"+archive)
	if out := tool(t, "checkpointctl", "show", archive); !strings.Contains(out, harness.WorkloadImage) || !strings.Contains(out, "io.containerd.gpuckpt.v2") {
		t.Errorf("checkpointctl show printed %s", out)
	}
	r := resume(t, shared, ref, k.Port)
	r.Expect(t, "next", "102")
}

// A Kubernetes archive made of an image is what checkpointctl reads, and the
// image that is made of it resumes, with the container's files as they were.
func TestKubernetesArchive(t *testing.T) {
	k := start(t, shared, harness.RunSpec{}, "writer", "--file", "/var/tmp/seq")
	k.Expect(t, "count", "101")
	const ref, back = "gpuckpt.test/archived:1", "gpuckpt.test/unarchived:1"
	gpuckpt(t, shared, "checkpoint", k.ID, "--image", ref)
	k.MustRemove(t)
	archive := filepath.Join(t.TempDir(), "checkpoint.tar")
	gpuckpt(t, shared, "image", "convert", ref, "kubernetes-archive:"+archive)

	show := tool(t, "checkpointctl", "show", archive)
	for _, want := range []string{k.ID, harness.WorkloadImage, "io.containerd.gpuckpt.v2", "containerd"} {
		if !strings.Contains(show, want) {
			t.Errorf("checkpointctl show does not print %q:\n%s", want, show)
		}
	}
	inspect := tool(t, "checkpointctl", "inspect", archive, "--ps-tree", "--mounts")
	for _, want := range []string{harness.WorkloadImage, "gpuwork", "/proc"} {
		if !strings.Contains(inspect, want) {
			t.Errorf("checkpointctl inspect does not print %q:\n%s", want, inspect)
		}
	}
	names := namesIn(t, archive)
	for _, want := range []string{"config.dump", "spec.dump", "network.status", "rootfs-diff.tar", "checkpoint/inventory.img", "checkpoint/gpuckpt.json"} {
		if !slices.Contains(names, want) {
			t.Errorf("the archive has no %s: %q", want, names)
		}
	}
	gpuckpt(t, shared, "image", "verify", archive)
	if out := gpuckpt(t, shared, "image", "inspect", archive); !strings.Contains(out, "Process 1") {
		t.Errorf("gpuckpt image inspect printed %s", out)
	}
	gpuckpt(t, shared, "image", "build", archive, back)
	r := resume(t, shared, back, k.Port)
	r.Expect(t, "count", "102")
}

func namesIn(t *testing.T, archive string) (names []string) {
	t.Helper()
	f, err := os.Open(archive)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for r := tar.NewReader(f); ; {
		h, err := r.Next()
		if err == io.EOF {
			return names
		}
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, h.Name)
	}
}
