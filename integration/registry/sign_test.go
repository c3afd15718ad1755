// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/images/sign"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// elsewhere has the shim be another node's: with a key of its own, and with these keys that
// count beside it.
func elsewhere(t *testing.T, keys string) (undo func()) {
	t.Helper()
	return shared.Configured(t, fmt.Sprintf("[restore]\nkeys = [%q]\n[signing]\nkey = %q\n", keys, filepath.Join(t.TempDir(), "signing.key")))
}

// tryResume is resume of what may be refused.
func tryResume(t *testing.T, ref string, port int) error {
	t.Helper()
	k, err := shared.TryWork(t, harness.RunSpec{
		ID: harness.Name(t) + "-refused", Image: ref, Port: port, GPUs: []int{0}, Annotations: map[string]string{"dev.gpuckpt.restore": "true"},
	}, "gpuwork")
	if err == nil {
		k.MustRemove(t)
	}
	return err
}

// Stock cosign verifies what a node has signed, and what it signs makes another node restore
// an image. So does a key given by hand. The same image is refused there before, with the
// name of what would help.
func TestCosign(t *testing.T) {
	k := start(t, shared, harness.RunSpec{}, "pattern", "--bytes", "50331648", "--seed", "5")
	k.Expect(t, "count", "101")
	const ref, signed, again = "gpuckpt.test/signed:1", "gpuckpt.test/signed:cosign", "gpuckpt.test/signed:key"
	gpuckpt(t, shared, "checkpoint", k.ID, "--image", ref)
	k.MustRemove(t)
	work := t.TempDir()
	at := func(name string) string { return filepath.Join(work, name) }
	save := func(name string, args ...string) {
		t.Helper()
		if err := os.WriteFile(at(name), []byte(gpuckpt(t, shared, args...)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cosign := func(args ...string) {
		t.Helper()
		program, err := bins.Path("cosign")
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(t.Context(), program, args...)
		cmd.Dir, cmd.Env = work, []string{"HOME=" + work, "COSIGN_PASSWORD=password"}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("cosign %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}

	// What the node signed lies in the image.
	save("node.pub", "key", "show")
	save(sign.ManifestName, "image", "sign", "--manifest", ref)
	gpuckpt(t, shared, "image", "verify", "--key", at("node.pub"), ref)
	gpuckpt(t, shared, "image", "convert", ref, "kubernetes-archive:"+at("job.tar"))
	if out, err := exec.CommandContext(t.Context(), "tar", "-xf", at("job.tar"), "-C", work, "--wildcards", "checkpoint/*.sig").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	signatures, err := filepath.Glob(at("checkpoint/*.sig"))
	if err != nil || len(signatures) != 1 {
		t.Fatalf("signatures %v, %v", signatures, err)
	}
	cosign("verify-blob", "--key", "node.pub", "--signature", signatures[0], "--insecure-ignore-tlog", sign.ManifestName)

	// Another node, where cosign's key counts.
	cosign("generate-key-pair")
	elsewhere(t, at("cosign.pub"))
	harness.Says(t, tryResume(t, ref, k.Port), "no trusted key has signed the checkpoint", "gpuckpt image sign", "[restore] keys")
	fails(t, shared, nil, []string{"no trusted key"}, "image", "verify", "--key", at("cosign.pub"), ref)
	cosign("sign-blob", "--key", "cosign.key", "--tlog-upload=false", "--yes", "--output-signature", "cosign.sig", sign.ManifestName)
	copied := asJSON[harness.CheckpointAnswer](t, shared, "image", "sign", "--signature", at("cosign.sig"), ref, signed)
	if copied.GPUReusedBytes == 0 || copied.GPUWrittenBytes != 0 {
		t.Errorf("to sign an image, layers of GPU state were written: %+v", copied)
	}
	gpuckpt(t, shared, "image", "verify", "--key", at("cosign.pub"), signed)
	gpuckpt(t, shared, "image", "verify", "--key", at("node.pub"), signed) // which stays
	r := resume(t, shared, signed, k.Port)
	r.Expect(t, "verify", "bad=0")
	r.Expect(t, "count", "102")
	r.MustRemove(t)

	// A third, where a key made by openssl counts; the signature is of another manifest first.
	for _, args := range [][]string{
		{"genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", at("release.key")},
		{"pkey", "-in", at("release.key"), "-pubout", "-out", at("release.pub")},
	} {
		if out, err := exec.CommandContext(t.Context(), "openssl", args...).CombinedOutput(); err != nil {
			t.Fatalf("openssl %s: %v: %s", strings.Join(args, " "), err, out)
		}
	}
	elsewhere(t, at("release.pub"))
	harness.Says(t, tryResume(t, signed, k.Port), "no trusted key has signed the checkpoint")
	gpuckpt(t, shared, "image", "sign", "--key", at("release.key"), ref, again)
	r = resume(t, shared, again, k.Port)
	r.Expect(t, "verify", "bad=0")
	r.Expect(t, "count", "102")
	r.MustRemove(t)
}

// The digest of a manifest in [restore] images lets that image in and no other.
func TestListedByDigest(t *testing.T) {
	k := start(t, shared, harness.RunSpec{}, "counter")
	k.Expect(t, "count", "101")
	const ref, second = "gpuckpt.test/listed:1", "gpuckpt.test/listed:2"
	gpuckpt(t, shared, "checkpoint", k.ID, "--image", ref, "--leave-running")
	gpuckpt(t, shared, "checkpoint", k.ID, "--image", second)
	k.MustRemove(t)
	manifest := asJSON[struct{ Manifest string }](t, shared, "image", "verify", ref).Manifest
	for _, policy := range []string{"signed", "annotated"} {
		undo := shared.Configured(t, fmt.Sprintf("[restore]\npolicy = %q\nimages = [%q]\n", policy, manifest))
		harness.Says(t, tryResume(t, second, k.Port), "not among those that this node restores")
		r := resume(t, shared, ref, k.Port)
		r.Expect(t, "count", "102")
		r.MustRemove(t)
		undo()
	}
}
