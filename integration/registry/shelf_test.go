// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"encoding/json"
	"slices"
	"testing"

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
	for _, name := range names {
		gpuckpt(t, c, "checkpoint", "job", "--image", name, "--leave-running")
	}
	list := func() (found []catalog.Entry, images []string) {
		t.Helper()
		if err := json.Unmarshal([]byte(gpuckpt(t, c, "ls", "--json")), &found); err != nil {
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
	for _, e := range found {
		if e.Container != "job" || e.SignedBy == "" || e.Bytes == 0 || e.GPUBytes == 0 || e.Created.IsZero() {
			t.Errorf("%+v", e)
		}
	}
	fails(t, c, nil, []string{"not a checkpoint image"}, "rm", harness.WorkloadImage)

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
	gpuckpt(t, c, "rm", names[0], names[2])
	if _, images = list(); len(images) != 0 {
		t.Errorf("left are %v", images)
	}
}
