// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"bytes"
	"context"
	"testing"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images/registry"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// Of two pulls of one name, the end of one takes nothing from the other. What a pull that failed has
// fetched stays until a pull of the name is complete.
func TestLeasePerPull(t *testing.T) {
	c := session.Own(t, harness.Options{})
	service := c.Client().LeasesService()
	const ref = "gpuckpt.test/twice:1"
	begin := func() (context.Context, func(bool)) {
		ctx, end, err := registry.Lease(t.Context(), c.Client(), ref)
		if err != nil {
			t.Fatal(err)
		}
		return ctx, func(complete bool) {
			t.Helper()
			for range 2 { // the second does nothing
				if err := end(complete); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	data := []byte("what a pull has fetched")
	blob := v1.Descriptor{Digest: digest.FromBytes(data), Size: int64(len(data))}
	isThere := func(when string, want bool) {
		t.Helper()
		collect, err := service.Create(t.Context(), leases.WithRandomID())
		if err == nil {
			err = service.Delete(t.Context(), collect, leases.SynchronousDelete) // returns when containerd has collected
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Client().ContentStore().Info(t.Context(), blob.Digest); (err == nil) != want {
			t.Errorf("%s: the content is there: %v (%v), want %v", when, err == nil, err, want)
		}
	}

	first, endFirst := begin()
	if err := content.WriteBlob(first, c.Client().ContentStore(), "blob", bytes.NewReader(data), blob); err != nil {
		t.Fatal(err)
	}
	_, endSecond := begin()
	endSecond(true)
	isThere("after another pull of the name", true)
	endFirst(false)
	isThere("after the pull has failed", true)
	_, endThird := begin()
	endThird(true)
	isThere("after a complete pull", false)
	if left, err := service.List(t.Context()); err != nil || len(left) != 0 {
		t.Errorf("leases are left: %v, error %v", left, err)
	}
}
