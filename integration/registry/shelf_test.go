// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"bytes"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/content"
	cimages "github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/images/catalog"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// Checkpoints are listed with who signed them, old ones go, one that a container was made of stays,
// and an image that is no checkpoint is refused.
func TestShelf(t *testing.T) {
	c := session.Own(t, harness.Options{})
	k := start(t, c, harness.RunSpec{ID: "job"}, "counter")
	k.Expect(t, "next", "101")
	names := []string{"gpuckpt.test/shelf:1", "gpuckpt.test/shelf:2", "gpuckpt.test/shelf:3"}
	var printed []string // NAME@DIGEST, by which an image is found too
	for _, name := range names {
		first, _, _ := strings.Cut(gpuckpt(t, c, "checkpoint", "job", "--image", name, "--leave-running"), "\n")
		printed = append(printed, first)
	}
	gpuckpt(t, c, "image", "verify", printed[0])
	fails(t, c, nil, []string{"there is no image"}, "image", "verify", strings.Replace(printed[0], names[0], names[1], 1))
	list := func(prefix ...string) (found []catalog.Entry, images []string) {
		t.Helper()
		if err := json.Unmarshal([]byte(gpuckpt(t, c, append([]string{"ls", "--json"}, prefix...)...)), &found); err != nil {
			t.Fatal(err)
		}
		for _, e := range found {
			images = append(images, e.Image)
		}
		return found, images
	}
	found, images := list()
	if !slices.Equal(images, []string{names[2], names[1], names[0]}) {
		t.Fatalf("listed are %v", images)
	}
	if _, images := list(names[1]); !slices.Equal(images, names[1:2]) {
		t.Errorf("by a prefix are listed %v", images)
	}
	for _, e := range found {
		if e.Container != "job" || e.SignedBy == "" || e.Bytes == 0 || e.GPUBytes == 0 || e.Created.IsZero() {
			t.Errorf("%+v", e)
		}
	}
	fails(t, c, nil, []string{"not a checkpoint image"}, "rm", harness.WorkloadImage)
	claims(t, c, names[0], "gpuckpt.test/claims:1")
	if _, images = list(); len(images) != 3 {
		t.Errorf("beside an image that nobody can read are listed %v", images)
	}

	k.MustRemove(t)
	r := resume(t, c, names[0], k.Port)
	gpuckpt(t, c, "prune", "--keep", "1", "--dry-run")
	if _, images = list(); len(images) != 3 {
		t.Errorf("a dry run left %v", images)
	}
	gpuckpt(t, c, "prune", "--keep", "1")
	if _, images = list(); !slices.Equal(images, []string{names[2], names[0]}) {
		t.Errorf("left are %v", images)
	}
	r.MustRemove(t)
	gpuckpt(t, c, "rm", names[0], printed[2])
	if _, images = list(); len(images) != 0 {
		t.Errorf("left are %v", images)
	}
}

// claims makes an image of a checkpoint that nobody can read: it says how much GPU state it has, and means nothing.
func claims(t *testing.T, c *harness.Containerd, of, name string) {
	t.Helper()
	ctx := namespaces.WithNamespace(t.Context(), c.Namespace())
	ctx, done, err := c.Client().WithLease(ctx) // until the image holds the manifest
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = done(ctx) }()
	image, err := c.Client().ImageService().Get(ctx, of)
	if err != nil {
		t.Fatal(err)
	}
	store := c.Client().ContentStore()
	data, err := content.ReadBlob(ctx, store, image.Target)
	var manifest ocispec.Manifest
	if err := errors.Join(err, json.Unmarshal(data, &manifest)); err != nil {
		t.Fatal(err)
	}
	manifest.Annotations[annotations.GPUState] = "much"
	if data, err = json.Marshal(manifest); err != nil {
		t.Fatal(err)
	}
	image = cimages.Image{Name: name, Target: ocispec.Descriptor{MediaType: manifest.MediaType, Digest: digest.FromBytes(data), Size: int64(len(data))}}
	if err = content.WriteBlob(ctx, store, name, bytes.NewReader(data), image.Target); err == nil {
		_, err = c.Client().ImageService().Create(ctx, image)
	}
	if err != nil {
		t.Fatal(err)
	}
}
