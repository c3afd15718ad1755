// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package convert

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The name of a place is a user's, or an archive's: none becomes another kind of place.
func FuzzParseRef(f *testing.F) {
	for _, seed := range []string{"example.com/job:1", "containerd:example.com/job:1", "oci:/x@y", "oci-archive:x.tar", "dir:/x", "kubernetes-archive:", "/nowhere", "./x@y", "x.tar"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		ref, err := ParseRef(text)
		if err != nil {
			return
		}
		if (ref.Kind == InContainerd) != (ref.Path == "") && ref.Path != "" || ref.Kind == InContainerd && IsPath(ref.Name) {
			t.Errorf("%q is %+v", text, ref)
		}
	})
}

// Looking at a file to find its kind reads it only.
func FuzzKindOf(f *testing.F) {
	f.Add([]byte("x"))
	f.Add([]byte{0x1f, 0x8b, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		path := filepath.Join(t.TempDir(), "file")
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		kind, err := kindOf(path)
		if err == nil && !strings.Contains(kind, "archive") {
			t.Errorf("a file is of the kind %q", kind)
		}
	})
}
