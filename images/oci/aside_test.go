// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"testing"

	"github.com/opencontainers/go-digest"
)

func TestAside(t *testing.T) {
	data := random(5*asideBytes + 7)
	for _, size := range []int{0, 1, asideBytes, len(data)} {
		for _, step := range []int{1000, asideBytes, 3*asideBytes + 1} {
			h := NewAside()
			for at := 0; at < size; at += step {
				part := data[at:min(size, at+step)]
				if n, err := h.Write(part); n != len(part) || err != nil {
					t.Fatal(n, err)
				}
			}
			if got := h.Digest(); got != digest.FromBytes(data[:size]) {
				t.Errorf("%d bytes by %d have the digest %s", size, step, got)
			}
		}
	}
}
