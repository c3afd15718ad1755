// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package arriving

import (
	"crypto/rand"
	"testing"

	"github.com/opencontainers/go-digest"
)

// Both hashers have the digest of what was written, in whatever parts.
func TestHasher(t *testing.T) {
	data := make([]byte, 5*asideBytes+7)
	_, _ = rand.Read(data)
	for name, hash := range map[string]func() hasher{
		"in place": func() hasher { return &inPlace{digest.SHA256.Digester()} },
		"aside":    func() hasher { return newAside(digest.SHA256) },
	} {
		for _, size := range []int{0, 1, asideBytes, len(data)} {
			for _, step := range []int{1000, asideBytes, 3*asideBytes + 1} {
				h := hash()
				for at := 0; at < size; at += step {
					part := data[at:min(size, at+step)]
					if n, err := h.Write(part); n != len(part) || err != nil {
						t.Fatal(n, err)
					}
				}
				if got := h.end(); got != digest.FromBytes(data[:size]) {
					t.Errorf("%s: %d bytes by %d have the digest %s", name, size, step, got)
				}
			}
		}
	}
}
